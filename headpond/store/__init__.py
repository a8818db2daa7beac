"""Stored bytes: a store of immutable blobs, each named by a BlobRef, and the two files of a rollout.

Imports numpy, xxhash and the standard library only: a trainer reads blobs in an environment that has nothing else.
"""

from headpond.store.base import BlobRef, Store
from headpond.store.opening import open_store

__all__ = ["BlobRef", "Store", "open_store"]
