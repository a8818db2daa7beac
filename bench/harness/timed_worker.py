"""The rollout worker on a loop that times its steps: `celery -A bench.harness.timed_worker worker -Q rollouts`."""

from bench.harness.step_timer import StepTimer
from headpond.tasks import app as app
from headpond.workers import rollouts as rollouts
from headpond.workers.delivery import Delivery

StepTimer(first=Delivery.start.__qualname__).install()
