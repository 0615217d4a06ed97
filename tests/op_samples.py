"""Every operator of `dt.ops` with a decomposition: sample operands and a float64 reference.

References are written from the definitions, on numpy arrays, without looking at the operators.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special
from scipy.stats import norm as normal

_random = np.random.default_rng(0)


def floats(*shape: int, low: float | None = None, high: float = 1.0) -> np.ndarray:
    """Normal numbers of both signs, or uniform ones in [low, high]."""
    if low is None:
        return _random.normal(size=shape)
    return _random.uniform(low, high, shape)


def integers(high: int, *shape: int) -> np.ndarray:
    return _random.integers(0, high, shape)


def signs(*shape: int) -> np.ndarray:
    return np.where(_random.random(shape) < 0.5, -1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A call of an operator.

    `elementwise`: special values are tried on it, too. `kinks`: derivatives are not compared with
    finite differences. `big`: many steps, tolerances for half precision are ten times wider.
    """

    op: str
    operands: tuple[Any, ...]
    reference: Callable[..., Any]
    static: dict[str, Any]
    elementwise: bool = False
    big: bool = False
    smooth: bool = True
    second: bool = True  # second derivatives are compared
    limits: bool = True  # infinities give no nan
    number: int = 0

    def __str__(self) -> str:
        return f"{self.op}-{self.number}"


SAMPLES: list[Sample] = []


def sample(op: str, operands: Any, reference: Any, *, flags: str = "", **static: Any) -> None:
    """Flags: elementwise, big, kinks (not smooth), first (no second derivative), nolimits."""
    words = flags.split()
    number = sum(s.op == op for s in SAMPLES)
    SAMPLES.append(
        Sample(
            op, tuple(operands), reference, static, "elementwise" in words, "big" in words,
            "kinks" not in words, "first" not in words, "nolimits" not in words, number,
        )
    )  # fmt: skip


def each(op: str, reference: Any, *, x: Any = None, flags: str = "", **static: Any) -> None:
    """A sample of an operator that acts on each element alone."""
    x = floats(4, 8) * 2 if x is None else x
    sample(op, [x], reference, flags=f"elementwise {flags}", **static)


# ---- activations ---------------------------------------------------------------------------------

sigmoid = special.expit


def softplus(x):
    return np.logaddexp(x, 0)


def gelu(x):
    return x * normal.cdf(x)


def tanh_gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def cut(x, low, high):
    return np.minimum(np.maximum(x, low), high)


each("relu", lambda x: np.where(x > 0, x, 0))
each("relu6", lambda x: cut(x, 0, 6), x=floats(4, 8) * 8)
for slope in (0.01, 1.5, -0.3):
    each("leaky_relu", lambda x, s=slope: np.where(x > 0, x, s * x), slope=slope)
sample("prelu", [floats(4, 8), floats(8)], lambda x, w: np.where(x > 0, x, w * x))
each("elu", lambda x: np.where(x > 0, x, np.expm1(x)))
each("elu", lambda x: np.where(x > 0, x, 0.7 * np.expm1(x)), alpha=0.7)
each("celu", lambda x: np.where(x > 0, x, 0.7 * np.expm1(x / 0.7)), alpha=0.7)
each("selu", lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)))
each("gelu", tanh_gelu)
each("gelu", gelu, approximate=False)
each("silu", lambda x: x * sigmoid(x))
each("swish", lambda x: x * sigmoid(1.7 * x), beta=1.7)
each("mish", lambda x: x * np.tanh(softplus(x)))
each("softplus", softplus)
each("sigmoid", sigmoid)
each("log_sigmoid", lambda x: -softplus(-x))
each("softsign", lambda x: x / (1 + np.abs(x)))
each("hard_sigmoid", lambda x: cut(x / 6 + 0.5, 0, 1), x=floats(4, 8) * 4)
each("hard_sigmoid", lambda x: cut(0.2 * x + 0.4, 0, 1), slope=0.2, offset=0.4)
each("hard_silu", lambda x: x * cut(x + 3, 0, 6) / 6, x=floats(4, 8) * 4)
each("hard_tanh", lambda x: cut(x, -1, 1))
each("tanh_shrink", lambda x: np.float64(np.longdouble(x) - np.tanh(np.longdouble(x))))
each("soft_shrink", lambda x: np.sign(x) * np.maximum(np.abs(x) - 0.5, 0))
each("hard_shrink", lambda x: np.where(np.abs(x) > 0.5, x, 0))
each("threshold", lambda x: np.where(x > 0.3, x, -2), threshold=0.3, value=-2.0)
each("squareplus", lambda x: (np.longdouble(x) + np.hypot(np.longdouble(x), 2)) / 2)
each("squareplus", lambda x: (np.longdouble(x) + np.hypot(np.longdouble(x), 0.5)) / 2, b=0.25)
each("logit", special.logit, x=floats(4, 8, low=0.02, high=0.98), flags="nolimits")
each("logit", lambda x: special.logit(cut(x, 0.1, 0.9)), x=floats(4, 8, low=0), epsilon=0.1)
each("entropy", special.entr, x=floats(4, 8, low=0.1, high=3), flags="nolimits")
each(
    "sparse_plus",
    lambda x: np.where(x < -1, 0, np.where(x > 1, x, (x + 1) ** 2 / 4)),
    flags="first",
)
sample("glu", [floats(4, 8)], lambda x: x[:, :4] * sigmoid(x[:, 4:]))
sample("glu", [floats(4, 8)], lambda x: x[:2] * sigmoid(x[2:]), axis=0)
sample("swiglu", [floats(4, 8)], lambda x: x[:, :4] * sigmoid(x[:, :4]) * x[:, 4:])
sample("swiglu", [floats(4, 8), floats(4, 8)], lambda x, y: x * sigmoid(x) * y)
sample("geglu", [floats(4, 8), floats(4, 8)], lambda x, y: tanh_gelu(x) * y)
sample("reglu", [floats(4, 8), floats(4, 8)], lambda x, y: np.maximum(x, 0) * y)

