"""Published models in plain flax and optax, trained and run as on one device.

The models and steps know nothing of meshes: what a test adds is where arrays lie.
"""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax import lax
from jax import numpy as jnp
from optax import contrib
from rotation import on_day
from test_flax import arrays
from test_programs import normal, same

import dtorchjax as dt

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def integers(seed, shape, most):
    return jax.random.randint(jax.random.key(seed), shape, 0, most)


def alike(ours, plain, tolerance=5e-5):
    """The numbers of two pytrees, models and keys among them."""
    same(arrays(ours), arrays(plain), tolerance)


OVER_DP = dt.by_path({"*": {"dp": "S0"}})


def trained(mesh, make, step, batch, where, programs=1, steps=3):
    """`step(*state, *batch) -> *state, loss` from `make() -> state`, `steps` times, on the mesh.

    The state lies as the path patterns `where` say, the batch with its first dim over dp. Losses
    and all that is in the state are those of one device; what comes out lies as what goes in, so
    that all steps are one program. Returns the state, that of one device and the plan.
    """
    plain, state = make(), dt.place(make(), mesh, dt.by_path(where))
    placed = dt.place(batch, mesh, OVER_DP)
    ours, theirs = dt.jit(step), jax.jit(step)
    for _ in range(steps):
        *state, loss = ours(*state, *placed)
        *plain, expected = theirs(*plain, *batch)
        alike(loss, expected)
    alike(state, plain)
    assert len(set(ours.programs.values())) == programs
    return state, plain, ours.explain(*state, *placed)


def nnx_step(loss):
    """The usual training step: `loss(model, *batch)` down, by an `nnx.Optimizer`."""

    def step(model, optimizer, *batch):
        value, grads = nnx.value_and_grad(loss)(model, *batch)
        optimizer.update(model, grads)
        return model, optimizer, value

    return step


def with_optimizer(model, transformation):
    return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)


# ---- a residual network: He et al., "Deep residual learning" (2016) ------------------------------


class ConvNorm(nnx.Module):
    def __init__(self, before, after, size, strides, rngs):
        # no bias: the norm takes it away, its gradient would be rounding noise
        self.conv = nnx.Conv(before, after, size, strides=strides, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(after, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x))


class ResidualBlock(nnx.Module):
    def __init__(self, before, after, strides, rngs):
        self.a = ConvNorm(before, after, (3, 3), strides, rngs)
        self.b = ConvNorm(after, after, (3, 3), 1, rngs)
        self.shortcut = ConvNorm(before, after, (1, 1), strides, rngs)

    def __call__(self, x):
        return nnx.relu(self.b(nnx.relu(self.a(x))) + self.shortcut(x))


