"""README and docs state what is true: commands parse or run, samples play, paths, links and settings exist."""

import ast
import importlib.util
import os
import re
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from celery.bin.worker import worker as celery_worker
from support import advantages, configuration_page, filtering
from support.cluster import BIN, Cluster, Process, cluster_in
from support.documents import CONTRIBUTING, GUIDES, LOGS, README, ROOT, Page
from support.engine_clients import attempt_of, run, stage_of
from support.engine_process import EngineProcess
from support.real_agents import AGENTS
from typer.main import get_command

from headpond.advantages import AdvantageSettings, BatchValues, batch_phase, group_phase, resolve
from headpond.batches import Batch, BatchReader, MicroBatch
from headpond.commands.main import app
from headpond.config import load
from headpond.config.engine import EnvironmentSettings
from headpond.config.named_rules import check_rules
from headpond.environments import AgentPolicy, Policy, load_environments
from headpond.environments.protocol import agent_variables
from headpond.filters import group_filters, rollout_filters
from headpond.playing.rollout import play
from headpond.records.rollout import RolloutResult

RECIPES = (
    "An estimator",
    "A filter",
    "A sampler",
    "An engine dialect",
    "A store",
    "A field for the trainer",
    "A stage",
)
PACKAGES = ("headpond", "tasks", "workers", "orchestrator", "bench")
FOLDERS = (*PACKAGES, "examples", "tests", "docs", "deploy")

RUN_HERE = ("headpond up", "headpond status", "headpond why", "headpond audit")
"""Run with the README's arguments. With the arguments of other pages they are only parsed."""
RUN_BY = {
    "celery -A headpond.workers": "tests/support/cluster.py",
    "celery -A workers": "tests/workers/test_clone.py",
    "celery -A tasks flower": "tests/workers/test_clone.py",
    "python -m bench": "tests/bench",
    "uvx": "tests/packaging/test_installed.py",
    "pip install dist/": "tests/packaging/test_installed.py",
    "uv": "tests/packaging/test_installed.py",
    "headpond run": "tests/support/cluster.py",
    "headpond bundle": "tests/headpond/commands/test_bundle.py",
    "headpond dead": "tests/pipeline/test_dead.py",
    "headpond init": "tests/headpond/commands/test_init.py",
    "headpond redis": "tests/headpond/commands/test_init.py",
    "celery -A headpond.tasks flower": "tests/recovery/test_flower.py",
    "docker-compose": "tests/test_compose.py",
    "make demo": "tests/headpond/commands/test_demo.py",
    "make simulate": "tests/simulation/test_schedules.py",
    "headpond dashboard": "tests/headpond/servers/dashboard",
    "headpond demo": "tests/headpond/commands/test_demo.py",
    "headpond doctor": "tests/headpond/doctor",
    "headpond engine": "tests/headpond/demo/scripted_engine",
    "headpond gc": "tests/headpond/commands/test_leftovers.py",
    "headpond redo": "tests/headpond/commands/test_redo.py",
    "headpond report": "tests/headpond/servers/dashboard/test_report.py",
    "headpond sessions": "tests/headpond/servers/sessions",
    "headpond try": "tests/headpond/commands/test_trial.py",
    "headpond record": "tests/headpond/commands/test_record.py",
    "python examples/numpy_trainer.py": "tests/examples/test_numpy_trainer.py",
    "python examples/tiny_model.py": "tests/vllm/test_start.py",
    "python examples/trl_": "tests/with_torch/test_trl.py",
    "torchrun": "tests/vllm/test_learning.py",
    "redis-server": "headpond/processes/embedded_redis.py",
    "python -m vllm.entrypoints.openai.api_server": "tests/vllm",
    "curl": "tests/headpond/engines/test_documented_commands.py",
    "make vllm": "tests/vllm",
}
"""What takes long, or needs Docker: parsed here, and run by this suite or module."""
NOT_RUN = (
    *("vllm serve", "python -m sglang.launch_server", "git clone", "make check", "make test", "make docs"),
    *(f"{word} " for word in (".", "cd", "cp", "export")),
)
"""Servers that need a GPU, what prepares a shell, and the checks themselves."""
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
VLLM_FLAGS = {
    *("--served-model-name", "--logprobs-mode", "--enable-return-routed-experts", "--enable-auto-tool-choice"),
    *("--tool-call-parser", "--reasoning-parser", "--enable-scale-out", "--dtype", "--max-model-len"),
    *("--max-num-seqs", "--enforce-eager", "--model", "--port"),
}
"""`make test-vllm` starts servers with each of them; `--enable-return-routed-experts` with vLLM 0.30."""
SGLANG_MODULE = "sglang.launch_server"
SGLANG_FLAGS = {
    *("--model-path", "--served-model-name", "--enable-return-routed-experts", "--tool-call-parser"),
    *("--reasoning-parser", "--enable-metrics", "--port"),
}
"""Read in the source of SGLang 0.5.23, which has no build for CPU."""
SHELL = {".", "cd", "curl", "docker", "export", "git", "torchrun"}
INCOMPLETE = "arguments are missing"
"""What a command that is only mentioned may lack."""


