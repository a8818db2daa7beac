"""The dashboard: a read-only view of run directories, also of runs that have crashed. It needs no Redis."""
