"""Every row of every rule, by brute force. `pytest -k dot_general` tells one primitive's story."""

import itertools
import math
import os
import random
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
import simulated
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from oracle import WrongRow
from rotation import ROTATION, today
from samples import (
    NEWER,
    SAMPLES,
    UNSAMPLED,
    WITHOUT_DERIVATIVE,
    Sample,
    bf16,
    bools,
    equations,
    f32,
    i32,
    sampled,
    u8,
)

import dtorchjax as dt
from dtorchjax import _jax, cli
from dtorchjax.notation import parse_row
from dtorchjax.placements import Partial, Shard, joint, parse_placements
from dtorchjax.registry import LOCALS, REFUSALS, RULES
from dtorchjax.rules_command import coverage

GOLDEN = Path(__file__).parent / "golden"
"""What the searches that only sample look at changes every day; set it to repeat one of them."""

EXACT = {name for name in RULES if RULES[name].moves} | {"bitcast_convert_type", "nextafter"}
"""What moves data moves every bit."""

QUICK = ("add", "dot_general", "exp", "gather", "reduce_max", "reshape")
NAMES = [
    *(pytest.param(name, marks=pytest.mark.smoke) for name in QUICK),
    *today(sorted(set(SAMPLES) - set(QUICK)), 3),
]


def usable(equation):
    """The rows that some number of devices can try."""
    return [
        row
        for row in equation.signature().rows
        if any(equation.fits(*oracle.placed(row), (n,), bool(row.by)) for n in oracle.COUNTS)
    ]


# ---- golden files --------------------------------------------------------------------------------


def golden(file):
    """`{primitive: lines}`"""
    lines = (GOLDEN / file).read_text("utf-8").splitlines() if (GOLDEN / file).exists() else []
    return {k: list(v) for k, v in itertools.groupby(lines, lambda line: line.partition("[")[0])}


def compare(file, name, lines, request, complete=True):
    """Lines of one primitive against a golden file; `--update-golden` writes them instead."""
    known = golden(file)
    if request.config.getoption("--update-golden"):
        assert "PYTEST_XDIST_WORKER" not in os.environ, "--update-golden works without -n only"
        if complete:
            known[name] = lines
            GOLDEN.mkdir(exist_ok=True)
            text = "".join(f"{line}\n" for key in sorted(known) for line in known[key])
            (GOLDEN / file).write_text(text, "utf-8")
        return
    new = [line for line in lines if line not in known.get(name, ())]
    gone = [line for line in known.get(name, ()) if line not in lines] if complete else []
    assert not new and not gone, (
        f"golden/{file} differs; if it should, run pytest tests/test_rules.py --update-golden\n"
        + "\n".join([*(f"+ {line}" for line in new), *(f"- {line}" for line in gone)])
    )


# ---- the table -----------------------------------------------------------------------------------


def test_every_rule_has_samples_and_every_sample_a_rule():
    missing = NEWER if jax.__version__ < "0.12" else set()
    ours = {name for name, rule in RULES.items() if "sharding_rules" in rule.place}
    assert ours - set(SAMPLES) - missing == set(UNSAMPLED)
    assert set(SAMPLES) - ours == set()
    assert set(LOCALS) <= set(RULES)
    assert set(REFUSALS) & set(RULES) == set()
    assert set(WITHOUT_DERIVATIVE) <= set(SAMPLES)
    assert set(golden("rows.txt")) | set(golden("missed.txt")) <= set(SAMPLES) | NEWER


def test_every_primitive_of_jax_is_known():
    """A newer jax that adds a primitive fails here: it needs a rule, or a reason."""
    assert {k.name: k.how for k in coverage() if k.kind == "missing"} == {}
    assert {k.kind for k in coverage()} == {"rule", "in place", "graph", "refused"}
    assert all(k.how for k in coverage())


