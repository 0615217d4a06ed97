"""The sharded layers against dense float64 references, values and gradients."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import dtorchjax as dt
from dtorchjax import blockwise
from dtorchjax.hlo import collective_bytes
from dtorchjax.parallel import (
    column_parallel_linear,
    combine,
    dispatch,
    ring_attention,
    row_parallel_linear,
    ulysses_attention,
    vocab_parallel_cross_entropy,
)

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}


# ---- dense references ----------------------------------------------------------------------------


def linear(x, w, b=None):
    return x @ w + (0 if b is None else b)


def attention(q, k, v, causal=False, scale=None):
    shared = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, shared, 2), jnp.repeat(v, shared, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    if causal:
        scores = jnp.where(jnp.tri(*scores.shape[2:], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def cross_entropy(logits, labels, label_smoothing=0.0, ignore_index=None, z_loss=0.0):
    classes = logits.shape[-1]
    target = jax.nn.one_hot(labels, classes, dtype=logits.dtype) * (1 - label_smoothing)
    loss = -((target + label_smoothing / classes) * jax.nn.log_softmax(logits)).sum(-1)
    loss += z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return jnp.where(labels == ignore_index, 0, loss)


def places(expert_index, n_experts, capacity, groups):
    """Token by token, the choices that are not dropped: token, number of choice, expert, place."""
    taken = np.zeros((n_experts, groups), int)
    found = []
    for t, choices in enumerate(expert_index):
        group = t * groups // len(expert_index)
        for i, expert in enumerate(choices):
            if 0 <= expert < n_experts:
                if taken[expert, group] < capacity:
                    found.append((t, i, expert, group * capacity + taken[expert, group]))
                taken[expert, group] += 1
    return np.array(found).T


def dispatched(tokens, expert_index, n_experts, capacity, groups=1):
    t, _, expert, place = places(INDEX, n_experts, capacity, groups)
    out = jnp.zeros((n_experts, groups * capacity, tokens.shape[1]), tokens.dtype)
    return out.at[expert, place].set(tokens[t])


def combined(outputs, expert_index, weights, groups=1):
    t, i, expert, place = places(INDEX, len(outputs), outputs.shape[1] // groups, groups)
    out = jnp.zeros((len(weights), outputs.shape[2]), outputs.dtype)
    return out.at[t].add(outputs[expert, place] * weights[t, i][:, None])


# ---- the table -----------------------------------------------------------------------------------

RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 32, (8, 3)).astype(np.int32)
INDEX = RANDOM.integers(-1, 8, (16, 2)).astype(np.int32)


@dataclasses.dataclass
class Case:
    """`args` are shapes of random arrays, arrays of integers, or None; `rows` must be taken."""

    function: Callable
    reference: Callable
    args: list[Any]
    rows: list[str]
    statics: dict[str, Any] = dataclasses.field(default_factory=dict)

    def arrays(self, dtype: str) -> list[Any]:
        random = np.random.default_rng(1)
        return [
            jnp.asarray(random.standard_normal(a), dtype) if isinstance(a, tuple) else a
            for a in self.args
        ]


HEADS = [(8, 16, 16, 4), (8, 16, 8, 4), (8, 16, 8, 4)]
SEQUENCE = "S1, S1, S1 -> S1"
LOSS = [(8, 3, 32), LABELS]
CLASSES = "S2, R -> R"
EXPERTS = "S0, S0, S0 -> S0"

CASES = {
    "column": Case(
        column_parallel_linear, linear, [(8, 3, 16), (16, 24), (24,)],
        ["R, S1, S0 -> S2", "S0, R, R -> S0"],
    ),
    "column without bias": Case(
        column_parallel_linear, linear, [(8, 16), (16, 24)], ["R, S1 -> S1"]
    ),
    "row": Case(
        row_parallel_linear, linear, [(8, 3, 16), (16, 24), (24,)],
        ["S2, S0, R -> P", "S0, R, R -> S0"],
    ),
    "row without bias": Case(
        row_parallel_linear, linear, [(8, 16), (16, 24)], ["S1, S0 -> P"]
    ),
    "loss": Case(vocab_parallel_cross_entropy, cross_entropy, LOSS, [CLASSES, "S0, S0 -> S0"]),
    "smooth loss": Case(
        vocab_parallel_cross_entropy, cross_entropy, LOSS, [CLASSES],
        dict(label_smoothing=0.1, z_loss=0.02, ignore_index=int(LABELS[0, 0])),
    ),
    "ring": Case(ring_attention, attention, HEADS, ["S2, S2, S2 -> S2"]),
    "causal ring": Case(ring_attention, attention, HEADS, [SEQUENCE], dict(causal=True, scale=0.3)),
    "cross attention": Case(
        ring_attention, attention, [HEADS[0], (8, 8, 8, 4), (8, 8, 8, 4)], [SEQUENCE]
    ),
    "ulysses": Case(ulysses_attention, attention, HEADS, []),
    "causal ulysses": Case(ulysses_attention, attention, HEADS, [SEQUENCE], dict(causal=True)),
    "dispatch": Case(
        dispatch, dispatched, [(16, 8), INDEX], ["S0, S0 -> S0", "S1, R -> S2"],
        dict(n_experts=8, capacity=3),
    ),
    "dispatch groups": Case(
        dispatch, dispatched, [(16, 8), INDEX], ["S0, S0 -> S0"],
        dict(n_experts=8, capacity=1, groups=8),
    ),
    "combine": Case(
        combine, combined, [(8, 3, 8), INDEX, (16, 2)], [EXPERTS, "S2, R, R -> S1"]
    ),
    "combine groups": Case(
        combine, combined, [(8, 8, 8), INDEX, (16, 2)], [EXPERTS], dict(groups=8)
    ),
}  # fmt: skip


@functools.cache
def expected(name: str, dtype: str) -> Any:
    """Arrays, the gradient of the result, and in float64 the result and the gradients of arrays."""
    case = CASES[name]
    arrays = case.arrays(dtype)
    kept = jax.eval_shape(lambda *xs: case.function(*xs, **case.statics), *arrays)
    g = jnp.asarray(np.random.default_rng(2).standard_normal(kept.shape), kept.dtype)
    with jax.enable_x64(True):
        wide = [
            np.asarray(a, np.float64) if isinstance(given, tuple) else a
            for a, given in zip((g, *arrays), ((), *case.args))
        ]
        found = jax.jit(with_gradients(case, case.reference))(*wide)
        return arrays, g, jax.tree.map(np.asarray, found)


def with_gradients(case: Case, function: Callable) -> Callable:
    """(g, *arrays) -> (result, gradients of the floating arrays)."""
    floats = [i for i, s in enumerate(case.args) if isinstance(s, tuple)]

    def run(g, *arrays):
        def of_floats(*xs):
            given = dict(enumerate(arrays)) | dict(zip(floats, xs))
            return function(*given.values(), **case.statics)

        value, pull = jax.vjp(of_floats, *(arrays[i] for i in floats))
        return value, pull(g)

    return run


def close(got: Any, wanted: Any, dtype: str) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a = np.asarray(a, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * max(1, np.abs(b).max()))


def placements(row: str) -> list[str]:
    return row.replace(" -> ", ", ").split(", ")


def mesh_of(*sizes: int) -> Any:
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, tuple("xyz"[: len(sizes)]))


def jitted(mesh: Any, name: str, row: list[str]) -> Any:
    """A case's value and gradients with one placement text per operand, then that of the result."""
    case = CASES[name]
    *ins, out = (text.split(",") for text in row)
    dense = ["R" if p == "P" else p for p in out]
    floats = tuple(p for p, a in zip(ins, case.args) if isinstance(a, tuple))
    return dt.jit(
        with_gradients(case, case.function), mesh=mesh, redistribute="never",
        in_placements=(dense, *ins), out_placements=(dense, floats),
    )  # fmt: skip


