"""Paged attention on a CPU: one pass over the live keys, in the registers and caches of a core.

Keys are taken in tiles at fixed positions, so a query's result depends neither on its neighbours
nor on the block size.
"""

from pallas_kernels.llvm.decode import decode_attention
from pallas_kernels.llvm.prefill import prefill_attention

__all__ = ["decode_attention", "prefill_attention"]
