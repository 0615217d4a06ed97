"""dfunctions as users write them: plain arrays, DTensors, dt.jit, and JAX's transformations."""

import itertools

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from rotation import today

import dtorchjax as dt
from dtorchjax.notation import parse_row

X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
W = np.random.default_rng(1).normal(size=(16, 8)).astype("float32")
RAMP = np.arange(16, dtype="float32")
B = np.random.default_rng(2).normal(size=(8,)).astype("float32")


def close(found, expected, tolerance=1e-5):
    if isinstance(found, dt.DTensor):
        found = found.full_tensor()
    scale = max(1.0, float(np.max(np.abs(expected), initial=0)))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=tolerance * scale)


def all_close(found, expected, tolerance=1e-5):
    found = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, dt.DTensor))
    expected = jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        close(f, e, tolerance)


def table(*rows):
    return dt.PlacementSignature(tuple(map(parse_row, rows)))


def whole(x):
    return x.reduce_partial() if isinstance(x, dt.DTensor) else x


# ---- the two examples ----------------------------------------------------------------------------


class AddRule(dt.LayoutRule):
    def __init__(self):
        super().__init__("MyAdd")

    def infer_layout(self, x, y):
        if x != y:
            raise ValueError("operands of one layout, please")
        return x


AddRule()


class MyAdd(dt.DFunction):
    op_name = "MyAdd"

    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x + y

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        assert x.shape == y.shape == grad.shape
        return grad, grad


@pytest.mark.smoke
def test_my_add(mesh24):
    x, y = (dt.distribute_tensor(a, mesh24, ["S0", "R"]) for a in (X, X[::-1].copy()))
    z = MyAdd.apply(x, y)
    assert z.placements == (dt.Shard(0), dt.Replicate())
    close(z, X + X[::-1])
    close(MyAdd.apply(X, 2 * X), 3 * X)

    def loss(a, b):
        return (MyAdd.apply(a, b) ** 2).sum()

    for gradient in jax.grad(loss, (0, 1))(x, y):
        assert gradient.placements == (dt.Shard(0), dt.Replicate())
        close(gradient, 2 * (X + X[::-1]))
    all_close(dt.jit(jax.grad(loss, (0, 1)))(x, y), [2 * (X + X[::-1])] * 2)
    all_close(jax.grad(loss, (0, 1))(X, X), [4 * X] * 2)
    assert "MyAdd" in dt.LayoutRule.registered()


class LinearRule(dt.LayoutRule):
    """`x @ w + b`: where the sum is sharded, every device adds its share of the bias."""

    op_name = "Linear"

    def infer_layout(self, x, w, b=None):
        found = []
        for axis, (p, q) in enumerate(zip(x.placements, w.placements, strict=True)):
            bias = "R" if b is None else str(b.placements[axis])
            here = {
                ("R", "R", "R"): "R", ("S0", "R", "R"): "S0", ("S1", "S0", "R"): "P",
                ("R", "S1", "R" if b is None else "S0"): "S1",
            }  # fmt: skip
            found.append(here[str(p), str(q), bias])
        return dt.Layout(x.mesh, tuple(found))

    def get_expand_impl(self, fun, out_layouts, in_layouts):
        x, _, b = in_layouts
        shares = 1
        for p, n in zip(x.placements, x.sizes, strict=True):
            shares *= n if p == dt.Shard(1) else 1
        if b is None or shares == 1:
            return None

        return lambda x, w, b: fun(x, w, b / shares)


LinearRule()


@dt.dfunction(op_name="Linear")
def linear(x, w, b=None):
    return x @ w if b is None else x @ w + b


linear.defvjp(
    lambda x, w, b=None: (linear.fun(x, w, b), (x, w)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g, g.sum(0)),
)

LINEAR = {
    "column": ((1, 8), ["R", "R"], ["R", "S1"], None, ["R", "S1"]),
    "data and column": ((2, 4), ["S0", "R"], ["R", "S1"], None, ["S0", "S1"]),
    "row with bias": ((2, 4), ["S0", "S1"], ["R", "S0"], ["R", "R"], ["S0", "P"]),
    "row": ((2, 4), ["S0", "S1"], ["R", "S0"], None, ["S0", "P"]),
}