def check_on(mesh: Any, name: str, row: list[str], dtype: str = "float32") -> None:
    arrays, g, wanted = expected(name, dtype)
    close(jitted(mesh, name, row)(g, *arrays), wanted, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in CASES]
    + [(name, "bfloat16") for name in ("row", "smooth loss", "dispatch", "combine")]
    + [(name, "float16") for name in ("row", "smooth loss", "causal ring")],
)
def test_on_plain_arrays(name, dtype):
    arrays, g, wanted = expected(name, dtype)
    got = jax.jit(with_gradients(CASES[name], CASES[name].function))(g, *arrays)
    close(got, wanted, dtype)
    assert [x.dtype for x in got[1]] == [a.dtype for a in arrays if a.dtype != np.int32]


@pytest.mark.parametrize(("name", "row"), [(n, row) for n, c in CASES.items() for row in c.rows])
def test_on_eight_devices(name, row):
    check_on(mesh_of(8), name, placements(row))


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "rows", "sizes", "dtype"),
    [
        ("row", ["S2, S0, R -> P"], [8], "bfloat16"),
        ("smooth loss", [CLASSES], [2], "float16"),
        ("causal ring", [SEQUENCE], [2], "bfloat16"),
        ("causal ring", [SEQUENCE], [1], "float32"),
        ("row", ["S0, R, R -> S0", "S2, S0, R -> P"], [2, 2], "float32"),
        ("loss", [CLASSES], [1], "float32"),
        ("causal ring", [SEQUENCE, SEQUENCE], [2, 4], "float32"),
        SLOW("ring", ["S0, S0, S0 -> S0", SEQUENCE], [2, 4], "float32"),
        SLOW("causal ulysses", [SEQUENCE, "S2, S2, S2 -> S2"], [4, 2], "float32"),
        SLOW("row", ["S0, R, R -> S0", "S2, S0, R -> P", "R, S1, S0 -> S2"], [2, 2, 2], "float32"),
        SLOW("loss", ["S0, S0 -> S0", CLASSES], [2, 4], "float32"),
        ("loss", [CLASSES, CLASSES], [2, 4], "float32"),
        SLOW("dispatch", ["S0, S0 -> S0", "S1, R -> S2"], [4, 2], "float32"),
        SLOW("combine groups", [EXPERTS, EXPERTS], [2, 4], "float32"),
    ],
)
def test_on_other_meshes(name, rows, sizes, dtype):
    columns = zip(*map(placements, rows))
    check_on(mesh_of(*sizes), name, [",".join(column) for column in columns], dtype)


