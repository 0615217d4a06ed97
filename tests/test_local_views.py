"""Cases on local views that users of other systems reported, with the right answers."""

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from test_dfunction import all_close, close, table

import dtorchjax as dt
from dtorchjax.parallel import column_parallel_linear, row_parallel_linear

RNG = np.random.default_rng(7)
X = RNG.normal(size=(8, 16)).astype("float32")
W = RNG.normal(size=(16, 8)).astype("float32")
B = RNG.normal(size=(8,)).astype("float32")


@pytest.fixture(scope="module")
def mesh2():
    return dt.init_device_mesh((2,), ("x",))


def placed(x, mesh, where):
    return dt.distribute_tensor(x, mesh, where)


# ---- from tensor-parallel eager frameworks -------------------------------------------------------


def test_a_result_of_five_rows_has_five_rows_everywhere(mesh2):
    @dt.dfunction(rule="a b -> a b")
    def double(x):
        return 2 * x

    five = X[:5]
    out = dt.jit(double, mesh=mesh2)(five)
    assert out.shape == (5, 16)
    close(out, 2 * five)
    uneven = placed(five, mesh2, "S0")
    assert uneven.shape == (5, 16) and uneven.to_local().shape == (2, 3, 16)
    close(dt.jit(double)(uneven), 2 * five)


def test_a_local_sum_has_the_gradient_of_the_sum(mesh2):
    @dt.dfunction(rule="n -> -", linear="each")
    def triple_sum(x):
        return 3 * x.sum()

    x = placed(np.array([1.0, 2.0], "float32"), mesh2, "S0")
    assert triple_sum(x).placements == (dt.Partial(),)
    close(triple_sum(x).reduce_partial(), 9.0)
    close(jax.grad(lambda x: triple_sum(x) * 1.0)(x), [3.0, 3.0])
    close(dt.jit(jax.grad(triple_sum))(x), [3.0, 3.0])


@pytest.mark.parametrize("out", ["row parallel layer", "ordinary operations"])
def test_a_bias_beside_a_partial_sum_is_added_once(mesh24, out):
    x, w, b = placed(X, mesh24, "R,S1"), placed(W, mesh24, "R,S0"), placed(B, mesh24, "R")

    def layer(x, w, b):
        return row_parallel_linear(x, w, b) if out == "row parallel layer" else x @ w + b

    def loss(x, w, b):
        return (jnp.sin(layer(x, w, b)) * X[:, :8]).sum()

    close(dt.jit(layer)(x, w, b), X @ W + B)
    expected = jax.grad(lambda x, w, b: (jnp.sin(x @ w + b) * X[:, :8]).sum(), (0, 1, 2))(X, W, B)
    all_close(dt.jit(jax.grad(loss, (0, 1, 2)))(x, w, b), expected)


def test_one_reduction_for_the_gradient_of_what_experts_share(mesh8):
    @dt.dfunction(rule="e t d!, e d! f! -> e t f!")
    def experts(tokens, weights):
        return jax.nn.relu(jnp.einsum("etd,edf->etf", tokens, weights))

    tokens = placed(RNG.normal(size=(64, 128)).astype("float32"), mesh8, "R")
    weights = placed(RNG.normal(size=(8, 128, 256)).astype("float32"), mesh8, "S0")

    @dt.dfunction(rule="t d, e d f -> e t f")
    def shared(tokens, weights):
        return jax.nn.relu(jnp.einsum("td,edf->etf", tokens, weights))

    plan = dt.explain(jax.grad(lambda t, w: (shared(t, w) ** 2).sum()), tokens, weights)
    assert len(plan.collectives) == 1
    expected = jax.grad(
        lambda t: (jax.nn.relu(jnp.einsum("td,edf->etf", t, weights.full_tensor())) ** 2).sum()
    )(tokens.full_tensor())
    close(dt.jit(jax.grad(lambda t, w: (shared(t, w) ** 2).sum()))(tokens, weights), expected)


# ---- from JAX programs ---------------------------------------------------------------------------


