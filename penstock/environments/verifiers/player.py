"""One environment of `verifiers`, loaded, and how an episode of it is played. Runs in the process of `served.py`.

Every rollout has a session of its own, so a URL and a key of its own. The package wants the key in a variable of the
process and keeps a client with its own connections for every URL it has seen; here each rollout gets a copy of one
client, which shares the connections and is forgotten with the rollout.
"""

import contextlib
import copy
import importlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.environments.verifiers.outcomes import answer_of
from penstock.environments.verifiers.wire import Answer, Ask, Settings
from penstock.errors import ConfigError, StageError

LOCAL_RUNTIME = {"type": "subprocess"}
# All rollouts of the process go through one interception: the package's pools of them are for tunnels.
ONE_SERVER = {"type": "server"}
NO_VARIABLE = "PENSTOCK_HAS_NO_VARIABLE_FOR_IT"
UNUSED_URL = "http://127.0.0.1:9/v1"


class Player:
    def __init__(self, settings: Settings) -> None:
        self._vf = _package()
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        if settings.directory:
            _work_in(Path(settings.directory))
        self._environment = loaders.load_environment(_config(loaders.resolve_env_config, settings))
        self.tasks = _tasks(self._environment.taskset, settings.size)
        self._client = importlib.import_module("verifiers.v1.clients").EvalClient(self._endpoint(UNUSED_URL))
        self._clients: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Around all episodes."""
        try:
            async with self._environment.serving():
                self._clients = self._environment._interception.clients
                yield
        finally:
            await self._client.close()

    async def play(self, asked: Ask) -> Answer:
        slot = self._environment.slots(self.tasks[asked.example])[0]
        with self._session(asked) as endpoint:
            context = self._vf.ModelContext(model=asked.model, client=endpoint)
            episode = await self._environment.run_slot(slot, context, on_trace=_refuse_untrained(asked.base_url))
        return answer_of(asked.number, episode)

    @contextlib.contextmanager
    def _session(self, asked: Ask) -> Iterator[Any]:
        """What the interception finds under this endpoint is a client of this rollout."""
        endpoint = self._endpoint(asked.base_url)
        client = copy.copy(self._client)
        client.base_url, client.api_key = asked.base_url, asked.api_key
        key = endpoint.model_dump_json()
        self._clients[key] = client
        try:
            yield endpoint
        finally:
            del self._clients[key]

    def _endpoint(self, base_url: str) -> Any:
        return self._vf.EvalClientConfig(base_url=base_url, api_key_var=NO_VARIABLE)


def _package() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        raise ConfigError(f"it needs {error.name}: pip install 'penstock[verifiers]' where the worker runs") from error


def _work_in(directory: Path) -> None:
    """The package's own place is in the home directory, where nobody looks after a crash. What it keeps there for all
    processes, programs that it has installed, stays."""
    runtime: Any = importlib.import_module("verifiers.v1.runtimes.subprocess")
    runtime.CACHE_DIR = directory


def _config(resolve: Callable[[dict[str, Any]], Any], settings: Settings) -> Any:
    """As the package reads it, with this machine as the default runtime of every role: its own is a remote sandbox."""
    taskset = {"id": settings.taskset, **settings.config.get("taskset", {})}
    wanted = {"interception": ONE_SERVER, **settings.config, "taskset": taskset}
    if wanted["interception"].get("type") != ONE_SERVER["type"]:
        raise ConfigError("options.config.interception: its type must be `server`, one serves all rollouts of a worker")
    agent_config = importlib.import_module("verifiers.v1.configs.agent")
    for role, agent in agent_config.agent_config_fields(resolve(copy.deepcopy(wanted))).items():
        own = dict(wanted.get(role, {}))
        if "runtime" not in agent.model_fields_set:
            own["runtime"] = LOCAL_RUNTIME
        if settings.harness and "harness" not in agent.model_fields_set:
            own["harness"] = {"id": settings.harness}
        wanted[role] = own
    return _without_retries(resolve(wanted), agent_config.agent_config_fields)


def _without_retries(config: Any, roles_of: Callable[[Any], dict[str, Any]]) -> Any:
    """What the package tries again stays recorded in the rollout's session: it would be trained on."""
    seats = {f"{role}.retries": agent.retries for role, agent in roles_of(config).items() if agent.client is None}
    for setting, retries in {"retries": config.retries, **seats}.items():
        if retries.max_retries or retries.rules:
            raise ConfigError(f"options.config.{setting}: leave it out, Penstock tries again by itself")
    return config


def _tasks(taskset: Any, size: int | None) -> list[Any]:
    if size is None and not taskset.bounded:
        raise ConfigError("the taskset is endless: set options.size, the number of tasks to take")
    return list(taskset if size is None else taskset.take(size))


def _refuse_untrained(base_url: str) -> Callable[[Any], None]:
    """What goes through a rollout's session is trained on."""

    def look(trace: Any) -> None:
        agent = trace.agent
        if not agent.trainable and agent.config.client.base_url == base_url:
            raise StageError(
                f"the agent {agent.name!r} is not to be trained and has no model of its own: "
                f"set options.config.{agent.name}.client and options.config.{agent.name}.model"
            )

    return look
