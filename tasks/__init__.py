"""What is queued: the Celery app, its tasks (`jobs.py`), and the execution that every job shares."""

from tasks import jobs
from tasks.celery_app import app

__all__ = ["app", "jobs"]