# ---- softmax -------------------------------------------------------------------------------------


def softmax(x, axis=-1):
    return special.softmax(x, axis)


MASK = np.array([[True] * 8, [False] * 8, [True, False] * 4, [False] * 7 + [True]])


def masked_softmax(x, mask):
    e = np.where(mask, np.exp(x), 0)
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-300)


def masked_logsumexp(x, mask):
    with np.errstate(divide="ignore"):
        return np.log(np.where(mask, np.exp(x), 0).sum(-1))


sample("softmax", [floats(4, 8)], softmax)
sample("softmax", [floats(2, 3, 4)], lambda x: softmax(x, 1), axis=1)
sample("softmax", [floats(2, 3, 4)], lambda x: softmax(x, (0, 2)), axis=(0, -1))
sample("softmax", [floats(4, 8), MASK], masked_softmax)
sample("log_softmax", [floats(4, 8)], lambda x: special.log_softmax(x, -1))
sample("log_softmax", [floats(4, 8)], lambda x: special.log_softmax(x, 0), axis=0)
sample("logsumexp", [floats(4, 8)], lambda x: special.logsumexp(x))
sample(
    "logsumexp", [floats(4, 8)], lambda x: special.logsumexp(x, 1, keepdims=True), axis=-1,
    keepdims=True,
)  # fmt: skip
sample("logsumexp", [floats(4, 8), MASK], masked_logsumexp, axis=1)
sample("log_mean_exp", [floats(4, 8)], lambda x: np.log(np.exp(x).mean(0)), axis=0)

# ---- normalisation -------------------------------------------------------------------------------


def normalized(x, axes, epsilon):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


