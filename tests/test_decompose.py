"""Operators taken apart: decompose, its switches and logs, the command line, the page."""

import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from rotation import today

import dtorchjax as dt
from dtorchjax.decompose import census, decomposed
from dtorchjax.op import Op
from dtorchjax.registry import OPS
from dtorchjax.switches import Choice


def primitives(fun, *args):
    """The names of all primitives in a function's program, inner programs included."""
    found = set()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            found.add(eqn.primitive.name)
            for p in eqn.params.values():
                for item in p if isinstance(p, list | tuple) else (p,):
                    inner = getattr(item, "jaxpr", item)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(fun)(*args).jaxpr)
    return found


def program(x):
    def body(c, row):
        return c + dt.ops.softmax(row), dt.ops.gelu(row).sum()

    c, ys = jax.lax.scan(jax.checkpoint(body), x[0], x)
    picked = jax.lax.cond(
        c.sum() > 0, lambda c: dt.ops.layer_norm(c).sum(), lambda c: dt.ops.p_norm(c), c
    )
    last = jax.lax.while_loop(lambda c: c.sum() > 1e3, lambda c: dt.ops.silu(c), c)
    return picked + ys.sum() + last.sum() + jax.jit(dt.ops.cross_entropy)(x, jnp.arange(3))


def differentiable(x):
    c, ys = jax.lax.scan(lambda c, r: (c + dt.ops.softmax(r), dt.ops.gelu(r).sum()), x[0], x)
    return dt.ops.layer_norm(c) @ c + ys.sum() + jax.jit(dt.ops.cross_entropy)(x, jnp.arange(3))


PROGRAMS = {"all": program, "loop": differentiable, "gradient": jax.grad(differentiable)}


@pytest.mark.parametrize("fun", PROGRAMS.values(), ids=PROGRAMS)
def test_decompose_goes_through_everything(fun):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    taken = dt.decompose(fun)
    assert primitives(taken, x) <= dt.primitive_set()
    assert not primitives(fun, x) <= dt.primitive_set()
    np.testing.assert_allclose(taken(x), fun(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(taken)(x), fun(x), rtol=1e-5, atol=1e-6)
    kept = primitives(dt.decompose(fun, deny=["softmax"]), x)
    assert {n for n in kept - dt.primitive_set()} <= {"softmax", "softmax_tangent"}
    assert "softmax" in kept
    only = primitives(dt.decompose(fun, allow="softmax"), x)
    assert "softmax" not in only and "gelu" in only | {"gelu"}
    assert "softmax" in primitives(dt.decompose(fun, allow="softmax", deny={"softmax"}), x)


def test_decompose_of_forward_mode():
    x = jnp.arange(4.0)
    fun = lambda x: jax.jvp(dt.ops.softmax, (x,), (x * x,))[1]  # noqa: E731
    assert "softmax_tangent" in primitives(fun, x)
    assert primitives(dt.decompose(fun), x) <= dt.primitive_set()
    np.testing.assert_allclose(dt.decompose(fun)(x), fun(x), rtol=1e-6)


def test_names_are_checked():
    with pytest.raises(dt.OpError, match="no op `sofmax`"):
        dt.decompose(dt.ops.softmax, deny=["sofmax"])
    with pytest.raises(TypeError, match="str, list, tuple or set"):
        dt.decompose(dt.ops.softmax, allow=3)
    with pytest.raises(TypeError, match="names are strings"):
        dt.decompose(dt.ops.softmax, allow=[3])
    for name in ("softmax", "layer_norm"):
        assert dt.has_decomposition(name)
    assert not dt.has_decomposition("exp") and not dt.has_decomposition("dot_general")
    with pytest.raises(dt.OpError, match="neither an op nor a primitive"):
        dt.has_decomposition("sofmax")
    with pytest.raises(dt.OpError, match="has no decomposition"):
        dt.decomposition("exp")
    x = jnp.arange(4.0)
    np.testing.assert_allclose(dt.decomposition("softmax")(x, axis=0), dt.ops.softmax(x), rtol=1e-6)
    assert [dt.vjp_kind(n) for n in ("softmax", "lerp", "add")] == ["custom", "automatic", "plain"]
    with dt.custom_vjps(deny="softmax"):
        assert dt.vjp_kind("softmax") == "automatic"


def test_contexts_and_environment(monkeypatch):
    x = jnp.arange(4.0)
    both = lambda x: dt.ops.softmax(dt.ops.silu(x))  # noqa: E731
    names = lambda: primitives(dt.decompose(both), x) & {"softmax", "silu"}  # noqa: E731
    assert names() == set()
    with dt.decomposing(deny="softmax"):
        assert names() == {"softmax"}
        with dt.decomposing(allow=["softmax", "silu"]):  # a denial wins, outside ones too
            assert names() == {"softmax"}
    monkeypatch.setenv("DTORCHJAX_DECOMPOSE", "silu")
    assert names() == {"softmax"}
    monkeypatch.setenv("DTORCHJAX_DECOMPOSE", "none")
    assert names() == {"softmax", "silu"}
    monkeypatch.setenv("DTORCHJAX_DECOMPOSE", "all")
    monkeypatch.setenv("DTORCHJAX_DECOMPOSE_DENY", "silu;gelu")
    assert names() == {"silu"}
    monkeypatch.setenv("DTORCHJAX_VJP_DENY", "softmax")
    assert "softmax_tangent" not in primitives(lambda x: jax.jvp(both, (x,), (x,)), x)
    monkeypatch.delenv("DTORCHJAX_VJP_DENY")
    assert "softmax_tangent" in primitives(lambda x: jax.jvp(both, (x,), (x,)), x)


def test_a_denied_rule_is_not_in_jits_cache():
    fun = jax.jit(jax.grad(lambda x: (dt.ops.clip(x, 0.0) ** 2).sum() + dt.ops.relu6(x).sum()))
    x = jnp.array([0.0, 6.0])
    assert fun(x).tolist() == [0, 12]
    with dt.custom_vjps(deny=["relu6"]):
        assert fun(x).tolist() == [0.5, 12.5]  # JAX shares the gradient of equal elements
    assert fun(x).tolist() == [0, 12]


@pytest.mark.parametrize("block", today(range(4), 4))
def test_every_decomposition_and_rule_is_in_the_primitive_set(block):
    from op_samples import SAMPLES
    from test_ops import Call

    for s in SAMPLES[block::4]:
        call = Call(s, "float32")
        left = primitives(dt.decompose(call), *call.xs) - dt.primitive_set()
        assert not left, (s.op, left)
        if call.differentiable:
            left = primitives(dt.decompose(call.gradient), *call.xs) - dt.primitive_set()
            assert not left, (f"gradient of {s.op}", left)


# ---- logs ----------------------------------------------------------------------------------------


def test_logs(caplog):
    x = jnp.arange(5.0, dtype=jnp.float32)
    with caplog.at_level(logging.DEBUG, "dtorchjax"):
        dt.decompose(lambda x: dt.ops.silu(dt.ops.softsign(x)), deny="silu")(x)
        jax.grad(lambda x: dt.ops.softsign(x).sum())(x)
        with dt.custom_vjps(deny="softsign"):
            jax.grad(lambda x: dt.ops.softsign(x).sum())(x)
    text = "\n".join(f"{r.name}: {r.getMessage()}" for r in caplog.records)
    for line in (
        "dtorchjax.decompose: softsign(f32[5]) -> f32[5]: ",
        "dtorchjax.decompose: softsign: taken",
        "dtorchjax.decompose: silu: denied",
        "dtorchjax.decompose: before: 1 softsign, 1 silu",
        "dtorchjax.vjp: softsign: its rule reads x f32[5]; gradients ",
        "dtorchjax.vjp: softsign: derivative of its decomposition (its rule is denied)",
    ):
        assert line in text, (line, text)


def test_log_switch(monkeypatch):
    from dtorchjax.switches import set_loggers

    logger = logging.getLogger("dtorchjax.vjp")
    level, handlers = logger.level, list(logger.handlers)
    try:
        set_loggers("vjp:info")
        assert logger.level == logging.INFO and logger.handlers
        with pytest.raises(dt.OpError, match="is not one of decompose, vjp"):
            set_loggers("vpj:debug")
        with pytest.raises(dt.OpError, match="with a level"):
            set_loggers("vjp:loud")
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_census_counts_inner_programs():
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(jnp.sin(x)))(1.0).jaxpr
    assert census(jaxpr) == "2 sin, 1 jit"


