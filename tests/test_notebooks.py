"""The notebooks run, and each is stored with outputs beside its text form.

python tests/test_notebooks.py    executes them all and stores their outputs
"""

from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from rotation import today

FOLDER = Path(__file__).parent.parent / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def sources(notebook):
    return [(cell.cell_type, cell.source.strip()) for cell in notebook.cells]


def executed(script):
    notebook = jupytext.read(script)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return notebook


@pytest.mark.smoke  # there all of them run
@pytest.mark.parametrize("script", today([p.stem for p in SCRIPTS], 3))
def test_notebook_runs(script, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert executed(FOLDER / f"{script}.py").cells


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_stored_notebook_is_the_same_and_has_outputs(script):
    """After a change: `make notebooks`."""
    stored = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    assert sources(stored) == sources(jupytext.read(script))
    assert sum(bool(cell.get("outputs")) for cell in stored.cells) >= 3


def test_there_are_notebooks():
    assert SCRIPTS


if __name__ == "__main__":
    for script in SCRIPTS:
        nbformat.write(executed(script), script.with_suffix(".ipynb"))
