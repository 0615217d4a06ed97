"""The corpus (bytes of source files) and its batches: the same on every machine and mesh."""

import sysconfig
from pathlib import Path

import numpy as np

from . import UsageError

LIMIT = 4_000_000  # bytes kept: enough never to see a byte twice in the default run


def load(path: str | Path | None = None, limit: int = LIMIT) -> np.ndarray:
    """The first `limit` bytes of a file, of a folder's files, or of the standard library's sources.

    A folder gives its *.py files where it has any, else all files, by sorted path.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path)
    if not root.exists():
        raise UsageError(f"corpus {str(root)!r} does not exist")
    if root.is_file():
        files = [root]
    elif path is None:
        files = sorted(root.glob("*.py"))  # not its packages: site-packages lies among them
    else:
        files = sorted(root.rglob("*.py")) or sorted(p for p in root.rglob("*") if p.is_file())
    parts, size = [], 0
    for file in files:
        if size >= limit:
            break
        parts.append(file.read_bytes()[: limit - size])
        size += len(parts[-1])
    if size == 0:
        raise UsageError(f"corpus {str(root)!r} holds no bytes")
    return np.frombuffer(b"".join(parts), np.uint8)


def batch(corpus: np.ndarray, step: int, *, size: int, seq: int, seed: int) -> np.ndarray:
    """Batch number `step`, int32 [size, seq + 1]: windows at random offsets, a function of the seed
    and the step alone, so that a run can stop and go on anywhere."""
    room = len(corpus) - seq
    if room < 1:
        raise UsageError(f"the corpus has {len(corpus)} bytes, --seq {seq} needs {seq + 1}")
    offsets = np.random.default_rng([seed, step]).integers(room, size=size)
    return corpus[offsets[:, None] + np.arange(seq + 1)].astype(np.int32)
