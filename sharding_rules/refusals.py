"""Primitives that a device cannot do in part, and why."""

from __future__ import annotations

from dtorchjax.registry import refuse

refuse("shard_map", because="a shard_map inside dt.jit is not supported yet; call it outside")
refuse(
    "debug_callback debug_print io_callback pure_callback",
    because="callbacks inside dt.jit are not supported yet; return the value instead",
)
refuse("device_put", because="say where values go with dt.redistribute instead")
refuse("custom_linear_solve", because="linear solves with a function are not supported yet")
refuse(
    "all_gather all_to_all axis_index pmax pmin ppermute psum psum_scatter reduce_scatter",
    because="dt.jit takes whole-array programs and makes the collectives itself",
)
