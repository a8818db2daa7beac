"""Where bytes rest: a store of immutable files, each named by a BlobRef, and the two files of a rollout.

Imports numpy, safetensors, xxhash and the standard library only: a trainer reads blobs in a bare environment.
"""

from penstock.store.files import BlobRef, Store, open_store

__all__ = ["BlobRef", "Store", "open_store"]
