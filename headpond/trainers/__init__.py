"""Adapters to other trainers: `trl.py` reads a run for TRL; `slime.py`, `skyrl.py` and `verl.py` convert a batch.

Each imports its trainer only when it is called, so that this package needs what a trainer of Headpond needs.
"""