def test_the_coverage_and_a_table_on_the_command_line(capsys):
    assert cli.main(["rules", "--all"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("rule")
    assert cli.main(["rules", "dot_general", "f32[8,512]", "f32[512,64]"]) == 0
    assert "S1, S0 -> P" in capsys.readouterr().out
    assert cli.main(["rules", "cumsum", "f32[8,4]", "--static", "axis=0"]) == 0
    assert "S0 -> S0 by all-gather" in capsys.readouterr().out
    assert cli.main(["rules", "psum"]) == 0
    assert "refused" in capsys.readouterr().out
    assert cli.main(["rules", "nothing"]) == 2 and cli.main(["rules"]) == 2


@pytest.mark.parametrize("name", NAMES)
def test_rows_hold(name):
    for equation in sampled(name).values():
        rows = usable(equation)
        backward = () if name in WITHOUT_DERIVATIVE else (2 + ROTATION % 2,)
        equation.prepare(rows, backward)
        for row in rows:
            assert oracle.check_row(equation, row, exact=name in EXACT)
            oracle.check_vjp(equation, row, backward)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_rows_are_those_of_the_golden_file(name, request):
    lines = [
        f"{name}[{label}]: {row}"
        for label, equation in sampled(name).items()
        for row in usable(equation)
    ]
    compare("rows.txt", name, lines, request)


def missed(name, budget):
    return [
        f"{name}[{label}]: {row}"
        for label, equation in sampled(name).items()
        for row in oracle.missed_rows(
            equation, equation.signature().rows, name in EXACT, budget, ROTATION
        )
    ]


@pytest.mark.parametrize("name", sorted(SAMPLES)[ROTATION % 8 :: 8])
def test_rows_that_hold_are_declared_or_known(name, request):
    """An eighth of the primitives, a few placements of their operands; others every day."""
    if not request.config.getoption("--update-golden"):
        compare("missed.txt", name, missed(name, budget=12), request, complete=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_all_rows_that_hold_are_declared_or_known(name, request):
    compare("missed.txt", name, missed(name, budget=None), request)


@pytest.mark.parametrize("name", today(sorted(set(LOCALS) & set(SAMPLES)), 2))
def test_local_programs_on_two_axes(name, budget=2):
    """Rows are proved for one axis; a local program sees all of them, and their order."""
    for equation in sampled(name).values():
        rows = [row for row in equation.signature().rows if not row.by]
        found = oracle.joint_rows(equation, rows, (2, 3))
        if budget is not None and len(found) > budget:
            found = random.Random(ROTATION).sample(found, budget)
        for inputs, outputs in found:
            oracle.check_joint(equation, inputs, outputs, (2, 3), name in EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(LOCALS) & set(SAMPLES)))
def test_local_programs_on_two_axes_in_full(name):
    test_local_programs_on_two_axes(name, budget=None)


def test_an_empty_array_is_moved_whole():
    (equation,) = equations("reshape", Sample("", lambda x: x.reshape(6, 0, 2), (f32(0, 6),)))
    assert str(equation.signature()).splitlines()[0] == "R -> R"
    assert not any("S" in str(row) for row in equation.signature().rows)


@pytest.mark.parametrize(
    ("full", "starts"),
    [
        ((7, 5), (3, 2)),
        ((70_000, 70_000), (69_990, 69_990)),
        ((2**20, 3, 2**14), (2**20 - 2, 1, 9)),
    ],
)
def test_random_counters_are_flat_indices_in_64_bits(full, starts):
    part = (2, 3, 4)[: len(full)]
    high, low = _jax._counters(part, full, starts)
    where = np.meshgrid(
        *(np.arange(p, dtype=object) + s for p, s in zip(part, starts)), indexing="ij"
    )
    flat = sum(i * math.prod(full[d + 1 :]) for d, i in enumerate(where))
    assert (np.asarray(high).astype(object) * 2**32 + np.asarray(low) == flat).all()


ON_A_MESH = {
    "every second row": (lambda x: x[::2], "S0,S1"),
    "a lookup outside the table": (
        lambda x: jnp.take(x, jnp.arange(-3, 40, 3), axis=0, fill_value=7), "S0,S0",
    ),
    "the largest of each segment": (
        lambda x: jnp.full((4, 16), -9.0).at[jnp.arange(32) % 4].max(x), "S0,R",
    ),
    "a lookup in terms": (lambda x: x[jnp.arange(8) * 3], "P,S0"),
    "all finite": (lambda x: jnp.isfinite(jnp.log(abs(x))).all() | jnp.isfinite(x).all(), "S0,S1"),
    "counting": (lambda x: x + jnp.arange(16), "R,S1"),
    "bits": (lambda x: x * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), "S1,S0"),
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("what", ON_A_MESH)
def test_local_programs_on_a_real_mesh(what, mesh24):
    fun, placements = ON_A_MESH[what]
    x = f32(32, 16)(np.random.default_rng(0))
    placed = dt.distribute_tensor(x, mesh24, placements)
    np.testing.assert_array_equal(np.asarray(dt.jit(fun)(placed)), fun(x))


# ---- the oracle itself ---------------------------------------------------------------------------

WRONG = {
    "exp of terms": ("exp", "f32", "P -> P"),
    "the largest square is not that of the largest": ("square", "f32", "P(max) -> P(max)"),
    "a quotient of integers is rounded": ("div", "i32", "P, R -> P"),
    "a cast to integers cuts every term": ("convert_element_type", "f32 to i32", "P -> P"),
    "narrow integers wrap around": ("convert_element_type", "i8 to i32", "P -> P"),
    "negative integers become large": ("convert_element_type", "i32 to u32", "P(max) -> P(max)"),
    "a constant counts once": ("add", "f32", "P, R -> P"),
    "cross terms": ("mul", "f32", "P, P -> P"),
    "the other case counts once": ("select_n", "f32", "R, P, R -> P"),
    "a padding value counts once": ("pad", "positive", "P, R -> P"),
    "log of a negative term is nan": ("log", "f32", "P(max) -> P(max)"),
    "what is reduced differs": ("reduce_sum", "f32 over (0, 2)", "S0 -> R"),
    "of maxima the largest, not their sum": ("reduce_max", "f32 over (0, 2)", "S0 -> P"),
    "max and min do not swap": ("reduce_max", "f32 over (0, 2)", "P(min) -> P(min)"),
    "trailing parts are no stretch of elements": ("reshape", "merge", "S1 -> S0"),
    "leading parts of unequal groups": ("reshape", "no dim alike", "S1 -> S0"),
    "dims are renamed": ("transpose", "f32", "S0 -> S2"),
    "contracted with what is whole": ("dot_general", "matrix, matrix", "S1, R -> P"),
    "two different dims": ("dot_general", "matrix, matrix", "S0, S1 -> S0"),
    "the table is added once": ("scatter-add", "rows, fill", "R, S0, S0 -> P"),
    "keys of other generators come in batches": ("random_bits", "a batch of rbg keys", "S0 -> S0"),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_row_is_refuted(why):
    name, label, text = WRONG[why]
    row, equation = parse_row(text), sampled(name)[label]
    assert row not in equation.signature().rows
    with pytest.raises(WrongRow, match=f"`{name}` row .* on 2 devices"):
        oracle.check_row(equation, row)


PROGRAMS = {
    "sharded along the joined dim": (
        "concatenate", "columns", "S1, S1 -> S1 by permute", lambda call, *xs: call.bind(*xs),
    ),
    "totals of the parts before are missing": (
        "cumsum", "f32", "S0 -> S0 by all-gather", lambda call, x: call.bind(x),
    ),
    "no mask": ("gather", "rows, fill", "S0, R -> P", lambda call, *xs: call.bind(*xs)),
    "every device fills": (
        "gather", "own fill value", "P, R -> P", lambda call, *xs: call.bind(*xs),
    ),
    "no offset": ("iota", "int32", "-> S1", lambda call: call.bind(shape=call.out_shape())),
    "the whole shape": ("iota", "int32", "-> S1", lambda call: call.bind()),
    "the same numbers everywhere": (
        "random_bits", "2d", "R -> S0", lambda call, key: call.bind(key, shape=call.out_shape()),
    ),
    "the whole limit": ("slice", "every second", "S1 -> S1", lambda call, x: call.bind(x)),
}  # fmt: skip


@pytest.mark.parametrize("why", PROGRAMS)
def test_a_wrong_local_program_is_refuted(why, monkeypatch):
    name, label, text, program = PROGRAMS[why]
    equation = sampled(name)[label]
    assert parse_row(text) in equation.signature().rows
    monkeypatch.setitem(LOCALS, name, program)
    fresh = oracle.dataclasses.replace(equation)  # has compiled nothing yet
    fresh.prepare([parse_row(text)])
    with pytest.raises(WrongRow, match=f"`{name}` row .* on 2 devices"):
        oracle.check_row(fresh, parse_row(text))


def test_padding_that_counts_is_refuted(monkeypatch):
    (equation,) = equations("reduce_max", Sample("", lambda x: x.max(0), (f32(5, 3),)))
    row = parse_row("S0 -> P(max)")
    assert oracle.check_row(equation, row) == 2
    monkeypatch.setattr(oracle, "summed_up", lambda where, outputs, rank: [None] * rank)
    with pytest.raises(WrongRow, match=r"`reduce_max` row S0 -> .* devices"):
        oracle.check_row(oracle.dataclasses.replace(equation), row)


def test_a_wrong_derivative_is_refuted(monkeypatch):
    equation = oracle.dataclasses.replace(sampled("reshape")["merge"])
    program = LOCALS["reshape"]
    monkeypatch.setitem(
        LOCALS, "reshape", lambda call, x: program(call, lax.stop_gradient(x) + 0 * x)
    )
    row = parse_row("S0 -> S0")
    assert oracle.check_row(equation, row) == 2
    with pytest.raises(WrongRow, match=r"derivative: gradient of operand 0, device \(0,\)"):
        oracle.check_vjp(equation, row)


def test_a_mean_over_the_local_number_is_refuted():
    mean_p = Primitive("mean")
    mean_p.def_impl(lambda x: x.mean(0))
    mean_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape[1:], x.dtype))
    mlir.register_lowering(mean_p, mlir.lower_fun(lambda x: x.mean(0), multiple_results=False))
    (equation,) = equations("mean", Sample("", mean_p.bind, (f32(6, 5),)))
    oracle.check_row(equation, parse_row("P -> P"))
    with pytest.raises(WrongRow, match="`mean` row S0 -> P on 2 devices"):
        oracle.check_row(equation, parse_row("S0 -> P"))


def test_rows_that_hold_are_found():
    found = oracle.missed_rows(sampled("add")["f32"], [parse_row("R, R -> R")])
    assert {parse_row(t) for t in ("S0, S0 -> S0", "S1, S1 -> S1", "P, P -> P")} <= set(found)
    assert not {parse_row(t) for t in ("R, P -> P", "P, P -> R", "S0, S1 -> S0")} & set(found)


def test_a_row_that_follows_from_another_is_not_found():
    strong, weak = parse_row("P(max) -> P(max)"), parse_row("R -> P(max)")
    assert oracle.covers(strong, weak) and not oracle.covers(weak, strong)
    assert strong not in oracle.missed_rows(sampled("exp")["f32"], [strong])


# ---- simulated arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("maker", [f32, bf16, i32, u8, bools])
def test_terms_reduce_to_the_value(op, maker):
    if maker is bools and op in ("sum", "prod"):
        pytest.skip("truth values have neither")
    rng = np.random.default_rng(0)
    x = maker(6, 12)(rng)
    parts = simulated.terms(x, op, 3, rng)
    assert all(p.dtype == x.dtype for p in parts)
    assert not any((parts[0] == p).all() for p in parts[1:])
    simulated.check_placed({(i,): p for i, p in enumerate(parts)}, joint([Partial(op)]), (3,), x)


@pytest.mark.parametrize("where", [
    "R,R", "S0,R", "R,S1", "S0,S0", "S1,S0", "P,S0", "S1,P(max)", "P,P", "P(min),P(min)",
])  # fmt: skip
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parts_make_up_the_whole(where, order):
    rng = np.random.default_rng(0)
    x = f32(6, 12)(rng)
    where = joint(parse_placements(where), order)
    parts = simulated.shards(x, where, (2, 3), rng)
    simulated.check_placed(parts, where, (2, 3), x)
    parts[1, 2] = parts[1, 2] + np.eye(*parts[1, 2].shape, dtype=np.float32) * 9
    with pytest.raises(simulated.Misplaced, match=r"device .*index \(0, 0\)"):
        simulated.check_placed(parts, where, (2, 3), x)


def test_the_major_axis_comes_first():
    x = np.arange(6)
    parts = simulated.shards(x, joint([Shard(0), Shard(0)]), (2, 3), np.random.default_rng(0))
    assert [int(parts[p][0]) for p in simulated.devices((2, 3))] == [0, 1, 2, 3, 4, 5]
    turned = joint([Shard(0), Shard(0)], (1, 0))
    parts = simulated.shards(x, turned, (2, 3), np.random.default_rng(0))
    assert [int(parts[p][0]) for p in simulated.devices((2, 3))] == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (np.zeros((3, 3), np.float32), r"holds float32\[3, 3\], not float32\[3, 2\]"),
        (np.zeros((3, 2), np.int32), r"holds int32\[3, 2\], not float32\[3, 2\]"),
        (np.full((3, 2), np.nan, np.float32), r"index \(0, 0\): nan instead of 0.0"),
    ],
)
def test_what_is_wrong_with_a_part_is_said(part, says):
    parts = {(0,): np.zeros((3, 2), np.float32), (1,): part}
    with pytest.raises(simulated.Misplaced, match=r"device \(1,\).*" + says):
        simulated.check_placed(parts, joint([Shard(0)]), (2,), np.zeros((6, 2), np.float32), 1e-3)
