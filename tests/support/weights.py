"""Weights of the engine: directories that its control endpoints load."""

import json
from pathlib import Path

from headpond.demo import tiny_moe


def write_weights(directory: Path, version: int, model: tiny_moe.Weights | None = None) -> Path:
    path = directory / "weights" / f"version_{version}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "weights.json").write_text(json.dumps({"version": version}))
    if model is not None:
        tiny_moe.save(path, model)
    return path