@pytest.mark.parametrize("case", LINEAR)
def test_linear_function(case):
    shape, px, pw, pb, expected = LINEAR[case]
    mesh = dt.init_device_mesh(shape, ("dp", "tp"))
    arrays = [X, W] + ([B] if pb else [])
    places = [px, pw] + ([pb] if pb else [])
    numbers = tuple(range(len(arrays)))

    def loss(*args):
        return (jnp.sin(whole(linear(*args)).astype("float32")) ** 2).mean()

    def eager_loss(*args):
        return (whole(linear(*args)) ** 2).mean()

    def dense(*args):
        return linear.fun(*args)

    placed = [dt.distribute_tensor(a, mesh, p) for a, p in zip(arrays, places, strict=True)]
    out = linear(*placed)
    assert [str(p) for p in out.placements] == expected
    close(out, dense(*arrays))
    if pb:  # every device adds b / 4
        zero = dt.distribute_tensor(np.zeros_like(X), mesh, px)
        terms = np.asarray(linear(zero, *placed[1:]).to_local())
        assert terms.shape == (2, 4, 4, 8)
        np.testing.assert_array_equal(terms, np.broadcast_to(B / 4, terms.shape))

    def sine(*args):
        return (jnp.sin(dense(*args)) ** 2).mean()

    def square(*args):
        return (dense(*args) ** 2).mean()

    # a backward pass without a bias returns one gradient less
    if not pb:
        return check_without_bias(mesh, placed, arrays, square, sine)
    reference = jax.value_and_grad(square, numbers)(*arrays)
    found = jax.value_and_grad(eager_loss, numbers)(*placed)
    all_close(found, reference)
    for gradient, x in zip(found[1], placed, strict=True):
        assert gradient.layout == x.layout
    reference = jax.value_and_grad(sine, numbers)(*arrays)
    all_close(jax.value_and_grad(loss, numbers)(*arrays), reference)
    all_close(dt.jit(jax.value_and_grad(loss, numbers))(*placed), reference)

    @dt.jit
    def train(weights, x):
        value, gradients = jax.value_and_grad(lambda ws: loss(x, *ws))(weights)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, weights, gradients)

    value, weights = train(placed[1:], placed[0])
    close(value, reference[0])
    all_close(weights, [w - 0.1 * g for w, g in zip(arrays[1:], reference[1][1:], strict=True)])


@dt.dfunction(op_name="Linear")
def linear_without_bias(x, w):
    return x @ w


linear_without_bias.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)
)


class PlainLinearRule(LinearRule):
    op_name = "PlainLinear"

    def infer_layout(self, x, w):
        return super().infer_layout(x, w)


PlainLinearRule.get_expand_impl = dt.LayoutRule.get_expand_impl  # type: ignore[method-assign]
PlainLinearRule()
linear_without_bias.op_name = "PlainLinear"


def check_without_bias(mesh, placed, arrays, square, sine):
    def eager_loss(x, w):
        return (whole(linear_without_bias(x, w)) ** 2).mean()

    def loss(x, w):
        return (jnp.sin(linear_without_bias(x, w)) ** 2).mean()

    found = jax.value_and_grad(eager_loss, (0, 1))(*placed)
    all_close(found, jax.value_and_grad(square, (0, 1))(*arrays))
    for gradient, x in zip(found[1], placed, strict=True):
        assert gradient.layout == x.layout
    reference = jax.value_and_grad(sine, (0, 1))(*arrays)
    all_close(jax.value_and_grad(loss, (0, 1))(*arrays), reference)
    all_close(dt.jit(jax.value_and_grad(loss, (0, 1)))(*placed), reference)


class ScaledLinear(LinearRule):
    """A rule that sorts the arguments itself; the function is called with arrays, then statics."""

    op_name = "ScaledLinear"

    def preprocess(self, args, kwargs):
        x, factor, w = args
        return (x, w), {"factor": factor, **kwargs}

    def infer_layout(self, x, w, factor):
        assert isinstance(factor, float)
        return super().infer_layout(x, w)

    def get_expand_impl(self, fun, out_layouts, in_layouts, factor):
        return None


ScaledLinear()


@dt.dfunction(op_name="ScaledLinear")
def scaled_linear(x, w, factor):
    return factor * (x @ w)


