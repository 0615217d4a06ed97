"""flax and optax as they are: modules, optimizers and train states as arguments of dt.jit."""

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax import numpy as jnp
from test_programs import normal, same

import dtorchjax as dt

WHERE = dt.by_path({"*": "R", "*up/kernel": {"tp": "S1"}, "*down/kernel": {"tp": "S0"}})
X, Y = normal(0, 8, 16), normal(1, 8, 8)


class Model(nnx.Module):
    """Parameters, running statistics and a generator that counts."""

    def __init__(self, rngs, hidden=32):
        self.up = nnx.Linear(16, hidden, use_bias=False, rngs=rngs)  # a norm takes it away again
        self.norm = nnx.BatchNorm(hidden, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(hidden, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def make(hidden=32):
    model = Model(nnx.Rngs(0), hidden)
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def step(model, optimizer, x, y):
    value, grads = nnx.value_and_grad(lambda m: jnp.square(m(x) - y).mean())(model)
    optimizer.update(model, grads)
    return model, optimizer, value


def arrays(tree):
    """The numbers of a tree, keys as numbers too."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, dt.DTensor))
    leaves = [x.full_tensor() if isinstance(x, dt.DTensor) else x for x in leaves]
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x) for x in leaves
    ]


@pytest.mark.smoke
def test_modules_and_optimizers_are_made_in_parts_and_trained(mesh24):
    """The program that makes them sends nothing; three steps are those of one device."""
    init = dt.jit(make, mesh=mesh24, out_placements=WHERE)
    assert init.explain().bytes_per_device == 0
    model, optimizer = init()
    plain = make()
    same(arrays((model, optimizer)), arrays(plain))
    train, placed = dt.jit(step), dt.distribute_tensor(X, mesh24, {"dp": "S0"})
    for _ in range(3):
        model, optimizer, value = train(model, optimizer, placed, Y)
        *plain, expected = jax.jit(step)(*plain, X, Y)
        same(arrays((model, optimizer, value)), arrays((*plain, expected)))
    assert len(train.programs) <= 2
    moments = optimizer.opt_state[0].mu["up"]["kernel"][...]
    for kernel in (model.up.kernel[...], moments):
        assert kernel.placements == (dt.Replicate(), dt.Shard(1))


def test_a_model_and_its_optimizer_are_placed(mesh24):
    """In place, as jax.Arrays; what has no such array is a DTensor; a mistake changes nothing."""
    model, optimizer = make()
    before = arrays((model, optimizer))
    with pytest.raises(dt.PlacementError, match="matches no leaf"):
        dt.place(model, mesh24, dt.by_path({"*": "R", "*side/kernel": {"tp": "S1"}}))
    assert len(model.up.kernel[...].sharding.device_set) == 1
    assert dt.place(model, mesh24, WHERE) is model
    assert dt.place(optimizer, mesh24, WHERE) is optimizer
    same(arrays((model, optimizer)), before)
    for kernel in (model.up.kernel[...], optimizer.opt_state[0].nu["up"]["kernel"][...]):
        assert isinstance(kernel, jax.Array)
        assert kernel.sharding.spec == jax.P(None, "tp")
    model.eval()
    close_to = make()[0]
    close_to.eval()
    same(model(X), close_to(X))  # plain flax goes on with it
    model, optimizer = make(hidden=30)
    dt.place(model, mesh24, WHERE)
    assert isinstance(model.up.kernel[...], dt.DTensor)
    *_, value = dt.jit(step)(model, optimizer, X, Y)
    same(value, step(*make(hidden=30), X, Y)[-1])


def test_tied_weights_are_one_variable(mesh24):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
            self.b.kernel = self.a.kernel

    model = dt.place(Tied(nnx.Rngs(0)), mesh24, dt.by_path({"*": "R", "a/kernel": {"tp": "S1"}}))
    assert model.a.kernel is model.b.kernel
    assert model.b.kernel[...].sharding.spec == jax.P(None, "tp")


def test_split_and_merged(mesh24):
    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def loss(state, x, y):
        model = nnx.merge(graph, state)
        return jnp.square(model(x) - y).mean(), nnx.state(model)

    placed = dt.place(state, mesh24, WHERE)
    value, after = dt.jit(loss)(placed, X, Y)
    expected = jax.jit(loss)(state, X, Y)
    same(arrays((value, after)), arrays(expected))


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "tp"))
        h = linen.relu(linen.Dense(32, kernel_init=init, name="up")(x))
        return linen.Dense(8, name="down")(h)


def test_a_train_state_of_linen(mesh24):
    def create():
        params = Dense().init(jax.random.key(0), X)["params"]
        return TrainState.create(apply_fn=Dense().apply, params=params, tx=optax.adam(1e-2))

    def train(state, x):
        def loss(params):
            return jnp.square(state.apply_fn({"params": params}, x)).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    plain = create()
    state = dt.place(plain, mesh24, dt.by_path({"*": "R", "*up/kernel": {"tp": "S1"}}))
    ours = dt.jit(train)
    for _ in range(2):
        state, value = ours(state, dt.distribute_tensor(X, mesh24, {"dp": "S0"}))
        plain, expected = jax.jit(train)(plain, X)
        same(arrays((state.params, value)), arrays((plain.params, expected)))
    assert state.opt_state[0].mu["up"]["kernel"].value.placements[1] == dt.Shard(1)


@pytest.mark.parametrize("inside", [False, True], ids=["made eagerly", "made by dt.jit"])
def test_metadata_is_read_as_placements(mesh24, inside):
    """flax lays annotated variables out by itself; inside dt.jit that is an annotation."""

    def annotated():
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tp"))
        return nnx.Linear(16, 32, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))

    with jax.set_mesh(mesh24):
        model = dt.jit(annotated)() if inside else annotated()
        kernel = model.kernel[...]
        assert kernel.sharding.spec == jax.P(None, "tp")
        plan = dt.jit(lambda m, x: m(x)).explain(model, X)
        assert plan.bytes_per_device == 0, plan.table()
        same(dt.jit(lambda m, x: m(x))(model, X), X @ np.asarray(kernel))


class Logical(linen.Module):
    """Dims with names of their own, which rules lay on mesh axes."""

    @linen.compact
    def __call__(self, x):
        init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("in", "hidden"))
        h = linen.relu(linen.Dense(32, use_bias=False, kernel_init=init, name="up")(x))
        return linen.Dense(8, use_bias=False, name="down")(h)


RULES = (("hidden", "tp"), ("in", None))


def test_logical_axes_are_read_by_their_rules(mesh24):
    params = Logical().init(jax.random.key(0), X)["params"]
    specs = linen.get_partition_spec(params)
    where = linen.logical_to_mesh_sharding(specs, mesh24, RULES)
    plain = linen.unbox(params)
    placed = dt.distribute(plain, mesh24, where)
    assert placed["up"]["kernel"].placements == (dt.Replicate(), dt.Shard(1))

    def loss(params, x):
        return jnp.square(Logical().apply({"params": params}, x)).mean()

    step = dt.jit(jax.value_and_grad(loss))
    batch = dt.distribute_tensor(X, mesh24, {"dp": "S0"})
    value, gradients = step(placed, batch)
    same(arrays((value, gradients)), arrays(jax.value_and_grad(loss)(plain, X)))
    assert gradients["up"]["kernel"].placements == (dt.Replicate(), dt.Shard(1))
