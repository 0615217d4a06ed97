"""Random programs of 5 to 30 steps: values and gradients of one device, bytes of the plan.

A few every day; `-m slow` runs 2,000. `python tests/fuzz.py 1 --seed N` repeats one.
"""

from collections import Counter

import fuzz
import jax
import pytest
from rotation import ROTATION

TODAY = 8


@pytest.mark.parametrize("number", range(TODAY))
def test_a_random_program_equals_one_device(number):
    assert fuzz.check(TODAY * ROTATION + number)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(40))
def test_many_random_programs_equal_one_device(part):
    for seed in range(50 * part, 50 * part + 50):
        fuzz.check(seed)
    jax.clear_caches()


def test_a_wrong_program_is_found_and_made_small(monkeypatch):
    from dtorchjax.registry import LOCALS

    def forgetful(call, x):
        return call.bind(x)

    monkeypatch.setitem(LOCALS, "cumsum", forgetful)
    program = fuzz.Program(
        [fuzz.Choices(0).array(8, 4)],
        [
            fuzz.Step("double", lambda v: 2 * v, (0,)),
            fuzz.Step("cumsum", lambda v: fuzz.jnp.cumsum(v, 0), (1,)),
            fuzz.Step("tanh", fuzz.jnp.tanh, (2,)),
            fuzz.Step("sum", lambda v: v.sum(), (1,)),
        ],
        [3, 4],
    )
    mesh = fuzz.dt.init_device_mesh((8,), ("a",))
    with pytest.raises(fuzz.Difference, match="result 0"):
        fuzz.compare(program, mesh, [["S0"]])
    small = fuzz.shrunk(program, mesh, [["S0"]], False)
    assert [s.name for s in small.steps] == ["double", "cumsum"]


def test_the_same_seed_is_the_same_program():
    assert str(fuzz.random_program(5)) == str(fuzz.random_program(5))
    assert 5 <= len(fuzz.random_program(5).steps) <= 30
    assert isinstance(fuzz.check(1), Counter)