def named(pages: list[Page]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


# Commands


@named(GUIDES)
def test_every_command_exists_with_its_flags(page: Page) -> None:
    strict = {" ".join(command): problem_of(command) for command in page.commands()}
    lenient = {" ".join(mention): problem_of(mention) for mention in page.mentions()}
    lenient = {command: problem for command, problem in lenient.items() if problem != INCOMPLETE}
    assert not {command: problem for command, problem in (lenient | strict).items() if problem}


def problem_of(command: list[str]) -> str | None:
    program, arguments = command[0], command[1:]
    if check := CHECKS.get(program):
        return check(arguments)
    return None if program in SHELL else f"unknown program {program}: add a check"


def headpond_problem(arguments: list[str]) -> str | None:
    """Parses the arguments as the command itself would."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    if arguments[0] not in commands:
        return None if arguments[0].startswith("-") else f"no command {arguments[0]}"
    values = ["control" if word == "NAME" else word for word in arguments[1:] if word != "--help"]
    try:
        commands[arguments[0]].make_context(arguments[0], values)
    except Exception as error:  # noqa: BLE001  typer brings a copy of click, with exceptions of its own
        return INCOMPLETE if type(error).__name__ == "MissingParameter" else str(error)
    return None


def celery_problem(arguments: list[str]) -> str | None:
    if len(arguments) < 3:
        return INCOMPLETE
    option, module, command, *rest = arguments
    if option != "-A" or importlib.util.find_spec(module) is None:
        return f"no app {module}"
    if command == "worker":
        known = {name for parameter in celery_worker.params for name in parameter.opts}
        unknown = [word for word in rest if word.startswith("-") and word not in known]
        return f"unknown {unknown}" if unknown else None
    return None if command in ("flower", "inspect", "purge") else f"unknown command {command}"


def make_problem(arguments: list[str]) -> str | None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return None if arguments[0] in targets else f"no target {arguments[0]}"


def compose_problem(arguments: list[str]) -> str | None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    command, *rest = arguments
    if command not in ("up", "down", "stop", "exec", "build", "logs"):
        return f"unknown command {command}"
    scaled = [word.partition("=")[0] for word in rest if "=" in word]
    missing = [name for name in [*scaled, *(rest[:1] if command == "exec" else [])] if name not in services]
    if command == "exec" and not missing:
        return problem_of(rest[1:])
    return f"no service {missing}" if missing else None


def python_problem(arguments: list[str]) -> str | None:
    if arguments[:2] == ["-m", SERVER_MODULE]:
        return vllm_problem(arguments[2:])
    if arguments[:2] == ["-m", SGLANG_MODULE]:
        return unknown_flags(arguments, SGLANG_FLAGS)
    if arguments[0] == "-m":
        return None if importlib.util.find_spec(arguments[1]) else f"no module {arguments[1]}"
    return None if (ROOT / arguments[0]).is_file() else f"no file {arguments[0]}"


def vllm_problem(arguments: list[str]) -> str | None:
    return unknown_flags(arguments, VLLM_FLAGS)


def unknown_flags(arguments: list[str], known: set[str]) -> str | None:
    unknown = {word for word in arguments if word.startswith("--")} - known
    return f"unknown {sorted(unknown)}" if unknown else None


def redis_problem(arguments: list[str]) -> str | None:
    compose = (ROOT / "docker-compose.yml").read_text()
    settings = " ".join(arguments).split("--")[1:]
    unknown = [each for each in settings if each.strip() not in compose]
    return f"not in docker-compose.yml: {unknown}" if unknown else None


def pip_problem(arguments: list[str]) -> str | None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [extra for word in arguments if (found := re.search(r"\[(.+)\]", word)) for extra in found[1].split(",")]
    missing = [extra for extra in named if extra not in extras]
    return f"no extra {missing}" if missing else None


CHECKS: dict[str, Callable[[list[str]], str | None]] = {
    "headpond": headpond_problem,
    "celery": celery_problem,
    "make": make_problem,
    "docker-compose": compose_problem,
    "python": python_problem,
    "pip": pip_problem,
    "uvx": pip_problem,
    "uv": pip_problem,
    "cp": python_problem,
    "pytest": lambda arguments: None if arguments == ["PATH::NAME"] else python_problem(arguments),
    "vllm": vllm_problem,
    "redis-server": redis_problem,
}


@named(GUIDES)
def test_every_command_of_a_block_is_run_here_or_by_a_suite_that_exists(page: Page) -> None:
    known = (*RUN_HERE, *RUN_BY, *NOT_RUN)
    assert [line for command in page.commands() if not (line := " ".join(command)).startswith(known)] == []
    assert [suite for suite in RUN_BY.values() if not (ROOT / suite).exists()] == []


# The README's run, as typed


class ReadmeRun:
    """The environment, configuration, commands and trainer of the README, with an engine that has no model."""

    def __init__(self, cluster: Cluster, engine: EngineProcess) -> None:
        self.cluster = cluster
        (cluster.directory / "run.toml").write_text(README.blocks("toml")[0])
        (cluster.directory / "sums.py").write_text(README.blocks("python")[0])
        host, port = engine.address
        self.variables = {
            "HEADPOND_CONFIG": "run.toml",
            "PYTHONPATH": f"{ROOT}{os.pathsep}.",
            "HEADPOND_ENGINE__URLS": f"http://{host}:{port}",
            "HEADPOND_STEPS": "2",
            "HEADPOND_BATCH__SIZE": "2",
        }

    def start(self, command: list[str]) -> Process:
        program = sys.executable if command[0] == "python" else str(BIN / command[0])
        return self.cluster.start(command[0], program, *command[1:], **self.variables)

    def output(self, command: list[str]) -> str:
        process = self.start(command)
        assert process.wait() == 0, process.text
        return process.text


@pytest.fixture(scope="module")
def readme_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadmeRun]:
    directory = tmp_path_factory.mktemp("readme")
    engine = EngineProcess(directory, "--layers", "8")
    try:
        with cluster_in(directory) as cluster:
            readme = ReadmeRun(cluster, engine)
            (up,) = [command for command in README.commands() if command[1] == "up"]
            run = readme.start(up)
            trainer = readme.start(["python", "-c", README.blocks("python")[1]])
            assert run.wait() == 0, run.text[-3000:]
            assert trainer.wait() == 0, trainer.text[-3000:]
            yield readme
    finally:
        engine.end()


def test_the_readmes_run_delivers_its_steps_to_its_trainer(readme_run: ReadmeRun) -> None:
    trained = readme_run.cluster.directory / "runs/sums/trainer"
    assert '"acked":1' in (trained / "rank_00.json").read_text().replace(" ", "")
    assert '"version":2' in (trained / "policy.json").read_text().replace(" ", "")


def test_status_and_audit_print_what_the_readme_describes(readme_run: ReadmeRun) -> None:
    commands = [command for command in README.commands() if command[1] in ("status", "why", "audit")]
    outputs = {command[1]: readme_run.output(command) for command in commands}
    assert "2 of 2 delivered" in outputs["status"]
    assert "the run is done" in outputs["why"]
    assert "+ 0 in flight + 0 dead" in outputs["audit"]


# Samples


@named(GUIDES)
def test_toml_blocks_load(page: Page, tmp_path: Path) -> None:
    for number, block in enumerate(page.blocks("toml")):
        assert tomllib.loads(block)
        path = tmp_path / f"{number}.toml"
        path.write_text(block)
        load(path, environ={})


@named(GUIDES)
def test_python_blocks_compile_and_use_the_readers_own_names(page: Page) -> None:
    kinds = {"reader": BatchReader, "batch": Batch, "mb": MicroBatch}
    for block in page.blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in kinds:
                assert is_attribute(kinds[node.value.id], node.attr), f"{node.value.id}.{node.attr}"


def is_attribute(kind: type, name: str) -> bool:
    """Of the class, or set by its `__init__`."""
    assigned = kind.__init__.__code__.co_names if hasattr(kind.__init__, "__code__") else ()
    return hasattr(kind, name) or name in kind.__annotations__ or name in assigned


def test_the_environment_of_the_guide_plays(readme_run: ReadmeRun, tmp_path: Path, monkeypatch: Any) -> None:
    guide = Page(ROOT / "docs" / "environments.md")
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "capitals.py").write_text(guide.blocks("python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    settings = tomllib.loads(guide.blocks("toml")[0])["environments"]["capitals"]
    results: list[RolloutResult] = []

    async def main() -> None:
        environment = load_environments({"capitals": EnvironmentSettings(**settings)})["capitals"]
        async with stage_of(tmp_path / "store", readme_run.variables["HEADPOND_ENGINE__URLS"]) as stage:
            results.append(await play(stage, environment, 0, attempt_of()))

    run(main)
    assert results[0].metrics["hinted"] == 1.0, "an engine without a model does not answer with a capital"
    assert results[0].policy_error is None


def test_the_rules_of_the_guide_compute(tmp_path: Path, monkeypatch: Any) -> None:
    guide = Page(ROOT / "docs" / "trainers.md")
    (tmp_path / "my_package").mkdir()
    (code,) = (block for block in guide.blocks("python") if "Estimator" in block)
    (settings,) = (block for block in guide.blocks("toml") if "estimator" in block)
    (tmp_path / "my_package" / "mine.py").write_text(code)
    (tmp_path / "rules.toml").write_text(settings)
    monkeypatch.syspath_prepend(tmp_path)
    config = load(tmp_path / "rules.toml", environ={})
    assert check_rules(config), "it has a batch phase"
    values = BatchValues(values=np.array([1.0, 2.0]), sampled_tokens=np.array([1, 1]))
    recipe = resolve(config.advantages, group_size=2)
    first = batch_phase(values, recipe)
    assert batch_phase(values, recipe, first.state).values.tolist() == pytest.approx([0.85, 1.85])
    (*_, urls) = rollout_filters(config.filters, vocab_size=9)
    assert urls.name == "urls"
    assert urls.rule(filtering.rollout([-1.0] * 3, input_ids=[2485, 1, 2485], loss_mask=[0, 1, 1])) == 2, (
        "in completions only"
    )
    (*_, unanimous) = group_filters(config.filters, needs_variance=False)
    assert [unanimous.rule(filtering.group(rewards)) for rewards in ([1.0, 1.0], [1.0, 0.0])] == [True, False]
    ranked = resolve(AdvantageSettings(estimator="my_package.mine:soft_rank"), group_size=3)
    assert group_phase(advantages.group([2.0, 1.0, 2.0]), ranked).values.tolist() == pytest.approx(
        [1 / 9, -2 / 9, 1 / 9]
    )


def test_samples_of_the_environment_guide_can_be_imported() -> None:
    for block in Page(ROOT / "docs" / "environments.md").blocks("python"):
        exec(compile(block, "docs/environments.md", "exec"), {"__name__": "sample"})


# Names


@named(GUIDES)
def test_every_path_and_module_exists(page: Page) -> None:
    missing = [code for code in page.inline_code() if not path_exists(code) or not module_exists(code)]
    assert not missing


def path_exists(code: str) -> bool:
    found = re.fullmatch(rf"((?:{'|'.join(FOLDERS)})/[\w./-]*)(::\w+)?", code)
    return found is None or (ROOT / found[1]).exists()


def module_exists(code: str) -> bool:
    """A dotted name in one of our packages is a module, or an attribute of one."""
    if not re.fullmatch(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+", code) or code in settings_of_the_reference():
        return True
    if importlib.util.find_spec(code.split(".")[0]) is None:
        return False
    module, _, name = code.rpartition(".")
    try:
        return importlib.util.find_spec(code) is not None
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), name)


@named([*GUIDES, *LOGS])
def test_every_relative_link_resolves(page: Page) -> None:
    targets = [link.partition("#")[0] for link in page.links() if "://" not in link]
    assert [target for target in targets if not (page.path.parent / target).exists()] == []


def settings_of_the_reference() -> set[str]:
    """`section.key` of every setting, and the sections, read from the generated page."""
    names, section = set[str](), ""
    for line in configuration_page.page().splitlines():
        if heading := re.match(r"## `\[(.+)\]`", line):
            section = heading[1].replace(".NAME", "")
            names.add(section)
        elif row := re.match(r"\| `(\w+)` \|", line):
            names.add(f"{section}.{row[1]}".lstrip("."))
    return names


@named(GUIDES)
def test_every_setting_exists(page: Page) -> None:
    settings = settings_of_the_reference()
    sections = {name.split(".")[0] for name in settings if "." in name}
    unknown = [code for code in page.inline_code() if (name := setting_named(code, sections)) and name not in settings]
    assert not unknown


def setting_named(code: str, sections: set[str]) -> str | None:
    """`section.key`, `section.key = value` or `[section]`; None for attributes of a trainer's or policy's variables."""
    if heading := re.fullmatch(r"\[([a-z_.]+)\]", code):
        return None if heading[1] == "section" else heading[1]
    name = code.partition(" = ")[0]
    dotted = re.fullmatch(r"([a-z_]+)\.([a-z_]+)(?:\.[a-z_]+)*", name)
    if dotted is None or dotted[1] not in sections or dotted[2] in ("json", "jsonl"):
        return None
    kinds: dict[str, tuple[type, ...]] = {"batch": (Batch,), "policy": (Policy, AgentPolicy)}
    return None if any(is_attribute(kind, dotted[2]) for kind in kinds.get(dotted[1], ())) else name


@named(GUIDES)
def test_every_variable_is_a_setting(page: Page) -> None:
    examples = {"HEADPOND_SECTION__KEY", "HEADPOND_CONFIG"}
    variables = set(re.findall(r"\bHEADPOND_[A-Z_]*[A-Z]\b", page.text)) - examples
    names = {name.removeprefix("HEADPOND_").lower().replace("__", ".") for name in variables}
    assert not names - settings_of_the_reference()


# The pages themselves


def test_the_configuration_page_is_that_of_the_settings() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_page.page(), "run `make docs`"


def test_the_page_of_agents_has_every_variable_and_every_agent() -> None:
    """`make test-agents-all` compares the agents' figures."""
    page = (ROOT / "docs" / "agents.md").read_text()
    names = re.findall(r"`([A-Z][A-Z_]+)`", page.partition("## The variables of agents")[2].partition("\n## ")[0])
    assert set(names) == set(agent_variables("", "", ""))
    rows = [line.split(" | ")[0].strip("| ") for line in page.splitlines() if line.count("|") == 8]
    assert rows[2:] == [agent.name for agent in AGENTS]


def test_the_readme_links_every_page() -> None:
    linked = {(ROOT / link).resolve() for link in README.links()}
    assert [page.name for page in GUIDES[1:] if page.path not in linked] == []


def test_the_architecture_page_names_every_room() -> None:
    page = Page(ROOT / "docs" / "architecture.md")
    product = [package for package in PACKAGES if package != "bench"]
    modules = [path for package in product for path in (ROOT / package).rglob("__init__.py")]
    rooms = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in modules}
    assert rooms - set(page.inline_code()) == set()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_the_files_it_touches_and_the_test_to_copy(recipe: str) -> None:
    text = CONTRIBUTING.text.partition(f"\n## {recipe}\n")[2].partition("\n## ")[0]
    rows = {
        label: re.findall(r"`([\w./]+\.py)`", cell) for label, cell in re.findall(r"^\| (.+?) \| (.+) \|$", text, re.M)
    }
    assert rows.keys() >= {"yours", "here", "read first", "test to copy"}
    tests = rows["test to copy"]
    assert rows["here"]
    assert tests
    assert all(name.startswith("tests/") and (ROOT / name).is_file() for name in tests)


def test_the_code_of_contributing_runs() -> None:
    for block in CONTRIBUTING.blocks("python"):
        exec(compile(block, "CONTRIBUTING.md", "exec"), {"__name__": "sample"})


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_svg_for_light_and_dark(picture: Path) -> None:
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert "prefers-color-scheme: dark" in picture.read_text()
