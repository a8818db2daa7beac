"""Which replicas may serve, by what they say of their weights."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import configured

from headpond.batches import TrainerState
from headpond.batches.signals import PublishedPolicy
from headpond.engines.replicas.control import Replica, WeightLabel
from headpond.errors import RunError
from headpond.orchestrator.ledger.ledger import Ledger
from headpond.orchestrator.serving.replica_watch import ReplicaWatch
from headpond.orchestrator.serving.serving_weights import ServingWeights
from headpond.orchestrator.trainer import Trainer

TIMEOUT_S = 10.0


class Scene:
    def __init__(self, ledger: Ledger, **settings: Any) -> None:
        engine = {"urls": ["http://a", "http://b"], "weight_update_timeout_s": TIMEOUT_S, **settings.pop("engine", {})}
        config = configured(engine=engine, **settings)
        self.ledger = ledger
        self.trainer = Trainer(config, ledger)
        self.weights = ServingWeights(config, ledger, [Replica(url=url) for url in config.engine.urls])
        self.watch = ReplicaWatch(config, "r1", ledger, self.trainer, self.weights)
        self.at = self.watch._published_at

    def publish(self, version: int) -> None:
        self.trainer.state = TrainerState(policy=PublishedPolicy(version=version, weights=None))
        self.ledger.state.policy_version = version

    def say(self, *labels: str | None, after_s: float = 0.0) -> None:
        """Answers of the first replicas, judged some seconds later."""
        self.at += after_s
        for replica, label in zip(self.weights.replicas, labels, strict=False):
            replica.hear(None if label is None else WeightLabel.parse(label), began=self.at)
        self.watch.judge(self.at)

    @property
    def told(self) -> list[str]:
        return [text for text in self.watch.troubles() if text]

    @property
    def refused(self) -> list[str]:
        return [url for url, state in self.watch.status().items() if not state["serves"]]


def test_a_published_version_is_required_once_every_replica_has_it(ledger: Ledger) -> None:
    scene = Scene(ledger)
    scene.say("default", "default")
    assert (scene.weights.least_version, scene.refused) == (0, [])
    scene.publish(1)
    scene.say("1", "default", after_s=1)
    assert (scene.weights.least_version, scene.refused) == (0, [])
    scene.say("1", "1", after_s=1)
    assert (scene.weights.least_version, scene.refused) == (1, [])
    scene.say("1", "default", after_s=1)
    assert scene.refused == ["http://b"]
    assert re.search(r"http://b .*'default'.* version 1\b", str(scene.watch.troubles()))
    scene.say("1", "1", after_s=1)
    assert (scene.refused, scene.told) == ([], [])


def test_a_replica_that_stays_behind_is_refused_after_the_time_limit(ledger: Ledger) -> None:
    scene = Scene(ledger)
    scene.publish(1)
    scene.say("1", "default")
    scene.say("1", "default", after_s=TIMEOUT_S / 2)
    assert scene.refused == []
    scene.say("1", "default", after_s=TIMEOUT_S)
    assert scene.refused == ["http://b"]


def test_what_was_required_survives_a_restart_of_the_orchestrator(ledger: Ledger) -> None:
    scene = Scene(ledger)
    scene.publish(3)
    scene.say("3", "3")
    again = Scene(ledger)
    again.say("3", "default")
    assert (again.weights.least_version, again.refused) == (3, ["http://b"])


def after_going_back(ledger: Ledger) -> Scene:
    """Every replica has version 7, and the trainer has published 5."""
    scene = Scene(ledger)
    scene.publish(7)
    scene.say("7", "7")
    scene.publish(5)
    return scene


def test_a_trainer_that_goes_back_lowers_what_is_required(ledger: Ledger) -> None:
    scene = after_going_back(ledger)
    scene.say("5", "5", after_s=1)
    assert (scene.weights.least_version, scene.refused) == (5, [])


@pytest.mark.parametrize("label", ["loading 2@r1", "failed 2@r1"])
def test_weights_that_were_not_loaded_completely_serve_nothing(ledger: Ledger, label: str) -> None:
    scene = Scene(ledger)
    scene.say(label, "default")
    assert scene.refused == ["http://a"]


def test_what_replicas_say_before_the_first_publication_is_the_start_version(ledger: Ledger) -> None:
    scene = Scene(ledger)
    scene.say("default", "12")
    assert ledger.state.policy_version == ledger.state.start_version == 12
    assert "the run starts with version 12" in str(scene.watch.notes())
    scene.say("12", "12", after_s=1)
    assert scene.weights.least_version == 12
    scene.publish(13)
    assert scene.watch.notes() == []


def test_what_a_trainer_loads_before_its_first_publication_is_no_start_version(ledger: Ledger) -> None:
    scene = Scene(ledger)
    scene.say("default", "default")
    ledger.state.steps_delivered = 1
    scene.say("1", "default", after_s=1)
    assert (ledger.state.policy_version, ledger.state.start_version, scene.watch.notes()) == (1, 0, [])


def test_weights_of_another_run_stop_this_one(ledger: Ledger) -> None:
    scene = Scene(ledger)
    with pytest.raises(RunError, match=r"two runs .*one engine") as refused:
        scene.say("4@r2")
    calls = "/pause, /collective_rpc, /reset_prefix_cache, /update_weight_version, /resume"
    assert f'section "Weights of an earlier run": {calls})' in str(refused.value)


@pytest.mark.parametrize("label", ["default", None])
def test_a_run_whose_engine_names_no_version_stops_and_names_the_setting(ledger: Ledger, label: str | None) -> None:
    scene = Scene(ledger)
    scene.publish(1)
    scene.say(label)
    with pytest.raises(RunError, match=r'set engine\.versions = "announced"'):
        scene.say(label, after_s=TIMEOUT_S + 1)
    Scene(ledger, engine={"versions": "announced"})


def test_an_engine_that_cannot_be_reached_stops_nothing(ledger: Ledger) -> None:
    scene = Scene(ledger)
    scene.publish(1)
    scene.say(after_s=TIMEOUT_S + 1)
    scene.weights.replicas[0].poll_failed()
    scene.say(after_s=TIMEOUT_S + 1)


def test_a_replica_that_has_reported_before_and_restarts_does_not_stop_the_run(ledger: Ledger) -> None:
    scene = Scene(ledger)
    scene.publish(1)
    scene.say("1")
    scene.publish(2)
    scene.say("default", after_s=1)
    scene.say("default", after_s=TIMEOUT_S + 1)
    assert scene.refused[0] == "http://a"


def test_a_router_is_told(ledger: Ledger) -> None:
    scene = Scene(ledger)
    for label in ("2", "1", "2", "1", "2"):
        scene.say(label, after_s=1)
    assert "http://a is a router" in str(scene.watch.troubles())


def test_strict_rollouts_begin_when_every_replica_has_the_new_version(ledger: Ledger) -> None:
    scene = Scene(ledger, trainer={"max_steps_ahead": 0})
    scene.say("default", "default")
    assert scene.weights.may_begin(0)
    ledger.state.composed_step = 0
    ledger.state.composed_version = 0
    assert scene.weights.may_begin(0), "the step may be formed again"
    ledger.state.steps_delivered = 1
    assert not scene.weights.may_begin(1)
    scene.publish(1)
    scene.say("1", "default", after_s=1)
    assert not scene.weights.may_begin(1)
    assert re.search("every replica has version 1: http://b ", str([scene.weights.awaited(1), *scene.watch.troubles()]))
    scene.weights.replicas[1].poll_failed()
    assert scene.weights.may_begin(1), "a replica that cannot be reached does not serve"
    scene.say("1", "1", after_s=1)
    assert scene.weights.may_begin(1)
    assert not scene.weights.may_begin(2)
    assert scene.weights.least_version == 1


def test_announced_versions_are_not_waited_for(ledger: Ledger) -> None:
    scene = Scene(ledger, trainer={"max_steps_ahead": 0}, engine={"versions": "announced"})
    ledger.state.steps_delivered = 1
    assert not scene.weights.may_begin(1)
    scene.publish(1)
    assert scene.weights.may_begin(1)
    assert scene.weights.least_version == 0


def test_steps_may_begin_early_unless_strict(ledger: Ledger, tmp_path: Path) -> None:
    assert Scene(ledger).weights.may_begin(1)


def test_a_replica_that_still_has_what_the_trainer_abandoned_is_refused(ledger: Ledger) -> None:
    scene = after_going_back(ledger)
    scene.say("5", "7", after_s=1)
    assert (scene.refused, scene.weights.abandoned.versions) == (["http://b"], (7,))
    assert re.search("http://b .*'7'.* abandoned", str(scene.watch.troubles()))
    scene.publish(6)
    scene.say("6", "7", after_s=1)
    assert scene.refused == ["http://b"]
    scene.say("6", "6", after_s=1)
    assert (scene.refused, scene.weights.abandoned.versions) == ([], ())


def test_old_weights_are_not_taken_for_those_that_have_their_number_now(ledger: Ledger) -> None:
    """A trainer goes back from 7 to 6 and on to 7; one replica is not updated meanwhile."""
    scene = Scene(ledger)
    scene.publish(7)
    scene.say("7", "7")
    for version in (6, 7):
        scene.publish(version)
        scene.say(str(version), "7", after_s=1)
    assert scene.refused == ["http://b"]
    scene.say("7", "loading 7@r1", after_s=1)
    scene.say("7", "7@r1", after_s=1)
    assert scene.refused == []


def test_abandoned_weights_are_known_after_a_restart_of_the_orchestrator(ledger: Ledger) -> None:
    scene = after_going_back(ledger)
    scene.say("5", "7", after_s=1)
    restarted = Scene(ledger)
    restarted.trainer.state = scene.trainer.state
    restarted.say("5", "7", after_s=1)
    assert restarted.refused == ["http://b"]


def test_a_replica_that_never_answers_holds_up_no_version(ledger: Ledger) -> None:
    scene = Scene(ledger)
    scene.publish(7)
    scene.say("7")
    for version in (6, 7):
        scene.publish(version)
        scene.say(str(version), after_s=1)
    assert scene.weights.abandoned.versions == ()
    assert scene.refused == ["http://b"], "it has never answered"


@pytest.mark.parametrize("by", ["trainer", "headpond"])
@pytest.mark.parametrize("label", ["default", "loading 1@r1"])
def test_an_ordinary_update_warns_of_nothing_until_it_lasts(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, label: str, by: str
) -> None:
    scene = Scene(ledger, trainer={"max_steps_ahead": 0}, engine={"weight_update": by})
    scene.say("default", "default")
    scene.publish(1)
    scene.say("1", label, after_s=1)
    assert scene.refused == ["http://b"]
    assert "http://b calls its weights" not in str(scene.watch.troubles())
    assert "replica_refused" not in caplog.text
    scene.say("1", label, after_s=TIMEOUT_S + 1)
    assert "http://b calls its weights" in str(scene.watch.troubles())
    assert caplog.text.count("replica_refused") == 1
    assert ("POST /update_weight_version" in caplog.text) == (by == "trainer" and label == "default")
    scene.say("1", "1", after_s=1)
    assert (scene.refused, scene.told) == ([], [])


@pytest.mark.parametrize(("by", "told"), [("trainer", True), ("headpond", False)])
def test_a_restarted_replica_is_told_at_once_if_the_trainer_has_to_load_its_weights(
    ledger: Ledger, by: str, told: bool
) -> None:
    scene = Scene(ledger, engine={"weight_update": by})
    scene.publish(1)
    scene.say("1", "1")
    scene.say("1", "default", after_s=TIMEOUT_S + 1)
    assert scene.refused == ["http://b"]
    assert ("http://b calls its weights 'default'" in str(scene.watch.troubles())) is told
    scene.say("1", "failed 1@r1", after_s=1)
    assert "http://b calls its weights 'failed 1@r1'" in str(scene.watch.troubles())
