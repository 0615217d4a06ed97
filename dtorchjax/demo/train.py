"""The training loop. `make_step` is an ordinary function of whole arrays; all that makes it run on
several devices is in `place`."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from . import UsageError, data, model, placements

SIMULATED = 8  # CPU devices where there is nothing better and no mesh was asked for


@dataclass(frozen=True)
class Options:
    mesh: str | None = None
    placements: str = "megatron"
    context_parallel: int = 1  # devices that share a sequence, on the mesh axis "cp"
    devices: int | None = None  # 1 is the reference: plain jax.jit
    steps: int = 250
    seed: int = 0
    batch: int = 16
    lr: float = 5e-3
    corpus: str | None = None
    plan: bool = False
    sample: int = 120  # bytes of text at the end
    checkpoint: str | None = None  # a folder
    checkpoint_every: int = 50  # steps
    resume: bool = False
    config: model.Config = field(default_factory=model.Config)


def optimizer(lr: float, steps: int) -> optax.GradientTransformation:
    warmup = max(1, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        lr / warmup, lr, warmup, max(steps, warmup + 1), lr / 10
    )

    def matrices(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)  # scales of norms do not decay

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices),
    )


def make_step(graph: Any, rule: optax.GradientTransformation, seed: int) -> Callable:
    """step(params, state, number, batch) -> (params, state, loss)."""

    def step(params, state, number, batch):
        # Dropout depends on the seed and the step's number alone, so on any mesh it is the same.
        key = jax.random.fold_in(jax.random.key(seed), number)
        loss, grads = jax.value_and_grad(lambda p: model.loss(graph, p, batch, key))(params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


@dataclass
class Run:
    """What the loop needs: the compiled step, where things lie, and how a batch gets there."""

    step: Callable
    params: Any
    state: Any
    put: Callable[[np.ndarray], Any]
    plan: Any = None
    first: int = 0  # steps that were done before


def choose_mesh(o: Options) -> dict[str, int] | None:
    """The mesh that the options mean, None for the reference. Starts JAX's devices."""
    table = placements.load(o.placements)
    asked = placements.parse_mesh(o.mesh) if o.mesh else None
    wanted = math.prod(asked.values()) if asked else o.devices
    if asked and o.devices not in (None, wanted):
        raise UsageError(f"--mesh {o.mesh} has {wanted} devices, --devices says {o.devices}")
    if asked is None and o.devices == 1:
        if jax.distributed.is_initialized():
            raise UsageError("--devices 1 is the program without a mesh: run it in one process")
        return None
    simulate(wanted or SIMULATED)
    here = jax.devices()
    context = o.context_parallel
    mesh = asked or placements.default_mesh(table, wanted or len(here), context)
    if mesh.get("cp", 1) != context:
        raise UsageError(
            f"mesh {placements.format_mesh(mesh)} and --context-parallel {context}: the mesh needs "
            f"the axis cp={context}"
        )
    if o.config.seq % context:
        raise UsageError(f"--seq {o.config.seq} is not divisible by --context-parallel {context}")
    needed = math.prod(mesh.values())
    if needed > len(here):
        cpu = here[0].platform == "cpu"
        fix = "JAX has started with fewer" if cpu else f"JAX_PLATFORMS=cpu simulates {needed}"
        raise UsageError(
            f"mesh {placements.format_mesh(mesh)} needs {needed} devices, "
            f"there are {len(here)} ({here[0].platform}): {fix}"
        )
    placements.check_axes(o.placements, table, mesh)
    if o.batch % mesh.get("dp", 1):
        raise UsageError(f"--batch {o.batch} is not divisible by dp={mesh['dp']}")
    return mesh


def simulate(count: int) -> None:
    """Have that many CPU devices, should there be no other kind and no other process."""
    if jax.distributed.is_initialized():
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started: what it started with is counted below