class ResNet(nnx.Module):
    def __init__(self, rngs, width=8, classes=10):
        self.stem = ConvNorm(3, width, (3, 3), 1, rngs)
        self.blocks = nnx.List(
            [ResidualBlock(width, width, 1, rngs), ResidualBlock(width, 2 * width, 2, rngs)]
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(2 * width, classes, rngs=rngs)

    def __call__(self, images):
        x = nnx.max_pool(nnx.relu(self.stem(images)), (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((1, 2))))


def classified(model, images, labels):
    return cross_entropy(model(images), labels).mean()


def evaluated(model, images, labels):
    model.eval()
    logits = model(images)
    return logits, jnp.mean(logits.argmax(-1) == labels)


CHANNELS = {
    "*": "R",
    "*conv/kernel": {"tp": "S3"},
    "*norm/*": {"tp": "S0"},
    "*head/kernel": {"tp": "S0"},
}


@on_day(0, 3)
def test_residual_network(mesh24):
    """Data parallel with its channels sharded: statistics of the batch, pooling, dropout."""

    def make():
        return with_optimizer(ResNet(nnx.Rngs(0)), optax.sgd(0.05, momentum=0.9, nesterov=True))

    batch = normal(0, 8, 12, 12, 3), integers(1, (8,), 10)
    state, plain, _ = trained(mesh24, make, nnx_step(classified), batch, CHANNELS)
    assert state[0].blocks[1].a.norm.mean[...].sharding.spec == jax.P("tp")
    evaluate, placed = dt.jit(evaluated), dt.place(batch, mesh24, OVER_DP)
    alike(evaluate(state[0], *placed), jax.jit(evaluated)(plain[0], *batch))
    # with running statistics nothing is summed over the batch but what was classified right
    plan = evaluate.explain(state[0], *placed)
    assert all(c.bytes <= 8 for c in over(plan, "dp")), plan.table()


def over(plan, axis):
    return [c for c in plan.collectives if axis in c.axes]


# ---- sequence to sequence: Sutskever et al. (2014), with attention by Luong et al. (2015) --------

PAD, WORDS = 0, 24


class Translator(nnx.Module):
    def __init__(self, rngs, width=16):
        self.source = nnx.Embed(WORDS, width, rngs=rngs)
        self.target = nnx.Embed(WORDS, width, rngs=rngs)
        cell = functools.partial(nnx.OptimizedLSTMCell, width, 2 * width, rngs=rngs)
        self.encoder = nnx.RNN(cell(), return_carry=True, rngs=rngs)
        self.decoder = nnx.RNN(cell(), rngs=rngs)
        self.mix = nnx.Linear(4 * width, 2 * width, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(2 * width, WORDS, rngs=rngs)

    def __call__(self, source, given):
        here = source != PAD
        carry, memory = self.encoder(self.source(source), seq_lengths=here.sum(1))
        h = self.decoder(self.target(given), initial_carry=carry)
        scores = jnp.where(here[:, None], jnp.einsum("bth,bsh->bts", h, memory), -1e9)
        context = jnp.einsum("bts,bsh->bth", nnx.softmax(scores), memory)
        return self.head(nnx.tanh(self.mix(jnp.concatenate([context, h], -1))))


def translated(model, source, target):
    """Teacher forcing: every word from the right ones before it. Padding does not count."""
    logits = model(source, target[:, :-1])
    wanted, here = target[:, 1:], target[:, 1:] != PAD
    return jnp.sum(cross_entropy(logits, wanted) * here) / here.sum()


def padded(seed, count, length):
    """Sentences of several lengths, the shortest of three words."""
    lengths = 3 + integers(seed, (count, 1), length - 2)
    words = 1 + integers(seed + 1, (count, length), WORDS - 1)
    return jnp.where(jnp.arange(length) < lengths, words, PAD)


GATES = {
    "*": "R",
    "*embedding": {"tp": "S0"},
    "*dense_i/kernel": {"tp": "S1/4"},  # four gates in one matrix: each is sharded
    "*dense_h/kernel": {"tp": "S1/4"},
    "*dense_h/bias": {"tp": "S0/4"},
    "*mix/kernel": {"tp": "S1"},
    "*head/kernel": {"tp": "S0"},
}


@on_day(1, 3)
def test_translation_with_recurrent_cells(mesh24):
    def make():
        return with_optimizer(Translator(nnx.Rngs(0)), optax.adam(1e-2))

    batch = padded(0, 8, 9), padded(2, 8, 7)
    trained(mesh24, make, nnx_step(translated), batch, GATES)


# ---- a decoder with a cache: Touvron et al., "LLaMA" (2023), grouped queries ---------------------

WIDTH, HEADS, GROUPS, SIZE, LAYERS, ROOM = 32, 8, 4, 8, 2, 16


def rotated(x, positions):
    """Rotary positions of (batch, time, heads, size)."""
    angles = positions[:, None] / 10000 ** (jnp.arange(SIZE // 2) / (SIZE // 2))
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class CachedAttention(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.q = linear(WIDTH, (HEADS, SIZE))
        self.k = linear(WIDTH, (GROUPS, SIZE))
        self.v = linear(WIDTH, (GROUPS, SIZE))
        self.o = linear((HEADS, SIZE), WIDTH, axis=(-2, -1))

    def __call__(self, x, cache, start):
        """`x`: the tokens from `start`; `cache`: keys and values of those before."""
        positions = start + jnp.arange(x.shape[1])
        new = dict(k=rotated(self.k(x), positions), v=self.v(x))
        cache = {n: lax.dynamic_update_slice(cache[n], new[n], (0, start, 0, 0)) for n in new}
        q = rotated(self.q(x), positions).reshape(*x.shape[:2], GROUPS, -1, SIZE)
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, cache["k"]) / math.sqrt(SIZE)
        seen = jnp.arange(ROOM) <= positions[:, None]
        probabilities = nnx.softmax(jnp.where(seen, scores, -1e9))
        out = jnp.einsum("bgrqk,bkgd->bqgrd", probabilities, cache["v"])
        return self.o(out.reshape(*x.shape[:2], HEADS, SIZE)), cache


class LlamaBlock(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = CachedAttention(rngs)
        self.gate, self.up = linear(WIDTH, 2 * WIDTH), linear(WIDTH, 2 * WIDTH)
        self.down = linear(2 * WIDTH, WIDTH)

    def __call__(self, x, cache, start):
        h, cache = self.attention(self.norms[0](x), cache, start)
        x = x + h
        h = self.norms[1](x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h)), cache


class Llama(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([LlamaBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def __call__(self, tokens, caches, start):
        x, after = self.embed(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, cache, start)
            after.append(cache)
        return self.head(self.norm(x)), after

    def empty(self, batch):
        part = jnp.zeros((batch, ROOM, GROUPS, SIZE))
        return [dict(k=part, v=part) for _ in self.blocks]


def likeliest(model, tokens, caches, start):
    """The next token after each sequence, and what is kept of it."""
    logits, caches = model(tokens, caches, start)
    return logits[:, -1].argmax(-1)[:, None], caches


def generated(model, prompt, count):
    """The prompt at once, then `count` tokens one after the other."""
    token, caches = likeliest(model, prompt, model.empty(len(prompt)), 0)

    def one(carry, start):
        return likeliest(model, *carry, start), carry[0]

    _, tokens = lax.scan(one, (token, caches), prompt.shape[1] + jnp.arange(count))
    return tokens[:, :, 0].T


HEADS_OVER_TP = {
    "*": "R",
    "*attention/[qkv]/kernel": {"tp": "S1"},
    "*attention/o/kernel": {"tp": "S0"},
    "*gate/kernel": {"tp": "S1"},
    "*up/kernel": {"tp": "S1"},
    "*down/kernel": {"tp": "S0"},
    "*embedding": {"tp": "S1"},
    "head/kernel": {"tp": "S1"},
}
CACHED = dt.by_path({"*": {"dp": "S0", "tp": "S2"}})  # the batch over dp, heads over tp
PROMPT = integers(7, (4, 5), WORDS)


def placed_llama(mesh):
    model = dt.place(Llama(nnx.Rngs(0)), mesh, dt.by_path(HEADS_OVER_TP))
    return model, dt.distribute_tensor(PROMPT, mesh, {"dp": "S0"})


def test_generation_step_by_step(mesh24):
    """One program fills the cache, one adds a token: each token is that of one device."""
    model, token = placed_llama(mesh24)
    caches = dt.place(model.empty(len(PROMPT)), mesh24, CACHED)
    ours, theirs = dt.jit(likeliest), jax.jit(likeliest)
    plain, expected = Llama(nnx.Rngs(0)), PROMPT
    kept, start = plain.empty(len(PROMPT)), 0
    for _ in range(6):
        count = expected.shape[1]
        token, caches = ours(model, token, caches, start)
        expected, kept = theirs(plain, expected, kept, start)
        same(token, expected)
        start += count
    alike(caches, kept)
    assert len(set(ours.programs.values())) == 2
    assert caches[0]["k"].placements == (dt.Shard(0), dt.Shard(2))
    plan = ours.explain(model, token, caches, start)
    # a token's activations are sent, never keys and values: these are eight times as many
    assert max(c.bytes for c in plan.collectives) <= len(PROMPT) * 2 * WIDTH * 4, plan.table()


@on_day(2, 3)
def test_generation_in_one_program(mesh24):
    model, prompt = placed_llama(mesh24)
    ours = dt.jit(generated, static_argnums=2)
    same(
        ours(model, prompt, 6), jax.jit(generated, static_argnums=2)(Llama(nnx.Rngs(0)), PROMPT, 6)
    )


# ---- a vision transformer: Dosovitskiy et al., "An image is worth 16x16 words" (2021) ------------


class EncoderBlock(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            heads, width, use_bias=False, dropout_rate=0.1, decode=False, rngs=rngs
        )  # no bias: that of the keys changes nothing, its gradient would be rounding noise
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norms[0](x)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class VisionTransformer(nnx.Module):
    def __init__(self, rngs, width=32, heads=4, layers=2, patch=4, side=16, classes=10):
        self.patches = nnx.Conv(3, width, (patch, patch), strides=patch, padding="VALID", rngs=rngs)
        self.first = nnx.Param(jnp.zeros((1, 1, width)))
        count = (side // patch) ** 2 + 1
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, count, width)))
        self.blocks = nnx.List([EncoderBlock(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(len(x), -1, x.shape[-1])
        first = jnp.broadcast_to(self.first[...], (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([first, x], 1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def matrices(params):
    """What weight decay is for."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


MEGATRON = {
    "*": "R",
    "*attention/[qkv]*/kernel": {"tp": "S1"},
    "*attention/out/kernel": {"tp": "S0"},
    "*up/kernel": {"tp": "S1"},
    "*up/bias": {"tp": "S0"},
    "*down/kernel": {"tp": "S0"},
}


@pytest.mark.smoke
@on_day(3, 3)
def test_vision_transformer(mesh24):
    def make():
        schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 10)
        adam = optax.adamw(schedule, weight_decay=0.1, mask=matrices)
        clipped = optax.chain(optax.clip_by_global_norm(1.0), adam)
        model = VisionTransformer(nnx.Rngs(0))
        model.train()
        return with_optimizer(model, clipped)

    def loss(model, images, labels):
        smooth = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
        return optax.softmax_cross_entropy(model(images), smooth).mean()

    batch = normal(0, 8, 16, 16, 3), integers(1, (8,), 10)
    trained(mesh24, make, nnx_step(loss), batch, MEGATRON)


# ---- a mixture of experts: Lepikhin et al., "GShard" (2021), top 2 of them -----------------------


class Experts(linen.Module):
    """Every sequence is a group: a token that finds its expert full passes by."""

    count: int = 8
    hidden: int = 64
    capacity: float = 1.25

    @linen.compact
    def __call__(self, x):
        length, width = x.shape[1:]
        room = math.ceil(2 * length * self.capacity / self.count)
        scores = linen.softmax(linen.Dense(self.count, use_bias=False, name="router")(x))
        gates, choices = lax.top_k(scores, 2)
        gates = gates / gates.sum(-1, keepdims=True)
        chosen = jax.nn.one_hot(choices, self.count)  # batch, time, choice, expert
        # first choices go first: who comes before whom in each expert's queue
        queue = chosen.swapaxes(1, 2).reshape(len(x), 2 * length, self.count)
        place = (jnp.cumsum(queue, 1) - queue).reshape(len(x), 2, length, self.count)
        place = jnp.sum(place.swapaxes(1, 2) * chosen, -1)  # batch, time, choice
        seat = jax.nn.one_hot(place.astype(int), room)  # zero where there is no room
        combine = jnp.einsum("btk,btke,btkc->btec", gates, chosen, seat)
        dispatch = jnp.einsum("btke,btkc->btec", chosen, seat)
        init = linen.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.count, width, self.hidden))
        down = self.param("down", init, (self.count, self.hidden, width))
        sent = jnp.einsum("btec,btd->becd", dispatch, x)
        h = jnp.einsum("becd,edh->bech", sent, up)
        out = jnp.einsum("bech,ehd->becd", linen.gelu(h), down)
        self.sow("losses", "balance", balance(scores, chosen[:, :, 0]))
        return jnp.einsum("btec,becd->btd", combine, out)


def balance(scores, first):
    """Least where all experts are first choice equally often."""
    return scores.shape[-1] * jnp.mean(jnp.sum(scores.mean(1) * first.mean(1), -1))


class MixtureModel(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(WORDS, 32, name="embed")
        x = embed(tokens)
        mask = linen.make_causal_mask(tokens)
        h = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(4, use_bias=False, name="attention")(
            h, mask=mask
        )
        x = x + Experts(name="experts")(linen.LayerNorm()(x))
        return embed.attend(linen.LayerNorm()(x))


def mixture_step(state, tokens):
    def loss(params):
        logits, kept = state.apply_fn({"params": params}, tokens[:, :-1], mutable="losses")
        extra = sum(jax.tree.leaves(kept["losses"]))
        return cross_entropy(logits, tokens[:, 1:]).mean() + 1e-2 * extra

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


EXPERTS = {"*": "R", "*experts/up": {"tp": "S0"}, "*experts/down": {"tp": "S0"}}


@on_day(4, 3)
def test_mixture_of_experts(mesh24):
    """Tokens go to their experts, whose weights stay where they are."""
    model, tokens = MixtureModel(), integers(3, (8, 17), WORDS)

    def make():
        params = model.init(jax.random.key(0), tokens[:, :-1])["params"]
        return (TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3)),)

    state, _, plan = trained(mesh24, make, mixture_step, (tokens,), EXPERTS)
    assert state[0].params["experts"]["up"].sharding.spec == jax.P("tp")
    moved = [c for c in plan.collectives if c.kind == "all-gather"]
    assert not [c for c in moved if c.bytes >= 8 * 32 * 64 * 4 * 3 / 4], plan.table()


# ---- optax ---------------------------------------------------------------------------------------


def small():
    return dict(
        up=dict(kernel=normal(0, 16, 32) / 4, bias=normal(1, 32)),
        down=dict(kernel=normal(2, 32, 8) / 6, bias=normal(3, 8)),
    )


def squared(params, x, y):
    h = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.square(h @ params["down"]["kernel"] + params["down"]["bias"] - y).mean()


SMALL = {
    "*": "R",
    "*up/kernel": "S0,S1",  # over both axes
    "*up/bias": {"tp": "S0"},
    "*down/kernel": {"tp": "S0"},
}
X, Y = normal(4, 8, 16), normal(5, 8, 8)
RATE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)


def descent(transformation):
    """A step of plain optax over the parameters of `small`."""
    transformation = optax.with_extra_args_support(transformation)

    def step(params, state, x, y):
        def value_fn(p):
            return squared(p, x, y)

        value, grads = jax.value_and_grad(value_fn)(params)
        more = dict(value=value, grad=grads, value_fn=value_fn)  # what line searches ask for
        updates, state = transformation.update(grads, state, params, **more)
        return optax.apply_updates(params, updates), state, value

    return step


def masked_decay():
    return optax.chain(optax.adam(RATE), optax.masked(optax.add_decayed_weights(0.1), matrices))


def parts():
    labels = dict(up=dict(kernel="muon", bias="adam"), down=dict(kernel="muon", bias="adam"))
    return optax.partition(dict(muon=contrib.muon(RATE), adam=optax.adam(RATE)), labels)


# what an optimizer keeps of a whole array, or of its rows, has that array's path but not its dims
FACTORS = {"*v_row/*": "R", "*v_col/*": "R"}
BY_ARRAY = {"*nu/*": "R"}

OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(RATE)),
    "adafactor": lambda: optax.adafactor(RATE, weight_decay_rate=1e-3),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: contrib.muon(RATE),
    "lamb": lambda: optax.lamb(RATE, weight_decay=0.1),
    "every second step": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "if finite": lambda: optax.apply_if_finite(optax.adam(RATE), 3),
    "masked": masked_decay,
    "adaptive clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1, 0.9, True)),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(RATE, weight_decay=0.1),
    "averaged updates": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.55, jax.random.key(3)), optax.sgd(0.1)),
    "novograd": lambda: optax.novograd(1e-2),
}
MORE_OPTIMIZERS = {
    "partition": parts,
    "lars": lambda: optax.lars(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "centralized": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "block rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.adam(1e-2)),
    "plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1)),
    "schedule free": lambda: contrib.schedule_free_adamw(1e-2),
    "prodigy": lambda: contrib.prodigy(),
    "momo": lambda: contrib.momo_adam(1e-2),
    "polyak": lambda: optax.polyak_sgd(),
    "radam": lambda: optax.radam(1e-2),
    "bf16 moments": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "flat": lambda: optax.flatten(optax.adam(1e-2)),
}
LINE_SEARCHES = {
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8, store_grad=True)
    ),
    "lbfgs": lambda: optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(8)),
}
EXTRA = {"adafactor": FACTORS, "novograd": BY_ARRAY}


def optimized(mesh, make, name, programs=1):
    transformation = make()

    def start():
        return small(), transformation.init(small())

    where = {**SMALL, **EXTRA.get(name, {})}
    return trained(mesh, start, descent(transformation), (X, Y), where, programs=programs)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *map(slow, MORE_OPTIMIZERS)])
def test_optimizers(mesh24, name):
    """The state lies by the patterns of its parameters."""
    (params, *_), *_ = optimized(mesh24, (OPTIMIZERS | MORE_OPTIMIZERS)[name], name)
    assert params["up"]["kernel"].sharding.spec == jax.P("dp", "tp")


@pytest.mark.parametrize("name", [*map(slow, LINE_SEARCHES)])
def test_line_searches(mesh24, name):
    """Loops that evaluate the loss. What they keep lies elsewhere after the first step."""
    optimized(mesh24, LINE_SEARCHES[name], name, programs=2)


def test_an_optimizer_of_single_numbers_sends_nothing(mesh24):
    """Adam's moments lie as the gradients do: a step sends what plain descent sends."""
    plans = [
        optimized(mesh24, m, "")[-1] for m in (lambda: optax.sgd(0.1), lambda: optax.adam(0.1))
    ]
    assert plans[0].bytes_per_device == plans[1].bytes_per_device > 0


def test_an_optimizer_state_is_made_where_its_parameters_lie(mesh24):
    """No patterns for the state: moments take the layouts of the parameters, factors their own."""
    transformation = optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9)
    params = dt.place(small(), mesh24, dt.by_path(SMALL))
    init = dt.jit(transformation.init)
    state = init(params)
    assert init.explain(params).bytes_per_device == 0
    alike(state, transformation.init(small()))
    step = descent(transformation)
    got = dt.jit(step)(params, state, dt.place(X, mesh24, {"dp": "S0"}), Y)
    alike(got, jax.jit(step)(small(), transformation.init(small()), X, Y))


def test_moving_average_of_parameters(mesh24):
    transformation = optax.adam(1e-2)
    inner = descent(transformation)

    def step(params, average, state, x, y):
        params, state, value = inner(params, state, x, y)
        return params, optax.incremental_update(params, average, 0.1), state, value

    def make():
        return small(), small(), transformation.init(small())

    (_, average, _), *_ = trained(mesh24, make, step, (X, Y), SMALL)
    assert average["up"]["kernel"].sharding.spec == jax.P("dp", "tp")


def accumulated(transformation, count):
    """Gradients of `count` parts of the batch, one after the other, then one update."""

    def step(params, state, *batch):
        def one(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(squared)(params, *part)), None

        parts = jax.tree.map(lambda x: x.reshape(count, -1, x.shape[-1]), batch)
        zero = 0.0, jax.tree.map(jnp.zeros_like, params)
        total, _ = lax.scan(one, zero, parts)
        value, grads = jax.tree.map(lambda t: t / count, total)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def test_gradients_of_microbatches_are_accumulated(mesh24):
    """Gradients are sent once, after the loop; the result is that of the whole batch."""
    transformation = optax.adamw(RATE)

    def make():
        return small(), transformation.init(small())

    batch = normal(8, 1024, 16), normal(9, 1024, 8)
    state, _, plan = trained(mesh24, make, accumulated(transformation, 4), batch, SMALL)
    whole, *_ = trained(mesh24, make, descent(transformation), batch, SMALL)
    alike(state, arrays(whole))
    assert all(c.times == 1 for c in over(plan, "dp")), plan.table()


def mixed(transformation, dtype):
    """Products in half precision, parameters in single; steps of infinite gradients are left out.

    Micikevicius et al., "Mixed precision training" (2018): the loss is scaled, by less after an
    overflow and by more after two steps without one.
    """

    def scaled(params, scale, x, y):
        half = jax.tree.map(lambda a: a.astype(dtype), (params, x, y))
        return (squared(*half) * scale.astype(dtype)).astype("float32")

    def step(params, state, scaling, x, y):
        scale, good = scaling
        value, grads = jax.value_and_grad(scaled)(params, scale, x, y)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.isfinite(optax.tree.norm(grads))
        updates, after = transformation.update(grads, state, params)
        new = optax.apply_updates(params, updates), after
        params, state = optax.tree.where(finite, new, (params, state))
        more = jnp.where(good == 1, 2 * scale, scale)
        scaling = jnp.where(finite, more, scale / 2), jnp.where(finite, (good + 1) % 2, 0)
        return params, state, scaling, value / scale

    return step


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision(mesh24, dtype):
    """As near to single precision as one device is; scales and skipped steps are the same."""
    transformation = optax.sgd(0.1, momentum=0.9)

    def run(step, place):
        params = small()
        state = (params, transformation.init(params), (jnp.float32(2**18), jnp.int32(0)))
        state, scales = place(state, SMALL), []
        for _ in range(6):
            *state, value = step(*state, *place((X, Y), {"*": {"dp": "S0"}}))
            scales.append(float(state[2][0]))
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state[0]))
        return np.concatenate([a.ravel() for a in arrays((state[0], value))]), scales

    def place(tree, where):
        return dt.place(tree, mesh24, dt.by_path(where))

    exact, _ = run(jax.jit(mixed(transformation, "float32")), lambda tree, where: tree)
    plain, expected = run(jax.jit(mixed(transformation, dtype)), lambda tree, where: tree)
    ours, scales = run(dt.jit(mixed(transformation, dtype)), place)
    assert scales == expected
    assert (len(set(scales)) > 1) and (dtype == "bfloat16" or min(scales) < 2**18)
    assert np.linalg.norm(ours - exact) <= 1.5 * np.linalg.norm(plain - exact)


def test_the_type_of_sums_over_devices(mesh24):
    """Terms in bfloat16 are added up in float32 if that is asked for: plans and bytes say so."""

    def gradients(params, x, y):
        half = jax.tree.map(lambda a: a.astype("bfloat16"), (params, x, y))
        grads = jax.grad(squared)(*half)
        return jax.tree.map(lambda g: g.astype("float32"), grads)

    where = {"*": "R", "x": {"dp": "S0", "tp": "S0"}, "y": {"dp": "S0", "tp": "S0"}}
    arrays_in = dict(params=small(), x=normal(8, 1024, 16), y=normal(9, 1024, 8))
    placed = dt.place(arrays_in, mesh24, dt.by_path(where))
    exact = jax.grad(squared)(*arrays_in.values())
    sent, off = {}, {}
    for dtype in (None, "float32"):
        step = dt.jit(lambda params, x, y: gradients(params, x, y), reduce_dtype=dtype)
        plan = step.explain(*placed.values())
        sums = [c for c in plan.collectives if c.kind in ("all-reduce", "reduce-scatter")]
        assert {c.dtype for c in sums} == {dtype or "bfloat16"}
        sent[dtype] = sum(c.bytes for c in sums)
        found = step(*placed.values())
        off[dtype] = sum(
            float(np.square(a - b).sum()) for a, b in zip(arrays(found), arrays(exact), strict=True)
        )
        if dtype:
            plan.verify(step.lower(*placed.values()).compile())
    assert sent["float32"] == pytest.approx(2 * sent[None])
    assert off["float32"] < off[None]

    # a sum that stays in 16 bits is rounded once
    x = normal(3, 64, 16).astype("bfloat16")
    total = dt.jit(lambda x: x.sum(0), reduce_dtype="float32")
    lie = dt.distribute_tensor(x, mesh24, ["S0", "S0"])
    assert {c.dtype for c in total.explain(lie).collectives} == {"float32"}
    assert total(lie).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="a type of floats"):
        dt.jit(lambda x: x, reduce_dtype="int32")