@pytest.mark.parametrize("name", list(map(SLOW, CASES)))
def test_every_row(name):
    case = CASES[name]
    report = dt.check_dfunction(case.function, *case.arrays("float32"), **case.statics)
    assert report.checked and not report.skipped


def test_lengths_that_chunks_do_not_divide(monkeypatch):
    monkeypatch.setattr(blockwise, "CHUNK", 3)
    arrays, g, wanted = expected("causal ring", "float32")
    run = with_gradients(CASES["causal ring"], CASES["causal ring"].function)
    close(jax.jit(run)(g, *arrays), wanted, "float32")


BLOCK, TOKENS = 8 * 2 * 8 * 4 * 4, 8 * 3 * 4  # bytes of one device's k, of one float per token


@pytest.mark.parametrize(
    ("name", "row", "forward", "backward"),
    [
        ("column", "R, S1, S0 -> S2", {}, {}),
        ("row", "S2, S0, R -> P", {}, {}),
        ("loss", CLASSES, {"all-reduce": 3 * TOKENS * 14 / 8}, {}),
        ("smooth loss", CLASSES, {"all-reduce": 4 * TOKENS * 14 / 8}, {}),
        ("causal ring", SEQUENCE, {"permute": 14 * BLOCK}, {"permute": 30 * BLOCK}),
        ("ulysses", SEQUENCE, {"all-to-all": 6 * BLOCK * 7 / 8}, {"all-to-all": 6 * BLOCK * 7 / 8}),
        ("dispatch", "S0, S0 -> S0", {"all-gather": 16 * (8 + 2) * 4 * 7 / 8},
         {"reduce-scatter": 16 * 8 * 4 * 7 / 8}),
        ("dispatch groups", "S0, S0 -> S0", {"all-to-all": 8 * 8 * 4 * 7 / 8},
         {"all-to-all": 8 * 8 * 4 * 7 / 8}),
    ],
)  # fmt: skip
def test_what_a_body_sends(name, row, forward, backward):
    arrays, g, _ = expected(name, "float32")
    plan = jitted(mesh_of(8), name, placements(row)).explain(g, *arrays)
    for backwards, wanted in ((False, forward), (True, backward)):
        sent: dict[str, float] = {}
        for c in plan.collectives:
            inside = c.why.startswith("inside")
            if inside and c.primitive.startswith("backward of") == backwards:
                sent[c.kind] = sent.get(c.kind, 0) + c.bytes * c.times
        assert sent == wanted


