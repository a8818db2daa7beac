"""The compute stages: from a job's input and the store to the job's result. `tasks/` binds them to queues."""
