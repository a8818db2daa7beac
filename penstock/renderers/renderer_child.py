"""The process of a `ProcessRenderer`: builds one renderer and answers calls until its pipes end. Imports little."""

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, InfrastructureFailure, PenstockError
from penstock.renderers.protocol import Renderer


def build(*, backend: str, model: str, options: dict[str, Any], template: dict[str, Any]) -> Renderer:
    try:
        if backend == "renderers":
            return importlib.import_module("penstock.renderers.package").PackageRenderer(Path(model), options, template)
        return importlib.import_module("penstock.renderers.directory").DirectoryRenderer(Path(model), template)
    except ModuleNotFoundError as error:
        extra = "renderers" if backend == "renderers" else "tokenizers"
        raise ConfigError(f"policy.renderer needs {error.name}: pip install 'penstock[{extra}]'") from error


def main() -> None:
    encoding, decoding = (Connection(int(number)) for number in sys.argv[1:])
    what = encoding.recv()
    renderer = _answer(
        functools.partial(build, **what), f"the renderer {what['backend']} of {what['model']} could not be built"
    )
    if isinstance(renderer, PenstockError):
        encoding.send(renderer)
        return
    encoding.send(None)
    threading.Thread(target=_serve, args=(renderer, decoding), daemon=True).start()
    _serve(renderer, encoding)


def _serve(renderer: Any, pipe: Connection) -> None:
    while True:
        try:
            method, *arguments, more = pipe.recv()
        except EOFError:
            return
        call = functools.partial(getattr(renderer, method), *arguments, **more)
        pipe.send(_answer(call, f"{method} failed"))


def _answer(call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except PenstockError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a library's fault is told to who asked; the next call may be well
        return InfrastructureFailure(f"{what}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
