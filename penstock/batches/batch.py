"""One step's batch for one data rank, read from the files that its manifest names."""

from collections.abc import Iterator

from penstock.batches.manifest import Manifest
from penstock.batches.micro_batch import MicroBatch, Samples
from penstock.batches.routes import BatchRoutes
from penstock.batches.schema import EXTRA, OFFSETS, SAMPLE, SAMPLE_COLUMNS, TOKEN_COLUMNS, rank_metadata
from penstock.blobs import Store, tensors
from penstock.errors import BlobCorrupt


class Batch:
    def __init__(self, store: Store, manifest: Manifest, data_rank: int) -> None:
        """Checks every byte of the rank's file; experts are checked when they are asked for."""
        self.step = manifest.plan.step
        self.totals = manifest.totals
        self.plan = manifest.plan
        self._routes = BatchRoutes(store, manifest.plan)
        ref = manifest.ranks[data_rank].file
        file = tensors.read(store, ref)
        if file.metadata != rank_metadata(self.step, data_rank):
            raise BlobCorrupt(f"blob {ref.key} is not rank {data_rank} of step {self.step}: {file.metadata}")
        self._arrays = file.arrays

    def __len__(self) -> int:
        return self._arrays["max_seqlen"].size

    def micro_batches(self) -> Iterator[MicroBatch]:
        """As often as one likes, always the same. Every rank has as many."""
        return (self._micro_batch(number) for number in range(len(self)))

    def _micro_batch(self, number: int) -> MicroBatch:
        tokens, samples, segments = (slice(*self._arrays[name][number : number + 2].tolist()) for name in OFFSETS)
        return MicroBatch(
            **{name: self._arrays[name][tokens] for name in TOKEN_COLUMNS},
            cu_seqlens=self._arrays["cu_seqlens"][segments],
            max_seqlen=int(self._arrays["max_seqlen"][number]),
            samples=Samples(**{name: self._arrays[SAMPLE + name][samples] for name in SAMPLE_COLUMNS}),
            extras={name: self._arrays[EXTRA + name][tokens] for name in self.plan.extras},
            routes=self._routes,
        )