def ring(mesh_axes: dict[str, int]) -> model.Attend:
    """Attention of sequences that are split over "cp": keys and values go round a ring."""
    import dtorchjax as dt

    split = {"dp": "S0", "cp": "S1", "tp": "S2"}  # [batch, seq, heads, head]
    where = {axis: split[axis] for axis in mesh_axes if axis in split}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (dt.redistribute(x, where) for x in (q, k, v))
        return dt.parallel.ring_attention(q, k, v, causal=True)

    return attend


def place(o: Options, mesh_axes: dict[str, int], step: Callable, params: Any, state: Any) -> Run:
    """The same step on a mesh."""
    import dtorchjax as dt

    mesh = dt.init_device_mesh(tuple(mesh_axes.values()), tuple(mesh_axes))
    table = placements.load(o.placements)
    try:
        # One tree, so that a table may also speak of "optimizer/*" alone.
        tree = {"params": params, "optimizer": state}
        tree = dt.distribute(tree, mesh, dt.by_path(table))
    except dt.PlacementError as error:
        raise UsageError(f"placements {o.placements!r}: {error}") from error
    split = {"dp": "S0"} if "dp" in mesh_axes else "R"
    return Run(
        step=dt.jit(step, mesh=mesh, in_placements=None, donate_argnums=(0, 1)),
        params=tree["params"],
        state=tree["optimizer"],
        put=lambda batch: dt.distribute_tensor(batch, mesh, split),
    )


def train(o: Options, console: Console) -> dict[str, Any]:
    """Train, print as it goes, and return the figures."""
    mesh = choose_mesh(o)
    if o.plan and mesh is None:
        raise UsageError("--plan needs a mesh: --devices 1 plans nothing")
    corpus = data.load(o.corpus)
    seq = o.config.seq

    def batch(number: int) -> np.ndarray:
        return data.batch(corpus, number, size=o.batch, seq=seq, seed=o.seed)

    attend = ring(mesh) if mesh and o.context_parallel > 1 else model.attend
    graph, params = model.init(o.config, o.seed, attend)
    rule = optimizer(o.lr, o.steps)
    step = make_step(graph, rule, o.seed)
    count = sum(p.size for p in jax.tree.leaves(params))
    console.print(f"{count:,} parameters, {len(corpus):,} bytes of text")

    if mesh is None:
        console.print("one device, plain jax.jit")
        jitted = jax.jit(step, donate_argnums=(0, 1))
        run = Run(jitted, params, rule.init(params), put=jax.numpy.asarray)
    else:
        kind = jax.devices()[0].platform.replace("cpu", "simulated CPU")
        console.print(f"mesh {placements.format_mesh(mesh)} of {kind} devices, {o.placements}")
        run = place(o, mesh, step, params, rule.init(params))
        start = time.perf_counter()
        run.plan = run.step.explain(run.params, run.state, np.int32(0), run.put(batch(0)))
        seconds, figures = time.perf_counter() - start, summary(run.plan)
        console.print(
            f"plan, made in {seconds:.1f} s: {figures['collectives']} collectives send "
            f"{figures['bytes_per_device'] / 1e6:.2f} MB per device and step"
        )
    if o.plan and run.plan:
        console.print(run.plan.table(), markup=False, highlight=False, soft_wrap=True)
        return {}

    with contextlib.ExitStack() as stack:
        checkpoints = o.checkpoint and stack.enter_context(open_checkpoints(o, run, console))
        losses, seconds = loop(o, run, batch, console, checkpoints or None)
    done = len(losses)
    tokens = o.batch * seq * (done - 1) / seconds if done > 1 else None
    if losses:
        console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte")
    prompt = b"def "
    if length := min(o.sample, seq - len(prompt)):
        text = model.sample(graph, whole(run.params), prompt, length, o.seed)
        console.rule("sample")
        console.print(text.decode("utf-8", "replace"), markup=False, highlight=False)

    return {
        "options": asdict(o),
        "mesh": mesh,
        "first_step": run.first,
        "losses": losses,
        "tokens_per_second": tokens,
        "plan": run.plan and summary(run.plan),
    }