scaled_linear.defvjp(
    lambda x, w, factor: (factor * (x @ w), (x, w, factor)),
    lambda kept, g: (kept[2] * g @ kept[1].T, kept[2] * kept[0].T @ g),
)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_rule_may_sort_the_arguments(mesh24, factor):
    x, w = dt.distribute_tensor(X, mesh24, "S0,S1"), dt.distribute_tensor(W, mesh24, "R,S0")
    close(scaled_linear(x, factor, w).reduce_partial(), factor * X @ W)
    gradients = jax.grad(lambda x, w: (scaled_linear(x, factor, w) ** 2).sum(), (0, 1))
    expected = jax.grad(lambda x, w: ((factor * x @ w) ** 2).sum(), (0, 1))(X, W)
    all_close(dt.jit(gradients)(x, w), expected)
    all_close(gradients(X, W), expected)


# ---- errors and arguments ------------------------------------------------------------------------


def test_errors_name_what_is_wrong(mesh24, mesh8):
    x = dt.distribute_tensor(X, mesh24, "S0,R")

    @dt.dfunction
    def no_rule(a):
        return a

    with pytest.raises(ValueError, match=r"no_rule.*has no rule"):
        no_rule(x)
    with pytest.raises(ValueError, match=r"no_rule.*has no rule"):
        dt.jit(no_rule)(x)
    close(no_rule(X), X)

    @dt.dfunction(op_name="nobody")
    def unknown(a):
        return a

    with pytest.raises(ValueError, match=r"'nobody'; registered are: .*MyAdd"):
        unknown(x)

    @dt.dfunction(rule="a b -> a b")
    def padded(a):
        return jnp.concatenate([a, a])[:8]

    with pytest.raises(ValueError, match=r"padded.*\(8, 16\).*\(4, 16\)"):
        padded(x)
    with pytest.raises(ValueError, match="two meshes"):
        MyAdd.apply(x, dt.distribute_tensor(X, mesh8, "S0"))
    with pytest.raises(ValueError, match="MyAdd"):
        AddRule()
    with pytest.raises(dt.PlacementMismatchError, match="`same` cannot combine"):
        columns = dt.distribute_tensor(X, mesh24, "S1,R")
        same(x, columns)

    @dt.dfunction(rule="a b -> a")
    def too_many_dims(a):
        return a

    with pytest.raises(ValueError, match=r"returns arrays of \[2\] dims.*says \[1\]"):
        dt.jit(too_many_dims)(x)

    @dt.dfunction(rule="a b -> a b")
    def of_jax(a):
        return lax.psum(a, "tp")

    with pytest.raises(ValueError, match=r"of_jax.*dt\.psum"):
        of_jax(x)
    with pytest.raises(TypeError, match="hashable"):
        scaled(x, {2.0})
    with pytest.raises(ValueError, match=r"2 operands in the rule.*3 given"):
        dt.jit(lambda a: three(a, a, a))(x)


@dt.dfunction(rule="a b, a b -> a b")
def same(x, y):
    return x * y


@dt.dfunction(rule="a b, a b -> a b")
def three(x, y, z):
    return x + y + z


@dt.dfunction(rule="a b -> a b")
def scaled(x, factor=1.0, *, name="scaled"):
    assert not isinstance(factor, jax.Array) and isinstance(name, str)
    return x * factor


scaled.defvjp(
    lambda x, factor, name: (x * factor, {"factor": factor, "name": name}),
    lambda kept, g: (g * kept["factor"],),
)


@pytest.mark.smoke
def test_statics_reach_the_function_and_make_new_results(mesh24):
    x = dt.distribute_tensor(X, mesh24, "S0,S1")
    run = dt.jit(scaled, static_argnums=1, static_argnames="name")
    for factor in (2.0, 3.0, 2.0, 2, True):
        close(scaled(X, factor, name="plain"), X * factor)
        close(scaled(x, factor), X * factor)
        close(scaled(x=x, factor=factor), X * factor)
        close(run(x, factor, name="b"), X * factor)

        def loss(a, factor=factor):
            return (scaled(a, factor, name="c") ** 2).sum()

        close(jax.grad(loss)(X), 2 * factor**2 * X)
        close(jax.grad(loss)(x), 2 * factor**2 * X)
        close(dt.jit(jax.grad(loss))(x), 2 * factor**2 * X)


