"""Relative paths of a recipe start beside it, or else in the current folder; variables in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.recipe import RecipeFile, load_recipe
from ortlaunch.recipe.fields.data import Corpus

TEXT = """\
name: r
model: {{task: causal-lm, pretrained: {model}}}
data:
  train: {{format: text, path: '{path}'}}
  evaluation: {{format: text, path: [held.txt, other.txt]}}
  tokenizer: bert-base-uncased
  sequence_length: 64
optimizer: {{learning_rate: 1e-3}}
batch: {{global_size: 2}}
train: {{max_steps: 2}}
launch: {{forward: [MINE]}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(path: str = "a.txt", model: str = "base", *overrides: str) -> RecipeFile:
    """Return the recipe of a folder `there`, seen from the folder above it."""
    Path("there").mkdir(exist_ok=True)
    Path("there/r.yaml").write_text(TEXT.format(path=path, model=model))
    return load_recipe("there/r.yaml", overrides)


def paths(file: RecipeFile) -> list[tuple[str, ...]]:
    """Return the paths of the training data and of the evaluation data."""
    sources = (file.recipe.data.train, file.recipe.data.evaluation)
    return [each.path or () for each in sources if isinstance(each, Corpus)]


def test_beside_the_recipe_then_in_the_current_folder() -> None:
    """A path beside the recipe comes first; each choice is a note, and no hub name is a path."""
    Path("there/base").mkdir(parents=True)
    for name in ("there/a.txt", "there/held.txt", "a.txt", "other.txt"):
        Path(name).touch()
    file = loaded()
    assert paths(file) == [("there/a.txt",), ("there/held.txt", "other.txt")]
    assert file.recipe.model.pretrained == "there/base"
    assert file.recipe.data.tokenizer == "bert-base-uncased"
    assert sorted(file.notes) == [
        "data.evaluation.path[0]: there/held.txt, beside there/r.yaml",
        "data.evaluation.path[1]: other.txt is in the current folder, not beside there/r.yaml",
        "data.train.path: there/a.txt, beside there/r.yaml; another a.txt is in the current folder",
        "model.pretrained: there/base, beside there/r.yaml",
    ]


def test_of_a_base_and_of_the_command_line() -> None:
    """A path starts beside the file that has it; one of the command line in the current folder."""
    loaded("*.txt")
    Path("there/a.txt").touch()
    Path("top.yaml").write_text("extends: there/r.yaml\ndata: {evaluation: null}\n")
    assert paths(load_recipe("top.yaml")) == [("there/*.txt",)]
    file = load_recipe("top.yaml", ("data.train.path=a.txt",))
    assert paths(file) == [("a.txt",)]
    # From the recipe's own folder there is no choice.
    assert not loaded("a.txt", "base", "data.train=python-docs").notes


def test_parts_of_a_mixture() -> None:
    """Each source of a mixture has its own paths."""
    Path("there").mkdir(exist_ok=True)
    Path("there/a.txt").touch()
    train = "[{source: {format: text, path: a.txt}}, {source: python-docs}]"
    Path("there/mix.yaml").write_text(
        f"extends: r.yaml\ndata: {{train: {train}, evaluation: null}}\n"
    )
    loaded()
    file = load_recipe("there/mix.yaml")
    assert [getattr(part.source, "path", None) for part in file.recipe.data.parts] == [
        ("there/a.txt",),
        None,
    ]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~/a.txt", "/home/of/a.txt"),
        ("$HOME/a.txt", "/home/of/a.txt"),
        ("${SCRATCH}/$MINE.txt", "/scratch/my.txt"),
        # Not in the list, and not set: both stay, and are errors of files that are missing.
        ("$OTHER/a.txt", "$OTHER/a.txt"),
        ("$WORK/a.txt", "$WORK/a.txt"),
    ],
)
def test_variables(path: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the list and of launch.forward are expanded, also on the command line."""
    for name, value in {
        "HOME": "/home/of",
        "SCRATCH": "/scratch",
        "MINE": "my",
        "OTHER": "x",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WORK", raising=False)
    assert paths(loaded(path))[0] == (expected,)
    file = loaded("a.txt", "base", f"data.train.path={path}", f"engine.save_onnx={path}")
    assert paths(file)[0] == (expected,)
    assert file.recipe.engine.save_onnx == expected


def test_the_text_of_a_template_is_no_path() -> None:
    """A chat template that is given as its text keeps its dollar signs."""
    text = "{{ '$HOME' }}"
    made = loaded("a.txt", "base", f'data.chat_template="{text}"', "data.train=python-chats")
    assert made.recipe.data.chat_template == text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("b [v2].txt", "d [1]/b [v2].txt"),
        ("*.txt", "d [[]1]/*.txt"),
        ("a.txt", "d [1]/a.txt"),
        ("none [v2].txt", "none [v2].txt"),
    ],
)
def test_letters_of_patterns_in_names(path: str, expected: str) -> None:
    """A file or a folder whose name has the letters of a pattern is found beside the recipe."""
    Path("d [1]").mkdir()
    for name in ("a.txt", "b [v2].txt", "r.yaml"):
        Path("d [1]", name).write_text(TEXT.format(path=path, model="base"))
    assert paths(load_recipe("d [1]/r.yaml"))[0] == (expected,)
