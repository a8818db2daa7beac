"""Weights that change while a run plays: every trained token was sampled by the version that the batch names.

The scripted engine's filler text depends on the weights that are loaded, so a batch shows which version made a token.
"""

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cluster import Cluster, Process, cluster_in
from support.engine_process import EngineProcess, write_weights
from support.waiting import wait_until

from headpond.batches import BatchReader, MicroBatch
from headpond.demo.scripted_engine.generation import FILLER, shifted
from headpond.renderers import bytes_chatml

FILLER_TEXT = bytes_chatml.decode(FILLER)
ANSWER = ord("\n")
"""Ends the filler of a completion."""
MOST_STEPS_TO_SEE = 5
"""After so many steps no rollout is left that began before them: one step is trained on, one is ahead."""
ENGINE = ("--length", "constant:60", "--latency", "uniform:0.05:0.2")


class Replicas:
    def __init__(self, directory: Path, count: int, *arguments: str) -> None:
        self._directory, self._arguments = directory, (*ENGINE, *arguments)
        self.processes = [EngineProcess(directory, *self._arguments) for _ in range(count)]
        self.ports = [process.address[1] for process in self.processes]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def restart(self, index: int) -> None:
        """Another process at the same address, with the first weights."""
        self.processes[index].kill()
        self.processes[index] = EngineProcess(self._directory, "--port", str(self.ports[index]), *self._arguments)
        assert self.processes[index].address[1] == self.ports[index]

    def end(self) -> None:
        for process in self.processes:
            process.end()


@contextmanager
def run_of(
    directory: Path, *arguments: str, replicas: int = 1, named: str | None = None, **settings: Any
) -> Iterator[tuple[Cluster, Replicas, Process]]:
    """`named`: what the replicas call their weights before the run begins."""
    engines = Replicas(directory, replicas, *arguments)
    for url in engines.urls if named else ():
        post(f"{url}/update_weight_version", {"new_version": named})
    engine = {"urls": engines.urls, "unreachable_s": 0.5, **settings.pop("engine", {})}
    defaults: dict[str, Any] = {
        "steps": 4,
        "batch": {"size": 4, "seq_len": 4096},
        "trainer": {"max_steps_ahead": 1},
        "environments.sums": {"use": "arithmetic"},
    }
    try:
        with cluster_in(directory / "cluster", engine=engine, **defaults | settings) as cluster:
            cluster.store = cluster.run_dir / "store"
            cluster.configure(engine=engine, **defaults | settings)
            cluster.rollout_worker(concurrency=8)
            cluster.compute_worker()
            yield cluster, engines, cluster.orchestrator()
    finally:
        engines.end()


def checked_versions(mb: MicroBatch) -> list[int]:
    """The version of every exact token of filler, checked against its text."""
    checked: list[int] = []
    for start, end in zip(mb.cu_seqlens[:-1], mb.cu_seqlens[1:], strict=True):
        ids, versions, exact = (values[start:end] for values in (mb.input_ids, mb.versions, mb.version_exact))
        for span in completions(versions):
            filler = span[: int(np.argmax(ids[span] == ANSWER))]
            for version in np.unique(versions[filler]):
                part = filler[(versions[filler] == version) & (exact[filler] == 1)]
                text = bytes_chatml.decode(shifted(ids[part], -int(version)))
                assert is_filler(text), f"not sampled by version {version}: {bytes_chatml.decode(ids[part])}"
                checked += [int(version)] * len(part)
    return checked