@dt.dfunction(rule="a b, a b, [a], a -> a b, a, -")
def tree(first, second, offset=None, labels=None, *, keep="all"):
    out = first["x"] * second + (0 if offset is None else offset[:, None])
    total = dt.psum(out.astype("float32").sum(), (*dt.axes_of("a"), *dt.axes_of("b")))
    rows = dt.psum(out.sum(1), dt.axes_of("b"))
    assert labels is not None
    return {"out": out, "rows": (rows * labels).astype(second.dtype), "total": total, "kept": keep}


@pytest.mark.parametrize("offset", [True, False])
def test_trees_none_statics_integers_and_dtypes(mesh24, offset):
    labels = np.arange(8, dtype="int32")
    second = X.astype("bfloat16")
    plain_offset = np.arange(8, dtype="float32") if offset else None

    def run(fun, x, y, labels):
        return fun({"x": x}, y, plain_offset, labels, keep="some")

    expected = run(tree, X, second, labels)
    assert expected["kept"] == "some"
    place = lambda x, p: dt.distribute_tensor(x, mesh24, p)  # noqa: E731
    placed = place(X, "R,R"), place(second, "R,R"), place(labels, "R,R")
    results = run(tree, *placed)
    assert results["kept"] == "some" and results["rows"].dtype == jnp.bfloat16
    for name in ("out", "total"):
        close(results[name], expected[name], 1e-2)

    def loss(x, y):
        found = run(tree, x, y, labels)
        return (found["out"] ** 2).sum() + found["rows"].astype("float32").sum()

    reference = jax.grad(loss, (0, 1))(X, second)
    found = dt.jit(jax.grad(loss, (0, 1)))(place(X, "R,R"), place(second, "R,R"))
    assert found[1].dtype == jnp.bfloat16
    all_close(found, [np.asarray(g, "float32") for g in reference], 2e-2)


def test_an_array_as_a_default(mesh24):
    @dt.dfunction(rule="a b, b -> a b")
    def with_default(x, scale=RAMP):
        return x * scale

    x = dt.distribute_tensor(X, mesh24, "S0,S1")
    for run in (with_default, with_default, dt.jit(with_default)):
        close(run(x), X * RAMP)


def test_needs_input_grad():
    asked = []

    class Product(dt.DFunction):
        rule = "a, a -> a"

        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        def backward(ctx, g):
            asked.append(ctx.needs_input_grad)
            x, y = ctx.saved_tensors
            return g * y, g * x if ctx.needs_input_grad[1] else None

    x = jnp.arange(4.0)
    close(jax.grad(lambda a: Product.apply(a, x).sum())(2 * x), x)
    assert asked[-1] == (True, False)
    mesh = dt.init_device_mesh((4,), ("tp",))
    close(dt.jit(jax.grad(lambda a: Product.apply(a, x).sum()), mesh=mesh)(2 * x), x)
    assert asked[-1] == (True, False)
    all_close(jax.grad(lambda a, b: Product.apply(a, b).sum(), (0, 1))(x, 2 * x), (2 * x, x))
    assert asked[-1] == (True, True)


# ---- transformations -----------------------------------------------------------------------------


@dt.dfunction(rule="... i, i o -> ... o", extra=("i: S-1, S0 -> R",))
def dense(x, w):
    return jnp.tanh(dt.psum(x @ w, dt.axes_of("i")))


@dt.dfunction(rule="... i, i o -> ... o", extra=("i: S-1, S0 -> R",))
def by_hand(x, w):
    return jnp.tanh(dt.psum(x @ w, dt.axes_of("i")))


def _by_hand_backward(kept, g):
    x, w, y = kept
    d = g * (1 - y**2)
    return d @ w.T, jnp.einsum("...i,...o->io", x, d)


by_hand.defvjp(lambda x, w: (y := by_hand.fun(x, w), (x, w, y)), _by_hand_backward)


def reference(x, w):
    return jnp.tanh(x @ w)


def plain(f):
    return lambda x, w: (f(x, w) ** 2).sum()


def in_jit(f):
    return jax.jit(plain(f))


def vmapped(f):
    return lambda x, w: (jax.vmap(lambda r: f(jnp.stack([r, 2 * r]), w))(x) ** 2).sum()


def scanned(f):
    square = jnp.asarray(W @ X[:, :16] / 20)

    def run(x, w):
        def step(carry, _):
            new = f(carry, square) + 0.1 * f(carry, w @ jnp.ones((8, 16)) / 16)
            return new, new.sum()

        last, sums = lax.scan(step, x, None, length=3)
        return (last**2).sum() + sums.sum()

    return run


