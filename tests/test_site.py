"""The documentation: it builds without a warning, its links lead somewhere, its names exist."""

import re
import subprocess
import sys
from pathlib import Path

import pictures
import pytest

import dtorchjax as dt

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(ROOT.glob("docs/*.md"))
DOCUMENTS = [*PAGES, *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("dtorchjax/*/README.md"))]


def test_the_site_is_built(tmp_path):
    """In strict mode: links between pages, anchors and names in docstrings are checked."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "api/index.html").read_text()
    assert 'id="dtorchjax.distribute_tensor"' in reference
    assert "<code>&gt;&gt;&gt; x = distribute_tensor(" in reference  # examples are code


def test_every_public_name_is_on_the_page():
    page = (ROOT / "docs/api.md").read_text()
    parallel = [f"parallel.{name}" for name in dt.parallel.__all__]
    missing = [
        name
        for name in [*dt.__all__, *parallel]
        if not re.search(rf"^(::: dtorchjax\.{name}|### {name})$", page, re.MULTILINE)
    ]
    assert not missing


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"`[^`\n]*`", "", text))
    gone = [t for t in targets if not re.match(r"\w+:", t) and not (page.parent / t).exists()]
    assert not gone


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_exist(page):
    """`dt.name`, wherever a document speaks of it."""
    gone = []
    for path in set(re.findall(r"\bdt((?:\.[A-Za-z_]\w*)+)", page.read_text())):
        found = dt
        for name in path[1:].split("."):
            if not hasattr(found, name):
                gone.append(f"dt{path}")
                break
            found = getattr(found, name)
    assert not gone


def test_pictures_are_as_drawn(mesh24):
    assert (ROOT / "docs/placements.svg").read_text() == pictures.placements(mesh24)