def test_gradient_of_a_psum(mesh2):
    @dt.dfunction(rule="-, n -> -", extra=("n: R, S0 -> R",))
    def loss(w, d):
        return dt.psum(((w**2 + 1) * d).sum(), dt.axes_of("n"))

    w, d = placed(np.float32(1), mesh2, "R"), placed(np.array([0, 1], "float32"), mesh2, "S0")
    for gradient in (jax.grad(loss), dt.jit(jax.grad(loss))):
        close(gradient(w, d), 2.0)
    dt.check_dfunction(loss, jnp.float32(1), jnp.array([0.0, 1.0]))


def test_per_sample_gradients_of_what_is_closed_over(mesh2):
    samples = np.array([[0, 1], [1, 1], [1, 0], [0, 0]], "float32")
    w = np.array([1, 1], "float32")

    def gradients(w, samples):
        return jax.vmap(jax.grad(lambda w, s: (w * s).sum()), (None, 0))(w, samples)

    @dt.dfunction(rule="k, n k -> n k")
    def per_sample(w, samples):
        return gradients(w, samples)

    expected = gradients(w, samples)
    x, y = placed(w, mesh2, "R"), placed(samples, mesh2, "S0")
    close(per_sample(x, y), expected)
    close(dt.jit(per_sample)(x, y), expected)

    def closing(w, samples):
        @dt.dfunction(rule="n k -> n k")
        def inner(samples):
            return gradients(w, samples)

        return inner(samples)

    with pytest.raises(ValueError, match="closes over 'w'"):
        dt.jit(closing)(x, y)


def test_gradient_through_a_branch_that_devices_take_differently(mesh2):
    @dt.dfunction(rule=table("R, S0 -> P"))
    def two_or_three(x, d):
        del d
        return lax.cond(dt.axis_index("x") == 0, lambda x: 2 * x, lambda x: 3 * x, x)

    x, d = placed(np.float32(1), mesh2, "R"), placed(np.zeros(2, "float32"), mesh2, "S0")
    close(two_or_three(x, d).reduce_partial(), 5.0)
    close(jax.grad(lambda x: two_or_three(x, d) * 1.0)(x), 5.0)


def test_random_numbers_in_a_body(mesh8):
    @dt.dfunction(rule="r c!, - -> r c!")
    def noise(x, key):
        return x + jax.random.normal(key, x.shape)

    @dt.dfunction(rule="r c!, - -> r c!")
    def own_noise(x, key):
        return x + jax.random.normal(dt.local_key(key), x.shape)

    zeros, key = placed(np.zeros((8, 16), "float32"), mesh8, "S0"), jax.random.key(0)
    same = np.asarray(noise(zeros, key))
    assert all((row == same[0]).all() for row in same)  # one key, one stream per device
    with pytest.raises(dt.CheckError, match="noise"):
        dt.check_dfunction(noise, jnp.zeros((8, 16)), key)
    different = np.asarray(own_noise(zeros, key))
    assert len({row.tobytes() for row in different}) == 8
    # outside of the body, random numbers do not depend on the mesh
    dropout = dt.jit(lambda x, key: x + jax.random.bernoulli(key, 0.5, x.shape))
    np.testing.assert_array_equal(
        dropout(zeros, key), np.asarray(jax.random.bernoulli(key, 0.5, (8, 16)), "float32")
    )


def test_a_scan_carry_becomes_what_the_body_makes(mesh8):
    @dt.dfunction(rule="n -> -", linear="each")
    def total(x):
        return x.sum()

    def run(xs):
        return lax.scan(lambda c, x: (c + total(x), c), jnp.float32(0), xs)

    xs = placed(X, mesh8, "S1")
    all_close(dt.jit(run)(xs), lax.scan(lambda c, x: (c + x.sum(), c), jnp.float32(0), X))
    gradient = jax.grad(lambda xs: run(xs)[0] + run(xs)[1].sum())
    close(dt.jit(gradient)(xs), np.repeat(np.arange(8.0, 0, -1), 16).reshape(8, 16))


# ---- layout rules of another framework -----------------------------------------------------------


