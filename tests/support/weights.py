"""Weights of the scripted engine: directories that its control endpoints load."""

import json
from pathlib import Path


def write_weights(directory: Path, version: int) -> Path:
    path = directory / "weights" / f"version_{version}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "weights.json").write_text(json.dumps({"version": version}))
    return path
