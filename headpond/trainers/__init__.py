"""Adapters to other trainers: `trl.py` reads a run for TRL; `slime.py`, `skyrl.py` and `verl.py`
convert a batch.

Each imports its trainer only when it is called: this package needs no more than a trainer of
Headpond.
"""
