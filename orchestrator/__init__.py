"""When it runs: the loop, the planner, the ledger, submit and poll, the reconciler."""
