"""Tests of the shipped recipes: they are located by name, and copied with all that they need."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ortlaunch import recipe
from ortlaunch.base.errors import InputError, RecipeError
from ortlaunch.resolve import shipped

ROOT = Path(__file__).parents[3] / "recipes"
FILES = ("bert/base", "bert/tiny", "llama/tiny")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of three recipes, of which bert/tiny extends bert/base."""
    folder = tmp_path / "library"
    for name in FILES:
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# yaml-language-server: $schema=../schema.json\nname: {path.stem}\n")
    with (folder / "bert" / "tiny.yaml").open("a") as file:
        file.write("extends: base.yaml  # and changes nothing\n")
    with (folder / "llama" / "tiny.yaml").open("a") as file:
        file.write('model: {factory: "mine:model"}  # data by make.py; other.python and no: such\n')
    # `other` and `no` only look like modules in the recipe, and must not be copied.
    for name in ("mine", "make", "other", "no"):
        (folder / "llama" / f"{name}.py").write_text("")
    (folder / "schema.json").write_text("{}")
    monkeypatch.setattr(shipped, "shipped_folder_or_refuse", lambda: folder)
    monkeypatch.chdir(tmp_path)
    return folder


def test_names(library: Path) -> None:
    """Recipes are named by family and file, and nothing else is listed."""
    assert shipped.shipped_recipe_names() == list(FILES)


@pytest.mark.parametrize("name", ["bert/tiny", "bert/tiny.yaml"])
def test_find(name: str, library: Path) -> None:
    """A recipe is located with and without its ending."""
    assert shipped.shipped_recipe_path_or_refuse(name) == library / "bert" / "tiny.yaml"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bert/tinny", "no shipped recipe 'bert/tinny'; did you mean bert/tiny?"),
        ("lama/tiny", "no shipped recipe 'lama/tiny'; did you mean llama/tiny?"),
        ("tiny", "no shipped recipe 'tiny'; did you mean bert/tiny or llama/tiny?"),
        ("zebra", "no shipped recipe 'zebra'; there are bert/base, bert/tiny, llama/tiny"),
        # A path out of the library is not followed.
        ("../secret", "no shipped recipe '../secret'; there are bert/base, bert/tiny, llama/tiny"),
        ("", "no shipped recipe ''; there are bert/base, bert/tiny, llama/tiny"),
    ],
)
def test_there_is_no_such_recipe(name: str, message: str, library: Path) -> None:
    """The error for an unknown name has the nearest name, or all of them."""
    with pytest.raises(InputError) as caught:
        shipped.shipped_recipe_path_or_refuse(name)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "target", "new"),
    [
        ("llama/tiny", ".", ["tiny.yaml", "make.py", "mine.py"]),
        ("llama/tiny", "mine.yaml", ["mine.yaml", "make.py", "mine.py"]),
        ("llama/tiny", "new/mine.yml", ["new/mine.yml", "new/make.py", "new/mine.py"]),
        ("llama/tiny", "new", ["new/tiny.yaml", "new/make.py", "new/mine.py"]),
        ("bert/tiny", ".", ["tiny.yaml", "base.yaml"]),
        ("bert/tiny", "new/mine.yaml", ["new/mine.yaml", "new/base.yaml"]),
    ],
)
def test_copy(name: str, target: str, new: list[str], library: Path) -> None:
    """A copy has the recipe, its bases and its modules, and a valid link to the schema."""
    assert shipped.copy_shipped_recipe_and_dependencies(name, Path(target)) == [
        Path(path) for path in new
    ]
    text = (library / f"{name}.yaml").read_text()
    assert Path(new[0]).read_text() == text.replace("../schema.json", str(library / "schema.json"))
    copied = [
        path for path in Path().rglob("*.*") if "library" not in path.parts and path.is_file()
    ]
    assert sorted(map(str, copied)) == sorted(new)


@pytest.mark.parametrize("there", ["tiny.yaml", "base.yaml"])
def test_copy_never_overwrites(there: str, library: Path) -> None:
    """A file in the way stops the copy before anything is written."""
    Path(there).write_text("mine")
    with pytest.raises(InputError, match=rf"^{there} exists already; choose another name$"):
        shipped.copy_shipped_recipe_and_dependencies("bert/tiny", Path())
    assert [path.name for path in Path().glob("*.yaml")] == [there]
    assert Path(there).read_text() == "mine"


