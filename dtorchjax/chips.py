"""What devices can do, as data: the planner's prices and the estimated times come from here.

A link is what one device sends along one mesh axis. Sources: NVIDIA's data sheets of the H100 and
H200 SXM and of the HGX B200 (dense bfloat16 FLOP/s, HBM, NVLink per direction, half of the quoted
two-way figure; ConnectX-7 at 400 Gb/s between hosts); Google Cloud's TPU system architecture pages
and Austin et al., "How to Scale Your Model" (2025), part 2, for FLOP/s, HBM and ICI (a ring uses
both directions of its links). Latencies are of the usual order, not measured, as is all of the
simulated CPU, of which there are eight on a few cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Chip(NamedTuple):
    """One kind of device: FLOP/s (bfloat16, dense), bytes/s of memory, bytes of memory, bytes/s of
    one mesh axis inside a host or slice and between hosts, seconds to start a collective."""

    name: str
    flops: float
    memory_bandwidth: float
    memory: float
    link: float
    network: float
    latency: float


TPU_NETWORK = 6.25e9  # between slices, per chip
CHIPS = {
    "cpu": Chip("simulated CPU", 2e10, 5e9, 3e9, 1e9, 1e9, 20e-6),
    "h100": Chip("H100", 989e12, 3.35e12, 80e9, 450e9, 50e9, 10e-6),
    "h200": Chip("H200", 989e12, 4.8e12, 141e9, 450e9, 50e9, 10e-6),
    "b200": Chip("B200", 2250e12, 8.0e12, 180e9, 900e9, 50e9, 10e-6),
    "v4": Chip("TPU v4", 275e12, 1.2e12, 32e9, 90e9, TPU_NETWORK, 1e-6),
    "v5e": Chip("TPU v5e", 197e12, 0.81e12, 16e9, 90e9, TPU_NETWORK, 1e-6),
    "v5p": Chip("TPU v5p", 459e12, 2.8e12, 96e9, 180e9, TPU_NETWORK, 1e-6),
    "v6e": Chip("TPU v6e", 920e12, 1.6e12, 32e9, 180e9, TPU_NETWORK, 1e-6),
}
NAMES = (
    ("H100", "h100"), ("H200", "h200"), ("B200", "b200"), ("TPU v6", "v6e"), ("TPU v5 lite", "v5e"),
    ("TPU v5e", "v5e"), ("TPU v5", "v5p"), ("TPU v4", "v4"), ("cpu", "cpu"),
)  # fmt: skip
"""How the device kinds that JAX reports begin or what they contain."""


def chip_of(device_kind: str) -> Chip:
    """The figures for a device kind as JAX names it; an unknown accelerator counts as an H100."""
    for part, key in NAMES:
        if part.lower() in device_kind.lower():
            return CHIPS[key]
    return CHIPS["h100"]


class Speeds(NamedTuple):
    """What a mesh makes of it, in bytes on its fastest axis: the planner's unit.

    `latency`: the bytes that could be sent while a collective starts; `slowness`: how much longer a
    byte takes on each axis; `memory`: bytes sent in the time that one byte of memory takes.
    """

    latency: float
    slowness: tuple[float, ...]
    memory: float


def crosses_hosts(mesh: Any) -> tuple[bool, ...]:
    """Per mesh axis: whether neighbours along it belong to different processes."""
    found = []
    for axis in range(mesh.devices.ndim):
        lines = mesh.devices.swapaxes(axis, -1).reshape(-1, mesh.devices.shape[axis])
        found.append(any(len({d.process_index for d in line}) > 1 for line in lines))
    return tuple(found)


def links(mesh: Any) -> tuple[float, ...]:
    """Bytes per second that one device sends along each mesh axis."""
    first = mesh.devices.flat[0]
    chip = chip_of(first.device_kind)
    return tuple(
        chip.network if crosses and first.platform == "gpu" else chip.link
        for crosses in crosses_hosts(mesh)
    )


def simulated(axes: int) -> Speeds:
    """The planner's prices on a mesh of simulated devices with so many axes."""
    chip = CHIPS["cpu"]
    return _speeds(chip, (chip.link,) * axes)


def speeds_of(mesh: Any) -> Speeds:
    """The planner's prices on a mesh."""
    return _speeds(chip_of(mesh.devices.flat[0].device_kind), links(mesh))


def _speeds(chip: Chip, speeds: tuple[float, ...]) -> Speeds:
    fastest = max(speeds, default=chip.link)
    slowness = tuple(fastest / speed for speed in speeds)
    return Speeds(chip.latency * fastest, slowness, 0.5 * fastest / chip.memory_bandwidth)


def seconds(sent: float, axes: Sequence[int], mesh: Any) -> float:
    """The estimated time of one collective that sends so many bytes over these mesh axes."""
    speeds = links(mesh)
    chip = chip_of(mesh.devices.flat[0].device_kind)
    return chip.latency + sent / min((speeds[a] for a in axes), default=chip.link)