def rematerialised(f):
    return lambda x, w: (jax.checkpoint(f)(jax.checkpoint(f)(x, w) @ w.T, w) ** 2).sum()


def scanned_and_rematerialised(f):
    return scanned(jax.checkpoint(f))


def in_a_branch(f):
    def run(x, w):
        y = lax.cond(x[0, 0] > 5, lambda: f(x, w), lambda: x @ w)
        return (lax.cond(x[0, 0] > -5, lambda: f(x, w), lambda: x @ w) * y).sum()

    return run


WRAPS = [
    plain, in_jit, vmapped, scanned, rematerialised, scanned_and_rematerialised, in_a_branch,
]  # fmt: skip
BODIES = {"derived": dense, "by hand": by_hand}
PLACES = {"rows": ("S0,R", "R,S1"), "inner": ("S0,S1", "R,S0"), "whole": ("R,R", "R,R")}


TRANSFORMED = {
    f"{wrap.__name__}, {body}, {where}": (wrap, fun, where)
    for wrap, (body, fun), where in itertools.product(WRAPS, BODIES.items(), PLACES)
}


@pytest.mark.parametrize("case", today(TRANSFORMED, 3))
def test_transformations(mesh24, case):
    wrap, fun, where = TRANSFORMED[case]
    x, w = (dt.distribute_tensor(a, mesh24, p) for a, p in zip((X, W), PLACES[where], strict=True))
    program = wrap(fun)
    expected = jax.value_and_grad(wrap(reference), (0, 1))(X, W)
    all_close(jax.value_and_grad(program, (0, 1))(jnp.asarray(X), jnp.asarray(W)), expected)
    all_close(dt.jit(jax.value_and_grad(program, (0, 1)))(x, w), expected)
    if wrap in (plain, scanned):  # the derivative of a program, from outside
        found = jax.value_and_grad(dt.jit(program), (0, 1))(x, w)
        all_close(found, expected)


MESHES = {
    "two axes on rows": ((2, 4), "S0,S0", "R"),
    "minor axis first": ((2, 4), jax.sharding.PartitionSpec(("tp", "dp")), "R"),
    "both on the sum": ((2, 4), "S1,S1", "S0,S0"),
    "three axes": ((2, 2, 2), "S0,S1,R", "R,S0,S1"),
    "axes of one device": ((1, 8), "R,S1", "R,S0"),
    "one device": ((1, 1), "S0,S1", "R,S0"),
}


@pytest.mark.parametrize("case", MESHES)
def test_meshes_and_axis_orders(case):
    shape, px, pw = MESHES[case]
    mesh = dt.init_device_mesh(shape, ("dp", "tp", "pp")[: len(shape)])
    x, w = dt.distribute_tensor(X, mesh, px), dt.distribute_tensor(W, mesh, pw)
    expected = jax.grad(plain(reference), (0, 1))(X, W)
    for fun in (dense, by_hand):
        if case != "three axes":
            close(fun(x, w), reference(X, W))
        all_close(dt.jit(jax.grad(plain(fun), (0, 1)))(x, w), expected)


STACK = np.random.default_rng(4).normal(size=(4, 8, 16)).astype("float32")
VMAPS = {
    "first dim": lambda f: lambda x, w: jax.vmap(f, (0, None))(x, w),
    "second dim": lambda f: lambda x, w: jax.vmap(f, (1, None), 1)(x, w),
    "both operands": lambda f: lambda x, w: jax.vmap(lambda x, s: f(x, w * s))(x, jnp.arange(4.0)),
    "nested": lambda f: lambda x, w: jax.vmap(jax.vmap(lambda r: f(r[None], w)[0]))(x),
}


@pytest.mark.parametrize("case", VMAPS)
def test_vmaps(mesh24, case):
    program = VMAPS[case]
    x, w = dt.distribute_tensor(STACK, mesh24, "S0,S2"), dt.distribute_tensor(W, mesh24, "R,S0")
    expected = jax.value_and_grad(plain(program(reference)), (0, 1))(STACK, W)
    for fun in (dense, by_hand):
        all_close(dt.jit(jax.value_and_grad(plain(program(fun)), (0, 1)))(x, w), expected)


