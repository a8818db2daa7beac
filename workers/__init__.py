"""Where it runs: the asyncio pool and the two apps that `celery -A` starts."""
