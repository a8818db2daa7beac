"""The rollout worker on a loop that times its steps: `celery -A bench.harness.timed_worker worker -Q rollouts`."""

from bench.harness.step_timer import StepTimer
from tasks import app as app
from workers import rollouts as rollouts
from workers.delivery import Delivery

StepTimer(first=Delivery.start.__qualname__).install()