def is_filler(text: str) -> bool:
    """A part of the filler, or of what follows a drawn start when that is repeated up to the length."""
    repeated = (FILLER_TEXT[-length:] * (len(text) // length + 2) for length in range(1, len(text) + 1))
    return text in FILLER_TEXT or any(text in ends for ends in repeated)


def completions(versions: np.ndarray) -> list[np.ndarray]:
    sampled = np.flatnonzero(versions >= 0)
    return [run for run in np.split(sampled, np.flatnonzero(np.diff(sampled) > 1) + 1) if len(run)]


def post(url: str, body: Any = None) -> None:
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


def metrics(cluster: Cluster) -> list[dict[str, float]]:
    return [json.loads(line) for line in (cluster.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_run_loads_weights_and_brings_a_restarted_replica_up_to_date(tmp_path: Path) -> None:
    settings = {"engine": {"weight_update": "headpond"}, "trainer": {"max_steps_ahead": 0}}
    with run_of(tmp_path, replicas=2, **settings) as (cluster, engines, run):
        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        again = f"action=weights_loaded url={engines.urls[0]} version=2"
        for batch in reader:
            versions = [version for mb in batch.micro_batches() for version in checked_versions(mb)]
            assert set(versions) == {batch.step}, "strictly on-policy"
            reader.ack(batch.step)
            reader.publish_policy(batch.step + 1, weights=write_weights(tmp_path, batch.step + 1))
            if batch.step == 1:
                wait_until(lambda: labels(cluster) == {"2"}, what="both replicas to have version 2")
                engines.restart(0)
                wait_until(lambda: run.text.count(again) == 2, what="version 2 to be loaded again")
            reader.checkpointed(batch.step)
        assert run.wait() == 0, run.text[-3000:]
        assert cluster.audit()["balanced"]
        loaded = re.findall(r"action=weights_loaded url=(\S+) version=(\d)", run.text)
        assert loaded.count((engines.urls[0], "2")) == 2, "again after its restart"
        assert loaded.count((engines.urls[1], "2")) == 1
        assert "replica_refused" not in run.text, "the run itself loads what is missing"
        assert [line["staleness_max"] for line in metrics(cluster)] == [0, 0, 0, 0]


def test_a_replica_whose_update_fails_is_named_and_serves_nothing_until_one_succeeds(tmp_path: Path) -> None:
    settings = {"engine": {"weight_update": "headpond"}, "trainer": {"max_steps_ahead": 0}, "steps": 2}
    with run_of(tmp_path, **settings) as (cluster, engines, run):
        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        first = next(reader)
        reader.ack(first.step)
        reader.publish_policy(1, weights=tmp_path / "weights" / "version_1")
        cluster.wait_waiting_for(f"{engines.urls[0]} could not be updated and serves nothing: version 1 from")
        assert "cannot load weights from" in str(cluster.status().waiting_for)
        wait_until(lambda: not cluster.status().replicas[engines.urls[0]]["serves"], what="a poll after the failure")
        assert labels(cluster) == {"failed 1"}
        write_weights(tmp_path, 1)
        second = next(reader)
        assert {version for mb in second.micro_batches() for version in checked_versions(mb)} == {1}
        reader.ack(second.step)
        assert run.wait() == 0, run.text[-3000:]
        assert cluster.audit()["dead"] == 0


def test_every_version_of_a_lora_adapter_is_exact(tmp_path: Path) -> None:
    """Requests name the adapter, so that its replica may load the next one while they are answered."""
    settings = {"engine": {"weight_update": "headpond", "lora": True}}
    with run_of(tmp_path, replicas=2, **settings) as (cluster, _, run):
        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        versions: set[int] = set()
        for batch in reader:
            for mb in batch.micro_batches():
                versions |= set(checked_versions(mb))
                assert mb.version_exact[mb.versions > 0].all()
            reader.publish_policy(batch.step + 1, weights=write_weights(tmp_path, batch.step + 1))
            if batch.step == 0:
                wait_until(lambda: labels(cluster) == {"1"}, what="both replicas to have the first adapter")
            reader.ack(batch.step)
        assert run.wait() == 0, run.text[-3000:]
        assert versions - {0}, "an adapter played"
        assert cluster.audit()["dead"] == 0


def test_an_update_of_the_weights_waits_for_the_evaluation_of_the_version_before(tmp_path: Path) -> None:
    evaluation = {"use": "arithmetic", "every": 1, "examples": 6}
    settings = {"engine": {"weight_update": "headpond"}, "evaluation.held_out": evaluation}
    with run_of(tmp_path, **settings) as (cluster, _, run):
        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        for batch in reader:
            reader.publish_policy(batch.step + 1, weights=write_weights(tmp_path, batch.step + 1))
            if batch.step < 2:  # while step 2 is trained, step 3 may be sealed, which ends the run
                wait_until(lambda step=batch.step: labels(cluster) == {str(step + 1)}, what=f"version {batch.step + 1}")
            reader.ack(batch.step)
            reader.checkpointed(batch.step)
        assert run.wait() == 0, run.text[-3000:]
        lines = [json.loads(line) for line in (cluster.run_dir / "evaluations.jsonl").read_text().splitlines()]
        assert [line["version"] for line in lines][:3] == [0, 1, 2]
        assert all(line["version_first"] == line["version_last"] == line["version"] for line in lines), lines
        assert {line["rollouts"] for line in lines} == {6}


def load(url: str, weights: Path, version: int) -> None:
    """As docs/engines.md tells a trainer: requests are held between loading and naming."""
    post(f"{url}/pause?mode=keep")
    post(f"{url}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})
    post(f"{url}/update_weight_version", {"new_version": str(version)})
    post(f"{url}/resume")


def labels(cluster: Cluster) -> set[str]:
    """What the serving replicas call their weights, without the run's id."""
    return {str(state["weights"]).partition("@")[0] for state in cluster.status().replicas.values()}


@pytest.mark.parametrize("dialect", ["generate", "vllm"])
def test_updates_by_the_trainer_in_the_middle_of_responses(tmp_path: Path, dialect: str) -> None:
    """`generate` states the version of each token; of a chat across an update, only a range is known."""
    policy = {"renderer": "bytes-chatml"} if dialect == "generate" else {}
    with run_of(tmp_path, engine={"dialect": dialect}, policy=policy) as (cluster, engines, run):
        url = engines.urls[0]
        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        versions: set[int] = set()
        exact = tokens = later = 0
        for batch in reader:
            for mb in batch.micro_batches():
                versions |= set(checked_versions(mb))
                exact, tokens = exact + int(mb.version_exact.sum()), tokens + int((mb.versions >= 0).sum())
                later += int(((mb.versions > 0) & (mb.version_exact == 0)).sum())
            reader.ack(batch.step)
            load(url, write_weights(tmp_path, batch.step + 1), batch.step + 1)
            reader.publish_policy(batch.step + 1)
            reader.checkpointed(batch.step)
        assert run.wait() == 0, run.text[-3000:]
        assert len(versions) > 1
        assert tokens * 0.5 < exact
        # The first weights have no number: whether a response of them came before the update is seen by polls.
        assert later == 0 or dialect == "vllm"
        played = [(line, line["completion_tokens/mean"] * line["rollouts"]) for line in metrics(cluster)]
        inexact = sum(line["version_inexact_rate"] * sampled for line, sampled in played)
        assert round(inexact) == tokens - exact


def test_a_replica_with_weights_that_the_trainer_gave_up_serves_nothing(tmp_path: Path) -> None:
    """The trainer goes back from version 2 to 1 and forgets one replica until version 3."""
    with run_of(tmp_path, replicas=2, steps=5) as (cluster, engines, run):

        def publish(version: int, urls: list[str]) -> None:
            for url in urls:
                load(url, write_weights(tmp_path, version), version)
            reader.publish_policy(version)

        def forgotten() -> dict[str, Any]:
            return cluster.status().replicas[engines.urls[1]]

        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        for version in (1, 2):
            step = next(reader).step
            publish(version, engines.urls)
        wait_until(lambda: labels(cluster) == {"2"}, what="the status to show version 2")
        reader.ack(step - 1)
        reader.checkpointed(step - 1)

        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60, resume_step=0)
        publish(1, engines.urls[:1])
        wait_until(lambda: not forgotten()["serves"], what="the abandoned weights to be refused")
        told = f"{engines.urls[1]} calls its weights '2', which the trainer has abandoned"
        assert told in str(cluster.status().waiting_for)
        for batch in reader:
            if batch.step == 1:
                publish(2, engines.urls[:1])
                wait_until(lambda: labels(cluster) == {"2"}, what="the status to show version 2 of both")
                assert not forgotten()["serves"], "its version 2 is another one"
            else:
                publish(batch.step + 1, engines.urls)
            if batch.step == 2:
                wait_until(lambda: forgotten()["serves"], what="the replica to be admitted with version 3")
            reader.ack(batch.step)
        assert run.wait() == 0, run.text[-3000:]
        assert cluster.audit()["dead"] == 0


class TrainerOfReplicas:
    """Trains on every step and publishes another version, to the replicas that it is told."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        self._directory = directory
        self.version = 0

    def publish(self, urls: list[str]) -> None:
        self.version += 1
        for url in urls:
            self.load(url)
        self._reader.publish_policy(self.version)

    def load(self, url: str) -> None:
        load(url, write_weights(self._directory, self.version), self.version)

    def train(self, urls: list[str]) -> set[int] | None:
        """The versions that sampled the tokens of the next step; those of exact ones are checked against their text.
        None after the last step."""
        batch = next(self._reader, None)
        if batch is None:
            return None
        versions: set[int] = set()
        for mb in batch.micro_batches():
            checked_versions(mb)
            versions |= set(mb.versions[mb.versions >= 0].tolist())
        self.publish(urls)
        self._reader.ack(batch.step)
        self._reader.checkpointed(batch.step)
        return versions

    def train_above(self, version: int, urls: list[str]) -> None:
        """Until a step has newer versions only."""
        trained = [self.train(urls)]
        while not trained[-1] or min(trained[-1]) <= version:
            assert len(trained) < MOST_STEPS_TO_SEE, trained
            trained.append(self.train(urls))


def test_a_restarted_engine_serves_nothing_until_the_trainer_has_loaded_its_weights(tmp_path: Path) -> None:
    """There is no other one: its rollouts wait."""
    with run_of(tmp_path, steps=10, engine={"weight_update_timeout_s": 1.0}) as (cluster, engines, run):
        trainer = TrainerOfReplicas(cluster, tmp_path)
        trainer.train_above(0, engines.urls)
        wait_until(lambda: labels(cluster) == {str(trainer.version)}, what="the status to show the version")
        engines.restart(0)
        cluster.wait_waiting_for(f"calls its weights 'default', older than version {trainer.version}")
        trainer.load(engines.urls[0])
        while versions := trainer.train(engines.urls):
            assert min(versions) > 0, versions
        assert run.wait() == 0, run.text[-3000:]
        assert cluster.audit()["dead"] == 0


@pytest.mark.parametrize("fault", ["restarted", "left behind"])
def test_a_refused_replica_plays_nothing_while_the_other_goes_on(tmp_path: Path, fault: str) -> None:
    """One of two replicas restarts, or misses updates for longer than the time limit, and is updated later."""
    settings = {"steps": 18, "engine": {"weight_update_timeout_s": 1.0}}
    with run_of(tmp_path, replicas=2, **settings) as (cluster, engines, run):
        trainer = TrainerOfReplicas(cluster, tmp_path)
        other, refused = engines.urls
        trainer.train_above(0, engines.urls)
        wait_until(lambda: labels(cluster) == {str(trainer.version)}, what="the status to show the version of both")
        if fault == "restarted":
            engines.restart(1)
        else:
            trainer.publish([other])
        has, label = (0, "default") if fault == "restarted" else (trainer.version - 1, str(trainer.version - 1))
        cluster.wait_waiting_for(f"{refused} calls its weights '{label}', older than version {trainer.version}")
        serve = {url: state["serves"] for url, state in cluster.status().replicas.items()}
        assert serve == {other: True, refused: False}

        # What began before it was refused is trained on; then it plays nothing, although it answers and is idle.
        trainer.train_above(has, [other])
        after = [trainer.train([other]) for _ in range(4)]
        assert all(versions and min(versions) > has for versions in after), after
        assert not cluster.status().replicas[refused]["serves"]

        trainer.load(refused)
        wait_until(lambda: cluster.status().replicas[refused]["serves"], what="the updated replica to be admitted")
        while versions := trainer.train(engines.urls):
            assert min(versions) > has
        assert run.wait() == 0, run.text[-3000:]
        assert cluster.audit()["dead"] == 0


def test_an_engine_that_names_no_version_stops_the_run_and_names_the_setting(tmp_path: Path) -> None:
    with run_of(tmp_path, "--no-dev-mode", engine={"weight_update_timeout_s": 0.5}) as (cluster, _, run):
        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        batch = next(reader)
        assert all(not mb.version_exact.any() for mb in batch.micro_batches())
        reader.ack(batch.step)
        reader.publish_policy(1)
        assert run.wait() == 2
        assert 'set engine.versions = "announced"' in run.text


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_trainer_that_counts_from_0_on_an_engine_that_has_version_20_is_refused(tmp_path: Path, ahead: int) -> None:
    """The weights are of an earlier run, whose trainer named them."""
    with run_of(tmp_path, named="20", trainer={"max_steps_ahead": ahead}) as (cluster, engines, run):
        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        batch = next(reader)
        told = "the run starts with version 20"
        assert re.search(f"WARNING.*action=start_version.*{told}", run.text), run.text[-3000:]
        wait_until(lambda: told in str(cluster.status().notes), what="the note about the start version")
        load(engines.urls[0], write_weights(tmp_path, 1), 1)
        reader.publish_policy(batch.step + 1)
        reader.ack(batch.step)
        assert run.wait() == 2
        assert re.search("first publication .*version 1,.* version 20", run.text)
        assert "publish_policy(reader.start_version + batch.step + 1)" in run.text
        assert 'section "Weights of an earlier run"' in run.text


def test_a_trainer_that_counts_on_from_the_start_version_is_strictly_on_policy(tmp_path: Path) -> None:
    with run_of(tmp_path, named="20", trainer={"max_steps_ahead": 0}, steps=3) as (cluster, engines, run):
        reader = BatchReader(cluster.run_dir, data_rank=0, data_ranks=1, timeout_s=60)
        for batch in reader:
            played = {version for mb in batch.micro_batches() for version in mb.versions[mb.versions >= 0].tolist()}
            assert played == {20 + batch.step}
            version = reader.start_version + batch.step + 1
            load(engines.urls[0], write_weights(tmp_path, version), version)
            reader.publish_policy(version)
            reader.ack(batch.step)
        assert run.wait() == 0, run.text[-3000:]
        assert [(line["policy_version"], line["staleness_mean"]) for line in metrics(cluster)] == [
            (20, 0),
            (21, 0),
            (22, 0),
        ]
