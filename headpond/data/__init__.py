"""Which example is played next: an order for every epoch (`uniform`), or a sampler that draws in
advance.

A sampler is a class made with `size` (examples), `seed` and the options of the configuration. It
has one method:

    def draw(self, count, played, state): return examples, next_state

`played` lists the groups that ended since the last draw, dropped ones too. `state` is JSON, None
at first. The sampler stores nothing else between two calls: they may run in different processes,
and a call may be repeated.
"""

from headpond.data.order import Order, example_at
from headpond.data.samplers import SAMPLERS, STATE_LIMIT_BYTES, UNIFORM, Drawn, PlayedGroup, Sampler, draw

__all__ = ["SAMPLERS", "STATE_LIMIT_BYTES", "UNIFORM", "Drawn", "Order", "PlayedGroup", "Sampler", "draw", "example_at"]
