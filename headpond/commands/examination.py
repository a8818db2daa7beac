"""Findings of `headpond doctor`: the engine, and everything else that a run needs."""

from collections.abc import Iterator
from typing import cast

import redis

from headpond.broker import redis_keys
from headpond.commands.facts import Fact
from headpond.commands.output import print_facts
from headpond.config import RunConfig
from headpond.config.named_rules import check_rules
from headpond.config.redis_address import address, explain
from headpond.doctor.examination import Examination
from headpond.doctor.findings import Finding, Level, note, ok, wrong
from headpond.environments.loading import load_environments
from headpond.errors import ConfigError, HeadpondError
from headpond.event_loop.offload import in_io_thread
from headpond.inspection.status import open_redis
from headpond.store import open_store
from headpond.tasks.agreement import Presence, digest, used_settings

WORKERS_SHOWN = 8


async def examine(config: RunConfig, *, surroundings: bool, show: bool) -> list[Finding]:
    """`surroundings`: whether more than the engine is examined. `show`: print each finding at once."""
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        if show:
            print_facts(_facts(finding))

    async for finding in Examination(config).findings():
        add(finding)
    for check in (_store, _rules, _environments, _redis) if surroundings else ():
        for finding in await in_io_thread(check, config):
            add(finding)
    return findings


def _facts(finding: Finding) -> Iterator[Fact]:
    alarm = finding.level is not Level.OK
    mark = {Level.OK: "", Level.NOTE: "note: ", Level.WRONG: "WRONG: "}[finding.level]
    yield Fact(finding.what, f"{mark}{finding.text}", alarm=alarm)
    if finding.fix:
        yield Fact("", f"-> {finding.fix}", alarm=alarm)


def _store(config: RunConfig) -> list[Finding]:
    url = config.store_url
    if config.store is None and not config.run_dir.exists():
        return [ok("store", f"will be made in {config.run_dir}")]
    try:
        open_store(url).check()
    except (HeadpondError, OSError) as error:
        return [wrong("store", f"{url} cannot be written: {error}", "repair it, or set store")]
    return [ok("store", f"{url} can be written")]


def _rules(config: RunConfig) -> list[Finding]:
    try:
        check_rules(config)
    except ConfigError as error:
        return [wrong("rules", str(error))]
    return [ok("rules", f"advantages.estimator = {config.advantages.estimator!r} and the filters can be loaded")]


def _environments(config: RunConfig) -> list[Finding]:
    if not config.environments:
        return [wrong("plays", "no environment is configured", 'add [environments.NAME] with use = "module:Class"')]
    try:
        loaded = load_environments(config.environments, config.place_of)
        if config.evaluation:
            loaded |= load_environments(config.evaluation, config.place_of, section="evaluation")
    except ConfigError as error:
        return [wrong("plays", str(error))]
    sizes = ", ".join(f"{name} ({each.size:,} examples)" for name, each in loaded.items())
    return [ok("plays", f"{sizes}; `headpond try` plays some of them")]


def _redis(config: RunConfig) -> list[Finding]:
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
