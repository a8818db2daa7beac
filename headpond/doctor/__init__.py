"""Is the engine what the configuration says? Plays short conversations as a rollout would and reads what was recorded.

`quick` is made at every start of a run; `examine` is `headpond doctor`.
"""