def test_partial_sum_plus_whole(mesh24):
    """C13: an error in strict mode, the right value in auto mode."""
    x = placed(X, mesh24, "R").redistribute("P,R")
    with pytest.raises(dt.PlacementMismatchError):
        x + placed(X, mesh24, "R")
    close(dt.jit(lambda a, b: a + b)(x, placed(X, mesh24, "R")), 2 * X)


LAYERS = {  # x, w, b -> result, or what the error says
    "C39": ("S0,R", "R,R", None, "S0,R"),
    "C39 with bias": ("S0,R", "R,S1", "R,S0", "S0,S1"),
    "C41": ("S0,R", "R,S0", None, "S0,P"),  # x is sliced where it lies: no communication
    "C42": ("S0,S1", "R,S0", "S0,R", None),
    "C42 whole bias": ("S0,S1", "R,S0", "R,R", "S0,P"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_linear_layouts(mesh24, case):
    px, pw, pb, expected = LAYERS[case]
    args = [placed(X, mesh24, px), placed(W, mesh24, pw)]
    args += [placed(B, mesh24, pb)] if pb else []
    layer = row_parallel_linear if "S0" in pw else column_parallel_linear
    reference = X @ W + (B if pb else 0)
    close(dt.jit(layer)(*args), reference)
    if expected is None:
        with pytest.raises(dt.PlacementMismatchError):
            layer(*args)
    else:
        out = layer(*args)
        assert ",".join(map(str, out.placements)) == expected
        close(out, reference)
    if "C42" in case:  # without the layer: a partial sum plus a bias
        with pytest.raises(dt.PlacementMismatchError):
            args[0] @ args[1] + args[2]
        close(dt.jit(lambda x, w, b: x @ w + b)(*args), reference)


def test_linear_errors(mesh24, mesh8):
    x = placed(X, mesh24, "S0,R")
    with pytest.raises(ValueError, match="has 3 dims"):  # C43
        column_parallel_linear(x, placed(np.ones((2, 16, 8), "float32"), mesh24, "R"))
    with pytest.raises(ValueError, match="two meshes"):
        column_parallel_linear(x, placed(W, mesh8, "R"))


def test_a_chain_carries_the_partial_sum(mesh2):
    """C45: x S1 @ A S0 @ B R stays partial; reduced, it is the dense product."""
    x = placed(X[:4], mesh2, "S1")
    a, b = placed(W, mesh2, "S0"), placed(W.T.copy(), mesh2, "R")

    @dt.dfunction(rule="b i, i o -> b o", linear="each")
    def product(x, w):
        return x @ w

    out = product(product(x, a), b)
    assert out.placements == (dt.Partial(),)
    close(out.reduce_partial(), X[:4] @ W @ W.T)


def test_operands_and_results_as_the_table_says(mesh24, monkeypatch):
    """C69 to C75."""
    x = placed(X, mesh24, "S0,R")
    two = table("S0, S0 -> S0").finish()

    @dt.dfunction(rule=two)
    def one_operand(x):
        return x

    with pytest.raises(ValueError, match=r"2 operands in the row"):
        one_operand(x)

    @dt.dfunction(rule=table("S0, - -> S0").finish())
    def no_second(x, y=None):
        return x if y is None else x + y

    close(no_second(x), X)
    with pytest.raises(ValueError):  # a DTensor where the table has none
        no_second(x, x)

    @dt.dfunction(rule=table("S0, S0 -> S0").finish())
    def both(x, y):
        return x if y is None else x + y

    with pytest.raises(ValueError):  # nothing where the table wants an operand
        both(x, None)

    @dt.dfunction(rule=table("S0 -> S0, S0").finish())
    def one_result(x):
        return x

    with pytest.raises(ValueError, match="returns 1 arrays, its rule says 2"):
        one_result(x)

    @dt.dfunction(rule=table("S0 -> S0").finish())
    def and_text(x):
        return x, "text", 3

    assert and_text(x)[1:] == ("text", 3)
    close(and_text(x)[0], X)
    monkeypatch.setattr(dt.DTensor, "redistribute", None)
    with pytest.raises(dt.PlacementMismatchError):  # never redistributed by itself
        both(x, placed(X, mesh24, "S1,R"))