@pytest.mark.parametrize("where", today(PLACES, 3))
def test_forward_mode_and_second_derivatives(mesh24, where):
    x, w = (dt.distribute_tensor(a, mesh24, p) for a, p in zip((X, W), PLACES[where], strict=True))
    tangents = X[::-1].copy(), W[::-1].copy()

    def pushed(f):
        return lambda x, w: jax.jvp(f, (x, w), tangents)

    def curvature(f):
        def product(x, w):
            return jax.jvp(jax.grad(plain(f), (0, 1)), (x, w), tangents)[1]

        return product

    def hessian(f):
        return lambda x, w: jax.hessian(lambda s: plain(f)(s * x, w))(jnp.ones(()))

    def twice(f):
        def penalty(x, w):
            return (jax.grad(plain(f))(x, w) ** 2).sum()

        return jax.grad(penalty, (0, 1))

    for transformed in (pushed, curvature, hessian, twice):
        expected = transformed(reference)(jnp.asarray(X), jnp.asarray(W))
        all_close(transformed(dense)(jnp.asarray(X), jnp.asarray(W)), expected, 1e-4)
        all_close(dt.jit(transformed(dense))(x, w), expected, 1e-4)
    for order in (jax.jacrev, jax.jacfwd):
        close(dt.jit(order(lambda r: dense(r, W)))(x), order(lambda r: reference(r, W))(X))
    per_row = jax.vmap(jax.grad(lambda r: reference(r[None], W).sum()))(X)
    close(dt.jit(jax.vmap(jax.grad(lambda r: dense(r[None], W).sum())))(x), per_row)
    expected = jax.jacrev(lambda r: reference(r, W))(X)
    close(dt.jit(jax.jacrev(lambda r: by_hand(r, W)))(x), expected)
    with pytest.raises((ValueError, TypeError), match=r"forward-mode|custom_vjp"):
        dt.jit(pushed(by_hand))(x, w)


def test_explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    step = dt.jit(
        jax.value_and_grad(plain(dense), (0, 1)), mesh=mesh,
        in_placements=(["S0", "S1"], ["R", "S0"]),
    )  # fmt: skip
    all_close(step(X, W), jax.value_and_grad(plain(reference), (0, 1))(X, W))


def test_defjvp(mesh24):
    @dt.dfunction(rule="a b -> a b")
    def softplus(x, beta=1.0):
        return jnp.logaddexp(beta * x, 0) / beta

    calls = []

    @softplus.defjvp
    def _(primals, tangents, beta):
        calls.append(beta)
        (x,), (t,) = primals, tangents
        return softplus.fun(x, beta), t * jax.nn.sigmoid(beta * x)

    x = dt.distribute_tensor(X, mesh24, "S0,S1")
    close(jax.jvp(lambda x: softplus(x, 2.0), (X,), (X,))[1], X * jax.nn.sigmoid(2 * X))
    close(dt.jit(jax.grad(lambda x: softplus(x, 2.0).sum()))(x), jax.nn.sigmoid(2 * X))
    assert set(calls) == {2.0}
    with pytest.raises(ValueError, match="one or the other"):
        softplus.defvjp(lambda x, beta: (x, None), lambda kept, g: (g,))


def test_nested_calls_run_on_local_arrays(mesh24):
    shapes = []

    @dt.dfunction(rule="a b -> a b")
    def inner(x):
        shapes.append(x.shape)
        return 2 * x

    @dt.dfunction(rule="a b -> a b")
    def outer(x):
        return inner(x) + 1

    x = dt.distribute_tensor(X, mesh24, "S0,S1")
    close(outer(x), 2 * X + 1)
    assert shapes[-1] == (4, 4)
    close(dt.jit(jax.grad(lambda x: (outer(x) ** 2).sum()))(x), 4 * (2 * X + 1))


# ---- closed-over values --------------------------------------------------------------------------


