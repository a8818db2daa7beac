"""What is queued: the Celery app, its tasks (`jobs.py`), and the execution that every job shares."""

from headpond.tasks import jobs
from headpond.tasks.celery_app import app

__all__ = ["app", "jobs"]
