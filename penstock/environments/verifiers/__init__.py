"""Environments of the package `verifiers`, unmodified. It lives in a process of its own: nothing here imports it."""

from penstock.environments.verifiers.adapter import Verifiers

__all__ = ["Verifiers"]
