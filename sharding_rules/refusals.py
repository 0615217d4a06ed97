"""Primitives that a device cannot do in part, and why."""

from __future__ import annotations

from dtorchjax.registry import refuse

refuse(
    "rng_uniform",
    because="its numbers come from each device's own state; use jax.random with a key",
)
refuse(
    "after_all create_token",
    because="effects in an order cannot run on several devices, as in jax.jit",
)
refuse(
    "get swap addupdate",
    because="a mutable reference has no placement; return the new value instead",
)
refuse(
    "all_gather all_to_all axis_index pmax pmin ppermute psum psum_scatter reduce_scatter "
    "ragged_all_to_all pbroadcast pvary all_gather_invariant psum_invariant",
    because="dt.jit takes whole-array programs and makes the collectives itself",
)
