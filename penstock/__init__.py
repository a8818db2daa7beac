"""The library: what travels between processes, the pure stages, storage. Knows neither Celery nor a web server."""
