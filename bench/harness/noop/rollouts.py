"""The rollout worker with no-op stages: `celery -A bench.harness.noop.rollouts worker -Q rollouts`."""

from bench.harness.noop import stages
from headpond.tasks import app as app
from headpond.workers import rollouts as rollouts

stages.install()
