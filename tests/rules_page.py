"""Writes sharding_rules/README.md: the coverage of primitives, and a table of each rule.

`make rules` runs it. Shapes are those of the first sample of each primitive.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
from samples import SAMPLES, equations

import dtorchjax as dt
from dtorchjax.rules_command import coverage

PAGE = Path(__file__).parent.parent / "sharding_rules" / "README.md"
HEAD = f"""# Primitives

Made by `make rules` with jax {jax.__version__} from what this folder declares. Every primitive that
JAX names has a rule, runs in place, is known to the graph, or is refused for a reason. Each row of
a rule is tried by brute force (`tests/oracle.py`); `tests/golden/missed.txt` lists rows that hold
on the samples but are not declared.

`S0 -> S0 by permute` is a row in which the devices of that mesh axis send each other what moves.

"""


def page() -> str:
    lines = [HEAD, "| primitive | | |", "|---|---|---|"]
    lines += [
        f"| `{k.name}` | {k.kind} | {k.how.replace('|', chr(92) + '|')} |" for k in coverage()
    ]
    lines += ["", "## Tables", ""]
    for name in sorted(SAMPLES):
        sample = SAMPLES[name][0]
        try:
            (equation, *_) = equations(name, sample)
        except AssertionError:  # a primitive that this jax does not have
            continue
        types = ", ".join(a.str_short(short_dtypes=True) for a in equation.in_avals)
        rows = str(equation.signature()).splitlines()
        lines += [f"### {name}", "", f"{sample.label}: {types or 'no operands'}", "", "```"]
        lines += [*rows, "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    dt.simulate_devices(8)
    PAGE.write_text(page(), "utf-8")
