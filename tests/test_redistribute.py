"""From every layout to every other: values, and the bytes that compiled programs really send."""

import heapq
import itertools
import random

import jax
import numpy as np
import pytest
import simulated
from rotation import ROTATION

import dtorchjax as dt
from dtorchjax import dtensor
from dtorchjax.chips import Speeds
from dtorchjax.hlo import collective_bytes, collectives
from dtorchjax.placements import Joint, Layout, Partial, R, joint, kinds_of, parse_placements
from dtorchjax.redistribute import states as states_of
from dtorchjax.redistribute import table

"""Which pairs are tried changes every day; set it to repeat one of them."""

KINDS = ("sum", "max", "min", "prod")
MESHES = {"2x4": (2, 4), "2x2x2": (2, 2, 2), "2x2": (2, 2)}


def mesh_of(name):
    sizes = MESHES[name]
    return dt.init_device_mesh(sizes, ("a", "b", "c")[: len(sizes)])


def states(shape, sizes, kinds=KINDS):
    """Every joint placement of an array."""
    return [
        where
        for kind in kinds
        for where in states_of(shape, (kind,), sizes)
        if kind == kinds[0] or where.partial_axes()
    ]


def possible(source, target):
    """Terms come from R (as value and zeros) and from terms, and only a sum has zeros."""
    if not target.partial_axes():
        return True
    kinds = kinds_of(target.placements)
    if kinds == {"sum"}:
        return kinds_of(source.placements) <= kinds
    return all(source.placements[a] == target.placements[a] for a in target.partial_axes())


def pairs(shape, sizes):
    every = states(shape, sizes)
    return [(s, t) for s, t in itertools.product(every, every) if possible(s, t)]


def place(x, where, mesh):
    """A DTensor of `x` with terms that differ from device to device."""
    sizes = tuple(mesh.devices.shape)
    parts = simulated.shards(x, where, sizes, np.random.default_rng(0))
    blocks = np.stack([parts[p] for p in simulated.devices(sizes)])
    blocks = blocks.reshape(*sizes, *blocks.shape[1:])
    return dt.DTensor.from_local(blocks, mesh, Layout(mesh, where.placements, where.order))


def check(x, source, target, mesh):
    sizes = tuple(mesh.devices.shape)
    before = place(x, source, mesh)
    wanted = Layout(mesh, target.placements, target.order)
    after = before.redistribute(wanted)
    assert after.layout == wanted and after.shape == x.shape and after.dtype == x.dtype
    blocks = np.asarray(after.to_local())
    parts = {p: blocks[p] for p in simulated.devices(sizes)}
    simulated.check_placed(parts, target, sizes, x)


def bytes_of(x, source, target, mesh):
    """(planned, compiled) bytes that one device sends, and the kinds of both."""
    sizes = tuple(mesh.devices.shape)
    layouts = [Layout(mesh, w.placements, w.order) for w in (source, target)]
    move = dtensor._mover(mesh, *layouts, x.shape, x.dtype)
    storage = place(x, source, mesh).storage
    text = move.lower(storage).compile().as_text()
    kinds = tuple(sorted(kinds_of(source.placements + target.placements)))
    paths = table(x.shape, x.dtype.itemsize, kinds, sizes)
    path = [m for m in paths.path(source, target) if m.is_collective]
    planned = sum(paths.sent(m, sizes) for m in path)
    return (planned, [m.kind for m in path]), (
        collective_bytes(text), [c.kind for c in collectives(text)],
    )  # fmt: skip


