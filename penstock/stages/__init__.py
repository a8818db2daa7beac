"""The bodies of the compute jobs: fetch, call the pure stage, return its result. `tasks/` binds them to queues."""