def test_ops_are_ops():
    assert all(isinstance(OPS[n], Op) == dt.has_decomposition(n) for n in OPS)
    assert repr(dt.ops.softmax) == "<op softmax>" and repr(dt.ops.add) == "<op add, JAX's own>"


# ---- the command line and the page ---------------------------------------------------------------


def test_decompose_command(capsys):
    from dtorchjax.cli import main

    assert main(["decompose", "softmax", "--shapes", "bf16[8,4,6]", "--static", "axis=1"]) == 0
    text = capsys.readouterr().out
    for part in (
        "softmax: exp(x)",
        "f32[8,6] = reduce_max",
        "VJP: custom",
        "saves out",
        "S2 -> S2",
    ):
        assert part in text, part
    assert main(["decompose", "lerp", "--shapes", *["f32[4]"] * 3]) == 0
    assert "VJP: automatic" in capsys.readouterr().out
    assert main(["decompose", "list"]) == 0
    assert "custom: amax amin batch_norm" in capsys.readouterr().out
    for wrong, says in (
        (["sofmax"], "there is no op 'sofmax'"),
        (["linear"], "needs the operand `weight`"),
        (["softmax", "--shapes", "f32"], "write an array as f32[8,128]"),
        (["softmax", "--static", "axis"], "write name=value"),
        (["softmax", "--static", "axis=7"], "axis 7 is out of bounds"),
    ):
        assert main(["decompose", *wrong]) == 2
        assert says in capsys.readouterr().err


def test_the_page_has_every_operator():
    """After a change: `make operators`."""
    page = (Path(dt.__file__).parent.parent / "primitives" / "README.md").read_text("utf-8")
    sections = {line[3:] for line in page.splitlines() if line.startswith("## ")}
    assert sections == {n for n, o in OPS.items() if isinstance(o, Op) and n in dt.ops.__all__}


def test_results_are_checked_against_the_operators_own(fresh):
    wide = [False]

    @fresh
    def fickle(x):
        return jnp.stack([x, x]) if wide[0] else x

    x = jnp.ones(3)
    jaxpr = jax.make_jaxpr(fickle)(x)
    wide[0] = True
    with pytest.raises(dt.OpError, match=r"`fickle`: result 0 is f32\[3\], .* f32\[2,3\]"):
        decomposed(jaxpr, Choice())
