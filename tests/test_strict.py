"""redistribute="never": which programs fit, what the errors say, and that their remedies work."""

import re
import textwrap

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import dtorchjax as dt

X, W = (["S0", "S1"], ["R", "S0"])  # their product is [S0, P]

# name -> body of a function of (x, w, v, b); the last line is the one that must fail
PROGRAMS = {
    "exp of P": "h = x @ w\nreturn jnp.exp(h)",
    "P + constant": "h = x @ w\nreturn h + 1.0",
    "P + R": "h = x @ w\nreturn h + b",
    "P * P": "h = x @ w\nreturn h * h",
    "constant / P": "h = x @ w\nreturn 1.0 / h",
    "P ** 2": "h = x @ w\nreturn h**2",
    "clip of P": "h = x @ w\nreturn jnp.clip(h, -1.0, 1.0)",
    "max of P": "h = x @ w\nreturn jnp.max(h, axis=1)",
    "relu of P": "h = x @ w\nreturn jax.nn.relu(h)",
    "where on P": "h = x @ w\nreturn jnp.where(b > 0, h, 1.0)",
    "to integers": "h = x @ w\nreturn h.astype(int)",
    "softmax along its sharded dim": "return jax.nn.softmax(x, axis=1)",
    "logsumexp along its sharded dim": "return jax.nn.logsumexp(x, axis=1)",
    "S0 + S1": "return x + v",
    "contraction of S1 with S1": "return x @ v.T",
    "singular values": "return jnp.linalg.svd(x, compute_uv=False)",
    "fft along its sharded dim": "return jnp.abs(jnp.fft.rfft(x, axis=1))",
    "padding with ones": "h = x @ w\nreturn jnp.pad(h, ((0, 0), (1, 1)), constant_values=1.0)",
    "variance": "return jnp.var(x, axis=1)",
}
ARGS = (
    jax.random.normal(jax.random.key(0), (8, 16)),
    jax.random.normal(jax.random.key(1), (16, 32)),
    jax.random.normal(jax.random.key(2), (8, 16)),
    jax.random.normal(jax.random.key(3), (8, 32)),
)
WHERE = (X, W, ["S0", "S0"], "R")


def program(tmp_path, body, name):
    """A function in a file of its own, so that errors can name its lines."""
    path = tmp_path / f"{name}.py"
    path.write_text(
        "import jax\nimport jax.numpy as jnp\nimport dtorchjax as dt\n\n\ndef f(x, w, v, b):\n"
        + textwrap.indent(body, "    ")
        + "\n"
    )
    namespace = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace["f"]


def where_of(name):
    return (X, W, ["S0", "S0"] if "sharded" not in name else "R", "R")


@pytest.mark.parametrize("name", PROGRAMS)
def test_mismatch_is_an_error_and_its_remedies_work(mesh24, tmp_path, name):
    body = PROGRAMS[name]
    f = program(tmp_path, body, "train")
    expected = f(*ARGS)
    np.testing.assert_allclose(
        dt.jit(f, mesh=mesh24, in_placements=WHERE)(*ARGS), expected, rtol=2e-5, atol=1e-5
    )
    with pytest.raises(dt.PlacementMismatchError) as caught:
        dt.jit(f, mesh=mesh24, in_placements=WHERE, redistribute="never")(*ARGS)
    error = caught.value
    last = 6 + body.count("\n") + 1
    assert error.where == f"train.py:{last}", error
    assert f"train.py:{last}   {body.splitlines()[-1]}" in str(error)
    assert error.axis in ("dp", "tp") and error.rows and error.operands and error.primitive
    assert 1 <= len(error.remedies) <= 2, error
    for i, remedy in enumerate(error.remedies):
        target = re.match(r"dt\.redistribute\((.*), \{", remedy.code)[1]
        assert not target.startswith("operand"), error
        line = body.splitlines()[-1]
        head, tail = line.split("return ", 1)
        fixed = re.sub(rf"(?<![\w.]){re.escape(target)}(?!\w)", lambda _, r=remedy: r.code, tail)
        lines = [*body.splitlines()[:-1], f"{head}return {fixed}"]
        g = program(tmp_path, "\n".join(lines), f"fixed{i}")
        got = strict_value(g, mesh24)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5)


