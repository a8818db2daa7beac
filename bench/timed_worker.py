"""The rollout worker on a loop that times its steps: `celery -A bench.timed_worker worker -Q rollouts`."""

from bench.loop_steps import Steps
from tasks import app as app
from workers import rollouts as rollouts

Steps().watch()
