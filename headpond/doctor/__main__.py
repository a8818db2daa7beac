"""The quick part of an examination, in a process of its own: `python -m headpond.doctor [CONFIG.toml]`.

Prints a JSON object: `refused`, why every rollout would fail or be spoilt; `away`, that no replica can be reached;
`busy`, that none answered in time; `notes`, what fails only some rollouts.
"""

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import orjson

from headpond import config
from headpond.doctor import probes
from headpond.doctor.examination import quick
from headpond.engines.http.client import EngineClient
from headpond.errors import EngineUnreachable, HeadpondError
from headpond.event_loop import factory as event_loop
from headpond.playing.rollout import PlayResources, open_dialect
from headpond.store import open_store

CHECK_S = 20.0  # for a few short requests, without the start of this process: an engine that takes longer is busy


async def examined(settings: config.RunConfig) -> dict[str, Any]:
    engine = settings.engine.model_copy(update={"retries": 2, "unreachable_s": 1.0})
    try:
        dialect = await open_dialect(settings)
        async with asyncio.timeout(CHECK_S), EngineClient.open(engine) as client:
            store = open_store(probes.STORE)
            notes = await quick(PlayResources(client=client, store=store, settings=settings.policy, dialect=dialect))
    except TimeoutError:
        return {"busy": f"the engine did not answer within {CHECK_S:g} s"}
    except EngineUnreachable as error:
        return {"away": str(error)}
    except HeadpondError as error:
        return {"refused": str(error)}
    return {"notes": [finding.sentence for finding in notes]}


def main() -> None:
    settings = config.load(Path(sys.argv[1]) if sys.argv[1:] else None)
    with contextlib.redirect_stdout(sys.stderr):  # a dialect of the user may print
        result = event_loop.run(examined(settings), concurrency=4)
    sys.stdout.buffer.write(orjson.dumps(result))


if __name__ == "__main__":
    main()
