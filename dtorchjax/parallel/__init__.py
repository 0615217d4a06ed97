"""Sharded layers: dfunctions whose bodies hold the collectives, one file per topic.

They run on plain arrays, on DTensors and under `dt.jit`; the result is the same everywhere.
"""

from dtorchjax.parallel.attention import ring_attention, ulysses_attention
from dtorchjax.parallel.cross_entropy import vocab_parallel_cross_entropy
from dtorchjax.parallel.experts import combine, dispatch
from dtorchjax.parallel.linear import column_parallel_linear, row_parallel_linear

__all__ = [
    "column_parallel_linear",
    "row_parallel_linear",
    "vocab_parallel_cross_entropy",
    "ring_attention",
    "ulysses_attention",
    "dispatch",
    "combine",
]
