"""Several processes of one program on one machine: `dtorchjax launch -n 2 -- train.py`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from .demo import UsageError

PATIENCE = 10.0
"""Seconds that processes get to end by themselves when one has failed."""


def launch(count: int, devices_per_process: int | None, command: Sequence[str]) -> int:
    """Run `count` processes of a command and return 0, or the first code that is not 0.

    `command`: a file (`train.py --steps 3`), `-m module ...` or a command of `dtorchjax`
    (`train ...`). Each process finds in its environment what `jax.distributed.initialize` reads
    (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), so that `dt.init_distributed()`
    needs no arguments. The first one has this terminal; lines of the others come with their number
    before them. When one fails the others are stopped.
    """
    program = _program(command)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for number in range(count):
            own = None if number == 0 else subprocess.PIPE
            process = subprocess.Popen(
                program, stdout=own, stderr=own and subprocess.STDOUT, text=True,
                env=os.environ | environment(number, count, port, devices_per_process),
            )  # fmt: skip
            processes.append(process)
            if process.stdout is not None:
                reader = threading.Thread(target=_forward, args=(process.stdout, number))
                reader.start()
                readers.append(reader)
        return _wait(processes)
    finally:
        _stop(processes)
        for reader in readers:
            reader.join()


def environment(number: int, count: int, port: int, devices: int | None) -> dict[str, str]:
    """What one process finds in its environment."""
    found = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(number),
    }
    if devices is not None:
        # the first is for accelerators, the second for CPUs, whichever JAX finds
        own = range(number * devices, (number + 1) * devices)
        found["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, own))
        flags = os.environ.get("XLA_FLAGS", "")
        kept = [f for f in flags.split() if "xla_force_host_platform_device_count" not in f]
        kept.append(f"--xla_force_host_platform_device_count={devices}")
        found["XLA_FLAGS"] = " ".join(kept)
    return found


def _program(command: Sequence[str]) -> list[str]:
    words = list(command[1:] if command[:1] == ["--"] else command)
    if not words:
        raise UsageError("launch: name a program, such as `dtorchjax launch -n 2 -- train.py`")
    if words[0] == "-m" or Path(words[0]).is_file():
        return [sys.executable, *words]
    if words[0].endswith(".py"):
        raise UsageError(f"launch: there is no file {words[0]!r}")
    return [sys.executable, "-m", "dtorchjax", *words]


def _forward(lines: IO[str], number: int) -> None:
    for line in lines:
        sys.stderr.write(f"[{number}] {line}")


def _wait(processes: Sequence[subprocess.Popen[str]]) -> int:
    """Until all have ended well, or one has not."""
    while True:
        codes = [p.poll() for p in processes]
        for number, code in enumerate(codes):
            if code:
                if any(c is None for c in codes):
                    how = signal.Signals(-code).name if code < 0 else f"code {code}"
                    sys.stderr.write(f"process {number} ended with {how}; stopping the others\n")
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(0.05)


def _stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


__all__ = ["environment", "launch"]
