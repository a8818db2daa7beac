"""The run's ledger: records in memory, every change in SQLite."""
