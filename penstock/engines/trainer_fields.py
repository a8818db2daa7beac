"""Fields for the trainer that an engine's response has under their declared names: on its choice, in `meta_info`, or
outside of any."""

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.engines.dialects.base import ABSENT, read_part
from penstock.errors import Upstream
from penstock.fields import Array

OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
VALUES = msgspec.json.Decoder(int | float | list[int | float])


def read_fields(text: bytes, names: Sequence[str], *, tokens: int) -> dict[str, Array]:
    """The fields of `names` that the response has: a number, or one for each of its `tokens` completion tokens."""
    if not names or not any(b'"%b"' % name.encode() in text for name in names):
        return {}
    values = OBJECT.decode(text)
    if "choices" in values:
        values |= read_part(values["choices"], CHOICES, "choices")[0]
    if values.get("meta_info", ABSENT) != ABSENT:
        values = read_part(values["meta_info"], OBJECT, "meta_info") | values
    fields = {
        name: np.array(read_part(values[name], VALUES, name)) for name in names if values.get(name, ABSENT) != ABSENT
    }
    for name, array in fields.items():
        if array.shape not in ((), (tokens,)):
            raise Upstream(f"the engine's response has {array.size} values of {name} for {tokens} completion tokens")
    return fields
