"""gather and scatter-add: a lookup in a table whose rows are sharded masks what is not its own."""

from __future__ import annotations

from jax import lax
from jax import numpy as jnp

from dtorchjax.registry import local, rule


def batch_factors(indices, batching, partner):
    """The factors of the index array but its last dim, batching dims named as the operand's."""
    return indices.whole(len(indices) - 1).shared(list(batching), partner)


@rule("gather", linear="0")
def _(table, indices, *, dimension_numbers, slice_sizes, out, **_):
    """v d, b 1! -> b d: sharding v leaves a sum of masked lookups"""
    n = dimension_numbers
    indices = batch_factors(indices, n.start_indices_batching_dims, table[n.operand_batching_dims])
    windows = [
        d
        for d in range(len(table))
        if d not in n.collapsed_slice_dims and d not in n.operand_batching_dims
    ]
    result = [""] * len(out[0])
    for d, o in zip(windows, n.offset_dims, strict=True):
        whole = d in n.start_index_map or slice_sizes[d] != table.shape[d]
        result[o] = f"window{d}!" if whole else table.factors[d]
        table = table.whole(d) if whole else table
    rest = iter(indices[:-1])
    result = [factor or next(rest) for factor in result]
    fixed = [d for d in n.collapsed_slice_dims if d not in n.start_index_map]
    return f"{table.whole(*fixed)}, {indices} -> {' '.join(result) or '-'}"


@local("gather")
def _(call, table, indices):
    n, mode = call.params["dimension_numbers"], call.params["mode"]
    full, part = call.in_avals[0].shape, table.shape
    windows = [
        d
        for d in range(len(full))
        if d not in n.collapsed_slice_dims and d not in n.operand_batching_dims
    ]
    sizes = tuple(
        part[d] if d in windows and s == full[d] else s
        for d, s in enumerate(call.params["slice_sizes"])
    )
    mine = outside = None
    for column, d in enumerate(n.start_index_map):
        shard, parts = call.shard(call.inputs[0], d)
        if parts == 1 or d not in n.collapsed_slice_dims:
            continue
        index = indices[..., column]
        if mode == lax.GatherScatterMode.FILL_OR_DROP:
            bad = (index < 0) | (index >= full[d])
            outside = bad if outside is None else outside | bad
        index = jnp.clip(index, 0, full[d] - 1) - shard * part[d]
        here = (index >= 0) & (index < part[d])
        mine = here if mine is None else mine & here
        indices = indices.at[..., column].set(jnp.clip(index, 0, part[d] - 1))
    found = call.bind(table, indices, slice_sizes=sizes)
    if mine is None:
        return found
    spread = lambda mask: jnp.expand_dims(mask, n.offset_dims)  # noqa: E731
    found = jnp.where(spread(mine), found, jnp.zeros_like(found))
    if outside is not None:  # one device of those that hold the table's parts says the fill value
        owners = [a for d in n.start_index_map for a in call.inputs[0].axes_on(d)]
        fill = call.params["fill_value"]
        if fill is None:
            fill = jnp.nan if jnp.issubdtype(found.dtype, jnp.inexact) else 0
            if jnp.issubdtype(found.dtype, jnp.signedinteger):
                fill = jnp.iinfo(found.dtype).min
            elif jnp.issubdtype(found.dtype, jnp.unsignedinteger):
                fill = jnp.iinfo(found.dtype).max
        value = jnp.where(call.position(tuple(owners)) == 0, jnp.asarray(fill, found.dtype), 0)
        found = jnp.where(spread(outside), value.astype(found.dtype), found)
    return found


@rule("scatter-add", linear="0 2")
def _(table, indices, updates, *, dimension_numbers, **_):
    """v d, b 1!, b d -> v d: rows outside a device's part are dropped there

    Sharding b leaves a partial sum, so the table that is added to must be one as well.
    """
    n = dimension_numbers
    indices = batch_factors(
        indices, n.scatter_indices_batching_dims, table[n.operand_batching_dims]
    )
    windows = [
        d
        for d in range(len(table))
        if d not in n.inserted_window_dims and d not in n.operand_batching_dims
    ]
    update = [""] * len(updates)
    for d, u in zip(windows, n.update_window_dims, strict=True):
        whole = d in n.scatter_dims_to_operand_dims or updates.shape[u] != table.shape[d]
        update[u] = f"window{d}!" if whole else table.factors[d]
        table = table.whole(d) if whole else table
    rest = iter(range(len(indices) - 1))
    where = {u: next(rest) for u, factor in enumerate(update) if not factor}
    update = [factor or indices.factors[where[u]] for u, factor in enumerate(update)]
    batching = set(n.scatter_indices_batching_dims)
    sums = [f"P, S{i}, S{u} -> P" for u, i in where.items() if i not in batching]
    loose = [f"i{i}!" if i not in batching else f for i, f in enumerate(indices.factors[:-1])]
    renamed = dict(zip(indices.factors[:-1], loose, strict=True))
    update = [renamed.get(f, f) for f in update]
    fixed = [d for d in n.inserted_window_dims if d not in n.scatter_dims_to_operand_dims]
    table = table.whole(*fixed)
    text = (
        f"{table}, {' '.join([*loose, indices.factors[-1]])}, {' '.join(update) or '-'} -> {table}"
    )
    return text, sums


@local("scatter-add")
def _(call, table, indices, updates):
    n, mode = call.params["dimension_numbers"], call.params["mode"]
    for column, d in enumerate(n.scatter_dims_to_operand_dims):
        shard, parts = call.shard(call.inputs[0], d)
        if parts == 1:
            continue
        index, full, part = indices[..., column], call.in_avals[0].shape[d], table.shape[d]
        if mode == lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, full - 1)
        index = index - shard * part
        index = jnp.where((index >= 0) & (index < part), index, part)  # past the end: dropped
        indices = indices.at[..., column].set(index)
        mode = lax.GatherScatterMode.FILL_OR_DROP
    return call.bind(table, indices, updates, mode=mode)
