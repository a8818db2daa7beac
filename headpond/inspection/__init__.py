"""A run seen from outside: what its directory, its ledger and its Redis say, together or with any of them missing.

Read-only. None imports the settings, and only `audit` imports numpy: the other commands are started often, and nearly
all of their time is imports.
"""
