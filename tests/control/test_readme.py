"""The commands and links of README.md and docs/ work; training is a dry run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ort import needs_ort

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# docs/ortmodule is a link, which `**` does not follow.
PAGES_OF_DOCS = sorted(path for form in ("*.md", "*/*.md") for path in (ROOT / "docs").glob(form))
DOCS = "\n".join(path.read_text(encoding="utf-8") for path in PAGES_OF_DOCS)
# They take half a minute or more. ortmodule/tests/ortmodule_tests/native/test_extensions.py,
# tests/launch/test_bench.py and tests/worker/engine/test_prediction.py run them.
NOT_RUN = ("setup", "bench")
NOT_MEASURED = "--predict"


def _blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def _commands() -> list[list[str]]:
    lines = [
        line
        for text in (README, DOCS)
        for block in _blocks("sh", text)
        for line in block.splitlines()
    ]
    typed = [
        [word for word in shlex.split(line, comments=True)[1:] if word != NOT_MEASURED]
        for line in lines
        if line.startswith("ortlaunch ")
    ]
    planned = [["plan", words[1], *_overrides(words)] for words in typed if words[0] == "bench"]
    return [*typed, *planned]


def _overrides(words: list[str]) -> list[str]:
    """Return the overrides of a bench command, without the values of --vary."""
    return [word for before, word in zip(words, words[1:]) if "=" in word and before != "--vary"]


def test_readme_and_make_train_name_the_activation():
    """README and the last line of `make train` both name the command to activate the venv."""
    rule = (
        (ROOT / "Makefile")
        .read_text(encoding="utf-8")
        .partition("\ntrain: ")[2]
        .partition("\n\n")[0]
    )
    assert rule.endswith(': . $(BIN)/activate"')
    assert _blocks("sh")[0].splitlines()[1].startswith(". .venv/bin/activate ")


@needs_ort
def test_the_commands_of_the_readme_work(tmp_path):
    """The commands in README and docs/ end with status 0; setup and bench are not run."""
    own_model = (ROOT / "docs/start/own-model.md").read_text(encoding="utf-8")
    (tmp_path / "my_model.py").write_text(_blocks("python", own_model)[0])
    (tmp_path / "my_recipe.yaml").write_text(_blocks("yaml", own_model)[0])
    # What the pages call my.yaml is a reader's own recipe.
    shutil.copy(ROOT / "recipes/llama2-7b/tiny.yaml", tmp_path / "my.yaml")
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    commands = _commands()
    assert len(commands) >= 7
    dry = [
        [*words, "--dry-run"] if words[0] in ("train", "parity", "submit") else words
        for words in commands
    ]
    typed = json.dumps([words for words in dry if words[0] not in NOT_RUN])
    command = [sys.executable, "-c", ONE_BY_ONE, typed]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["each was run"]), done.stderr


# One process runs all commands, because starting Python would take most of the time.
ONE_BY_ONE = """
import json, sys
from ortlaunch.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["ortlaunch", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
print("each was run")
"""


def test_the_tree_of_contributing_exists() -> None:
    """All files in the tree in CONTRIBUTING.md exist."""
    tree = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("## The tree")[2]
        .partition("\n## ")[0]
    )
    named = set(re.findall(r"(?<=\s)[\w/]+\.py|(?<=\s)[a-z_]+/", tree)) - {
        "ortlaunch/",
        "ortmodule/",
    }
    folders = [
        *(ROOT / "ortlaunch" / name for name in ("", "recipe", "worker")),
        *(ROOT / "ortmodule" / name for name in ("", "src/ortmodule", "src/ortmodule/_internal")),
    ]
    missing = [name for name in named if not any((folder / name).exists() for folder in folders)]
    assert named
    assert not missing


PAGES = [*sorted(ROOT.glob("*.md")), *PAGES_OF_DOCS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """The file and the anchor of each relative link exist."""
    text = page.read_text(encoding="utf-8")
    # A pattern of a field in backquotes can look like a link.
    prose = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith("http"):
            file, _, place = target.partition("#")
            there = page.parent / file if file else page
            assert there.exists(), target
            assert not place or f'<a id="{place}"></a>' in there.read_text(encoding="utf-8"), target


def test_the_readme_leads_to_every_page() -> None:
    """Every page of docs/ can be reached from README by links."""
    seen = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page.resolve())
        links = re.findall(r"\]\(([\w./-]+\.md)\b", page.read_text(encoding="utf-8"))
        waiting += [
            there for link in links if (there := (page.parent / link).resolve()) not in seen
        ]
    # Pages of ortmodule are links to its own folder.
    assert {page.resolve() for page in PAGES} - seen == set()


@pytest.mark.parametrize(("page", "most"), [("README.md", 70), ("CHANGELOG.md", 80)])
def test_a_page_stays_short(page: str, most: int) -> None:
    """README and CHANGELOG are short enough that a new user reads all of them."""
    assert (ROOT / page).read_text(encoding="utf-8").count("\n") <= most
