"""Tests of load and validate: files, mappings, overrides and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import ortlaunch
from ortlaunch.base.errors import RecipeError
from tests.makers import CUSTOM, OWN_MODULE, bert


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose module is beside it, and not in the current folder."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "mine.py").write_text(OWN_MODULE)
    (folder / "good.yaml").write_text(yaml.safe_dump(CUSTOM))
    monkeypatch.chdir(tmp_path)
    return folder / "good.yaml"


def test_a_file_a_mapping_and_a_shipped_recipe(beside: Path) -> None:
    """A path, a name, a mapping and a loaded recipe give the same recipe."""
    loaded = ortlaunch.load(beside)
    assert loaded.model_dump() == ortlaunch.load(CUSTOM).model_dump()
    assert loaded.model_dump() == ortlaunch.load(loaded).model_dump()
    assert ortlaunch.load("bert-large/tiny").name == "bert-tiny"


@pytest.mark.parametrize(
    ("assignments", "overrides"),
    [
        (("train.max_steps=7", "engine.name=ort"), {}),
        ((), {"train": {"max_steps": 7}, "engine": {"name": "ort"}}),
        (("train.max_steps=5",), {"train": {"max_steps": 7}, "engine.name": "ort"}),
    ],
    ids=["as typed", "sections", "the keyword is last"],
)
def test_overrides(assignments: Any, overrides: Any) -> None:
    """Assignments of the command line, sections and dotted keys set fields; others stay."""
    made = ortlaunch.load(CUSTOM, *assignments, **overrides)
    assert (made.train.max_steps, made.engine.name, made.optimizer.name) == (7, "ort", "sgd")


def test_values_of_python() -> None:
    """None unsets a field, a small number stays one, and a value replaces a whole list."""
    made = ortlaunch.load(
        {**CUSTOM, "zero": {"stage": 1}}, zero=None, optimizer={"learning_rate": 1e-05}
    )
    assert (made.zero, made.optimizer.learning_rate) == (None, 1e-05)


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        ({**CUSTOM, "presicion": "fp32"}, {}, "recipe: presicion: unknown key; did you mean prec"),
        (CUSTOM, {"train": {"max_step": 3}}, "override 'train.max_step=3': train.max_step: unknow"),
        (CUSTOM, {"seed": object()}, "override seed: got object of this process"),
        ({"name": object()}, {}, "recipe: name: got object of this process, and ranks are other"),
        ({"extends": "nothing.yaml"}, {}, "recipe: extends: no file nothing.yaml"),
        ([1], {}, "recipe: a recipe is a mapping"),
        ("nothing.yaml", {}, "nothing.yaml: cannot be read"),
    ],
)
def test_errors(source: Any, overrides: Any, message: str) -> None:
    """An error has its place: the file, `recipe` for a mapping, or the override."""
    with pytest.raises(RecipeError) as caught:
        ortlaunch.load(source, **overrides)
    assert str(caught.value).startswith(message)


def test_a_mapping_extends_a_file(beside: Path) -> None:
    """A mapping may extend a file, relative to the current folder."""
    assert ortlaunch.load({"extends": "there/good.yaml", "seed": 3}).seed == 3


def test_a_changed_recipe_is_checked_again(beside: Path) -> None:
    """`model_copy` of pydantic checks nothing, so every function checks the recipe."""
    wrong = ortlaunch.load(beside).model_copy(update={"precision": "fp99"})
    with pytest.raises(RecipeError, match='recipe: precision: got "fp99"'):
        ortlaunch.plan(wrong)


def test_modules_beside_a_loaded_recipe(beside: Path) -> None:
    """The functions of a loaded recipe are found beside its file; of a mapping, here."""
    valid = ortlaunch.validate(ortlaunch.load(beside))
    assert (valid.recipe.name, valid.notes) == ("made", ())
    with pytest.raises(RecipeError, match="no module mine beside the recipe"):
        ortlaunch.validate(CUSTOM)
    assert "no module mine" in ortlaunch.validate(CUSTOM, elsewhere=True).notes[0]


def test_another_machine_is_named_only_for_what_is_absent() -> None:
    """Only what this host lacks may exist on the machine that trains; a wrong type may not."""
    wrong = bert(model={"task": "masked-lm", "config": {"model_type": "brt"}})
    with pytest.raises(RecipeError, match="did you mean bert") as error:
        ortlaunch.validate(wrong)
    assert "--elsewhere" not in str(error.value)
    with pytest.raises(RecipeError, match=r"(?s)no module mine.*--elsewhere"):
        ortlaunch.validate(CUSTOM)


def test_a_validation_as_text(beside: Path) -> None:
    """The text is that of `ortlaunch validate`, with the notes."""
    valid = ortlaunch.validate(beside, optimizer={"name": "adamw", "learning_rate": 3})
    first, note = str(valid).splitlines()
    assert first == f"{beside}: valid (made)"
    assert "adamw changes each weight by about this much" in note
