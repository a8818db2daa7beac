"""The compute worker with no-op stages: `celery -A bench.harness.noop.compute worker -Q encoding`."""

from bench.harness.noop import stages
from headpond.tasks import app as app
from headpond.workers import compute as compute

stages.install()
