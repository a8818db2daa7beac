"""`headpond doctor`: is the engine what the configuration says, and is everything else there that a run needs?"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from headpond.commands.facts import Fact
from headpond.commands.modules import find_modules
from headpond.commands.output import CONFIG_HELP, Json, print_facts, print_json

if TYPE_CHECKING:
    from headpond.config import RunConfig
    from headpond.doctor.engine import Examination
    from headpond.doctor.findings import Finding

WORKERS_SHOWN = 8


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help=CONFIG_HELP, show_default=False)] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Examine only this engine. Separate replicas by commas.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Examine the engine as a run would use it, and print what was found.

    Plays a few short conversations and reads what was recorded: ids, logprobs and their mode, routed experts, turns
    with tools, versions, speed. With a configuration, Redis, the store, the environments and the workers too. Changes
    nothing. Exits with 1 if something would kill or spoil every rollout.
    """
    import asyncio

    from headpond import config as configuration
    from headpond.doctor.engine import Examination
    from headpond.doctor.findings import problems
    from headpond.runtime.event_loop import event_loop_factory

    settings = configuration.load(config, flags={"engine.urls": engine})
    find_modules(config)
    examination = Examination(settings)
    with asyncio.Runner(loop_factory=event_loop_factory(concurrency=8)) as runner:
        findings = runner.run(_findings(examination, surroundings=engine is None, show=not as_json))
    if as_json:
        print_json({"findings": [vars(finding) for finding in findings]})
    if problems(findings):
        raise typer.Exit(1)


async def _findings(examination: "Examination", *, surroundings: bool, show: bool) -> "list[Finding]":
    findings: list[Finding] = []

    async def every() -> "AsyncIterator[Finding]":
        async for finding in examination.findings():
            yield finding
        if surroundings:
            async for finding in _surroundings(examination.config):
                yield finding

    async for finding in every():
        findings.append(finding)
        if show:
            print_facts(_facts(finding))
    return findings


def _facts(finding: "Finding") -> Iterator[Fact]:
    from headpond.doctor.findings import Level

    alarm = finding.level is not Level.OK
    mark = {Level.OK: "", Level.NOTE: "note: ", Level.WRONG: "WRONG: "}[finding.level]
    yield Fact(finding.what, f"{mark}{finding.text}", alarm=alarm)
    if finding.fix:
        yield Fact("", f"-> {finding.fix}", alarm=alarm)


async def _surroundings(config: "RunConfig") -> "AsyncIterator[Finding]":
    from headpond.runtime.offload import in_io_thread

    yield await in_io_thread(_store, config)
    yield await in_io_thread(_rules, config)
    yield await in_io_thread(_environments, config)
    for finding in await in_io_thread(_redis, config):
        yield finding


def _store(config: "RunConfig") -> "Finding":
    from headpond.doctor.findings import ok, wrong
    from headpond.errors import HeadpondError
    from headpond.store import open_store

    url = config.store_url
    if config.store is None and not config.run_dir.exists():
        return ok("store", f"will be made in {config.run_dir}")
    try:
        open_store(url).check()
    except (HeadpondError, OSError) as error:
        return wrong("store", f"{url} cannot be written: {error}", "repair it, or set store")
    return ok("store", f"{url} can be written")


def _rules(config: "RunConfig") -> "Finding":
    from headpond.config.rules import check_rules
    from headpond.doctor.findings import ok, wrong
    from headpond.errors import ConfigError

    try:
        check_rules(config)
    except ConfigError as error:
        return wrong("rules", str(error))
    return ok("rules", f"advantages.estimator = {config.advantages.estimator!r} and the filters can be loaded")


def _environments(config: "RunConfig") -> "Finding":
    from headpond.doctor.findings import ok, wrong
    from headpond.environments.loading import load_environments
    from headpond.errors import ConfigError

    if not config.environments:
        return wrong("plays", "no environment is configured", 'add [environments.NAME] with use = "module:Class"')
    try:
        loaded = load_environments(config.environments, config.place_of)
        if config.evaluation:
            loaded |= load_environments(config.evaluation, config.place_of, section="evaluation")
    except ConfigError as error:
        return wrong("plays", str(error))
    sizes = ", ".join(f"{name} ({each.size:,} examples)" for name, each in loaded.items())
    return ok("plays", f"{sizes}; `headpond try` plays some of them")


def _redis(config: "RunConfig") -> "list[Finding]":
    import redis

    from headpond import redis_keys
    from headpond.config.redis_address import address, explain
    from headpond.doctor.findings import note, ok, wrong
    from headpond.inspection.status import open_redis
    from headpond.tasks.agreement import Presence, digest, used_settings

    try:
        with open_redis(config.redis_url) as client:
            said = cast("dict[bytes, bytes]", client.hgetall(redis_keys.WORKERS))
    except redis.RedisError as error:
        if "redis_url" not in config.model_fields_set:
            return [note("redis", "redis_url is not set: `headpond up` starts one; `headpond run` needs one")]
        return [wrong("redis", explain(config.redis_url, error))]
    findings = [ok("redis", f"{address(config.redis_url)} is reachable")]
    workers = {node.decode(): presence for node, content in said.items() if (presence := Presence.read(content))}
    if not workers:
        return [
            *findings,
            note("workers", "none is running", "start them as the README shows, with HEADPOND_CONFIG set"),
        ]
    for node, presence in list(workers.items())[:WORKERS_SHOWN]:
        if presence.settings != digest(used_settings(config, presence.kind)):
            findings.append(note("workers", f"{node} has other settings than this configuration", "restart it"))
        else:
            findings.append(ok("workers", f"{node} has the settings of this configuration"))
    return findings
