"""Checks that the engine fits the configuration: plays short conversations like a rollout and reads the recording.

`quick` is made at every start of a run; `examine` is `headpond doctor`.
"""
