"""What is queued: the Celery app, one module per queue, and the one way every job is executed."""
