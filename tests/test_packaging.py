"""The wheel holds dtorchjax/ alone, and the two folders at the top import under one name only."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("primitives", "sharding_rules")


def run(*command, cwd, path=None):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def copy_tree(to):
    """What git would give someone else: files that are tracked, or new and not ignored."""
    listed = run(
        "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT
    )  # in an unpacked archive there is no git
    names = [n for n in listed.stdout.split("\0") if n] if listed.returncode == 0 else None
    if names is None:
        shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(".*", "build"))
        return
    for name in names:
        source, target = ROOT / name, to / name
        if os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("wheel")
    copy_tree(tmp / "tree")
    built = run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp)),
        cwd=tmp / "tree",
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = tmp.glob("*.whl")
    return path


def test_wheel_holds_the_package_alone(wheel):
    with zipfile.ZipFile(wheel) as z:
        members = z.namelist()
        metadata = next(z.read(n).decode() for n in members if n.endswith("/METADATA"))
    outside = [m for m in members if not re.match(r"dtorchjax(-[^/]+\.dist-info)?/", m)]
    assert not outside
    assert len(members) == len(set(members))
    wanted = {p.relative_to(ROOT).as_posix() for p in (ROOT / "dtorchjax").glob("*.py")}
    for folder in ("demo", "parallel"):
        files = (ROOT / "dtorchjax" / folder).glob("*.py")
        wanted |= {p.relative_to(ROOT).as_posix() for p in files}
    wanted |= {f"dtorchjax/{link}/{p.name}" for link in LINKS for p in (ROOT / link).glob("*.py")}
    wanted |= {"dtorchjax/py.typed"}
    assert not wanted - set(members)
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.smoke
def test_wheel_imports_away_from_the_checkout(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)
    names = ["dtorchjax", *(f"dtorchjax.{link}" for link in LINKS)]
    code = f"import {', '.join(names)}; print({', '.join(f'{n}.__file__' for n in names)})"
    got = run(sys.executable, "-c", code, cwd=elsewhere, path=site)
    assert got.returncode == 0, got.stderr
    assert all(file.startswith(str(site)) for file in got.stdout.split()), got.stdout


@pytest.mark.smoke
@pytest.mark.parametrize("folder", LINKS)
def test_folder_does_not_import_under_its_bare_name(folder):
    got = run(sys.executable, "-c", f"import {folder}", cwd=ROOT)
    assert got.returncode != 0
    last = got.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError:") and f"dtorchjax.{folder}" in last


@pytest.mark.parametrize("folder", LINKS)
def test_link_is_relative(folder):
    assert os.readlink(ROOT / "dtorchjax" / folder) == f"../{folder}"


def test_constraints_fix_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    fixed = {
        re.split("==", line)[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert {re.match(r"[\w-]+", w)[0].lower() for w in wanted} <= fixed


def test_extras_are_known_to_jax():
    """A name that jax does not have would install nothing, with a warning."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {"gpu", "tpu", "notebooks", "dev"} <= set(extras)
    known = importlib.metadata.metadata("jax").get_all("Provides-Extra")
    for name in ("gpu", "tpu"):
        (extra,) = re.match(r"jax\[(\w+)\]", extras[name][0]).groups()
        assert extra in known


@pytest.mark.smoke
def test_importing_does_no_work():
    """No device is touched, and libraries come when they are needed."""
    code = (
        "import sys, jax, dtorchjax; from jax._src import xla_bridge; "
        "assert not xla_bridge.backends_are_initialized(); "
        "print(*{'flax', 'optax', 'orbax', 'scipy', 'treescope', 'IPython'} & set(sys.modules))"
    )
    got = run(sys.executable, "-c", code, cwd=ROOT)
    assert got.returncode == 0, got.stderr
    assert not got.stdout.split()


@pytest.mark.smoke
def test_runs_as_a_module(tmp_path):
    got = run(sys.executable, "-m", "dtorchjax", "rules", "cumsum", "f32[8,512]", cwd=tmp_path)
    assert got.returncode == 0, got.stderr
    assert "S1 -> S1" in got.stdout
