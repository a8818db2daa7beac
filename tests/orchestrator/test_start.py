from pathlib import Path

import pytest

from headpond.config import RunConfig
from headpond.errors import ConfigError
from headpond.orchestrator import start


def test_a_run_without_environments_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[environments\.NAME\]"):
        start.run(RunConfig(run_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()
