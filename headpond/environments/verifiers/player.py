"""Loads an environment of `verifiers` and plays its episodes. Runs in the process of
`verifiers_child.py`.

Every rollout has its own session, with its own URL and key. The package reads the key from a
variable of the process and has a client with connections for every URL. Here each rollout gets a
copy of one client. The copy shares the connections and is dropped with the rollout.
"""

import asyncio
import contextlib
import copy
import importlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from headpond.environments.verifiers.episode_results import episode_result
from headpond.environments.verifiers.verifiers_process import kill_programs_of_ended_episodes
from headpond.environments.verifiers.wire import EpisodeRequest, EpisodeResult, Outcome, Settings
from headpond.errors import ConfigError, StageError
from headpond.event_loop.cancellation import run_to_completion
from headpond.event_loop.offload import in_io_thread

LOCAL_RUNTIME = {"type": "subprocess"}
# One interception server serves all rollouts of the process. The package's pools are for tunnels.
ONE_SERVER = {"type": "server"}
# The package's client requires these. Each rollout's copy of the client has its own URL and key.
UNUSED_VARIABLE = "HEADPOND_UNUSED_API_KEY"
UNUSED_URL = "http://127.0.0.1:9/v1"


class Player:
    def __init__(self, settings: Settings) -> None:
        self._vf = _import_package()
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        if settings.directory:
            _use_directory(Path(settings.directory))
        self._directory = settings.directory
        self._environment = loaders.load_environment(_config(loaders.resolve_env_config, settings))
        self.tasks = _tasks(self._environment.taskset, settings.size)
        self._client = importlib.import_module("verifiers.v1.clients").EvalClient(self._endpoint(UNUSED_URL))
        self._clients: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve the environment. Episodes are played in this context."""
        try:
            async with self._environment.serving():
                self._clients = self._environment._interception.clients
                yield
        finally:
            await self._client.close()

    async def play(self, request: EpisodeRequest) -> EpisodeResult:
        scored = False
        try:
            result = await self._play(request)
            scored = result.outcome is Outcome.SCORED
            return result
        finally:
            if self._directory and not scored:
                killing = in_io_thread(kill_programs_of_ended_episodes, self._directory)
                await run_to_completion(asyncio.create_task(killing))

    async def _play(self, request: EpisodeRequest) -> EpisodeResult:
        slot = self._environment.slots(self.tasks[request.example])[0]
        with self._session(request) as endpoint:
            context = self._vf.ModelContext(model=request.model, client=endpoint)
            episode = await self._environment.run_slot(slot, context, on_trace=_refuse_untrained(request.base_url))
        return episode_result(request.number, episode)

    @contextlib.contextmanager
    def _session(self, request: EpisodeRequest) -> Iterator[Any]:
        """Yield the rollout's endpoint. The interception server finds the rollout's own client
        under it."""
        endpoint = self._endpoint(request.base_url)
        client = copy.copy(self._client)
        client.base_url, client.api_key = request.base_url, request.api_key
        key = endpoint.model_dump_json()
        self._clients[key] = client
        try:
            yield endpoint
        finally:
            del self._clients[key]

    def _endpoint(self, base_url: str) -> Any:
        return self._vf.EvalClientConfig(base_url=base_url, api_key_var=UNUSED_VARIABLE)


def _import_package() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the package {error.name} is missing: pip install 'headpond[verifiers]' where the worker runs"
        ) from error


def _use_directory(directory: Path) -> None:
    """Put the files of episodes in `directory`, which is removed after a crash. The package's
    default is in the home directory; programs installed there for all processes stay there."""
    runtime: Any = importlib.import_module("verifiers.v1.runtimes.subprocess")
    runtime.CACHE_DIR = directory


def _config(resolve: Callable[[dict[str, Any]], Any], settings: Settings) -> Any:
    """Resolve the package's configuration. This machine is the default runtime of every role, in
    place of a sandbox."""
    taskset = {"id": settings.taskset, **settings.config.get("taskset", {})}
    config = {"interception": ONE_SERVER, **settings.config, "taskset": taskset}
    if config["interception"].get("type") != ONE_SERVER["type"]:
        raise ConfigError(
            "options.config.interception: its type must be `server`; one server is shared by all rollouts"
        )
    agent_config = importlib.import_module("verifiers.v1.configs.agent")
    for role, agent in agent_config.agent_config_fields(resolve(copy.deepcopy(config))).items():
        role_config = dict(config.get(role, {}))
        if "runtime" not in agent.model_fields_set:
            role_config["runtime"] = LOCAL_RUNTIME
        if settings.harness and "harness" not in agent.model_fields_set:
            role_config["harness"] = {"id": settings.harness}
        config[role] = role_config
    return _refuse_retries(resolve(config), agent_config.agent_config_fields)


def _refuse_retries(config: Any, roles_of: Callable[[Any], dict[str, Any]]) -> Any:
    """Refuse the package's retries: failed tries stay in the rollout's recording and would be
    trained on."""
    roles = {f"{role}.retries": agent.retries for role, agent in roles_of(config).items() if agent.client is None}
    for setting, retries in {"retries": config.retries, **roles}.items():
        if retries.max_retries or retries.rules:
            raise ConfigError(f"options.config.{setting}: remove it, Headpond retries failed rollouts")
    return config


def _tasks(taskset: Any, size: int | None) -> list[Any]:
    if size is None and not taskset.bounded:
        raise ConfigError("the taskset is infinite: set options.size to the number of tasks to use")
    return list(taskset if size is None else taskset.take(size))


def _refuse_untrained(base_url: str) -> Callable[[Any], None]:
    """Refuse agents that use a rollout's session but are not trained: everything in the session
    is trained on."""

    def check(trace: Any) -> None:
        agent = trace.agent
        if not agent.trainable and agent.config.client.base_url == base_url:
            raise StageError(
                f"the agent {agent.name!r} is not trained and has no model: "
                f"set options.config.{agent.name}.client and options.config.{agent.name}.model"
            )

    return check
