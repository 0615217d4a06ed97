"""Meshes and simulated devices."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from dtorchjax import _jax
from dtorchjax.errors import PlacementError


def init_device_mesh(shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """A `jax.sharding.Mesh` of `shape` over this program's devices, with Auto axes.

    Raises PlacementError with the fix if there are too few devices.
    """
    shape, axis_names = tuple(shape), tuple(axis_names)
    if len(shape) != len(axis_names):
        raise PlacementError(f"mesh shape {shape} and axis names {axis_names} differ in length")
    needed, there = math.prod(shape), jax.device_count()
    if needed > there:
        raise PlacementError(
            f"a mesh of shape {shape} needs {needed} devices, this process has {there} "
            f"({jax.default_backend()}). Simulate them on the CPU: call "
            f"dt.simulate_devices({needed}) before anything else uses jax, or set "
            f'XLA_FLAGS="--xla_force_host_platform_device_count={needed}"'
        )
    devices = jax.devices()[:needed] if needed < there else None
    return jax.make_mesh(
        shape, axis_names, axis_types=(AxisType.Auto,) * len(shape), devices=devices
    )


def simulate_devices(count: int) -> None:
    """Make this process see `count` CPU devices. Only before jax has started.

    Raises RuntimeError if jax runs already with another number of devices.
    """
    if _jax.started():
        if jax.device_count() >= count:
            return
        raise RuntimeError(
            f"jax has started with {jax.device_count()} devices; call dt.simulate_devices({count}) "
            "before the first use of jax, or set "
            f'XLA_FLAGS="--xla_force_host_platform_device_count={count}"'
        )
    flags = os.environ.get("XLA_FLAGS", "")
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags).strip()
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
