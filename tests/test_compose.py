"""Dockerfile and docker-compose.yml agree with the code base. Needs no Docker."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from headpond import config
from headpond.broker.queues import Queue
from headpond.commands.main import app
from headpond.store import open_store

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
IGNORE = (ROOT / ".dockerignore").read_text().split("\n")
RUN = ROOT / "deploy" / "run.toml"
WORKERS = {"rollout-worker", "compute-worker"}


def seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration.removesuffix("s"))


def options(command: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in command if word.startswith("--")]


def test_the_file_works_with_compose_1_and_2() -> None:
    """1.29 supports neither `name` nor `start_interval`; 2 warns of `version`."""
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"services", "volumes"}
    known = {"test", "interval", "timeout", "retries", "start_period"}
    assert all(service["healthcheck"].keys() <= known for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_a_health_check_and_can_be_stopped(name: str) -> None:
    service = SERVICES[name]
    assert service["init"] is True
    assert service["healthcheck"]["test"]
    assert service["restart"]
    assert service["cap_drop"] == ["ALL"]
    assert service["logging"]["options"]["max-size"]
    assert "container_name" not in service
    assert "hostname" not in service


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_a_ping_that_starts_slowly_on_busy_cores_is_no_unhealthy_worker(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    [answer_s] = re.findall(r"--timeout (\d+)", check["test"][-1])
    assert seconds(check["timeout"]) >= float(answer_s) + 60, "30 s were too short at a load of 50"


def test_only_flower_and_the_dashboard_have_a_port_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {"flower", "dashboard"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_passwords_are_required_environment_variables() -> None:
    named = re.findall(r"\$\{(\w*(?:PASSWORD|SECRET)\w*)([^}]*)", TEXT)
    assert {name for name, _ in named} == {"REDIS_PASSWORD", "FLOWER_PASSWORD", "DASHBOARD_SECRET"}
    assert all(rest.startswith(f":?set {name} in .env") for name, rest in named)
    example = dict(line.split("=") for line in (ROOT / ".env.example").read_text().splitlines() if "=" in line[:20])
    assert {example[name] for name, _ in named} == {""}
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", SERVICES)
def test_no_password_is_in_a_command_line(name: str) -> None:
    service = SERVICES[name]
    assert "PASSWORD" not in f"{service['command']} {service['healthcheck']}"


def test_engine_and_trainer_get_no_password() -> None:
    assert {name for name, service in SERVICES.items() if "environment" not in service} == {"engine", "trainer"}


def test_redis_is_durable_and_evicts_nothing() -> None:
    settings = SERVICES["redis"]["command"][-1]
    assert all(
        line in settings for line in ("appendonly yes", "maxmemory-policy noeviction", 'requirepass "$$REDISCLI')
    )
    assert SERVICES["redis"]["volumes"] == ["redis:/data"]


@pytest.mark.parametrize("name", ["engine", "orchestrator", "dashboard"])
def test_commands_and_options_of_headpond_exist(name: str) -> None:
    program, command, *arguments = SERVICES[name]["command"]
    assert program == "headpond"
    subcommand = get_command(app).commands[command]  # pyright: ignore[reportAttributeAccessIssue]
    known = {option for parameter in subcommand.params for option in parameter.opts}
    assert set(options(arguments)) <= known


def test_the_celery_apps_exist_outside_a_clone_and_every_queue_has_a_worker(tmp_path: Path) -> None:
    served: list[str] = []
    apps: list[str] = []
    for name in (*WORKERS, "flower"):
        program, flag, module, command, *arguments = SERVICES[name]["command"]
        assert (program, flag) == ("celery", "-A")
        apps.append(module)
        assert command == ("worker" if name in WORKERS else "flower")
        served += arguments[arguments.index("-Q") + 1].split(",") if name in WORKERS else []
    assert sorted(served) == sorted(queue.value for queue in Queue)
    # In a process of its own: a worker's module limits the queues of its process.
    code = "import sys, importlib; print([type(importlib.import_module(each).app).__name__ for each in sys.argv[1:]])"
    imported = subprocess.run(
        [sys.executable, "-c", code, *apps], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert imported.stdout == "['Celery', 'Celery', 'Celery']\n"


def test_the_trainer_script_exists_and_reads_the_run_directory() -> None:
    interpreter, script, run_dir, *_ = SERVICES["trainer"]["command"]
    assert interpreter == "python3"
    assert (ROOT / script).is_file()
    assert Path(run_dir) == config.load(RUN, environ={}).run_dir


def test_the_dashboard_reads_the_run_and_can_change_nothing() -> None:
    service = SERVICES["dashboard"]
    assert Path(service["command"][2]) == config.load(RUN, environ={}).run_dir
    assert service["volumes"] == ["data:/data:ro"]
    assert service["environment"].keys() == {"DASHBOARD_SECRET"}


def test_the_run_s_configuration_fits_the_containers() -> None:
    environment = SERVICES["orchestrator"]["environment"]
    settings = config.load(RUN, environ={"HEADPOND_REDIS_URL": "redis://:secret@redis:6379/0"})
    assert {use.use for use in settings.environments.values()} == {"arithmetic", "guess", "distinct", "program"}
    assert settings.engine.urls == ("http://engine:8000",)
    assert settings.sessions.urls == ("http://sessions:8100",)
    assert all(
        str(path).startswith("/data/")
        for path in (settings.run_dir, open_store(settings.store_url), settings.ledger_path)
    )
    for name in (*WORKERS, "orchestrator"):
        assert SERVICES[name]["environment"] == environment
        assert f"./deploy/run.toml:{environment['HEADPOND_CONFIG']}:ro" in SERVICES[name]["volumes"]
        assert "data:/data" in SERVICES[name]["volumes"]
        assert seconds(SERVICES[name]["stop_grace_period"]) >= settings.recovery.drain_s + 10
    assert environment.keys() == {"HEADPOND_CONFIG", "HEADPOND_REDIS_URL"}


def test_the_image_has_every_package_and_nothing_else() -> None:
    included = {line[1:] for line in IGNORE if line.startswith("!")}
    assert "*" in IGNORE
    assert included == {
        "headpond", "tasks", "workers", "orchestrator", "examples", "constraints",
        "pyproject.toml", "deploy/build_hooks.py", "README.md", "LICENSE",
    }  # fmt: skip
    assert all((ROOT / name).exists() for name in included)


def test_what_the_links_of_the_image_point_to_is_in_it_too() -> None:
    """COPY keeps links as they are. A link without its target dangles, and the wheel lacks the folder or file."""
    included = {line[1:] for line in IGNORE if line.startswith("!")}
    links = [path for name in included for path in (ROOT / name).rglob("*") if path.is_symlink()]
    assert {"tasks", "workers", "orchestrator", "demo.toml", "run.toml"} <= {link.name for link in links}
    assert not [link for link in links if link.resolve().relative_to(ROOT).parts[0] not in included]


def test_the_image_does_not_run_as_root_and_uses_the_constraints() -> None:
    build, image = DOCKERFILE.split("\nFROM ")[1:]
    assert "ARG BASE=python:3.12-slim" in DOCKERFILE
    assert "--constraint constraints/app.txt '.[app,flower]'" in build
    assert re.search(r"^USER \$\{UID\}", image, re.MULTILINE)
    assert not re.search("apt-get|pip ", image)
