import re
from pathlib import Path

import pytest

from headpond.config import RunConfig
from headpond.config.declared import declarations, settings_used_by, shared_settings
from headpond.config.problems import all_keys
from headpond.declarations.sections import Declared, Reader

ROOT = Path(__file__).parents[3]
READERS = {
    Reader.ORCHESTRATOR: ["orchestrator"],
    Reader.ROLLOUTS: ["tasks/player.py", "workers/rollouts.py"],
    Reader.COMPUTE: [f"tasks/stages/{name}.py" for name in ("draw", "filter", "advantage", "batch_phase", "encode")],
    Reader.SESSIONS: ["headpond/servers/sessions"],
}
"""Where each kind of process reads its settings, as `config.section.key`."""


def declared_by(key: str) -> Declared:
    return dict(declarations(RunConfig))[key]


def test_every_setting_declares_who_reads_it() -> None:
    declared = dict(declarations(RunConfig))
    assert list(declared) == list(all_keys(RunConfig))
    assert [key for key, each in declared.items() if not each.read_by] == []


@pytest.mark.parametrize("reader", READERS)
def test_what_a_process_reads_is_declared(reader: Reader) -> None:
    declared = dict(declarations(RunConfig))
    files = [file for path in READERS[reader] for file in sorted((ROOT / path).rglob("*.py")) or [ROOT / path]]
    read = {key for file in files for key in re.findall(r"config\.([a-z]\w*(?:\.[a-z]\w*)*)", file.read_text())}
    known = read & declared.keys()
    assert known, "the expression finds what a process reads"
    assert {key for key in known if reader not in declared[key].read_by} == set()


def test_processes_agree_on_what_they_share_but_not_on_paths_addresses_and_secrets() -> None:
    first = RunConfig.model_validate(
        {"redis_url": "redis://:pw@a/0", "engine": {"urls": ["http://a"], "api_key": "k"}, "run_dir": "/a"}
    )
    second = RunConfig.model_validate({"redis_url": "redis://b/0", "engine": {"urls": ["http://b"]}, "run_dir": "/b"})
    for reader in Reader:
        assert settings_used_by(first, reader) == settings_used_by(second, reader)
    changed = RunConfig.model_validate({"advantages": {"estimator": "rloo"}, "policy": {"max_turns": 3}})
    for reader, key in [("compute", "advantages.estimator"), ("rollouts", "policy.max_turns")]:
        before, after = settings_used_by(first, reader), settings_used_by(changed, reader)
        assert {name for name in before if before[name] != after[name]} == {key}


def test_options_have_keys_of_their_own_and_secrets_among_them_are_digests() -> None:
    options = {"api_key": "hush", "max_tokens": 3, "deep": {"token": "hush", "list": [1]}}
    config = RunConfig.model_validate({"environments": {"sums": {"use": "x", "options": options}}})
    used = settings_used_by(config, Reader.ROLLOUTS)
    assert used["environments.sums.options.max_tokens"] == 3
    assert used["environments.sums.options.deep.list"] == [1]
    assert used["environments.sums.options.api_key"].startswith("sha256:")
    assert "hush" not in str(shared_settings(config))


@pytest.mark.parametrize(
    ("key", "fixed", "restarts"),
    [
        ("seed", True, ()),
        ("steps", None, ()),
        ("rollouts.group_size", True, ("compute",)),
        ("environments.NAME.options", True, ("rollouts",)),
        ("advantages.estimator", None, ("compute",)),
        ("policy.max_turns", None, ("rollouts", "sessions")),
        ("filters.stale.mode", None, ("compute",)),
        ("batch.data_ranks", True, ("trainer",)),
    ],
)
def test_a_declaration_of_a_setting_prevails_over_that_of_its_section(
    key: str, fixed: bool | None, restarts: tuple[str, ...]
) -> None:
    assert (declared_by(key).fixed, declared_by(key).restarts) == (fixed, restarts)