def gathered(q, k, v):
    """What the ring saves: all keys, and all scores of this device's queries."""
    k, v = (jax.lax.all_gather(x, "x", axis=1, tiled=True) for x in (k, v))
    return attention(q, k, v)


def test_ring_memory_and_bytes():
    q, k = (jax.ShapeDtypeStruct((1, 2**14, heads, 8), jnp.float32) for heads in (2, 1))
    mesh, where = mesh_of(8), (["S1"], ["S1"], ["S1"])
    ring = dt.jit(ring_attention, mesh=mesh, in_placements=where).lower(q, k, k).compile()
    assert collective_bytes(ring.as_text()) == 2 * 7 * (4 * 8 * 2**14 / 8)
    spec = jax.sharding.PartitionSpec(None, "x")
    dense = jax.jit(jax.shard_map(gathered, mesh=mesh, in_specs=spec, out_specs=spec))
    most = dense.lower(q, k, k).compile().memory_analysis().temp_size_in_bytes
    assert ring.memory_analysis().temp_size_in_bytes < most / 4


def test_in_the_users_own_shard_map():
    arrays, _, wanted = expected("causal ring", "float32")
    spec = jax.sharding.PartitionSpec("x")
    local = functools.partial(ring_attention, causal=True, scale=0.3)
    run = jax.shard_map(local, mesh=mesh_of(8), in_specs=spec, out_specs=spec)
    close(jax.jit(run)(*arrays), wanted[0], "float32")


def test_labels_that_are_ignored_or_no_class():
    logits = jnp.array([[0.0, 0.0], [jnp.inf, 0.0], [0.0, 0.0]])
    labels = jnp.array([1, -1, 2])

    @jax.jit
    def loss_and_slope(logits):
        loss = functools.partial(vocab_parallel_cross_entropy, labels=labels, ignore_index=-1)
        value, pull = jax.vjp(loss, logits)
        return value, *pull(jnp.ones(3))

    loss, slope = loss_and_slope(logits)
    np.testing.assert_allclose(loss, [np.log(2), 0, np.nan], rtol=1e-6)
    np.testing.assert_allclose(slope, [[0.5, -0.5], [0, 0], [np.nan, np.nan]], rtol=1e-6)


ONES = jnp.ones((1, 8, 4, 2))


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (ValueError, "4 heads of q", lambda: ring_attention(ONES, ONES[:, :, :3], ONES[:, :, :3])),
        (ValueError, "8 queries to 4 keys",
         lambda: ring_attention(ONES, ONES[:, :4], ONES[:, :4], causal=True)),
        (TypeError, "3", lambda: column_parallel_linear(jnp.ones((2, 3)), jnp.ones((4, 2)))),
        (ValueError, "3 groups do not divide 16 tokens",
         lambda: dispatch(jnp.ones((16, 1)), INDEX, n_experts=8, capacity=1, groups=3)),
        (ValueError, "3 groups do not divide the 4 places",
         lambda: combine(jnp.ones((8, 4, 1)), INDEX, jnp.ones((16, 2)), groups=3)),
        (dt.PlacementError, "4 heads of k and v",
         lambda: dt.jit(ulysses_attention, mesh=mesh_of(8), in_placements="S1")(ONES, ONES, ONES)),
    ],
)  # fmt: skip
def test_errors(error, says, call):
    with pytest.raises(error, match=says):
        call()
