"""The demo learns, its batches repeat, and every placement trains as one device does."""

import dataclasses
import json
from fnmatch import fnmatchcase

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from rotation import today

from dtorchjax import cli
from dtorchjax.demo import UsageError, data, model, placements
from dtorchjax.demo.train import Options, optimizer, train

TINY = model.Config(layers=1, width=32, heads=4, hidden=64, seq=16)
QUICK = Options(steps=3, batch=8, sample=0, config=TINY)


def run(**changes):
    return train(dataclasses.replace(QUICK, **changes), Console(quiet=True))


# ---- the model and the text -----------------------------------------------------------------


@pytest.mark.smoke
def test_loss_falls_on_one_device():
    losses = run(devices=1, steps=5)["losses"]
    assert losses[0] == pytest.approx(np.log(256), abs=0.1)
    assert losses[-1] < losses[0] - 0.1


def test_dropout_changes_the_loss_and_only_in_training():
    graph, params = model.init(TINY, 0)
    batch = np.arange(34, dtype=np.int32).reshape(2, 17)
    calm = [float(model.loss(graph, params, batch)) for _ in range(2)]
    noisy = [float(model.loss(graph, params, batch, jax.random.key(k))) for k in range(2)]
    assert calm[0] == calm[1]
    assert len({calm[0], *noisy}) == 3


def test_attention_sees_the_past_only():
    graph, params = model.init(TINY, 0)
    gpt = nnx.merge(graph, params)
    a = np.arange(16, dtype=np.int32)[None]
    b = a.copy()
    b[0, 9] = 200
    same = np.all(np.asarray(gpt(a) == gpt(b)), axis=-1)[0]
    assert same[:9].all() and not same[9:].any()


