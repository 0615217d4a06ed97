"""Writes primitives/README.md: every operator's decomposition, VJP and placements.

`make operators` runs it. Shapes are those of the first sample of each operator.
"""

import sys
from pathlib import Path

import dtorchjax as dt

dt.simulate_devices(8)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from op_samples import SAMPLES  # noqa: E402

from dtorchjax.decompose_command import described  # noqa: E402

PAGE = Path(__file__).parent.parent / "primitives" / "README.md"
HEAD = """# Operators

Made by `make operators` from what this folder declares, for the shapes of each operator's first
sample: the primitives of the decomposition; what the VJP rule saves, and the rule; the placement
table of one mesh axis; and the collectives that the planner inserts where the first array lies
otherwise, on four devices.

"""


def float32(tree):
    def one(x):
        x = np.asarray(x)
        kind = {"f": "float32", "b": "bool"}.get(x.dtype.kind, "int32")
        return jax.ShapeDtypeStruct(x.shape, kind)

    return jax.tree.map(one, tree)


def inserted(call, operands, mesh):
    """What auto mode inserts for each placement of the first operand with dims."""
    leaves, tree = jax.tree.flatten(operands)
    main = next((i for i, x in enumerate(leaves) if x.ndim), None)
    if main is None:
        return
    for d, n in enumerate(leaves[main].shape):
        if n % mesh.size:
            continue
        given = [["R"]] * len(leaves)
        given[main] = [f"S{d}"]
        flat = lambda *xs: call(*jax.tree.unflatten(tree, xs))  # noqa: E731
        plan = dt.explain(flat, *leaves, mesh=mesh, in_placements=tuple(given))
        sent = ", ".join(f"{c.kind} {c.bytes:g} B" for c in plan.collectives)
        yield f"  S{d}: {sent or 'nothing'}"


def main() -> None:
    mesh = dt.init_device_mesh((4,), ("tp",))
    text, seen = HEAD, set()
    for s in SAMPLES:
        if s.op in seen:
            continue
        seen.add(s.op)
        operands = float32(s.operands)
        call = lambda *xs, s=s: getattr(dt.ops, s.op, None)(*xs, **s.static)  # noqa: E731
        static = ", ".join(f"{k}={v!r}" for k, v in s.static.items())
        lines = list(inserted(call, operands, mesh))
        text += f"## {s.op}\n\n" + (f"With {static}.\n\n" if static else "")
        text += f"```\n{described(s.op, operands, s.static)}\n"
        text += ("\nauto mode inserts\n" + "\n".join(lines) + "\n" if lines else "") + "```\n\n"
    PAGE.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    sys.exit(main())
