"""gather and scatters: a lookup in a table whose rows are sharded masks what is not its own."""

from __future__ import annotations

from jax import lax
from jax import numpy as jnp

from dtorchjax import _jax
from dtorchjax.registry import local, rule

FILL, CLIP = lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.CLIP


def batch_factors(indices, batching, partner):
    """The factors of the index array but its last dim, batching dims named as the operand's."""
    return indices.whole(len(indices) - 1).shared(list(batching), partner)


def window_dims(rank, *without):
    gone = {d for group in without for d in group}
    return [d for d in range(rank) if d not in gone]


def wide(indices):
    """Indices that can hold any position in a table and negative offsets from it."""
    if indices.dtype.itemsize > 4 or indices.dtype == jnp.int32:
        return indices
    if indices.dtype == jnp.uint32:
        indices = jnp.minimum(indices, jnp.uint32(jnp.iinfo(jnp.int32).max))
    return indices.astype(jnp.int32)


@rule("gather", linear="0")
def _(table, indices, *, dimension_numbers, slice_sizes, out, **_):
    """v d, b 1! -> b d: sharding v leaves a sum of masked lookups"""
    n = dimension_numbers
    indices = batch_factors(indices, n.start_indices_batching_dims, table[n.operand_batching_dims])
    windows = window_dims(len(table), n.collapsed_slice_dims, n.operand_batching_dims)
    result = [""] * len(out[0])
    for d, o in zip(windows, n.offset_dims, strict=True):
        whole = slice_sizes[d] != table.shape[d]  # else it starts at 0, whatever the index
        result[o] = f"window{d}!" if whole else table.factors[d]
        table = table.whole(d) if whole else table
    rest = iter(indices[:-1])
    result = [factor or next(rest) for factor in result]
    fixed = [d for d in n.collapsed_slice_dims if d not in n.start_index_map]
    found = [d for d in n.collapsed_slice_dims if d in n.start_index_map]
    # truth values have no sum: what is masked is False, and the largest counts
    rows = [f"S{d}, R -> P(max)" for d in found if table.dtype.name == "bool"]
    return f"{table.whole(*fixed)}, {indices} -> {' '.join(result) or '-'}", rows


@local("gather", uneven=True)
def _(call, table, indices):
    n, mode, full = call.params["dimension_numbers"], call.params["mode"], call.in_avals[0].shape
    where = call.inputs[0]
    windows = window_dims(len(full), n.collapsed_slice_dims, n.operand_batching_dims)
    sizes = tuple(
        table.shape[d] if d in windows and s == full[d] else s
        for d, s in enumerate(call.params["slice_sizes"])
    )
    sharded = [d for d in n.start_index_map if where.axes_on(d) and d in n.collapsed_slice_dims]
    holders = tuple(a for d in sharded for a in where.axes_on(d)) + where.partial_axes()
    if not sharded and not (mode == FILL and holders):
        return call.bind(table, indices, slice_sizes=sizes)
    indices = wide(indices)
    mine = jnp.ones(indices.shape[:-1], bool)
    outside = jnp.zeros(indices.shape[:-1], bool)
    columns = []
    for column, d in enumerate(n.start_index_map):
        index, last = indices[..., column], full[d] - call.params["slice_sizes"][d]
        outside |= (index < 0) | (index > last)
        index = jnp.clip(index, 0, last)
        if d in sharded:
            first, count = call.span(where, full, d)
            index = index - first
            mine &= (index >= 0) & (index < count)
            index = jnp.clip(index, 0, table.shape[d] - 1)
        columns.append(index)
    found = call.bind(
        table, jnp.stack(columns, -1), slice_sizes=sizes, mode=CLIP,
        indices_are_sorted=False, unique_indices=False,
    )  # fmt: skip

    def spread(mask):
        return jnp.expand_dims(mask, n.offset_dims)

    if mode == FILL:
        # the fill value counts once: on one of the devices whose results add up
        fill = jnp.where(call.position(holders) == 0, fill_value(call, found.dtype), 0)
        found = jnp.where(spread(outside), fill.astype(found.dtype), found)
        mine |= outside
    return jnp.where(spread(mine), found, jnp.zeros_like(found))