def test_sample_repeats_and_has_its_length():
    graph, params = model.init(TINY, 0)
    texts = [model.sample(graph, params, b"def ", 5, seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 9 and texts[0].startswith(b"def ")


def test_text_and_batches_repeat():
    text = data.load(limit=50_000)
    assert len(text) == 50_000
    np.testing.assert_array_equal(text, data.load(limit=50_000))
    one, again, other = (data.batch(text, n, size=4, seq=8, seed=1) for n in (3, 3, 4))
    np.testing.assert_array_equal(one, again)
    assert one.shape == (4, 9) and one.dtype == np.int32 and (one != other).any()
    windows = {bytes(text[i : i + 9]) for i in range(len(text) - 8)}
    assert all(bytes(row.astype(np.uint8)) in windows for row in one)


def test_corpus_of_a_folder_is_in_order(tmp_path):
    for name, text in (("b.py", b"second"), ("a.py", b"first "), ("c.txt", b"left out")):
        (tmp_path / name).write_bytes(text)
    assert bytes(data.load(tmp_path)) == b"first second"
    assert bytes(data.load(tmp_path / "c.txt", limit=4)) == b"left"


def test_shortest_corpus_has_one_window():
    text = np.arange(9, dtype=np.uint8)
    np.testing.assert_array_equal(data.batch(text, 0, size=1, seq=8, seed=0)[0], text)
    with pytest.raises(UsageError, match="needs 10"):
        data.batch(text, 0, size=1, seq=9, seed=0)


# ---- placements -----------------------------------------------------------------------------


def leaves():
    params = model.init(model.Config(), 0)[1]
    tree = {"params": params, "optimizer": optimizer(1e-3, 10).init(params)}
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(k, simple=True, separator="/"): v.shape for k, v in flat}


@pytest.mark.parametrize("name", placements.TABLES)
def test_every_pattern_matches_and_every_shard_is_even(name):
    table, paths = placements.TABLES[name], leaves()
    mesh = placements.default_mesh(table, 8)
    for pattern in table:
        assert any(fnmatchcase(path, pattern) for path in paths), pattern
    for path, shape in paths.items():
        value = [v for pattern, v in table.items() if fnmatchcase(path, pattern)][-1]
        for axis, placement in value.items() if isinstance(value, dict) else ():
            assert shape[int(placement[1:])] % mesh[axis] == 0, (path, shape, value)


@pytest.mark.parametrize("name", ["fsdp", "fsdp_tp"])
def test_fully_sharded_leaves_nothing_but_counters_whole(name):
    table = placements.TABLES[name]
    for path, shape in leaves().items():
        value = [v for pattern, v in table.items() if fnmatchcase(path, pattern)][-1]
        assert (value == "R") == (shape == ()), path


def test_default_mesh():
    assert placements.default_mesh(placements.DP, 6) == {"dp": 6}
    assert placements.default_mesh(placements.MEGATRON, 8) == {"dp": 2, "tp": 4}
    assert placements.default_mesh(placements.FSDP_TP, 6) == {"dp": 3, "tp": 2}
    assert placements.default_mesh(placements.MEGATRON, 1) == {"dp": 1, "tp": 1}


@pytest.fixture(scope="module")
def reference():
    return run(devices=1)["losses"]


@pytest.mark.parametrize("name", today(["dp", "megatron"], 2))
def test_devices_that_share_sequences_train_as_one_does(name, reference):
    result = run(placements=name, context_parallel=2)
    np.testing.assert_allclose(result["losses"], reference, rtol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("name", today(["megatron", "fsdp", "fsdp_tp", "dp"], 2))
def test_trains_as_one_device_does(name, reference):
    result = run(placements=name)
    # Sums are taken in another order, and Adam's quotient enlarges that for small gradients: 1e-7.
    np.testing.assert_allclose(result["losses"], reference, rtol=1e-5)
    assert result["plan"]["bytes_per_device"] > 0


def test_placements_from_a_file(tmp_path, reference):
    file = tmp_path / "zero1.json"
    file.write_text(json.dumps({"*": "R", "optimizer/*/mlp/*/kernel": {"dp": "S0"}}))
    np.testing.assert_allclose(run(placements=str(file))["losses"], reference, rtol=1e-5)


def test_a_run_goes_on_where_it_was_stopped_on_another_mesh(tmp_path, reference, monkeypatch):
    batch = data.batch

    def stopping(corpus, step, **sizes):
        if step == 2:
            raise KeyboardInterrupt
        return batch(corpus, step, **sizes)

    checkpointed = dict(checkpoint=str(tmp_path), checkpoint_every=1)
    with monkeypatch.context() as patched:
        patched.setattr(data, "batch", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(placements="dp", **checkpointed)
    with pytest.raises(UsageError, match="has come to step 2: --resume goes on with it"):
        run(devices=1, **checkpointed)
    with pytest.raises(UsageError, match=r"other options: lr was 0.005 and is 0.1"):
        run(devices=1, resume=True, lr=0.1, **checkpointed)
    result = run(mesh="dp=4", placements="fsdp", resume=True, **checkpointed)
    assert result["first_step"] == 2
    np.testing.assert_allclose(result["losses"], reference[2:], rtol=1e-5)
    assert run(devices=1, resume=True, **checkpointed)["losses"] == []  # nothing is left to do


# ---- the command line -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--mesh dp=2,tp", "expected axes and sizes such as dp=2,tp=4"),
        ("--mesh dp=2,dp=4", "expected axes and sizes"),
        ("--mesh dp=8", "name the mesh axis 'tp', the mesh has dp=8"),
        ("--mesh dp=4,tp=4", "needs 16 devices, there are 8"),
        ("--mesh dp=2,tp=4 --devices 4", "has 8 devices, --devices says 4"),
        ("--mesh dp=2,tp=4 --batch 3", "--batch 3 is not divisible by dp=2"),
        ("--placements nowhere.json", "neither one of megatron, fsdp, fsdp_tp, dp nor"),
        ("--corpus nowhere", "corpus 'nowhere' does not exist"),
        ("--json nowhere/x.json", "there is no folder 'nowhere'"),
        ("--devices 1 --plan", "--plan needs a mesh"),
        ("--dropout 1", "is not in [0, 1)"),
        ("--seed -1", "is negative"),
        ("--resume", "--resume needs --checkpoint"),
        ("--context-parallel 3 --placements dp", "do not divide by --context-parallel 3"),
        ("--mesh dp=2,tp=4 --context-parallel 4", "the mesh needs the axis cp=4"),
        ("--context-parallel 8 --placements dp --seq 12", "is not divisible by --context-parallel"),
    ],
)
def test_what_cannot_be_is_one_line_and_code_2(arguments, says, capsys):
    assert cli.main(["train", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dtorchjax: ") and says in line


@pytest.mark.parametrize("content", ["nonsense", "[]", "{}"])
def test_a_placements_file_that_is_no_table(content, tmp_path, capsys):
    file = tmp_path / "p.json"
    file.write_text(content)
    assert cli.main(["train", "--placements", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_a_pattern_that_matches_nothing_is_named(tmp_path, capsys):
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"*": "R", "*/no/such/leaf": "R"}))
    assert cli.main(["train", "--placements", str(file)]) == 2
    assert "*/no/such/leaf" in capsys.readouterr().err


def test_plan_is_printed_and_nothing_trained(capsys):
    assert cli.main(["train", "--plan", "--seq", "16", "--placements", "dp"]) == 0
    out = capsys.readouterr().out
    assert "all-reduce" in out and "sample" not in out


def test_json_has_the_figures(tmp_path):
    file = tmp_path / "out.json"
    arguments = f"train --devices 1 --steps 2 --batch 2 --seq 8 --sample 4 --json {file}"
    assert cli.main(arguments.split()) == 0
    got = json.loads(file.read_text())
    assert len(got["losses"]) == 2 and got["tokens_per_second"] > 0
    assert got["versions"]["jax"] == jax.__version__ and got["plan"] is None


@pytest.mark.smoke
def test_doctor(capsys):
    assert cli.main(["doctor", "--devices", "8"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert cli.main(["doctor", "--devices", "9"]) == 1
    assert "problem: 9 devices asked for, 8 found" in capsys.readouterr().out


def test_doctor_reads_versions():
    good = cli.versions()
    assert cli.version_problems(good) == []
    bad = {**good, "jax": "0.9.2", "flax": None}
    assert cli.version_problems(bad) == [
        "flax is not installed",
        "jax 0.9.2 is older than 0.10.2, the oldest supported",
        f"jax 0.9.2 and jaxlib {good['jaxlib']} do not fit",
    ]
