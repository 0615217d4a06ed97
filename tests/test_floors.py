"""Imports go down only: the table of floors, held by reading the source (nothing is imported)."""

import ast
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

# Patterns are paths from the checkout's root; a file belongs to the first floor that names it.
FLOORS = {
    0: [
        "dtorchjax/placements.py",
        "dtorchjax/parts.py",
        "dtorchjax/notation.py",
        "dtorchjax/errors.py",
    ],
    1: [
        "dtorchjax/registry.py",
        "dtorchjax/_jax.py",
        "dtorchjax/masks.py",
        "dtorchjax/padding.py",
        "dtorchjax/exchange.py",
        "dtorchjax/sent.py",
        "dtorchjax/op.py",
        "dtorchjax/op_primitives.py",
        "dtorchjax/switches.py",
        "dtorchjax/settled.py",
        "dtorchjax/numerics.py",
        "dtorchjax/blockwise.py",
    ],
    2: ["sharding_rules/*.py", "primitives/*.py"],
    3: [
        "dtorchjax/chips.py",
        "dtorchjax/redistribute.py",
        "dtorchjax/cost.py",
        "dtorchjax/checking.py",
        "dtorchjax/collectives.py",
        "dtorchjax/decompose.py",
        "dtorchjax/layout_rule.py",
        "dtorchjax/local_*.py",
    ],
    4: [
        "dtorchjax/classes.py",
        "dtorchjax/graph.py",
        "dtorchjax/op_tables.py",
        "dtorchjax/plan.py",
        "dtorchjax/relaxation.py",
        "dtorchjax/solver.py",
        "dtorchjax/higher_order.py",
        "dtorchjax/hlo.py",
        "dtorchjax/limit.py",
        "dtorchjax/memory.py",
        "dtorchjax/remat.py",
        "dtorchjax/merge.py",
        "dtorchjax/report.py",
        "dtorchjax/rows.py",
        "dtorchjax/source_lines.py",
        "dtorchjax/strict.py",
    ],
    5: ["dtorchjax/lower.py"],
    6: [
        "dtorchjax/__init__.py",
        "dtorchjax/__main__.py",
        "dtorchjax/annotate.py",
        "dtorchjax/api.py",
        "dtorchjax/program.py",
        "dtorchjax/arguments.py",
        "dtorchjax/cli.py",
        "dtorchjax/rules_command.py",
        "dtorchjax/devices.py",
        "dtorchjax/call_shape.py",
        "dtorchjax/check.py",
        "dtorchjax/dfunction.py",
        "dtorchjax/dfunction_class.py",
        "dtorchjax/flat_call.py",
        "dtorchjax/dtensor.py",
        "dtorchjax/explain_command.py",
        "dtorchjax/decompose_command.py",
        "dtorchjax/operators.py",
        "dtorchjax/signatures.py",
        "dtorchjax/parallel/*.py",
        "dtorchjax/place.py",
        "dtorchjax/checkpoint.py",
        "dtorchjax/launch.py",
        "dtorchjax/numpy.py",
        "dtorchjax/nn.py",
        "dtorchjax/visualize.py",
        "dtorchjax/demo/*.py",
    ],
}
# Folders at the top of the checkout that import as parts of the package. Their files (the leaves)
# are read through the registry, so only their own __init__ names them.
LEAF_FOLDERS = ("sharding_rules", "primitives")
NO_JAX_BELOW = 1  # floors under this one are plain Python
JAX_INTERNALS = "dtorchjax/_jax.py"  # the only file that may reach into jax._src
JAX = {"jax", "jaxlib", "flax", "optax"}

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(  # rglob does not enter the linked folders in dtorchjax/, so each file comes once
    path.relative_to(ROOT).as_posix()
    for folder in ("dtorchjax", *LEAF_FOLDERS)
    for path in (ROOT / folder).rglob("*.py")
)


def floor_of(file):
    return next(
        (n for n, names in FLOORS.items() if any(fnmatchcase(file, p) for p in names)), None
    )


def module_of(file):
    """The dotted name that a file imports by."""
    parts = file.removesuffix(".py").split("/")
    if parts[0] in LEAF_FOLDERS:
        parts.insert(0, "dtorchjax")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(f): f for f in FILES}


def is_leaf(file):
    return file.split("/")[0] in LEAF_FOLDERS and not file.endswith("/__init__.py")


def _runtime_nodes(tree):
    """Every node but those under `if TYPE_CHECKING:`; a name in an annotation is no dependency."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack += node.orelse
            continue
        yield node
        stack += ast.iter_child_nodes(node)


def imports(source, file):
    """(line, dotted name) of each import in a file; of our own modules, the deepest one meant."""
    package = module_of(file).split(".")
    if not file.endswith("/__init__.py"):
        package = package[:-1]
    for node in _runtime_nodes(ast.parse(source, file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield node.lineno, deeper if deeper in MODULES else base


def complaints(file, source):
    """What is wrong with a file's imports, one sentence each."""
    floor = floor_of(file)
    if floor is None:
        yield f"{file} is on no floor: add it to FLOORS in tests/test_floors.py"
        return
    if "jax._src" in source and file != JAX_INTERNALS:
        yield f"{file} names jax._src: only {JAX_INTERNALS} may, give it a function there"
    for line, name in imports(source, file):
        at = f"{file}:{line} imports {name}"
        if floor < NO_JAX_BELOW and name.split(".")[0] in JAX:
            yield f"{at}: floor {floor} is free of JAX"
        other = MODULES.get(name)
        if name.split(".")[0] != "dtorchjax" or other == file:
            continue
        if other is None:
            yield f"{at}: there is no such module"
            continue
        target = floor_of(other)
        if target is None:
            continue  # that file has its own failing test
        if target > floor:
            yield f"{at}: floor {floor} may not import floor {target}"
        elif is_leaf(file) and target >= floor:
            yield f"{at}: a leaf imports floors below {floor} only"
        elif is_leaf(other) and file != f"{other.split('/')[0]}/__init__.py":
            yield f"{at}: leaves are read through the registry, nobody imports them by name"


@pytest.mark.smoke
@pytest.mark.parametrize("file", FILES)
def test_file_imports_down_only(file):
    found = list(complaints(file, (ROOT / file).read_text("utf-8")))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "says"),
    [
        ("dtorchjax/unheard_of.py", "", "is on no floor"),
        ("dtorchjax/placements.py", "import jax.numpy as jnp", "free of JAX"),
        ("dtorchjax/cost.py", "from jax._src import core", "only dtorchjax/_jax.py"),
        ("dtorchjax/placements.py", "from . import primitives", "floor 0 may not import floor 2"),
        ("dtorchjax/placements.py", "def f():\n    import dtorchjax", "may not import floor 6"),
        ("sharding_rules/x.py", "from .. import primitives", "a leaf imports floors below 2"),
        ("dtorchjax/cost.py", "from .nothing import f", "no such module"),
    ],
)
def test_a_wrong_import_is_seen(file, source, says):
    assert says in "\n".join(complaints(file, source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("dtorchjax/placements.py", "if TYPE_CHECKING:\n    import jax"),
        ("dtorchjax/_jax.py", "from jax._src import core"),
        ("dtorchjax/cli.py", "import dtorchjax as dt\nfrom . import primitives"),
        ("dtorchjax/cost.py", "import numpy"),
    ],
)
def test_a_right_import_is_not(file, source):
    assert not list(complaints(file, source))
