"""Two processes with four devices each compute what one with eight does, and notice a lost one."""

import json
import os
import socket
import subprocess
import sys
import time

import distributed_program
import numpy as np
import pytest
from rotation import on_day

import dtorchjax as dt
from dtorchjax import cli
from dtorchjax.demo.placements import TABLES
from dtorchjax.launch import environment


def compare(folder, names):
    tasks = ["arrays", *(f"train:{name}" for name in names)]
    command = [sys.executable, "-m", "dtorchjax", "launch", "-n", "2", "--devices-per-process", "4"]
    command += ["--", distributed_program.__file__, str(folder), *tasks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    two = json.loads((folder / "found.json").read_text())
    one = distributed_program.run(folder, tasks)  # reads the checkpoint that the two have written
    assert two["devices"] == one["devices"] == 8 and len(two[tasks[-1]]) == 10
    for task in tasks:
        np.testing.assert_allclose(two[task], one[task], rtol=1e-5)


@pytest.mark.smoke
@on_day(1, 2)
def test_two_processes_are_one_program(tmp_path):
    compare(tmp_path, ["dp"])


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    compare(tmp_path, list(TABLES))


def test_a_lost_process_is_an_error_and_not_a_hang(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, distributed_program.__file__, str(tmp_path), "wait"]
    both = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | environment(number, 2, port, 4),
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        assert both[0].stdout is not None
        for line in both[0].stdout:
            if line == "step\n":
                break
        both[1].kill()
        start = time.monotonic()
        output = both[0].stdout.read()  # until it has ended
        assert both[0].wait(60) != 0 and time.monotonic() - start < 60
        assert "rror" in output
    finally:
        for process in both:
            process.kill()
            process.wait()


# ---- the launcher --------------------------------------------------------------------------------

FAILS = """
import os, sys, time
print("here", os.environ["JAX_PROCESS_ID"], flush=True)
if os.environ["JAX_PROCESS_ID"] == "1":
    time.sleep(1)
    sys.exit(3)
time.sleep(100)
"""


def test_one_that_fails_stops_the_others(tmp_path, capfd):
    (tmp_path / "fails.py").write_text(FAILS)
    start = time.monotonic()
    assert cli.main(["launch", "-n", "3", "--", str(tmp_path / "fails.py")]) == 3
    assert time.monotonic() - start < 20
    out, err = capfd.readouterr()
    assert out == "here 0\n" and "[1] here 1" in err
    assert "process 1 ended with code 3; stopping the others" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [([], "name a program"), (["--", "nowhere.py"], "there is no file 'nowhere.py'")],
)
def test_what_cannot_be_launched(words, says, capsys):
    assert cli.main(["launch", "-n", "2", *words]) == 2
    assert says in capsys.readouterr().err


def test_joining_needs_all_three_arguments_and_an_unused_jax(monkeypatch):
    dt.init_distributed()  # started alone: it stays alone
    with pytest.raises(ValueError, match="give coordinator_address, num_processes and process_id"):
        dt.init_distributed("127.0.0.1:1")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES"):
        dt.init_distributed()
    dt.init_device_mesh((2,), ("dp",))
    with pytest.raises(RuntimeError, match="jax has started alone"):
        dt.init_distributed("127.0.0.1:1", 2, 0)