X = (np.random.default_rng(1).integers(-32, 33, (8, 16)) / 8).astype(np.float32)
CASES = [
    pytest.param(*mesh_and_pair, id=f"{mesh_and_pair[0]} {mesh_and_pair[1]} to {mesh_and_pair[2]}")
    for name in ("2x4", "2x2x2")
    for pair in random.Random(ROTATION).sample(pairs(X.shape, MESHES[name]), 30)
    for mesh_and_pair in [(name, *pair)]
]
ALWAYS = [
    ("2x4", "S0,S0", (1, 0), "S0,S0", (0, 1)),
    ("2x4", "S0,S0", (0, 1), "R,S0", (0, 1)),
    ("2x4", "S0,S1", (0, 1), "S1,S0", (0, 1)),
    ("2x4", "P,P", (0, 1), "R,R", (0, 1)),
    ("2x4", "P,P", (0, 1), "S1,S1", (1, 0)),
    ("2x4", "R,S0", (0, 1), "P,S1", (0, 1)),
    ("2x4", "P(max),S0", (0, 1), "S0,S0", (1, 0)),
    ("2x2x2", "P(prod),S0,P(prod)", (0, 1, 2), "S1,R,S0", (0, 1, 2)),
    ("2x2x2", "S0,S0,S0", (2, 0, 1), "S0,S1,S0", (0, 1, 2)),
]


@pytest.mark.parametrize(("name", "source", "target"), CASES)
def test_values(name, source, target):
    check(X, source, target, mesh_of(name))


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "source", "from_order", "target", "to_order"), ALWAYS)
def test_values_and_bytes(name, source, from_order, target, to_order):
    source = joint(parse_placements(source), from_order)
    target = joint(parse_placements(target), to_order)
    mesh = mesh_of(name)
    check(X, source, target, mesh)
    planned, compiled = bytes_of(X, source, target, mesh)
    assert planned[0] == pytest.approx(compiled[0]), (planned, compiled)


