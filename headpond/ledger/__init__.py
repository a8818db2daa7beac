"""The ledger's tables, states and read-only queries, shared by orchestrator, command line and dashboard."""