def fill_value(call, dtype):
    """What a lookup outside the table gives, as jax.lax.gather documents it."""
    value = call.params["fill_value"]
    if value is None and jnp.issubdtype(dtype, jnp.inexact):
        value = jnp.nan
    elif value is None and jnp.issubdtype(dtype, jnp.integer):
        bounds = jnp.iinfo(dtype)
        value = bounds.min if jnp.issubdtype(dtype, jnp.signedinteger) else bounds.max
    return jnp.asarray(True if value is None else value, dtype)


def scatter(names: str, shared: str = "", **kinds) -> None:
    """`shared`: placements of table and result that let b be sharded, such as `P -> P`."""

    @rule(names, **kinds)
    def _(table, indices, updates, *, dimension_numbers, **_):
        """v d, b! 1!, b! d -> v d: rows outside a device's part are dropped there"""
        n = dimension_numbers
        indices = batch_factors(
            indices, n.scatter_indices_batching_dims, table[n.operand_batching_dims]
        )
        windows = window_dims(len(table), n.inserted_window_dims, n.operand_batching_dims)
        update = [""] * len(updates)
        for d, u in zip(windows, n.update_window_dims, strict=True):
            whole = updates.shape[u] != table.shape[d]  # else it starts at 0, whatever the index
            update[u] = f"window{d}!" if whole else table.factors[d]
            table = table.whole(d) if whole else table
        loops = [u for u, factor in enumerate(update) if not factor]
        batching = set(n.scatter_indices_batching_dims)
        before, _, after = shared.partition(" -> ")
        rows = [
            f"{before}, S{i}, S{u} -> {after}"
            for i, u in enumerate(loops)
            if i not in batching and shared
        ]
        factors = [f if i in batching else f"{f}!" for i, f in enumerate(indices.factors[:-1])]
        for i, u in enumerate(loops):
            update[u] = factors[i]
        fixed = [d for d in n.inserted_window_dims if d not in n.scatter_dims_to_operand_dims]
        table = table.whole(*fixed)
        where = " ".join([*factors, indices.factors[-1]])
        return f"{table}, {where}, {' '.join(update) or '-'} -> {table}", rows

    @local(names, uneven=True)
    def _(call, table, indices, updates):
        n, mode, full = (
            call.params["dimension_numbers"],
            call.params["mode"],
            call.in_avals[0].shape,
        )
        where = call.inputs[0]
        # XLA on the CPU (jaxlib 0.10) merges a slice into a scatter and then lets a dropped index
        # write into the slice's last row; the slice may come from a redistribution to this row
        (table,) = _jax.optimization_barrier([table])
        searched = [d for d in n.scatter_dims_to_operand_dims if d in n.inserted_window_dims]
        sharded = [d for d in searched if where.axes_on(d)]
        if not sharded:
            return call.bind(table, indices, updates)
        indices = wide(indices)
        windows = window_dims(len(full), n.inserted_window_dims, n.operand_batching_dims)
        extent = dict.fromkeys(range(len(full)), 1)
        extent |= {
            d: call.in_avals[2].shape[u] for d, u in zip(windows, n.update_window_dims, strict=True)
        }
        columns = []
        for column, d in enumerate(n.scatter_dims_to_operand_dims):
            index = indices[..., column]
            if mode == CLIP:
                index = jnp.clip(index, 0, full[d] - extent[d])
            if d in sharded:
                first, count = call.span(where, full, d)
                index = index - first
                here = (index >= 0) & (index < count)
                index = jnp.where(here, index, table.shape[d])  # dropped
            columns.append(index)
        return call.bind(
            table, jnp.stack(columns, -1), updates, mode=FILL,
            indices_are_sorted=False, unique_indices=False,
        )  # fmt: skip


# The table counts once, so where updates are sharded it must hold terms or not count when it is
# held by many.
scatter("scatter-add scatter-sub", linear="0 2", shared="P -> P")
scatter("scatter-max", shared="R -> P(max)")
scatter("scatter-min", shared="R -> P(min)")
scatter("scatter-mul", linear="0")
scatter("scatter", linear="0 2", moves=True)
