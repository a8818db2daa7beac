"""Environments of the package `verifiers`. Only the child process (`verifiers_child.py`) imports
the package."""

from headpond.environments.verifiers.adapter import Verifiers

__all__ = ["Verifiers"]
