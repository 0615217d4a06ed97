"""Sharding rules, one file per family. Importing this package fills the registry."""

if __name__ != "dtorchjax.sharding_rules":
    raise ImportError(
        "import dtorchjax.sharding_rules, not sharding_rules: "
        "two copies would declare every rule twice"
    )

from dtorchjax.sharding_rules import (
    contractions,
    elementwise,
    indexing,
    linear_algebra,
    movement,
    random,
    reductions,
    refusals,
    sorting,
    windows,
)

__all__ = [
    "contractions",
    "elementwise",
    "indexing",
    "linear_algebra",
    "movement",
    "random",
    "reductions",
    "refusals",
    "sorting",
    "windows",
]