@pytest.mark.parametrize(("name", "source", "target"), CASES[::3])
def test_bytes(name, source, target):
    planned, compiled = bytes_of(X, source, target, mesh_of(name))
    assert planned[0] == pytest.approx(compiled[0]), (planned, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("source", [str(w) for w in states((4, 4), (2, 2))])
def test_every_pair(source):
    x, mesh = X[:4, :4], mesh_of("2x2")
    for one, target in pairs(x.shape, (2, 2)):
        if str(one) == source:
            check(x, one, target, mesh)
            planned, compiled = bytes_of(x, one, target, mesh)
            assert planned[0] == pytest.approx(compiled[0]), (target, planned, compiled)


@pytest.mark.parametrize("dtype", ["int32", "bool", "bfloat16", "uint8"])
@pytest.mark.parametrize(("source", "target"), [("S0,R", "S1,S0"), ("R,S0", "P(max),S0")])
def test_other_dtypes(dtype, source, target, mesh24):
    x = dt.distribute_tensor((X > 0).astype(dtype), mesh24, source)
    if "P" in target:
        terms = dt.DTensor.from_local(np.stack([x.to_local()[0]] * 2), mesh24, target)
        np.testing.assert_array_equal(terms.full_tensor(), (X > 0).astype(dtype))
    else:
        np.testing.assert_array_equal(x.redistribute(target), (X > 0).astype(dtype))


def test_keys(mesh24):
    keys = jax.random.split(jax.random.key(0), 8)
    x = dt.distribute_tensor(keys, mesh24, "S0,R").redistribute("R,S0")
    np.testing.assert_array_equal(jax.random.key_data(x.full_tensor()), jax.random.key_data(keys))


@pytest.mark.parametrize("target", ["P(max),R", "P(prod),R", "P(max),P(max)"])
def test_terms_of_other_kinds_come_only_from_operations(target, mesh24):
    with pytest.raises(dt.PlacementError, match="comes only from an operation that leaves it"):
        dt.distribute_tensor(X, mesh24, "R").redistribute(target)


def test_one_reduction_over_several_axes_is_one_collective(mesh24):
    (planned, kinds), (_, compiled) = bytes_of(X, J("P,P"), J("R,R"), mesh24)
    assert kinds == compiled == ["all-reduce"]
    whole = place(X, J("P,P"), mesh24).redistribute("R").to_local()
    assert (np.asarray(whole) == np.asarray(whole)[0, 0]).all(), "replicas differ"
    assert planned == pytest.approx(2 * X.nbytes * 7 / 8)


def test_a_move_back_is_its_transpose(mesh24):
    """<move(x), y> == <x, move back(y)>: exact for small multiples of a power of two."""
    for source, target in random.Random(ROTATION).sample(dual_pairs(X.shape, (2, 4)), 6):
        rng = np.random.default_rng(2)
        x = place(X, source, mesh24)
        moved = x.redistribute(Layout(mesh24, target.placements, target.order))
        y = (rng.integers(-8, 9, X.shape) / 8).astype(np.float32)
        there = place(y, dual(target), mesh24)
        back = there.redistribute(Layout(mesh24, dual(source).placements, dual(source).order))
        left = float(np.vdot(np.asarray(moved.to_local()), np.asarray(there.to_local())))
        right = float(np.vdot(np.asarray(x.to_local()), np.asarray(back.to_local())))
        assert left == right, (source, target)


def dual(where):
    swap = {R: Partial(), Partial(): R}
    return joint([swap.get(p, p) for p in where.placements], where.order)


def dual_pairs(shape, sizes):
    every = states(shape, sizes, ("sum",))
    return [(s, t) for s, t in itertools.product(every, every) if s != t]


# ---- plans only ----------------------------------------------------------------------------------


def J(text, order=None) -> Joint:
    return joint(parse_placements(text), order)


MIB = 2**20
SQUARE = [  # float32[1024,1024] on 8x8: MiB and collectives
    ("S0,S1", "S1,S0", 0.0625, 1),
    ("S0,S0", "R,S0", 0.5, 2),
    ("S0,S0", "S1,S1", 0.0616, 1),
    ("S0,R", "R,S0", 0.5, 1),
    ("P,P", "S0,S0", 3.94, 1),
    ("P,P", "R,R", 7.88, 1),
    ("P,S0", "S0,S0", 0.5, 2),
    ("P,S0", "S0,R", 0.94, 3),
    ("P,R", "R,S0", 0.88, 1),
    ("R,S0", "S0,S0", 0.0625, 1),
]
CUBE = [  # float32[256,256,64] on 4x4x4
    ("S0,S1,S2", "S1,S2,S0", 0.25, 1),
    ("P,S0,P", "S0,S0,S0", 4.0, 2),
    ("P,P,P", "R,S0,R", 19.5, 2),
]


@pytest.mark.parametrize(
    ("shape", "sizes", "source", "target", "mib", "steps"),
    [((1024, 1024), (8, 8), *row) for row in SQUARE]
    + [((256, 256, 64), (4, 4, 4), *row) for row in CUBE],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_paths_are_the_cheapest_known(shape, sizes, source, target, mib, steps):
    paths = table(shape, 4, ("sum",), sizes)
    path = paths.path(J(source), J(target))
    assert sum(paths.sent(m, sizes) for m in path) <= mib * MIB * 1.002, path
    assert sum(m.is_collective for m in path) <= steps, path


def test_no_path_is_dearer_than_a_detour():
    shape, sizes = (64, 64), (2, 4)
    paths = table(shape, 4, ("sum",), sizes)
    through = (paths.cost[:, :, None] + paths.cost[None, :, :]).min(axis=1)
    assert (paths.cost <= through + 1e-6).all()


def test_paths_lead_from_source_to_target():
    paths = table((16, 16), 4, ("max", "sum"), (2, 4))
    for source, target in itertools.product(paths.states, paths.states):
        if possible(source, target) and kinds_of(source.placements + target.placements) != {
            "max",
            "sum",
        }:
            steps = paths.path(source, target)
            assert [m.source for m in steps] == [source, *(m.target for m in steps)][: len(steps)]
            assert (steps[-1].target if steps else source) == target


def test_arrays_are_never_of_two_kinds_of_partial(mesh24):
    assert all(len(kinds_of(w.placements)) < 2 for w in states_of((4,), ("max", "sum"), (2, 4)))
    with pytest.raises(dt.PlacementError, match=r"P, P\(max\): an array has one kind of partial"):
        dt.distribute_tensor(X, mesh24, "P,P(max)")


# ---- against another planner ---------------------------------------------------------------------


def single_axis_moves(source, shape, sizes):
    """(target, bytes sent) of one collective or slice over one mesh axis, axes in mesh order.

    This is what planners do that know no several axes at once and no permutes: all-gather and
    all-to-all of the innermost axis of a dim, all-reduce, reduce-scatter, slice.
    """
    held = 4 * np.prod(shape) / np.prod([1, *(
        n for p, n in zip(source, sizes, strict=True) if p.startswith("S")
    )])  # fmt: skip
    for axis, (p, n) in enumerate(zip(source, sizes, strict=True)):
        change = lambda q: (*source[:axis], q, *source[axis + 1 :])  # noqa: B023, E731
        inner = p.startswith("S") and p not in source[axis + 1 :]
        later = lambda d: f"S{d}" in source[axis + 1 :]  # noqa: B023, E731
        free = [f"S{d}" for d in range(len(shape)) if not later(d) and f"S{d}" != p]
        if inner:
            yield change("R"), held * (n - 1)
            for q in free:
                yield change(q), held * (n - 1) / n
        elif p == "R":
            for q in free:
                yield change(q), 0.0
        elif p == "P":
            yield change("R"), 2 * held * (n - 1) / n
            for q in free:
                yield change(q), held * (n - 1) / n


def dijkstra(source, shape, sizes):
    """The least cost to every state, 20 KB per collective."""
    found, queue = {}, [(0.0, source)]
    while queue:
        cost, at = heapq.heappop(queue)
        if at in found:
            continue
        found[at] = cost
        for target, sent in single_axis_moves(at, shape, sizes):
            parts = np.prod([[n if p == f"S{d}" else 1 for d in range(len(shape))]
                             for p, n in zip(target, sizes, strict=True)], axis=0)  # fmt: skip
            if all(size % int(n) == 0 for size, n in zip(shape, parts, strict=True)):
                heapq.heappush(queue, (cost + sent + (20e3 if sent else 0), target))
    return found


@pytest.mark.parametrize("sizes", [(2, 4), (4, 4), (2, 2, 2), (4, 2, 2)])
def test_no_path_is_above_that_of_single_axis_moves(sizes):
    """400 random redistributions, of large and of small arrays."""
    rng = random.Random(ROTATION)
    for _ in range(100):
        shape = tuple(rng.choice([16, 64, 256]) for _ in range(rng.choice([2, 3])))
        choices = ["R", "P", *(f"S{d}" for d in range(len(shape)))]
        source = tuple(rng.choice(choices) for _ in sizes)
        target = tuple(rng.choice(choices[:1] + choices[2:]) for _ in sizes)
        paths = table(shape, 4, ("sum",), sizes)
        start, end = (joint(parse_placements(",".join(w))) for w in (source, target))
        path = [m for m in paths.path(start, end) if m.is_collective]
        ours = sum(paths.sent(m, sizes) + 20e3 for m in path)
        theirs = dijkstra(source, shape, sizes)[target]
        assert ours <= theirs * 1.002 + 1, (shape, source, target, path)


def test_a_slow_axis_carries_least():
    """A sum over a slow and a fast axis: scatter on the fast one, reduce a part on the slow one."""
    slow_first = Speeds(latency=20e3, slowness=(9.0, 1.0), memory=0.1)
    paths = table((1024, 1024), 4, ("sum",), (2, 4), slow_first)
    path = paths.path(J("P,P"), J("R,R"))
    assert [(m.kind, m.axes) for m in path] == [
        ("reduce-scatter", (1,)), ("all-reduce", (0,)), ("all-gather", (1,)),
    ]  # fmt: skip
    alike = table((1024, 1024), 4, ("sum",), (2, 4)).path(J("P,P"), J("R,R"))
    assert [(m.kind, m.axes) for m in alike] == [("all-reduce", (0, 1))]