@pytest.mark.parametrize(
    ("given", "found"),
    [("bert/tiny", "library/bert/tiny.yaml"), ("llama/tiny.yaml", "library/llama/tiny.yaml"),
     ("mine.yaml", "mine.yaml"), ("bert/base", "bert/base"), ("absent.yaml", "absent.yaml")],
)  # fmt: skip
def test_a_recipe_is_a_file_or_a_shipped_name(given: str, found: str, library: Path) -> None:
    """An existing file precedes a shipped recipe of the same name."""
    # A path that is neither is returned, for the error of a missing file.
    Path("mine.yaml").touch()
    Path("bert").mkdir()
    Path("bert/base").touch()
    assert shipped.recipe_path_or_shipped_recipe(Path(given)) in (
        Path(found),
        library.parent / found,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("bert/tinny", "bert/tinny: no such file or shipped recipe; did you mean bert/tiny?"),
        ("runs/net", "runs/net: is the folder of a run; to continue it: "
                     "ortlaunch train runs/net/recipe.yaml --run-dir "
                     "runs/net (with more steps: train.max_steps=NUMBER)"),
        ("library/llama", "library/llama: is a folder; give one of its recipes: tiny.yaml, "
                          "or a name that `ortlaunch "
                          "recipes list` prints"),
        ("runs", "runs: is a folder; give a recipe, a YAML file, "
                 "or a name that `ortlaunch recipes list` prints"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_says_what_to_type(given: str, said: str, library: Path) -> None:
    """A misspelled name, a run's folder and any other folder are refused with advice."""
    Path("runs/net").mkdir(parents=True)
    for name in ("plan.json", "recipe.yaml"):
        Path("runs/net", name).touch()
    with pytest.raises(RecipeError) as caught:
        shipped.recipe_path_or_shipped_recipe(Path(given))
    assert str(caught.value) == said


def test_copy_makes_one_folder_at_most(library: Path) -> None:
    """A copy creates one new folder; a path with more of them is refused as a mistake."""
    with pytest.raises(
        InputError, match=r"^new/folder: cannot be written: No such file or directory$"
    ):
        shipped.copy_shipped_recipe_and_dependencies("llama/tiny", Path("new/folder/mine.yaml"))
    assert not Path("new").exists()


def test_copy_to_an_impossible_place(library: Path) -> None:
    """The error of a copy that cannot be written has the system's reason."""
    Path("file").write_text("")
    with pytest.raises(
        InputError, match=r"^file: cannot be written: File exists$|file/x: .*Not a directory$"
    ):
        shipped.copy_shipped_recipe_and_dependencies("llama/tiny", Path("file/x/tiny.yaml"))


def test_copy_on_a_full_disk(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy on a full disk leaves no empty file, which would prevent the next copy."""

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    # The text is written to a temporary file and flushed before it gets its name.
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        InputError, match=r"^mine.yaml: cannot be written: No space left on device$"
    ):
        shipped.copy_shipped_recipe_and_dependencies("llama/tiny", Path("mine.yaml"))
    assert not Path("mine.yaml").exists()


def test_the_real_ones_copy_and_load(tmp_path: Path) -> None:
    """Every shipped recipe is valid in its folder and as a copy."""
    assert shipped.shipped_folder_or_refuse() == ROOT
    assert len(shipped.shipped_recipe_names()) >= 7
    for number, name in enumerate(shipped.shipped_recipe_names()):
        here = recipe.load_recipe(shipped.shipped_recipe_path_or_refuse(name)).recipe
        copied = shipped.copy_shipped_recipe_and_dependencies(name, tmp_path / str(number))
        assert recipe.load_recipe(copied[0]).recipe == here
        assert str(ROOT / "schema.json") in copied[0].read_text()


@pytest.mark.parametrize("root", ["target", "environment", "user"])
def test_installed_recipes_are_found(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed recipes are found in each share folder that pip may choose."""
    monkeypatch.setattr(
        shipped, "__file__", str(tmp_path / "target" / "ortlaunch" / "run" / "shipped.py")
    )
    monkeypatch.setattr(shipped.sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setattr(shipped.site, "getuserbase", lambda: str(tmp_path / "user"))
    with pytest.raises(
        InputError, match=r"^the shipped recipes are in none of .*; install ortlaunch again$"
    ):
        shipped.shipped_folder_or_refuse()
    there = tmp_path / root / "share" / "ortlaunch" / "recipes"
    there.mkdir(parents=True)
    assert shipped.shipped_folder_or_refuse() == there


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("constraints", "torch-2.7", "no shipped constraint 'torch-2.7'; did you mean torch-2.6?"),
        ("hostfiles", "zebra", "no shipped hostfile 'zebra'; there are deepspeed, mpich, openmpi"),
    ],
)
def test_there_is_no_such_text(kind: str, name: str, message: str) -> None:
    """The error for an unknown name has the nearest name, or all of them."""
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        shipped.read_shipped_text(kind, name)


@pytest.mark.parametrize("name", ["torch-2.6", "torch-2.6.txt"])
def test_text(name: str) -> None:
    """A text is located with and without its ending."""
    assert (
        shipped.read_shipped_text("constraints", name)
        == (ROOT.parent / "constraints" / "torch-2.6.txt").read_text()
    )
