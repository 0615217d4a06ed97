"""Which part of a long list is tested today; another one each day, all of it with `-m slow`."""

import os
import time

import pytest

ROTATION = int(os.environ.get("DTORCHJAX_SEED", time.time() // 86400))


def today(items, part):
    """One of `part` parts of the items, another one each day; the others are slow."""
    return [
        pytest.param(x, id=str(x), marks=() if (i + ROTATION) % part == 0 else pytest.mark.slow)
        for i, x in enumerate(items)
    ]


def on_day(i, part):
    """Decorates the i-th of some long tests, of which one in `part` runs on a day."""
    return pytest.mark.slow if (i + ROTATION) % part else lambda test: test
