"""The child process of a `ProcessRenderer`: builds one renderer and serves calls until its pipes
close.

The module imports little, to start fast.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headpond.errors import ConfigError, HeadpondError, InfrastructureFailure
from headpond.renderers.protocol import Renderer


def build(*, backend: str, model: str, options: dict[str, Any], template: dict[str, Any]) -> Renderer:
    try:
        if backend == "renderers":
            return importlib.import_module("headpond.renderers.renderers_package").PackageRenderer(
                Path(model), options, template
            )
        return importlib.import_module("headpond.renderers.tokenizer_directory").DirectoryRenderer(
            Path(model), template
        )
    except ModuleNotFoundError as error:
        extra = "renderers" if backend == "renderers" else "tokenizers"
        raise ConfigError(f"policy.renderer needs {error.name}: pip install 'headpond[{extra}]'") from error


def main() -> None:
    encoding, decoding = (Connection(int(number)) for number in sys.argv[1:])
    arguments = encoding.recv()
    label = f"the renderer {arguments['backend']} of {arguments['model']} could not be built"
    renderer = _call(functools.partial(build, **arguments), label)
    if isinstance(renderer, HeadpondError):
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
        pipe.send(_call(functools.partial(getattr(renderer, method), *arguments, **more), f"{method} failed"))


def _call(call: Callable[[], Any], label: str) -> Any:
    try:
        return call()
    except HeadpondError as error:
        return error
    except Exception as error:  # noqa: BLE001  the caller gets it
        return InfrastructureFailure(f"{label}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