def open_checkpoints(o: Options, run: Run, console: Console) -> Any:
    """The checkpoints of this run; with `--resume` its state becomes that of the last one.

    A checkpoint says nothing of meshes: a run may go on with other placements, or on one device.
    """
    import dtorchjax as dt

    folder = Path(str(o.checkpoint))
    meaning = {"seed": o.seed, "batch": o.batch, "steps": o.steps, "lr": o.lr} | asdict(o.config)
    facts = folder / "options.json"
    checkpoints = dt.Checkpoints(folder, keep=2)
    if checkpoints.latest is None:
        if o.resume:
            console.print(f"no checkpoint in {folder}: starting at step 1")
        folder.mkdir(parents=True, exist_ok=True)
        facts.write_text(json.dumps(meaning, indent=1) + "\n")
        return checkpoints
    if not o.resume:
        raise UsageError(
            f"--checkpoint {folder} holds a training that has come to step {checkpoints.latest}: "
            "--resume goes on with it; or use another folder"
        )
    before = json.loads(facts.read_text()) if facts.is_file() else meaning
    changed = [
        f"{k} was {before.get(k)} and is {v}" for k, v in meaning.items() if before.get(k) != v
    ]
    if changed:
        raise UsageError(f"--resume: the run in {folder} had other options: {'; '.join(changed)}")
    state = {"params": run.params, "optimizer": run.state, "step": 0}
    state = checkpoints.restore(state)
    run.params, run.state, run.first = state["params"], state["optimizer"], state["step"]
    console.print(f"going on after step {run.first}")
    return checkpoints


def loop(
    o: Options, run: Run, batch: Callable, console: Console, checkpoints: Any = None
) -> tuple[list[float], float]:
    """The losses, and the seconds that all steps but the first took (that one compiles)."""
    losses: list[float] = []
    start = time.perf_counter()
    columns = ["step {task.completed}/{task.total}", "loss {task.fields[loss]}"]
    columns += ["{task.fields[speed]} tokens/s"]
    with Progress(
        *map(TextColumn, columns),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=o.steps, loss="-", speed="-")
        for number in range(run.first, o.steps):
            run.params, run.state, loss = run.step(
                run.params, run.state, np.int32(number), run.put(batch(number))
            )
            # Waiting for each loss keeps one step in flight: simulated devices share the
            # machine's threads, and collectives of several steps could wait for each other.
            losses.append(float(loss))
            done = number - run.first
            if not done:
                start = time.perf_counter()
            seconds = time.perf_counter() - start
            speed = f"{o.batch * o.config.seq * done / seconds:,.0f}" if done else "-"
            progress.update(task, completed=number + 1, loss=f"{losses[-1]:.3f}", speed=speed)
            every = max(1, o.steps // 10)
            if not console.is_terminal and (number % every == 0 or number == o.steps - 1):
                console.print(
                    f"step {number + 1}/{o.steps}  loss {losses[-1]:.3f}  {speed} tokens/s"
                )
            if checkpoints and ((number + 1) % o.checkpoint_every == 0 or number == o.steps - 1):
                state = {"params": run.params, "optimizer": run.state, "step": number + 1}
                checkpoints.save(number + 1, state)
    if losses and not math.isfinite(losses[-1]):
        console.print("[yellow]the loss is not finite: try a smaller --lr[/]")
    return losses, time.perf_counter() - start


def whole(params: Any) -> Any:
    """Parameters as numpy arrays (a DTensor converts as a jax.Array does), for one device."""
    return jax.tree.map(np.asarray, params, is_leaf=lambda leaf: hasattr(leaf, "full_tensor"))


def summary(plan: Any) -> dict[str, Any]:
    return {
        "bytes_per_device": int(plan.bytes_per_device),
        "collectives": int(sum(c.times for c in plan.collectives)),
        "memory_per_device": int(plan.memory_per_device),
    }
