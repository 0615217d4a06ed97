"""Where parameters live: one table of path patterns per way of sharding.

A pattern is matched against a leaf's path, and the last match wins. AdamW's moments have paths that
end as their parameter's does (`optimizer/1/0/mu/layers/0/mlp/up/kernel`), so one pattern places a
parameter together with its optimizer state.
"""

import json
import math
from pathlib import Path
from typing import Any

from . import UsageError

Table = dict[str, Any]  # pattern -> what dt.by_path takes: "R", "S0,R" or {"tp": "S1"}

# Data parallel: everything on every device, only the batch is split.
DP: Table = {"*": "R"}

# Fully sharded: each parameter is split over "dp" too, gathered where it is used.
FSDP: Table = {
    "*": "R",
    "*/embedding": {"dp": "S0"},
    "*/kernel": {"dp": "S0"},
    "*/scale": {"dp": "S0"},
    "*/attention/out/kernel": {"dp": "S2"},  # [heads, head, width]: width, there are few heads
}

# Tensor parallel after Megatron: heads, hidden units and the vocabulary are split over "tp", so
# that each block needs one reduction after attention and one after the MLP.
MEGATRON: Table = {
    "*": "R",
    "*/embed/embedding": {"tp": "S0"},
    "*/attention/qkv/kernel": {"tp": "S2"},  # [width, 3, heads, head]
    "*/attention/out/kernel": {"tp": "S0"},
    "*/mlp/gate/kernel": {"tp": "S1"},
    "*/mlp/up/kernel": {"tp": "S1"},
    "*/mlp/down/kernel": {"tp": "S0"},
    "*/head/kernel": {"tp": "S1"},
}

# Both: the dim that Megatron leaves whole is split over "dp".
FSDP_TP: Table = {
    "*": "R",
    "*/scale": {"dp": "S0"},
    "*/embed/embedding": {"dp": "S1", "tp": "S0"},
    "*/attention/qkv/kernel": {"dp": "S0", "tp": "S2"},
    "*/attention/out/kernel": {"dp": "S2", "tp": "S0"},
    "*/mlp/gate/kernel": {"dp": "S0", "tp": "S1"},
    "*/mlp/up/kernel": {"dp": "S0", "tp": "S1"},
    "*/mlp/down/kernel": {"dp": "S1", "tp": "S0"},
    "*/head/kernel": {"dp": "S0", "tp": "S1"},
}

TABLES: dict[str, Table] = {"megatron": MEGATRON, "fsdp": FSDP, "fsdp_tp": FSDP_TP, "dp": DP}


def load(name: str) -> Table:
    """The table of that name, or the one in that JSON file."""
    if name in TABLES:
        return TABLES[name]
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"placements {name!r}: neither one of {', '.join(TABLES)} nor a JSON file that exists"
        )
    try:
        table = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UsageError(f"placements {name!r} is not JSON: {error}") from None
    if not isinstance(table, dict) or not table:
        raise UsageError(f"placements {name!r}: expected an object, pattern -> placements")
    return table


def axes_named(table: Table) -> set[str]:
    """The mesh axes that a table speaks of."""
    return {axis for value in table.values() if isinstance(value, dict) for axis in value}


def check_axes(name: str, table: Table, mesh: dict[str, int]) -> None:
    if missing := sorted(axes_named(table) - set(mesh)):
        raise UsageError(
            f"placements {name!r} name the mesh axis {', '.join(map(repr, missing))}, "
            f"the mesh has {format_mesh(mesh)}"
        )


def parse_mesh(text: str) -> dict[str, int]:
    """{"dp": 2, "tp": 4} of "dp=2,tp=4"."""
    mesh: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = (part.strip() for part in item.partition("="))
        if not axis.isidentifier() or not size.isdecimal() or int(size) == 0 or axis in mesh:
            raise UsageError(f"mesh {text!r}: expected axes and sizes such as dp=2,tp=4")
        mesh[axis] = int(size)
    return mesh


def default_mesh(table: Table, devices: int, context: int = 1) -> dict[str, int]:
    """A mesh of that many devices with the axes that a table speaks of; "cp" has `context`."""
    if context > 1:
        if devices % context:
            raise UsageError(f"{devices} devices do not divide by --context-parallel {context}")
        return {**default_mesh(table, devices // context), "cp": context}
    if "tp" not in axes_named(table):
        return {"dp": devices}
    tp = math.gcd(devices, 4)
    return {"dp": devices // tp, "tp": tp}


def format_mesh(mesh: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())
