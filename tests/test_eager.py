"""Arithmetic on DTensors: values, dtypes and placements of results, errors, derivatives, reuse."""

import threading

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import dtorchjax as dt
from dtorchjax import operators
from dtorchjax.operators import run_eagerly

KEYS = jax.random.split(jax.random.key(0), 4)
X = np.asarray(jax.random.normal(KEYS[0], (8, 8)))
Y = np.asarray(jax.random.normal(KEYS[1], (8, 8)))
N = np.asarray(jax.random.randint(KEYS[2], (8, 8), -9, 9))
M = np.asarray(jax.random.randint(KEYS[3], (8, 8), 1, 5))

# functions of two arrays: of floats, of integers (compared bitwise), of either
FLOATS = {
    "/": lambda x, y: x / y,
    "@": lambda x, y: x @ y,
    "**": lambda x, y: abs(x) ** y,
    "** 2": lambda x, y: x**2 + 2.0**y,
    "numbers": lambda x, y: (1.5 * x - 2) / 3.0 + (1 - y) + 2 / y,
    "numpy": lambda x, y: X @ x + np.float32(2) * y - np.ones(8, "float32"),
    "jax": lambda x, y: jnp.asarray(X) @ x + jnp.float32(2) / y,
    "mean": lambda x, y: x.mean(0),
    "var": lambda x, y: x.var(1, keepdims=True),
    "std": lambda x, y: x.std(),
    "cumsum": lambda x, y: x.cumsum(0),
    "dot": lambda x, y: x.dot(y),
    "round": lambda x, y: x.round(1),
    "imag": lambda x, y: x.imag + x.real,
    "divmod": lambda x, y: divmod(x, abs(y) + 1)[1],
    "at": lambda x, y: x.at[:, 2:4].multiply(3.0).at[0].set(y[0]),
}
INTEGERS = {
    "bits": lambda x, y: (x & y) | (x ^ 3) | ~y,
    "shifts": lambda x, y: (x << 2) + (x >> y) + (1 << y),
    "to floats": lambda x, y: x.astype("float32") * 0.5,
    "where": lambda x, y: x.sum(1, where=y > 2),
    "prod": lambda x, y: (x % 3).prod(1),
    "bools": lambda x, y: (x > 0).any(0) & (y > 0).all(0),
    "at[rows]": lambda x, y: x.at[np.array([1, 5, 1])].add(y[:3]),
    "take": lambda x, y: x.take(np.array([3, 0]), axis=1),
    "gather": lambda x, y: x[y[0], 1:3],
}
EITHER = {
    "+ - *": lambda x, y: (x + y) * x - y,
    "// %": lambda x, y: x // y + x % 3,
    "- abs": lambda x, y: -x + abs(y) + (+x),
    "< <=": lambda x, y: (x < y) ^ (x <= 1),
    "> >=": lambda x, y: (x > y) ^ (0 >= x),
    "== !=": lambda x, y: (x == y) | (x != 1),
    "sum": lambda x, y: x.sum(np.int64(0)) + x[np.int32(2)],
    "max": lambda x, y: x.max(axis=1) + x.min(axis=0, keepdims=True),
    "argmax": lambda x, y: x.argmax(0) - y.argmin(1),
    "sort": lambda x, y: x.sort(1).cumsum(1).round(),
    "[2:4]": lambda x, y: x[2:4, ::-1],
    "[None, ..., 0]": lambda x, y: x[None, ..., 0],
    "[[1, 3]]": lambda x, y: x[np.array([1, 3])],
    "[numbers]": lambda x, y: x[1, -2],
    "rows": lambda x, y: list(x)[3],
    "T": lambda x, y: x.T + y.mT,
    "transpose": lambda x, y: x.transpose(1, 0).swapaxes(0, 1).copy().conj(),
    "reshape": lambda x, y: x.reshape(2, 4, -1).ravel().reshape((4, 16)).flatten(),
    "squeeze": lambda x, y: x[:, None].squeeze(1),
    "clip": lambda x, y: x.clip(-1, 2),
    "repeat": lambda x, y: x.repeat(3, axis=0),
}
OPERATIONS = {
    **{f"{n} of floats": (f, X, Y) for n, f in {**FLOATS, **EITHER}.items()},
    **{f"{n} of integers": (f, N, M) for n, f in {**INTEGERS, **EITHER}.items()},
}