def test_closed_over_values(mesh24):
    constant = jnp.asarray(W)

    @dt.dfunction(rule="a i! -> a o!")
    def project(x):
        return x @ constant

    x = dt.distribute_tensor(X, mesh24, "S0,R")
    close(dt.jit(jax.grad(lambda x: (project(x) ** 2).sum()))(x), 2 * X @ W @ W.T)
    placed = dt.distribute_tensor(W, mesh24, "R,S1").to_array()

    @dt.dfunction(rule="a i! -> a o!")
    def with_placed(x):
        return x @ placed

    close(dt.jit(with_placed)(x), X @ W)

    distributed = dt.distribute_tensor(W, mesh24, "R")

    @dt.dfunction(rule="a i! -> a o!")
    def with_dtensor(x):
        return x @ distributed

    with pytest.raises(ValueError, match="pass it as an argument"):
        with_dtensor(x)

    def loss(x, weights):
        @dt.dfunction(rule="a i! -> a o!")
        def closing(x):
            return x @ weights

        return closing(x).sum()

    with pytest.raises(ValueError, match="closes over 'weights'"):
        dt.jit(jax.grad(loss, 1))(x, W)
    close(jax.grad(loss, 1)(X, W), jax.grad(lambda w: (X @ w).sum())(W))


# ---- gradients -----------------------------------------------------------------------------------


def test_what_gradients_cost(mesh24):
    """x whole, w sharded on columns: grad_x is one partial sum, reduced once, P while cheap."""

    @dt.dfunction(rule="b i, i o -> b o")
    def column(x, w):
        return x @ w

    column.defvjp(lambda x, w: (x @ w, (x, w)), lambda k, g: (g @ k[1].T, k[0].T @ g))
    x = dt.distribute_tensor(np.ones((256, 512), "float32"), mesh24, "R,R")
    w = dt.distribute_tensor(np.ones((512, 1024), "float32"), mesh24, "R,S1")

    def two(x, w):
        return (column(x, w) + column(x, 2 * w)).sum()

    plan = dt.jit(jax.grad(two)).explain(x, w)
    assert [c.kind for c in plan.collectives] in (["all-reduce"], ["reduce-scatter", "all-gather"])
    close(dt.jit(jax.grad(two))(x, w), np.full((256, 512), 3 * 1024.0))


def test_cotangents_may_be_declared(mesh24):
    def make(**said):
        @dt.dfunction(rule="b i, i o -> b o", **said)
        def column(x, w):
            return x @ w

        def backward(kept, g):
            x, w = kept
            return dt.psum(g @ w.T, dt.axes_of("o")), x.T @ g

        column.defvjp(lambda x, w: (x @ w, (x, w)), backward)
        return column

    right, wrong = make(cotangents={"x": "R"}), make()
    dt.check_dfunction(right, X, W)
    with pytest.raises(dt.CheckError, match=r"gradient of operand 0 \(`x`\)"):
        dt.check_dfunction(wrong, X, W)
    x, w = dt.distribute_tensor(X, mesh24, "R,R"), dt.distribute_tensor(W, mesh24, "R,S1")
    close(jax.grad(lambda x: (right(x, w) ** 2).sum())(x), 2 * X @ W @ W.T)
    with pytest.raises(ValueError, match="cotangents"):
        make(cotangents={"nothing": "R"})


def test_the_plan_is_the_program(mesh24):
    fun = jax.value_and_grad(plain(dense), (0, 1))
    x, w = dt.distribute_tensor(X, mesh24, "S0,S1"), dt.distribute_tensor(W, mesh24, "R,S0")
    big = jax.ShapeDtypeStruct((512, 1024), "float32"), jax.ShapeDtypeStruct((1024, 512), "float32")
    step = dt.jit(fun, mesh=mesh24, in_placements=(["S0", "S1"], ["R", "S0"]))
    plan = step.explain(*big)
    assert any("inside `dense`" in c.why for c in plan.collectives)
    plan.verify(step.lower(*big).compile())
    all_close(step(x, w), jax.value_and_grad(plain(reference), (0, 1))(X, W))


def test_checking(mesh24):
    @dt.dfunction(rule=table("S1, S0 -> R"))
    def forgot(x, w):
        return x @ w

    x, w = dt.distribute_tensor(X, mesh24, "R,S1"), dt.distribute_tensor(W, mesh24, "R,S0")
    forgot(x, w)
    for run in (forgot, dt.jit(lambda x, w: 2 * forgot(x, w))):
        with dt.checking(), pytest.raises(dt.PlacementError, match=r"`forgot`: result 0.*'tp'"):
            run(x, w)
    with dt.checking():
        close(dt.jit(dense)(x, w), reference(X, W))
