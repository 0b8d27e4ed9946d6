"""Paged attention: arrays in, arrays out, and the reference that defines each function.

`paged_attention_ref` and `combine_ref` are the specification; `decode_attention`,
`prefill_attention` and `combine` are the public functions, with one file per backend. `kv_format`
is how keys and values are stored.
Nothing here knows of engines, models or files.
"""

from pallas_kernels.api import (
    NO_WINDOW,
    Implementation,
    PrefillTiles,
    combine,
    decode_attention,
    prefill_attention,
)
from pallas_kernels.kv_format import KVDType, KVRows
from pallas_kernels.linear_map import head, head_ref, linear, linear_ref, pack
from pallas_kernels.memory import untouched
from pallas_kernels.partials import Partials
from pallas_kernels.reference import combine_ref, paged_attention_ref

__all__ = [
    "NO_WINDOW",
    "Implementation",
    "KVDType",
    "KVRows",
    "Partials",
    "PrefillTiles",
    "combine",
    "combine_ref",
    "decode_attention",
    "head",
    "head_ref",
    "linear",
    "linear_ref",
    "pack",
    "paged_attention_ref",
    "prefill_attention",
    "untouched",
]
