"""Versions of a trainer's weights as directories that a run loads into its engine."""

import shutil
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from headpond.batches.reader import BatchReader

KEPT = 3  # Number of directories: an engine may still load the second newest.


class PublishedWeights:
    """Writes each version of the weights beside the model's other files and announces it to the
    run, which loads it (`engine.weight_update = "headpond"`). Implements TRL's
    `WeightTransferProtocol`. Version 0 is the engine's model. A restarted trainer continues
    counting: no number names two sets of weights."""

    def __init__(self, model_dir: str | Path, output_dir: str | Path) -> None:
        self._model, self._output = Path(model_dir), Path(output_dir)
        # A checkpoint may be older than the engine's weights: a restarted trainer publishes it
        # under a new number. One number for two sets of weights would make the versions of tokens
        # wrong.
        self.version = max((int(path.name) for path in self._output.glob("*") if path.name.isdigit()), default=-1)

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        self.version += 1
        newest = self._output / str(self.version)
        shutil.copytree(self._model, newest, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in iterator}
        import_module("safetensors.torch").save_file(tensors, newest / "model.safetensors", {"format": "pt"})
        shutil.rmtree(self._output / str(self.version - KEPT), ignore_errors=True)

    def announce(self, reader: BatchReader) -> None:
        if self.version > 0:
            reader.publish_policy(self.version, weights=self._output / str(self.version))

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
