"""Meshes and simulated devices."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

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


def init_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 60,
    **options: Any,
) -> None:
    """Join the other processes of this program: before anything else uses jax.

    `jax.distributed.initialize`, which finds out by itself under SLURM, Open MPI, Kubernetes and
    on Cloud TPUs, and from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which
    `dtorchjax launch` sets; anywhere else give the three arguments. A program that is started
    alone, outside of all these, stays alone. `timeout`: seconds after which a process that
    has gone counts as lost, and every other one ends with an error. `options` are those of
    `jax.distributed.initialize`.

    Afterwards `jax.devices()` are all processes' devices, `dt.init_device_mesh` spans them, and
    every process must run the same program. Raises RuntimeError if jax has started, ValueError for
    a part of the three arguments.
    """
    if jax.distributed.is_initialized():
        return
    names = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
    given = coordinator_address, num_processes, process_id
    if given == (None, None, None):
        given = coordinator_address, num_processes, process_id = _from_environment(names)
    if any(x is None for x in given) and given != (None, None, None):
        raise ValueError(
            "init_distributed: give coordinator_address, num_processes and process_id (or "
            f"{', '.join(names)}), or none of them, not {given}"
        )
    if coordinator_address is None and not _jax.in_a_cluster():
        return
    if _jax.started():
        raise RuntimeError(
            "jax has started alone: call dt.init_distributed() first, before any array is made or "
            "jax.devices() is asked"
        )
    jax.distributed.initialize(
        coordinator_address, num_processes, process_id,
        heartbeat_timeout_seconds=max(1, round(timeout)), **options,
    )  # fmt: skip


def _from_environment(names: Sequence[str]) -> tuple[str | None, int | None, int | None]:
    address, *numbers = (os.environ.get(name) for name in names)
    count, number = (None if n is None else int(n) for n in numbers)
    return address, count, number
