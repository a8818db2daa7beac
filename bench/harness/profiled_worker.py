"""The rollout worker with timed functions: `celery -A bench.harness.profiled_worker worker -Q rollouts`."""

from bench.harness.section_timer import SectionTimer
from headpond.tasks import app as app
from headpond.workers import rollouts as rollouts

SectionTimer().install()
