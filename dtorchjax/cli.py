"""The command line: `dtorchjax train`, `explain`, `decompose`, `rules`, `launch` and `doctor`.

Nothing here imports JAX before the arguments are read, since how many devices it has is settled
when it starts.
"""

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .demo import UsageError

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "rich")
OLDEST = {"python": "3.11", "jax": "0.10.2", "flax": "0.12.8", "optax": "0.2.8", "numpy": "2.0"}


def versions() -> dict[str, str | None]:
    """The version of Python and of each package we run on, None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


def version_problems(found: dict[str, str | None]) -> list[str]:
    problems = [f"{name} is not installed" for name, version in found.items() if version is None]
    for name, oldest in OLDEST.items():
        version = found.get(name)
        if version and _numbers(version) < _numbers(oldest):
            problems.append(f"{name} {version} is older than {oldest}, the oldest supported")
    if found.get("jax") and found.get("jaxlib"):
        ours, theirs = _numbers(str(found["jax"])), _numbers(str(found["jaxlib"]))
        if ours[:2] != theirs[:2]:
            problems.append(f"jax {found['jax']} and jaxlib {found['jaxlib']} do not fit")
    return problems


def device_problems(devices: Sequence[Any], wanted: int | None) -> list[str]:
    if wanted is None or len(devices) >= wanted:
        return []
    if devices[0].platform != "cpu":
        return [
            f"{wanted} devices asked for, {len(devices)} found: JAX_PLATFORMS=cpu simulates them"
        ]
    flag = f"--xla_force_host_platform_device_count={wanted}"
    why = (
        "without" if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", "") else "with"
    )
    return [
        f"{wanted} devices asked for, {len(devices)} found, {why} a device count in XLA_FLAGS: "
        f"call dt.simulate_devices({wanted}) first, or set XLA_FLAGS={flag}"
    ]


def doctor(wanted: int | None) -> int:
    """Print what is installed and what is wrong with it; 0 where nothing is."""
    found = versions()
    for name, version in found.items():
        print(f"{name:8} {version or '-'}")
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        print(f"{name} {os.environ.get(name) or '(not set)'}")
    problems = version_problems(found)
    try:
        import jax

        devices = jax.devices()
        kinds = sorted({f"{d.platform} ({d.device_kind})" for d in devices})
        print(f"devices  {len(devices)} {', '.join(kinds)}")
        problems += device_problems(devices, wanted)
    except (ImportError, RuntimeError) as error:
        problems.append(f"JAX does not start: {error}")
    for problem in problems:
        print(f"problem: {problem}")
    if not problems:
        print("nothing is wrong")
    return 1 if problems else 0


def _positive(kind: type) -> Any:
    def parse(text: str):
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="dtorchjax", description="Sharded JAX programs.")
    commands = p.add_subparsers(dest="command", required=True)

    t = commands.add_parser(
        "train",
        help="train the demo, a byte-level GPT",
        description="Train a byte-level GPT on the standard library's sources.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count = _positive(int)
    t.add_argument("--mesh", help="axes and sizes, such as dp=2,tp=4 (default: all devices)")
    t.add_argument(
        "--placements",
        default="megatron",
        help="megatron, fsdp, fsdp_tp, dp, or a JSON file: path pattern -> placements",
    )
    t.add_argument(
        "--context-parallel", type=count, default=1,
        help="devices that share a sequence (mesh axis cp): ring attention",
    )  # fmt: skip
    t.add_argument("--devices", type=count, help="how many; 1 is the reference, plain jax.jit")
    t.add_argument("--steps", type=count, default=250)
    t.add_argument("--seed", type=int, default=0)
    t.add_argument("--batch", type=count, default=16, help="sequences in a batch")
    t.add_argument("--seq", type=count, default=128, help="bytes in a sequence")
    t.add_argument("--lr", type=_positive(float), default=5e-3, help="the highest learning rate")
    t.add_argument("--dropout", type=float, default=0.1)
    t.add_argument("--corpus", help="a file or folder to learn (default: the standard library)")
    t.add_argument("--plan", action="store_true", help="print the plan and do not train")
    t.add_argument("--sample", type=int, default=120, help="bytes to write after training")
    t.add_argument(
        "--distributed", action="store_true",
        help="join the other processes that SLURM, Open MPI or Kubernetes has started; those of "
        "`launch` always do",
    )  # fmt: skip
    t.add_argument("--checkpoint", help="a folder for checkpoints, the last two are kept")
    t.add_argument("--checkpoint-every", type=count, default=50, help="steps between checkpoints")
    t.add_argument(
        "--resume", action="store_true",
        help="go on from the last checkpoint, on any mesh and with any placements",
    )  # fmt: skip
    t.add_argument("--json", help="write losses, speed, versions and the plan's bytes there")

    e = commands.add_parser(
        "explain",
        help="print the plan of a function",
        description="Print which collectives module:function needs for arguments of these shapes.",
    )
    e.add_argument("function", help="module:function")
    e.add_argument("--mesh", required=True, help="axes and sizes, such as dp=2,tp=4")
    e.add_argument("--shapes", nargs="*", default=[], help="one per argument, such as f32[8,128]")
    e.add_argument("--args", help="module:function that returns the arguments, instead of --shapes")
    e.add_argument("--placements", nargs="*", default=[], help="one per argument, such as S0,R")
    e.add_argument("--out-placements", nargs="*", default=[], help="one per result")
    e.add_argument("--memory-limit", type=_positive(float), help="bytes on one device")
    e.add_argument("--json", action="store_true", help="print JSON")

    o = commands.add_parser(
        "decompose",
        help="print what an operator is made of",
        description="Print an operator's decomposition, VJP rule and placement table.",
    )
    o.add_argument("name", help="such as softmax; `list` prints all names")
    o.add_argument("--shapes", nargs="*", default=[], help="one per operand (default: f32[8,16])")
    o.add_argument(
        "--static", nargs="*", default=[], help="static arguments, such as axis=0 reduction=sum"
    )

    r = commands.add_parser(
        "rules",
        help="print the placement table of a primitive",
        description="Print the placement table of a primitive or operator, or how all are covered.",
    )
    r.add_argument("name", nargs="?", help="such as dot_general")
    r.add_argument("shapes", nargs="*", help="one per operand, such as f32[8,512]")
    r.add_argument("--static", nargs="*", default=[], help="parameters, such as axis=0")
    r.add_argument("--all", action="store_true", help="every primitive, and how it is covered")

    n = commands.add_parser(
        "launch",
        help="run several processes of a program on this machine",
        description="Run processes that find each other by dt.init_distributed(), such as "
        "`dtorchjax launch -n 2 --devices-per-process 4 -- train --steps 10`.",
    )
    n.add_argument("-n", "--processes", type=count, required=True)
    n.add_argument("--devices-per-process", type=count, help="CPUs are simulated")
    n.add_argument("program", nargs=argparse.REMAINDER, help="file.py, -m module, or train ...")

    d = commands.add_parser("doctor", help="print versions and devices, and what is wrong")
    d.add_argument("--devices", type=count, help="how many there should be")
    return p


NOT_OF_THE_TRAINING = ("command", "seq", "dropout", "json", "distributed")


def train(args: argparse.Namespace) -> int:
    import jax
    from rich.console import Console

    from .demo import model
    from .demo.train import Options, train
    from .devices import init_distributed

    if not 0 <= args.dropout < 1:
        raise UsageError(f"--dropout {args.dropout} is not in [0, 1)")
    if args.seq < 8:
        raise UsageError(f"--seq {args.seq} is too short: 8 at least")
    for name in ("seed", "sample"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name} {getattr(args, name)} is negative")
    if args.resume and not args.checkpoint:
        raise UsageError("--resume needs --checkpoint, the folder to go on from")
    file = args.json and Path(args.json)
    if file and not file.parent.is_dir():
        raise UsageError(f"--json {args.json}: there is no folder {str(file.parent)!r}")
    rest = {k: v for k, v in vars(args).items() if k not in NOT_OF_THE_TRAINING}
    config = model.Config(seq=args.seq, dropout=args.dropout)
    if args.distributed or "JAX_COORDINATOR_ADDRESS" in os.environ:
        init_distributed()
    first = not jax.distributed.is_initialized() or jax.process_index() == 0
    results = train(Options(**rest, config=config), Console(quiet=not first))
    if file and first:
        file.write_text(json.dumps(results | {"versions": versions()}, indent=1) + "\n")
    return 0


def explain(args: argparse.Namespace) -> int:
    from .demo.placements import parse_mesh

    axes = parse_mesh(args.mesh)
    from .demo.train import simulate

    simulate(math.prod(axes.values()))
    from .explain_command import explain_function

    plan = explain_function(
        args.function, list(axes.items()), args.shapes, args.placements, args.out_placements,
        args.memory_limit, args.args,
    )  # fmt: skip
    print(plan.to_json() if args.json else plan.table())
    return 0


def decompose(args: argparse.Namespace) -> int:
    from .decompose_command import decompose_operator, list_operators

    print(
        list_operators()
        if args.name == "list"
        else decompose_operator(args.name, args.shapes, args.static)
    )
    return 0


def rules(args: argparse.Namespace) -> int:
    from .rules_command import all_rules, table_of

    if not args.all and args.name is None:
        raise UsageError("rules: name a primitive, or say --all")
    print(all_rules() if args.all else table_of(args.name, args.shapes, args.static))
    return 0


def launch(args: argparse.Namespace) -> int:
    from .launch import launch

    return launch(args.processes, args.devices_per_process, args.program)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command == "doctor":
            return doctor(args.devices)
        commands = {
            "explain": explain, "decompose": decompose, "rules": rules, "train": train,
            "launch": launch,
        }  # fmt: skip
        return commands[args.command](args)
    except UsageError as error:
        print(f"dtorchjax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
