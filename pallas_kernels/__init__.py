"""Paged attention: arrays in, arrays out, and the reference that defines each function.

`paged_attention_ref` is the specification; `decode_attention` and `prefill_attention` are the
public functions, with one file per backend. Nothing here knows of engines, models or files.
"""

from pallas_kernels.api import PrefillTiles, decode_attention, prefill_attention
from pallas_kernels.reference import paged_attention_ref

__all__ = ["PrefillTiles", "decode_attention", "paged_attention_ref", "prefill_attention"]
