"""What is queued: the Celery app, one module per queue, and the execution that every job shares."""

from tasks import advantages, encoding, filtering, rollouts
from tasks.celery_app import app

__all__ = ["advantages", "app", "encoding", "filtering", "rollouts"]
