"""Eight simulated CPU devices for every test, and the two meshes that most of them use."""

import os
import sys

# JAX reads these once, at its first import and at its first device: too late to change afterwards,
# and whoever has set them knows what they want.
if "jax" not in sys.modules:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags += " --xla_force_host_platform_device_count=8"
    if "xla_backend_optimization_level" not in flags:
        # programs here run a few times: what takes time is making machine code of them
        flags += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = flags.strip()

import pytest


@pytest.fixture(scope="session")
def mesh24():
    import dtorchjax as dt

    return dt.init_device_mesh((2, 4), ("dp", "tp"))


@pytest.fixture(scope="session")
def mesh8():
    import dtorchjax as dt

    return dt.init_device_mesh((8,), ("dp",))


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/ instead of comparing"
    )


@pytest.fixture
def fresh():
    """Declare operators that are forgotten after the test."""
    import dtorchjax as dt
    from dtorchjax.registry import OPS, RULES

    before = dict(OPS), dict(RULES)
    yield dt.op
    for registry, old in zip((OPS, RULES), before, strict=True):
        for name in set(registry) - set(old):
            del registry[name]
