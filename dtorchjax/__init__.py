"""dtorchjax: whole-array JAX programs, sharded by declared placements.

Say where arrays live, one placement per mesh axis; `dt.jit` makes one shard_map with exactly the
collectives that its plan shows.
"""

from dtorchjax import local_effects as _effects  # noqa: F401 - fills the registry
from dtorchjax import local_settled as _settled  # noqa: F401 - fills the registry
from dtorchjax import local_shard_map as _shard_map  # noqa: F401 - fills the registry
from dtorchjax import nn, numpy, parallel
from dtorchjax import primitives as ops
from dtorchjax import sharding_rules as _rules  # noqa: F401 - fills the registry
from dtorchjax.annotate import redistribute
from dtorchjax.api import distribute, explain, jit
from dtorchjax.arguments import by_path
from dtorchjax.check import CheckError, check_dfunction
from dtorchjax.checking import checking
from dtorchjax.checkpoint import Checkpoints
from dtorchjax.collectives import (
    all_gather,
    all_to_all,
    axes_of,
    axis_index,
    axis_size,
    local_key,
    pmax,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)
from dtorchjax.decompose import (
    decompose,
    decomposition,
    has_decomposition,
    primitive_set,
    vjp_kind,
)
from dtorchjax.devices import init_device_mesh, init_distributed, simulate_devices
from dtorchjax.dfunction import dfunction
from dtorchjax.dfunction_class import DFunction
from dtorchjax.dtensor import (
    DTensor,
    distribute_tensor,
    from_process_local,
    full,
    ones,
    randn,
    zeros,
)
from dtorchjax.errors import OpError, PlacementError, PlacementMismatchError
from dtorchjax.layout_rule import LayoutRule
from dtorchjax.notation import PlacementSignature, einsum_signature
from dtorchjax.op import op
from dtorchjax.operators import redistribution
from dtorchjax.place import place
from dtorchjax.placements import Layout, Optional, Partial, Placement, Replicate, Shard
from dtorchjax.plan import Plan
from dtorchjax.registry import elementwise, local, refuse, rule
from dtorchjax.signatures import signature
from dtorchjax.switches import custom_vjps, decomposing, set_loggers
from dtorchjax.visualize import visualize

__version__ = "0.1.0"

set_loggers()

__all__ = [
    "Placement",
    "Replicate",
    "Shard",
    "Partial",
    "Optional",
    "Layout",
    "PlacementSignature",
    "einsum_signature",
    "signature",
    "init_device_mesh",
    "simulate_devices",
    "init_distributed",
    "DTensor",
    "distribute_tensor",
    "distribute",
    "from_process_local",
    "place",
    "Checkpoints",
    "by_path",
    "zeros",
    "ones",
    "full",
    "randn",
    "redistribute",
    "redistribution",
    "jit",
    "explain",
    "Plan",
    "visualize",
    "ops",
    "op",
    "decompose",
    "decomposition",
    "decomposing",
    "has_decomposition",
    "primitive_set",
    "vjp_kind",
    "custom_vjps",
    "OpError",
    "dfunction",
    "DFunction",
    "LayoutRule",
    "check_dfunction",
    "parallel",
    "numpy",
    "nn",
    "CheckError",
    "checking",
    "psum",
    "pmax",
    "pmin",
    "all_gather",
    "psum_scatter",
    "all_to_all",
    "ppermute",
    "axis_index",
    "axis_size",
    "axes_of",
    "local_key",
    "rule",
    "elementwise",
    "local",
    "refuse",
    "PlacementError",
    "PlacementMismatchError",
]
