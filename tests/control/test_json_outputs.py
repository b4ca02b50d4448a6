"""The output of a verb with `--json` has the schema of `ortlaunch schema --output`, and no other field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ortlaunch.api.json_outputs import TYPE_BY_VERB
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.run.job_file import JobFile
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.run_folder.verdict import Verdict
from tests.control.typed import Run
from tests.makers import plan, recipe

ROOT = Path(__file__).parents[2]
# A command of each verb, in a folder with recipes and the folders of two runs that failed, and its exit status.
COMMANDS = {
    "validate": ("validate bad.yaml", 2),
    "list": ("list", 0),
    "status": ("status one", 0),
    "compare": ("compare one two", 0),
    "diagnose": ("diagnose one", 0),
    "ranks": ("ranks", 0),
    "plan --fit": ("plan bert.yaml --fit --gpu 80GiB", 0),
    "recipes list": ("recipes list", 0),
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_an_output_has_its_schema(
    verb: str, ortlaunch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is valid by the printed schema, which names every field."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
    for name in ("one", "two"):
        run = RunDir(name)
        with JobFile(run, "local") as file:
            file.record_end_or_print_disk_error(Verdict(7, f"rank 0 of {name} failed"))
        # What `compare` needs of a run that has begun.
        write_text_atomically(run.recipe, dump_recipe_yaml(recipe(name=name)))
        write_text_atomically(run.plan, plan(recipe()).to_json())
    words, status = COMMANDS[verb]
    ended = ortlaunch(*words.split(), "--json")
    output: Any = json.loads(ended.out)
    assert (ended.status, ended.err) == (status, "")
    schema = json.loads(ortlaunch("schema", "--output", verb).out)
    jsonschema.validate(output, schema)
    item = output[0] if isinstance(output, list) and output else output
    if isinstance(item, dict):
        name = (schema.get("items") or schema).get("$ref", "").rpartition("/")[2]
        assert list(item) == list(schema.get("$defs", {}).get(name, schema)["properties"])


def test_every_verb_of_the_table_is_tried() -> None:
    """Each output is held to its schema; doctor's in tests/launch/test_doctor.py, which starts ranks."""
    assert {*COMMANDS, "doctor"} == set(TYPE_BY_VERB)


def test_validate_prints_all_problems_as_json(ortlaunch: Run) -> None:
    """The problems are those of the text, in the same order; a valid recipe has none."""
    found = json.loads(ortlaunch("validate", "bad.yaml", "--json").out)
    assert found["problems"] == ortlaunch("validate", "bad.yaml").err.splitlines()
    found = json.loads(ortlaunch("validate", "good.yaml", "--json").out)
    assert (found["valid"], found["problems"]) == (True, [])


def test_an_output_without_a_schema_is_refused(ortlaunch: Run) -> None:
    """The error names the verbs that have one."""
    ended = ortlaunch("schema", "--output", "train")
    assert (ended.status, ended.out) == (2, "")
    assert "--output: got 'train'; one of validate, list, " in ended.err


def test_the_page_of_the_command_line_is_current(ortlaunch: Run) -> None:
    """docs/reference/cli.md is what `ortlaunch schema --commands` prints."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert ortlaunch("schema", "--commands").out == page


def test_pages_of_the_documentation_are_printed(ortlaunch: Run) -> None:
    """`docs` lists every page by folder; `docs NAME` prints one; a misspelt name gets a suggestion."""
    names = [line.split()[0] for line in ortlaunch("docs").out.splitlines()]
    files = (ROOT / "docs").glob("*/*.md")
    assert set(names) == {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in files}
    page = (ROOT / "docs" / "concepts" / "engines.md").read_text(encoding="utf-8")
    for name in ("engines", "concepts/engines", "engines.md"):
        assert ortlaunch("docs", name).out == page
    assert "did you mean engines?" in ortlaunch("docs", "engine").err


def test_the_pictures_are_drawn_from_their_source() -> None:
    """docs/pictures has what tools/pictures.py draws."""
    import runpy

    pictures = runpy.run_path(str(ROOT / "tools" / "pictures.py"))["PICTURES"]
    folder = ROOT / "docs" / "pictures"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        name: picture() for name, picture in pictures.items()
    }