def strict_value(g, mesh):
    """The value in strict mode; a result that is still partial is asked for whole."""
    try:
        return dt.jit(g, mesh=mesh, in_placements=WHERE, redistribute="never")(*ARGS)
    except dt.PlacementMismatchError as error:
        assert error.primitive.startswith("the result"), error
        options = dict(in_placements=WHERE, out_placements="R", redistribute="never")
        return dt.jit(g, mesh=mesh, **options)(*ARGS)


def test_text_of_the_error(mesh24, tmp_path):
    f = program(tmp_path, PROGRAMS["exp of P"], "train")
    with pytest.raises(dt.PlacementMismatchError) as caught:
        dt.jit(f, mesh=mesh24, in_placements=WHERE, redistribute="never")(*ARGS)
    lines = [
        "`exp` cannot take a partial sum on mesh axis 'tp'",
        "  at         train.py:8   return jnp.exp(h)",
        "  operand 0  f32[8,32]  [dp=S0, tp=P]   (made at train.py:7 by dot_general)",
        "  rows       R -> R | S0 -> S0 | S1 -> S1 | P(max) -> P(max) | P(min) -> P(min)",
        '  remedies   dt.redistribute(h, {"dp": "S0", "tp": "S1"})   '
        "reduce-scatter, 384 B per device, result S1",
        '             dt.redistribute(h, {"dp": "S0", "tp": "R"})   all-reduce, 768 B per device',
    ]
    assert str(caught.value).splitlines() == lines


FITTING = {
    "column then row": ("h = jnp.tanh(x @ w)\nreturn h", ("S0,R", "R,S1", "R", "R")),
    "a bias that every device has": ("return x @ w + b[0]", ("S0,R", "R,S1", "R", "R")),
    "P + P, scaled": ("return 2.0 * (x @ w + (v * 0.5) @ w)", (X, W, X, "R")),
    "zeros are terms of a sum": (
        "return jnp.zeros((8, 32)).at[:, :].add(0.0) + b",
        ("R", "R", "R", "S0,R"),
    ),
    "softmax along a whole dim": ("return jax.nn.softmax(x, axis=1)", ("S0,R", "R", "R", "R")),
}


@pytest.mark.parametrize("name", FITTING)
def test_what_fits_runs_without_communication(mesh24, tmp_path, name):
    body, where = FITTING[name]
    f = program(tmp_path, body, "fits")
    out = "R" if "P + P" in name else "S0,S1"
    step = dt.jit(f, mesh=mesh24, in_placements=where, out_placements=out, redistribute="never")
    np.testing.assert_allclose(step(*ARGS), f(*ARGS), rtol=2e-5, atol=1e-5)
    assert all("the result" in c.primitive for c in step.explain(*ARGS).collectives)


def test_a_result_may_not_be_partial_unasked(mesh24):
    step = dt.jit(lambda x: x.sum(), mesh=mesh24, in_placements=("S0,R",), redistribute="never")
    with pytest.raises(dt.PlacementMismatchError, match="the result"):
        step(ARGS[0])


def test_partial_results_on_request(mesh24):
    x = dt.distribute_tensor(ARGS[0], mesh24, "S0,S1")
    out = dt.jit(lambda x: x.sum(0), out_placements="P,S0", redistribute="never")(x)
    assert isinstance(out, dt.DTensor) and str(out.layout) == "[dp=P, tp=S0]"
    np.testing.assert_allclose(out.full_tensor(), ARGS[0].sum(0), rtol=1e-5)


def test_a_loop_that_does_not_fit(mesh24):
    def f(x, w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0]

    w = jnp.ones((16, 16))
    with pytest.raises(dt.PlacementMismatchError) as caught:
        dt.jit(f, mesh=mesh24, in_placements=("S0,S1", "R,S0"), redistribute="never")(ARGS[0], w)
    assert "test_strict.py" in caught.value.where
    step = dt.jit(f, mesh=mesh24, in_placements=("S0,R", "R"), redistribute="never")
    np.testing.assert_allclose(step(ARGS[0], w), f(ARGS[0], w), rtol=1e-5)
