"""Tokens to experts and back (GShard, Lepikhin et al. 2020), with experts on several devices.

Which tokens an expert takes does not depend on the devices: it takes the first `capacity` of those
that chose it, in the order of the tokens (of their choices, within a token), and drops the rest.
"""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp

from dtorchjax.collectives import (
    all_gather,
    all_to_all,
    axes_of,
    axis_index,
    axis_size,
    psum_scatter,
)
from dtorchjax.dfunction import dfunction


@dfunction(rule="t! d, t! k! -> e! c! d", extra=("e: S0, S0 -> S0",))
def dispatch(
    tokens: Any, expert_index: Any, *, n_experts: int, capacity: int, groups: int = 1
) -> Any:
    """The tokens of every expert, in order, followed by zeros.

    tokens [t, d], expert_index [t, k] ints (the experts that each token chose, any other number for
    none) -> [n_experts, groups * capacity, d] in the dtype of tokens. Each of `groups` equal groups
    of successive tokens has `capacity` places of its own in every expert. Linear in the tokens.

    Sharded over n devices on t, the result is on the experts. If n divides `groups`, that is one
    all-to-all of a device's n_experts * groups / n * capacity * d numbers. Otherwise a place may
    depend on the tokens of all devices, and no exchange of fixed size is smaller in the worst case
    than an all-gather of the tokens, t * d numbers, and of expert_index. d may be sharded too.

    Raises ValueError where `groups` does not divide t, or n not n_experts.

    Source: Lepikhin et al. 2020, GShard, section 2.2.

    >>> tokens = jnp.array([[1.0], [2.0], [3.0]])
    >>> index = jnp.array([[0], [1], [0]])
    >>> dispatch(tokens, index, n_experts=2, capacity=2)[..., 0].tolist()
    [[1.0, 3.0], [2.0, 0.0]]
    """
    axes = axes_of("e")
    local = _local_groups(groups, axes)
    if local:
        places = _places(expert_index, n_experts, capacity, local)
        return all_to_all(_take(tokens, places, n_experts, local * capacity), axes, 0, 1)
    places = _places(all_gather(expert_index, axes), n_experts, capacity, groups)
    mine = _mine(places, _share(n_experts, axes), groups * capacity, axes)
    return _take(all_gather(tokens, axes), mine, _share(n_experts, axes), groups * capacity)


@dfunction(rule="e! c! d, t! k!, t! k! -> t! d", extra=("e: S0, S0, S0 -> S0",))
def combine(expert_outputs: Any, expert_index: Any, weights: Any, *, groups: int = 1) -> Any:
    """The weighted sum, for every token, of what its experts made of it.

    expert_outputs [n_experts, groups * capacity, d], placed as `dispatch` places tokens,
    expert_index [t, k] as there, weights [t, k] -> [t, d] in the dtype of expert_outputs; summed in
    float32 at least. A choice that was dropped counts as zeros: so a token that no expert took
    comes back as zeros.

    Sharded over n devices on the experts, the result is on t. If n divides `groups`, that is one
    all-to-all of a device's outputs; otherwise a reduce-scatter of t * d numbers and an all-gather
    of expert_index and weights. d may be sharded too.

    Raises ValueError where `groups` does not divide t or the places of an expert.

    Source: Lepikhin et al. 2020, GShard, section 2.2.

    >>> outputs, index = jnp.array([[[1.0], [3.0]], [[2.0], [0.0]]]), jnp.array([[0], [1], [0]])
    >>> combine(outputs, index, jnp.full((3, 1), 0.5))[:, 0].tolist()
    [0.5, 1.0, 1.5]
    """
    axes = axes_of("e")
    local = _local_groups(groups, axes)
    share, room = expert_outputs.shape[:2]
    if room % groups:
        raise ValueError(f"{groups} groups do not divide the {room} places of an expert")
    n_experts, capacity = share * axis_size(axes), room // groups
    if local:
        places = _places(expert_index, n_experts, capacity, local)
        outputs = all_to_all(expert_outputs, axes, 1, 0)
        return _weighted(outputs, places, weights).astype(expert_outputs.dtype)
    places = _places(all_gather(expert_index, axes), n_experts, capacity, groups)
    terms = _weighted(expert_outputs, _mine(places, share, room, axes), all_gather(weights, axes))
    return psum_scatter(terms.astype(expert_outputs.dtype), axes)


def _local_groups(groups: int, axes: tuple[str, ...]) -> int:
    """How many whole groups each device has; 0 if groups are spread over devices."""
    return 0 if groups % axis_size(axes) else groups // axis_size(axes)


def _share(n_experts: int, axes: tuple[str, ...]) -> int:
    size = axis_size(axes)
    if n_experts % size:
        raise ValueError(f"{n_experts} experts cannot be shared out to {size} devices")
    return n_experts // size


def _places(expert_index: Any, n_experts: int, capacity: int, groups: int) -> Any:
    """The place of every choice [t, k] among those of all experts; past the end if it has none.

    The places of an expert lie together, and among them those of a group.
    """
    tokens, choices = expert_index.shape
    if tokens % groups:
        raise ValueError(f"{groups} groups do not divide {tokens} tokens")
    expert = expert_index.astype(jnp.int32)
    group = _count(tokens)[:, None] // (tokens // groups)
    known = (expert >= 0) & (expert < n_experts)
    queue = jnp.where(known, expert * groups + group, n_experts * groups).reshape(-1)
    order = jnp.argsort(queue, stable=True)
    ahead = jnp.searchsorted(queue[order], queue[order])  # where this queue starts
    position = jnp.zeros_like(queue).at[order].set(_count(len(queue)) - ahead.astype(jnp.int32))
    place = queue * capacity + position
    room = n_experts * groups * capacity
    return jnp.where(known.reshape(-1) & (position < capacity), place, room).reshape(
        tokens, choices
    )


def _count(n: int) -> Any:
    return jnp.arange(n, dtype=jnp.int32)


def _mine(places: Any, share: int, room: int, axes: tuple[str, ...]) -> Any:
    """The places among those of this device's experts; past the end where they are elsewhere."""
    here = places - axis_index(axes) * (share * room)
    return jnp.where((here >= 0) & (here < share * room), here, share * room)


def _take(tokens: Any, places: Any, n_experts: int, room: int) -> Any:
    """[n_experts, room, d]: at each place its token, or zeros."""
    count, choices = places.shape
    source = jnp.repeat(_count(count), choices)
    token_at = (
        jnp.full(n_experts * room, count, jnp.int32).at[places.reshape(-1)].set(source, mode="drop")
    )
    rows = tokens.at[token_at].get(mode="fill", fill_value=0)
    return rows.reshape(n_experts, room, -1)


def _weighted(outputs: Any, places: Any, weights: Any) -> Any:
    """[t, d]: the weighted sum of the outputs at each token's places."""
    wide = jnp.promote_types(jnp.result_type(outputs, weights), jnp.float32)
    rows = outputs.reshape(-1, outputs.shape[-1])
    total: Any = 0
    for choice in range(places.shape[1]):  # one after the other: [t, k, d] may be large
        taken = rows.at[places[:, choice]].get(mode="fill", fill_value=0)
        total += taken.astype(wide) * weights[:, choice, None].astype(wide)
    return total