def grouped(x, groups, scale=1.0, bias=0.0, epsilon=1e-6):
    n, c = x.shape[0], x.shape[-1]
    parts = x.reshape(n, -1, groups, c // groups)
    return normalized(parts, (1, 3), epsilon).reshape(x.shape) * scale + bias


def batch(x, scale, bias, mean, var, epsilon=1e-5, momentum=0.9):
    axes = tuple(range(x.ndim - 1))
    out = normalized(x, axes, epsilon) * scale + bias
    return (
        out,
        momentum * mean + (1 - momentum) * x.mean(axes),
        momentum * var + (1 - momentum) * x.var(axes),
    )


def batch_inference(x, scale, bias, mean, var, epsilon=1e-5):
    return (x - mean) / np.sqrt(var + epsilon) * scale + bias, mean, var


def first(v):
    return v.transpose(0, 3, 1, 2)


def last(v):
    return v.transpose(0, 2, 3, 1)


sample("layer_norm", [floats(4, 8)], lambda x: normalized(x, -1, 1e-6), flags="big")
sample(
    "layer_norm", [floats(4, 8), floats(8), floats(8)],
    lambda x, s, b: normalized(x, -1, 1e-5) * s + b, flags="big", epsilon=1e-5,
)  # fmt: skip
for begin in (1, 2, 3):
    axes = tuple(range(begin, 4))
    sample(
        "layer_norm", [floats(2, 3, 4, 5), floats(*(2, 3, 4, 5)[begin:])],
        lambda x, s, a=axes: (normalized(x, a, 1e-6) * s, x.mean(a), x.var(a)), flags="big",
        axis=axes, statistics=True,
    )  # fmt: skip
sample(
    "rms_norm", [floats(4, 8), floats(8)],
    lambda x, s: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * s, flags="big",
)  # fmt: skip
sample(
    "rms_norm", [floats(3, 4, 5)],
    lambda x: x / np.sqrt((x**2).mean((1, 2), keepdims=True) + 1e-6), flags="big", axis=(1, 2),
)  # fmt: skip
sample("group_norm", [floats(2, 3, 4, 8)], lambda x: grouped(x, 4), flags="big", groups=4)
sample(
    "group_norm", [floats(2, 3, 8), floats(8), floats(8)], lambda x, s, b: grouped(x, 2, s, b),
    flags="big", groups=2,
)  # fmt: skip
sample(
    "group_norm", [floats(2, 8, 3, 2), floats(8)],
    lambda x, s: first(grouped(last(x), 2, s)), flags="big", groups=2, axis=1,
)  # fmt: skip
sample(
    "group_norm", [floats(2, 3, 8)],
    lambda x: (
        grouped(x, 2), x.reshape(2, 3, 2, 4).mean((1, 3)), x.reshape(2, 3, 2, 4).var((1, 3))
    ), flags="big", groups=2, statistics=True,
)  # fmt: skip
sample(
    "instance_norm", [floats(2, 6, 5, 4), floats(4), floats(4)],
    lambda x, s, b: normalized(x, (1, 2), 1e-6) * s + b, flags="big",
)  # fmt: skip
STATISTICS = floats(4), floats(4, low=0.5, high=2)
sample("batch_norm", [floats(6, 3, 4), floats(4), floats(4), *STATISTICS], batch, flags="big kinks")
sample(
    "batch_norm",
    [floats(6, 1), floats(1), floats(1), floats(1), floats(1)],
    batch,
    flags="big kinks",
)
sample(
    "batch_norm", [floats(3, 2, 5, 4), floats(4), floats(4), *STATISTICS], batch_inference,
    flags="big", train=False,
)  # fmt: skip
sample(
    "batch_norm", [floats(3, 4, 2, 5), floats(4), floats(4), *STATISTICS],
    lambda x, *rest: (first(batch(last(x), *rest)[0]), *batch(last(x), *rest)[1:]),
    flags="big kinks",
    axis=1,
)  # fmt: skip

# ---- linear algebra ------------------------------------------------------------------------------

sample("linear", [floats(2, 3, 4), floats(4, 5)], lambda x, w: x @ w)
sample("linear", [floats(3, 4), floats(4, 5), floats(5)], lambda x, w, b: x @ w + b)
sample("linear", [floats(4), floats(4, 5)], lambda x, w: x @ w)
sample("bmm", [floats(2, 3, 4), floats(2, 4, 5)], lambda x, y: x @ y)
sample("addmm", [floats(3, 5), floats(3, 4), floats(4, 5)], lambda i, x, y: i + x @ y)
sample(
    "addmm", [floats(5), floats(3, 4), floats(4, 5)], lambda i, x, y: 0.3 * i - 2 * (x @ y),
    beta=0.3, alpha=-2.0,
)  # fmt: skip
sample(
    "baddbmm", [floats(2, 3, 5), floats(2, 3, 4), floats(2, 4, 5)],
    lambda i, x, y: 0.5 * i + 2 * (x @ y), beta=0.5, alpha=2.0,
)  # fmt: skip
sample("outer", [floats(3), floats(4)], np.outer)
sample("kron", [floats(2, 3), floats(3, 2)], np.kron)
sample("kron", [floats(3), floats(2, 3, 2)], np.kron)
sample(
    "bilinear", [floats(6, 3), floats(6, 4), floats(5, 3, 4), floats(5)],
    lambda x, y, w, b: np.einsum("ni,oij,nj->no", x, w, y) + b,
)  # fmt: skip
for offset in (0, 2, -1):
    sample("diag", [floats(4)], lambda x, o=offset: np.diag(x, o), offset=offset)
    sample("diag", [floats(4, 5)], lambda x, o=offset: np.diag(x, o), offset=offset)
sample("diag", [floats(3, 3)], lambda x: np.zeros(0), offset=5)
sample("cross", [floats(4, 3), floats(4, 3)], np.cross)

# ---- tables, masks, positions --------------------------------------------------------------------


def rotary(x, positions, interleaved=False):
    d = x.shape[-1]
    angle = positions[..., None, None] * 10000.0 ** (-np.arange(d // 2) * 2 / d)
    out = np.empty_like(x)
    pairs = (
        (np.s_[..., 0::2], np.s_[..., 1::2])
        if interleaved
        else (np.s_[..., : d // 2], np.s_[..., d // 2 :])
    )
    a, b = x[pairs[0]], x[pairs[1]]
    out[pairs[0]] = a * np.cos(angle) - b * np.sin(angle)
    out[pairs[1]] = a * np.sin(angle) + b * np.cos(angle)
    return out


IDS = integers(6, 3, 4)
sample("embedding", [IDS, floats(6, 5)], lambda i, t: t[i])
sample("embedding", [np.array(2), floats(6, 5)], lambda i, t: t[i])
sample(
    "embedding", [np.array([[0, 1, 5], [1, 1, 2]]), floats(6, 5)],
    lambda i, t: np.where((i == 1)[..., None], 0, t[i]), padding_idx=1,
)  # fmt: skip
sample("one_hot", [IDS], lambda i: np.eye(6)[i], num_classes=6)
sample("one_hot", [IDS], lambda i: np.eye(6)[i].transpose(2, 0, 1), num_classes=6, axis=0)
sample("index_select", [floats(5, 3), integers(5, 4)], lambda x, i: x[i])
sample("index_select", [floats(3, 5), integers(5, 4)], lambda x, i: x[:, i], axis=-1)
sample("index_sample", [floats(3, 5), integers(5, 3, 2)], lambda x, i: np.take_along_axis(x, i, 1))
sample("masked_fill", [floats(4, 8), MASK, floats()], lambda x, m, v: np.where(m, v, x))


def written(x, i, v):
    i, v = np.broadcast_arrays(i, v)
    out = x.copy()
    np.put_along_axis(out, i, v, 1)
    return out


WHERE = np.array([[3, 0], [1, 2], [2, 1]])
sample("put_along_axis", [floats(3, 4), WHERE, floats(3, 2)], written, axis=1)
sample("put_along_axis", [floats(3, 4), WHERE[:, :1], floats(1, 1)], written, axis=-1)
sample(
    "masked_select", [floats(4, 8), MASK], lambda x, m: np.append(x[m], [0, 0, 0]),
    size=int(MASK.sum()) + 3,
)  # fmt: skip
sample("masked_select", [floats(4, 8), MASK], lambda x, m: x[m][:5], size=5)
sample("rotary_embedding", [floats(2, 5, 3, 8), np.arange(5)], rotary)
sample(
    "rotary_embedding", [floats(5, 3, 4), np.arange(5) + 7], lambda x, p: rotary(x, p, True),
    interleaved=True,
)  # fmt: skip

# ---- attention -----------------------------------------------------------------------------------


def attention(q, k, v, mask=None, bias=None, causal=False, scale=None):
    groups = q.shape[-2] // k.shape[-2]
    k, v = (np.repeat(x, groups, -2) for x in (k, v))
    scores = np.einsum("...shd,...thd->...hst", q, k) * (scale or 1 / np.sqrt(q.shape[-1]))
    if bias is not None:
        scores = scores + bias
    seen = np.ones(scores.shape, bool) if mask is None else np.broadcast_to(mask, scores.shape)
    if causal:
        s, t = scores.shape[-2:]
        seen = seen & (np.arange(t)[None] <= np.arange(s)[:, None] + t - s)
    return np.einsum("...hst,...thd->...shd", masked_softmax(scores, seen), v)


SEEN = _random.random((2, 1, 6, 7)) < 0.7
SEEN[0, 0, 2] = False
QKV = [floats(2, 6, 4, 8), floats(2, 7, 2, 8), floats(2, 7, 2, 5)]
SELF = [floats(6, 4, 8), floats(6, 4, 8), floats(6, 4, 8)]
for chunk in (None, 3):
    sample("scaled_dot_product_attention", SELF, attention, flags="big", chunk=chunk)
    sample(
        "scaled_dot_product_attention", SELF, lambda q, k, v: attention(q, k, v, causal=True),
        flags="big", causal=True, chunk=chunk,
    )  # fmt: skip
    sample(
        "scaled_dot_product_attention", [*QKV, SEEN], attention, flags="big", chunk=chunk,
    )  # fmt: skip
    sample(
        "scaled_dot_product_attention", QKV,
        lambda q, k, v: attention(q, k, v, causal=True, scale=0.2), flags="big", causal=True,
        scale=0.2, chunk=chunk,
    )  # fmt: skip
sample(
    "scaled_dot_product_attention", [*QKV, SEEN, floats(4, 6, 7)], attention, flags="big",
)  # fmt: skip

# ---- losses --------------------------------------------------------------------------------------


def mean_of(loss, reduction="mean", weight=None):
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (loss.size if weight is None else max(weight.sum(), 1e-300))


def cross_entropy(
    logits, labels, weights=None, ignore=-100, smoothing=0.0, z=0.0, reduction="mean", classes=None
):
    v = logits.shape[-1]
    log_p = special.log_softmax(logits, -1)
    lse = special.logsumexp(logits, -1)
    chosen = np.where((labels >= 0) & (labels < v), labels, 0)
    loss = -(1 - smoothing) * np.take_along_axis(log_p, chosen[..., None], -1)[..., 0]
    loss = loss - smoothing * log_p.mean(-1) + z * lse**2
    weight = np.ones(labels.shape) if weights is None else weights[chosen]
    weight = np.where(labels == ignore, 0, weight)
    return mean_of(loss * weight, reduction, weight)


LABELS = np.array([3, 0, -100, 7, 2])
PROBABILITIES = special.softmax(floats(5, 8), -1)
for reduction in ("mean", "sum", "none"):
    sample(
        "cross_entropy", [floats(5, 8), LABELS],
        lambda x, y, r=reduction: cross_entropy(x, y, reduction=r), reduction=reduction,
    )  # fmt: skip
sample(
    "cross_entropy", [floats(5, 8), LABELS, floats(8, low=0.1)],
    lambda x, y, w: cross_entropy(x, y, w, smoothing=0.1, z=0.01), label_smoothing=0.1, z_loss=0.01,
)  # fmt: skip
sample(
    "cross_entropy", [floats(5, 8), PROBABILITIES],
    lambda x, y: -(y * special.log_softmax(x, -1)).sum(-1).mean(),
)  # fmt: skip
sample(
    "cross_entropy", [floats(5, 8), PROBABILITIES, floats(8, low=0.1)],
    lambda x, y, w: (
        -((0.9 * y + 0.1 / 8) * w * special.log_softmax(x, -1)).sum(-1)
        + 0.01 * special.logsumexp(x, -1) ** 2
    ).sum(), label_smoothing=0.1, z_loss=0.01, reduction="sum",
)  # fmt: skip
sample(
    "cross_entropy", [floats(8, 5), LABELS], lambda x, y: cross_entropy(x.T, y), axis=0,
)  # fmt: skip
sample(
    "label_cross_entropy", [floats(5, 8), integers(8, 5)],
    lambda x, y: cross_entropy(x, y, reduction="none", smoothing=0.2), label_smoothing=0.2,
)  # fmt: skip
sample(
    "soft_cross_entropy", [floats(5, 8), floats(5, 8)],
    lambda x, y: -(y * special.log_softmax(x, -1)).sum(-1),
)  # fmt: skip
sample(
    "nll_loss", [floats(5, 8), LABELS, floats(8, low=0.1)],
    lambda x, y, w: mean_of(
        -x[np.arange(5), np.maximum(y, 0)] * w[np.maximum(y, 0)] * (y >= 0), "mean",
        w[np.maximum(y, 0)] * (y >= 0),
    ),
)  # fmt: skip


def bce(p, y):
    return -(y * np.log(p) + (1 - y) * np.log1p(-p))


P = floats(4, 8, low=0.05, high=0.95)
Y = floats(4, 8, low=0)
sample("bce_loss", [P, Y], lambda p, y: bce(p, y).mean())
sample("bce_loss", [P, Y, floats(8)], lambda p, y, w: (bce(p, y) * w).sum(), reduction="sum")
sample("binary_entropy", [P, Y], bce)
sample("bce_with_logits", [floats(4, 8), Y], lambda x, y: bce(sigmoid(x), y).mean())
sample(
    "bce_with_logits", [floats(4, 8), Y, floats(4, 8), floats(8, low=0.5, high=3)],
    lambda x, y, w, c: (w * -(c * y * np.log(sigmoid(x)) + (1 - y) * np.log(sigmoid(-x)))),
    reduction="none",
)  # fmt: skip
sample(
    "bce_with_logits", [floats(4), np.array([0.0, 1, -1, 1])],
    lambda x, y: bce(sigmoid(x), y)[[0, 1, 3]].mean(), ignore_index=-1,
)  # fmt: skip
sample("binary_logit_entropy", [floats(4, 8), Y], lambda x, y: bce(sigmoid(x), y))
HARD = (Y > 0.5).astype(float)
sample(
    "sigmoid_focal_loss", [floats(4, 8), HARD],
    lambda x, y: (
        bce(sigmoid(x), y) * np.where(y > 0.5, sigmoid(-x), sigmoid(x)) ** 2
        * np.where(y > 0.5, 0.25, 0.75)
    ).mean(), alpha=0.25,
)  # fmt: skip
sample("log_loss", [P, Y], lambda p, y: -y * np.log(p + 1e-4) - (1 - y) * np.log(1 - p + 1e-4))
TARGETS = PROBABILITIES * (floats(5, 8) > -1)
sample("kl_div", [floats(5, 8), TARGETS], lambda x, y: (special.xlogy(y, y) - x * y).mean())
sample(
    "kl_div", [floats(5, 8), TARGETS], lambda x, y: (special.xlogy(y, y) - x * y).sum() / 5,
    reduction="batchmean",
)  # fmt: skip
sample(
    "kl_div", [floats(5, 8), floats(5, 8)], lambda x, y: np.exp(y) * (y - x), log_target=True,
    reduction="none",
)  # fmt: skip
A, B = floats(4, 8), floats(4, 8)
for reduction in ("mean", "sum", "none"):
    sample(
        "mse_loss", [A, B], lambda x, y, r=reduction: mean_of((x - y) ** 2, r), reduction=reduction
    )
sample("l1_loss", [A, B], lambda x, y: np.abs(x - y).mean())


def huber(d, delta):
    return np.where(np.abs(d) < delta, d * d / 2, delta * (np.abs(d) - delta / 2))


sample("huber_loss", [A, B], lambda x, y: huber(x - y, 0.7).mean(), delta=0.7)
sample("smooth_l1_loss", [A, B], lambda x, y: huber(x - y, 0.7).mean() / 0.7, beta=0.7)
sample("smooth_l1_loss", [A, B], lambda x, y: np.abs(x - y).sum(), beta=0.0, reduction="sum")
sample("log_cosh_loss", [A, B], lambda x, y: np.log(np.cosh(x - y)).mean())
each("log_cosh", lambda x: np.logaddexp(x, -x) - np.log(2))
COUNTS = integers(6, 4, 8).astype(float)
sample("poisson_nll_loss", [A, COUNTS], lambda x, y: (np.exp(x) - y * x).mean())
sample(
    "poisson_nll_loss", [P, COUNTS],
    lambda x, y: (
        x - y * np.log(x + 1e-8)
        + np.where(y > 1, special.xlogy(y, y) - y + np.log(2 * np.pi * np.maximum(y, 1)) / 2, 0)
    ).mean(), log_input=False, full=True,
)  # fmt: skip
sample(
    "gaussian_nll_loss", [A, B, floats(4, 8, low=0.5, high=2)],
    lambda m, y, v: -normal.logpdf(y, m, np.sqrt(v)).mean(), full=True,
)  # fmt: skip
SIGNS = signs(4, 8)
sample("hinge_loss", [A, SIGNS], lambda x, y: np.maximum(0, 1 - x * y).mean())
sample("soft_margin_loss", [A, SIGNS], lambda x, y: np.log1p(np.exp(-x * y)).mean())
sample(
    "margin_ranking_loss", [A, B, SIGNS], lambda x, y, t: np.maximum(0, -t * (x - y) + 0.5).mean(),
    margin=0.5,
)  # fmt: skip
sample(
    "hinge_embedding_loss", [A, SIGNS], lambda x, y: np.where(y > 0, x, np.maximum(0, 1 - x)).mean()
)


def multi_margin(x, y, margin=1.0, p=1):
    n, v = x.shape
    terms = np.maximum(0, margin - x[np.arange(n), y][:, None] + x) ** p
    terms[np.arange(n), y] = 0
    return (terms.sum(1) / v).mean()


sample("multi_margin_loss", [A, integers(8, 4)], multi_margin)
sample(
    "multi_margin_loss", [A, integers(8, 4)], lambda x, y: multi_margin(x, y, 0.5, 2), margin=0.5,
    p=2,
)  # fmt: skip

# ---- norms ---------------------------------------------------------------------------------------


def p_norm(x, p, axis=None, keepdims=False):
    size = np.abs(x)
    if p == 0:
        return (size != 0).astype(float).sum(axis, keepdims=keepdims)
    if p == np.inf:
        return size.max(axis, keepdims=keepdims)
    if p == -np.inf:
        return size.min(axis, keepdims=keepdims)
    return (size**p).sum(axis, keepdims=keepdims) ** (1 / p)


for p, (axis, keepdims) in itertools.product(
    (0, 1, 2, 0.3, 1.5, 3, 3.7, -1, -2, np.inf, -np.inf), ((None, False), (0, True), (-1, False))
):
    sample(
        "p_norm", [floats(4, 6)], lambda x, p=p, a=axis, k=keepdims: p_norm(x, p, a, k), p=p,
        axis=axis, keepdims=keepdims, flags="big",
    )  # fmt: skip
sample("p_norm", [floats()], lambda x: np.abs(x))
sample("squared_l2_norm", [A], lambda x: (x**2).sum())
sample("normalize", [A], lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True), flags="big")
sample(
    "global_norm", [{"w": A, "b": floats(3)}],
    lambda t: np.sqrt((t["w"] ** 2).sum() + (t["b"] ** 2).sum()),
)  # fmt: skip


def clipped(tree, most):
    n = np.sqrt(sum((v**2).sum() for v in tree.values()))
    return {k: v * min(1, most / n) for k, v in tree.items()}


for most in (0.5, 100.0):
    sample(
        "clip_by_global_norm", [{"w": A, "b": floats(3)}], lambda t, m=most: clipped(t, m),
        max_norm=most,
    )  # fmt: skip
sample("clip_by_norm", [A], lambda x: x * min(1, 0.5 / np.linalg.norm(x)), max_norm=0.5)
sample(
    "clip_by_norm", [A],
    lambda x: x * np.minimum(1, 2 / np.linalg.norm(x, axis=1, keepdims=True)), max_norm=2.0, axis=1,
)  # fmt: skip


def cosine(x, y):
    return (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)


sample("cosine_similarity", [A, B], cosine, flags="big")
sample("pairwise_distance", [A, B], lambda x, y: np.linalg.norm(x - y + 1e-6, axis=-1), flags="big")
sample(
    "pairwise_distance", [A, B], lambda x, y: p_norm(x - y + 1e-6, 3, -1, True), p=3, keepdims=True,
    flags="big",
)  # fmt: skip
sample(
    "cosine_embedding_loss", [A, B, signs(4)],
    lambda x, y, t: np.where(t > 0, 1 - cosine(x, y), np.maximum(0, cosine(x, y) + 0.1)).mean(),
    margin=-0.1, flags="big",
)  # fmt: skip
sample(
    "triplet_margin_loss", [A, B, floats(4, 8)],
    lambda a, p, n: np.maximum(
        0, np.linalg.norm(a - p + 1e-6, axis=-1) - np.linalg.norm(a - n + 1e-6, axis=-1) + 1
    ).mean(), flags="big",
)  # fmt: skip

# ---- dropout without chance ----------------------------------------------------------------------

sample("dropout", [A], lambda x: x, deterministic=True)
sample("dropout", [A], lambda x: x * 0.7, deterministic=True, rate=0.3, mode="downscale")
sample("dropout", [A], lambda x: x, rate=0.0)
sample("dropout", [A], lambda x: 0 * x, rate=1.0)
sample("alpha_dropout", [A], lambda x: x, deterministic=True)

# ---- pooling -------------------------------------------------------------------------------------


def windows(x, size, stride, reduce, pad=0, fill=0.0):
    if pad:
        x = np.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)], constant_values=fill)
    rows = range(0, x.shape[1] - size + 1, stride)
    columns = range(0, x.shape[2] - size + 1, stride)
    return np.stack(
        [
            np.stack([reduce(x[:, i : i + size, j : j + size], (1, 2)) for j in columns], 1)
            for i in rows
        ],
        1,
    )


IMAGE = floats(2, 6, 6, 4)
sample("max_pool", [IMAGE], lambda x: windows(x, 2, 2, np.max), window=2, flags="first")
sample(
    "max_pool", [IMAGE], lambda x: windows(x, 3, 2, np.max, 1, -np.inf), window=3, strides=2,
    padding=1, flags="first",
)  # fmt: skip
sample("avg_pool", [IMAGE], lambda x: windows(x, 2, 2, np.mean), window=2)
sample(
    "avg_pool", [IMAGE], lambda x: windows(x, 3, 1, np.nanmean, 1, np.nan), window=3, strides=1,
    padding="SAME",
)  # fmt: skip
sample(
    "avg_pool", [IMAGE], lambda x: windows(x, 3, 1, np.mean, 1), window=3, strides=1, padding=1,
    count_padding=True,
)  # fmt: skip
sample(
    "lp_pool", [IMAGE], lambda x: np.cbrt(windows(np.abs(x) ** 3, 2, 2, np.sum)), window=2, p=3,
    flags="big",
)  # fmt: skip
sample("adaptive_avg_pool", [IMAGE], lambda x: windows(x, 2, 2, np.mean), size=3)
sample(
    "adaptive_avg_pool", [IMAGE],
    lambda x: windows(x, 2, 1, np.mean)[:, [0, 1, 3, 4]][:, :, [0, 1, 3, 4]], size=4,
)  # fmt: skip
sample("adaptive_max_pool", [IMAGE], lambda x: windows(x, 3, 3, np.max), size=2)
sample(
    "interpolate", [IMAGE], lambda x: x.repeat(2, 1).repeat(2, 2), size=12, method="nearest",
)  # fmt: skip
sample(
    "interpolate", [floats(2, 3, 4)],
    lambda x: np.stack([x[:, i] * (1 - f) + x[:, j] * f for i, j, f in (
        (0, 0, 0), (0, 1, 0.25), (0, 1, 0.75), (1, 2, 0.25), (1, 2, 0.75), (2, 2, 0)
    )], 1), size=6,
)  # fmt: skip


def shuffled(x, f):
    n, h, w, c = x.shape
    out = np.empty((n, h * f, w * f, c // f**2))
    for i, j, k in itertools.product(range(f), range(f), range(c // f**2)):
        out[:, i::f, j::f, k] = x[..., k * f * f + i * f + j]
    return out


sample("pixel_shuffle", [IMAGE], lambda x: shuffled(x, 2), factor=2)
sample(
    "pixel_unshuffle", [IMAGE],
    lambda x: np.stack([x[:, i::2, j::2, k] for k in range(4) for i in (0, 1) for j in (0, 1)], -1),
    factor=2,
)  # fmt: skip
sample("channel_shuffle", [IMAGE], lambda x: x[..., [0, 2, 1, 3]], groups=2)

# ---- reductions ----------------------------------------------------------------------------------

CUBE = floats(2, 3, 4)
for axis, keepdims in ((None, False), (1, True), ((0, -1), False), (-1, False)):
    given = {"axis": axis, "keepdims": keepdims}
    for op, fun in (
        ("sum", np.sum), ("mean", np.mean), ("prod", np.prod), ("amax", np.max), ("amin", np.min),
        ("any", np.any), ("all", np.all), ("count_nonzero", np.count_nonzero), ("var", np.var),
        ("std", np.std), ("median", np.median),
    ):  # fmt: skip
        sample(op, [CUBE], lambda x, f=fun, g=given: f(x, **g), flags="big", **given)
sample("var", [CUBE], lambda x: x.var(0, ddof=1), axis=0, ddof=1)
sample("std", [CUBE], lambda x: x.std(2, ddof=1), axis=2, ddof=1, flags="big")
sample("any", [np.array([[1.0, -1.0], [0, 0]])], lambda x: x.any(1), axis=1)
sample("clip", [A, -0.5, 0.7], lambda x, a, b: cut(x, a, b))
sample("clip", [A, floats(8) - 1], lambda x, a: np.maximum(x, a))
sample("clip", [A, None, floats(4, 1) + 1], lambda x, a, b: np.minimum(x, b))
sample("lerp", [A, B, floats(4, 8, low=0)], lambda x, y, w: (1 - w) * x + w * y)
sample("add_n", [[A, B, CUBE[0, 0, 0]]], lambda xs: xs[0] + xs[1] + xs[2])
sample("moving_average", [A, B], lambda x, y: 0.8 * x + 0.2 * y, decay=0.8)

# ---- shapes --------------------------------------------------------------------------------------

sample("concat", [[floats(2, 3), floats(4, 3)]], lambda xs: np.concatenate(xs))
sample("concat", [[floats(2, 3), floats(2, 1)]], lambda xs: np.concatenate(xs, 1), axis=-1)
sample("unbind", [CUBE], lambda x: [x[:, 0], x[:, 1], x[:, 2]], axis=1)
sample("flatten", [CUBE], lambda x: x.reshape(-1))
sample("flatten", [CUBE], lambda x: x.reshape(2, 12), start=1)
sample("flatten", [floats()], lambda x: x.reshape(1))
sample("repeat_interleave", [CUBE], lambda x: x.repeat(3, 1), repeats=3, axis=1)
sample(
    "meshgrid", [[floats(3), floats(), floats(2)]],
    lambda xs: list(np.meshgrid(*map(np.atleast_1d, xs), indexing="ij")),
)  # fmt: skip