def like_one_device(got, expected):
    """The same value and type; bitwise for what is not computed in floats."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    got = np.asarray(got.full_tensor())
    if jnp.issubdtype(expected.dtype, jnp.floating):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=2e-6)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_equals_one_device(mesh24, name):
    """As it lies if placements fit, and always if operations may redistribute."""
    f, x, y = OPERATIONS[name]
    expected = f(jnp.asarray(x), jnp.asarray(y))
    for one, two in [("S0,R", "S0,R"), ("S1,S0", "R,S1")]:
        args = dt.distribute_tensor(x, mesh24, one), dt.distribute_tensor(y, mesh24, two)
        try:
            like_one_device(f(*args), expected)
        except dt.PlacementMismatchError as error:
            assert error.where.startswith("test_eager.py")
            with dt.redistribution("auto"):
                like_one_device(f(*args), expected)


# function of (x, y), their placements, the result's
RESULTS = [
    (lambda x, y: x + y, "R", "R", "R,R"),
    (lambda x, y: x @ y, "R", "R", "R,R"),
    (lambda x, y: x + y, "S0,R", "R", "S0,R"),
    (lambda x, y: x + y, "S0,R", "R,S1", "S0,S1"),
    (lambda x, y: x @ y, "S0,R", "R,S1", "S0,S1"),
    (lambda x, y: x @ y, "R,S1", "R,S0", "R,P"),
    (lambda x, y: x @ y, "R,S1", "R", "R,P"),
    (lambda x, y: x @ Y, "S0,S1", "R", "S0,P"),
    (lambda x, y: Y.T @ x, "S0,S1", "R", "P,S1"),
    (lambda x, y: x @ Y, "R", "R", "R,R"),
    (lambda x, y: x.sum(0), "S0,S1", "R", "P,S0"),
    (lambda x, y: x.mean(), "S0,S1", "R", "P,P"),
    (lambda x, y: x.max(1), "S0,S1", "R", "S0,P(max)"),
    (lambda x, y: (x @ y + 2.0 * (x @ y)) / 3, "R,S1", "R,S0", "R,P"),
    (lambda x, y: -(x @ y).T[2:4], "R,S1", "R,S0", "R,P"),
    (lambda x, y: x.T, "S0,R", "R", "S1,R"),
    (lambda x, y: x[:, 2:4], "S0,R", "R", "S0,R"),
    (lambda x, y: (x @ y).reduce_partial() ** 2, "S0,S1", "R,S0", "S0,R"),
]


@pytest.mark.parametrize(("f", "one", "two", "placements"), RESULTS)
def test_where_results_lie(mesh24, f, one, two, placements):
    result = f(dt.distribute_tensor(X, mesh24, one), dt.distribute_tensor(Y, mesh24, two))
    assert ",".join(map(str, result.placements)) == placements
    whole = f(dt.distribute_tensor(X, mesh24, "R"), dt.distribute_tensor(Y, mesh24, "R"))
    like_one_device(result, whole.to_array())


# function of a partial h, what the error says, the remedy
ERRORS = {
    "P + number": (lambda h, x: h + 1.0, "combine a partial sum and R", "redistribute(h, "),
    "P + array": (lambda h, x: Y + h, "combine R and a partial sum", "redistribute(h, "),
    "P ** 2": (lambda h, x: h**2, "`integer_pow` cannot take a partial sum", "redistribute(h, "),
    "P > 0": (lambda h, x: h > 0, "combine a partial sum", "redistribute(h, "),
    "abs of P": (lambda h, x: abs(h), "`abs` cannot take a partial", "redistribute(h, "),
    "S0 + S1": (lambda h, x: x + x.T, "combine S0 and S1", "redistribute("),
    "variance over S0": (lambda h, x: x.var(0), "combine S0 and a partial", "redistribute(x, "),
    "trailing parts": (lambda h, x: x.T.reshape(-1), "`reshape` cannot take S1", "redistribute("),
}


@pytest.mark.parametrize("name", ERRORS)
def test_placements_that_do_not_fit(mesh24, name):
    f, says, remedy = ERRORS[name]
    h, x = dt.distribute_tensor(X, mesh24, "R,P"), dt.distribute_tensor(X, mesh24, "S0,R")
    with pytest.raises(dt.PlacementMismatchError, match=says) as caught:
        f(h, x)
    assert caught.value.where.startswith("test_eager.py")
    assert any(remedy in r.code for r in caught.value.remedies), caught.value
    with dt.redistribution("auto"):
        like_one_device(f(h, x), f(jnp.asarray(X), jnp.asarray(X)))


def test_redistribution_is_local_to_its_block_and_thread(mesh24):
    x = dt.distribute_tensor(X, mesh24, "S0,R")
    failed = []

    def elsewhere():
        with pytest.raises(dt.PlacementMismatchError):
            x + x.T
        failed.append(True)

    with dt.redistribution("auto"):
        x + x.T
        with dt.redistribution("never"), pytest.raises(dt.PlacementMismatchError):
            x + x.T
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        x + x.T
    assert failed
    with pytest.raises(dt.PlacementMismatchError):
        x + x.T
    with pytest.raises(ValueError, match="'sometimes'"):
        dt.redistribution("sometimes")


def test_what_may_stand_beside_a_dtensor(mesh24, mesh8):
    x = dt.distribute_tensor(X, mesh24, "S0,R")
    with pytest.raises(dt.PlacementError, match="two meshes"):
        x + dt.distribute_tensor(X, mesh8, "S0")
    for other in (None, "text", [1.0], (1.0,)):
        with pytest.raises(TypeError):
            x + other
        with pytest.raises(TypeError):
            other * x
    assert (x == None) is False and (x != "text") is True  # noqa: E711
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)
    with pytest.raises(TypeError, match=r"dt\.jit\(jnp\.exp\)\(x\)"):
        jnp.exp(x)
    with pytest.raises(TypeError, match=r"dt\.jit"):
        jnp.add(jnp.ones(8), x)
    with pytest.raises(TypeError, match="0-d"):
        iter(x.sum())
    placed = x.redistribute("R,S1").to_array()  # a jax.Array on the mesh counts as it lies
    assert (x + placed).placements == (dt.Shard(0), dt.Shard(1))
    low = dt.distribute_tensor(jnp.asarray(X, jnp.bfloat16), mesh24, "S0,R")
    assert (low * 2.0 + 1).dtype == jnp.bfloat16 and (low + np.float32(1)).dtype == jnp.float32


def made(f, *args):
    """How many programs a call makes."""
    before = set(operators._operations)
    f(*args)
    return len(set(operators._operations) - before)


def test_programs_are_kept(mesh24):
    x, y = (dt.distribute_tensor(a, mesh24, "S0,R") for a in (X, Y))
    calls = [
        lambda x, y: x * y,
        lambda x, y: x * 3.0,
        lambda x, y: x[:, 1:3],
        lambda x, y: x.sum(1, keepdims=True),
        lambda x, y: y.at[:, 1:3].set(x[:, :2]),
    ]
    for call in calls:
        call(x, y)
        assert made(call, y, x) == 0
    assert made(lambda: x * 4.0) == 0  # another number
    assert made(list, x.T[:4]) == 1 and made(list, x.T[4:]) == 0  # one program for all rows
    for other in (lambda: x[:, 1:4], lambda: x * 3, lambda: x * True, lambda: x.T * x.T):
        assert made(other)
    for zero in (0.0, -0.0):
        np.testing.assert_array_equal(np.signbit(x * zero), np.signbit(X * np.float32(zero)))
    # equal as keys, but other programs
    assert [(x.astype(int) ** e).dtype for e in (1, 1.0, True)] == [
        (jnp.asarray(X).astype(int) ** e).dtype for e in (1, 1.0, True)
    ]


def test_any_function(mesh24):
    """Pytrees in and out, static values, DTensors as constants of an outer program."""
    x = dt.distribute_tensor(X, mesh24, "S0,R")

    def both(tree, scale, *, axis):
        return dict(norm=jnp.linalg.norm(tree["x"], axis=axis) * scale, exp=jnp.exp(tree["y"]))

    found = run_eagerly(both, dict(x=x, y=Y), 2, axis=1)
    expected = both(dict(x=X, y=Y), 2, axis=1)
    for name, value in found.items():
        like_one_device(value, expected[name])
    assert found["norm"].placements == (dt.Shard(0), dt.Replicate())
    inside = dt.jit(lambda y: (y + x).sum(0) * 2.0 - (x @ Y)[0], mesh=mesh24)
    np.testing.assert_allclose(inside(Y), (Y + X).sum(0) * 2 - (X @ Y)[0], rtol=1e-5, atol=1e-5)


def test_three_mesh_axes():
    mesh = dt.init_device_mesh((2, 2, 2), ("a", "b", "c"))
    x, y = dt.distribute_tensor(X, mesh, "S0,S1,R"), dt.distribute_tensor(Y, mesh, "R,S0,S1")
    assert str((x @ y).layout) == "[a=S0, b=P, c=S1]"
    like_one_device(x @ y, jnp.asarray(X) @ Y)


# ---- derivatives ---------------------------------------------------------------------------------


def loss(x, w):
    h = x @ w
    h = h.reduce_partial() if isinstance(h, dt.DTensor) else h
    return ((h + 1.0) ** 2).mean() + (0.1 * w).sum() / 3


WEIGHTS = [("R", "R"), ("S0,R", "R,S1"), ("S0,S1", "R,S0"), ("P,R", "R,S1"), ("S0,R", "R,P")]


@pytest.mark.parametrize(("one", "two"), WEIGHTS)
def test_gradients_outside_jit(mesh24, one, two):
    args = dt.distribute_tensor(X, mesh24, one), dt.distribute_tensor(Y, mesh24, two)
    value, gradients = jax.value_and_grad(loss, (0, 1))(*args)
    known, expected = jax.value_and_grad(loss, (0, 1))(X, Y)
    assert isinstance(value, jax.Array)
    np.testing.assert_allclose(value, known, rtol=1e-6)
    for x, g, e in zip(args, gradients, expected, strict=True):
        assert g.layout == x.layout
        np.testing.assert_allclose(g.full_tensor(), e, rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
def test_a_training_step_by_hand(mesh24):
    x, y = dt.distribute_tensor(X, mesh24, "S0,R"), dt.distribute_tensor(Y, mesh24, "S0,R")
    w, v = dt.distribute_tensor(X, mesh24, "R,S1"), X

    def error(w, x, y):
        return ((x @ w - y) ** 2).mean()

    for _ in range(3):
        w, v = (
            weights - 0.1 * jax.grad(error)(weights, *data)
            for weights, data in ((w, (x, y)), (v, (X, Y)))
        )
    assert w.placements == (dt.Replicate(), dt.Shard(1))
    np.testing.assert_allclose(w, v, rtol=1e-5, atol=1e-6)


def test_gradients_of_moves_and_of_gradients(mesh24):
    x, p = dt.distribute_tensor(X, mesh24, "S0,R"), dt.distribute_tensor(X, mesh24, "P,S0")
    for moved in (
        lambda x: x.full_tensor(),
        lambda x: x.redistribute("R,S1"),
        lambda x: dt.redistribute(x, {"tp": "S1"}),
        lambda x: x.reduce_partial(),
    ):
        for array in (x, p):
            g = jax.jit(jax.grad(lambda x, moved=moved: (moved(x) ** 3).sum()))(array)
            assert g.layout == array.layout
            np.testing.assert_allclose(g.full_tensor(), 3 * X**2, rtol=1e-5)
    np.testing.assert_array_equal(g.storage[1], 0.0)  # a partial gradient: dense, then zeros
    y, pull = jax.vjp(lambda x: x.sum(0), x)  # a partial result, and its cotangent
    assert y.placements == (dt.Partial(), dt.Replicate())
    (g,) = pull(dt.distribute_tensor(Y[0], mesh24, y.layout))
    np.testing.assert_array_equal(g, np.broadcast_to(Y[0], (8, 8)))

    def of_gradient(x):
        g = jax.grad(lambda x: (x**3).sum())(x)
        return (g * g).sum()

    np.testing.assert_allclose(jax.grad(of_gradient)(x), 36 * X**3, rtol=1e-5)
    np.testing.assert_array_equal(jax.grad(lambda x: x.max())(x), X == X.max())
    with pytest.raises(dt.PlacementError, match=r"partial max .* has no gradient"):
        jax.grad(lambda x: x.max(0).reduce_partial().sum())(x)
    with pytest.raises(dt.PlacementError, match="does not fit its layout"):
        jax.vmap(lambda row: row * 2.0)(p)
