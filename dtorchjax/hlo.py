"""What a compiled program really sends: collectives read from its optimized HLO text."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ITEM = dict(
    pred=1, s8=1, u8=1, s16=2, u16=2, f16=2, bf16=2, s32=4, u32=4, f32=4, s64=8, u64=8, f64=8, c64=8
)
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)$")


class Sent(NamedTuple):
    """One collective: `group` devices take part; `sent` bytes by one device in one execution;
    `groups` of devices by number."""

    kind: str
    group: int
    sent: float
    times: int
    groups: list[list[int]]


def size_of(types: str) -> int:
    """Bytes of all arrays in a type, tuples included."""
    return sum(
        ITEM[name] * math.prod(int(d) for d in dims.split(",") if d)
        for name, dims in ARRAY.findall(types)
        if name in ITEM
    )


def sent(kind: str, n: int, result: int) -> float:
    """Bytes that one device sends with ring algorithms, from the bytes of its result."""
    return {
        "all-reduce": 2 * result * (n - 1) / n,
        "all-gather": result * (n - 1) / n,
        "reduce-scatter": result * (n - 1),
        "all-to-all": result * (n - 1) / n,
        "collective-permute": result,
    }[kind]


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    name, entry = "", ""
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.-]+) .*\{$", line):
            name = head[2]
            found[name] = []
            entry = name if head[1] else entry
        elif name and line.startswith(" "):
            found[name].append(line)
    return found, entry


def groups(rest: str, devices: int) -> list[list[int]]:
    """The groups of devices, by number in the mesh, among which a collective runs."""
    if listed := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", rest):
        return [
            [int(d) for d in g.split(",") if d.strip()]
            for g in re.findall(r"\{([\d, ]*)\}", listed[1])
        ]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, whole = ([int(n) for n in iota[k].split(",")] for k in (1, 2))
        order = [int(n) for n in iota[3].split(",")] if iota[3] else list(range(len(whole)))
        numbers = np.arange(math.prod(whole)).reshape(whole).transpose(order).reshape(shape)
        return numbers.reshape(shape[0], -1).tolist()
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        pairs = [part.strip().split("=") for part in meshed[1].split(",")]
        names = [k.strip("'\" ") for k, _ in pairs]
        sizes = [int(v) for _, v in pairs]
        over = [names.index(a.strip("'\" ")) for a in meshed[2].split(",") if a.strip()]
        return groups_over(over, sizes)
    return [list(range(devices))]


def groups_over(axes: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The groups of devices of a mesh, by number, that differ in these axes only."""
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    rest = [a for a in range(len(sizes)) if a not in axes]
    count = math.prod(sizes[a] for a in axes)
    return numbers.transpose([*rest, *axes]).reshape(-1, count).tolist()


def axes_of(found: list[list[int]], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The mesh axes over which such groups run; None if they follow no axes."""
    wanted = {frozenset(group) for group in found}
    usable = [a for a, n in enumerate(sizes) if n > 1]
    for count in range(len(usable) + 1):
        for axes in itertools.combinations(usable, count):
            if {frozenset(g) for g in groups_over(axes, sizes)} == wanted:
                return axes
    return None


def collectives(text: str) -> list[Sent]:
    """All collectives; in loops as often as they run, of a conditional the costliest branch."""
    parts, entry = computations(text)
    count = re.search(r"num_partitions=(\d+)", text)
    devices = int(count[1]) if count else 1

    def walk(name: str, times: int) -> list[Sent]:
        found: list[Sent] = []
        for line in parts.get(name, ()):
            match = INSTRUCTION.match(line)
            if match is None:
                continue
            _, types, operation, rest = match.groups()
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                among = groups(rest, devices)
                n = len(among[0])
                found.append(Sent(kind, n, sent(kind, n, size_of(types)), times, among))
            elif operation == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
                body = re.search(r"body=%?([\w.-]+)", rest)
                assert body is not None, line
                found += walk(body[1], times * (int(trips[1]) if trips else 1))
            elif operation == "conditional":
                names = re.findall(r"(?:true|false)_computation=%?([\w.-]+)", rest)
                if several := re.search(r"branch_computations=\{([^}]*)\}", rest):
                    names += [n.strip(" %") for n in several[1].split(",")]
                branches = [walk(n, times) for n in names]
                found += max(branches, key=lambda b: sum(c.sent * c.times for c in b))
            else:
                for called in re.findall(r"(?:to_apply|calls)=%?([\w.-]+)", rest):
                    found += walk(called, times)
        return found

    return walk(entry, 1)


def collective_bytes(text: str) -> float:
    """Bytes that one device sends in one execution of the program."""
    return sum(c.sent * c.times for c in collectives(text))
