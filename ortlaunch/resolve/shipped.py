"""Files shipped with the code: recipes, constraints, host files.

In a checkout they are in folders of these names, in an installation under share/ortlaunch. Printing
them needs the standard library only, so that `ortlaunch constraints` runs before the dependencies
are installed.
"""

from __future__ import annotations

import difflib
import os
import re
import site
import sys
from pathlib import Path

from ortlaunch.errors import InputError, RecipeError
from ortlaunch.run_folder.folder import write_text_atomically

# A module in a recipe: `module.py` or `module:function`.
_MODULE = re.compile(r"(\w+)(?:\.py\b|:\w)")


def folder(kind: str = "recipes") -> Path:
    """Return the folder of the shipped files of a kind, in a checkout or an installation.

    Raises:
        InputError: the folder does not exist.
    """
    # In a checkout the project's file is beside the package, in an installation it is not.
    package = Path(__file__).parents[2]
    if (package / "pyproject.toml").is_file():
        return package / kind
    # Data files of pip with --target, without options, and with --user.
    places = [
        Path(root, "share", "ortlaunch", kind) for root in (package, sys.prefix, site.getuserbase())
    ]
    there = next((place for place in places if place.is_dir()), None)
    if there is None:
        raise InputError(
            f"the shipped {kind} are in none of {', '.join(map(str, places))}; "
            "install ortlaunch again"
        )
    return there


def names() -> list[str]:
    """Return `family/recipe` for every shipped recipe."""
    return sorted(
        str(path.relative_to(folder()).with_suffix("")) for path in folder().rglob("*.yaml")
    )


def find(name: str) -> Path:
    """Return the file of a shipped recipe.

    Raises:
        InputError: no recipe has that name.
    """
    return _named(
        "recipe", name.removesuffix(".yaml"), {each: folder() / f"{each}.yaml" for each in names()}
    )


def text(kind: str, name: str) -> str:
    """Return the contents of a file of `constraints` or `hostfiles`.

    Raises:
        InputError: no file has that name.
    """
    files = {path.name.removesuffix(".txt"): path for path in sorted(folder(kind).iterdir())}
    return _named(kind.removesuffix("s"), name.removesuffix(".txt"), files).read_text(
        encoding="utf-8"
    )


def _named(what: str, name: str, files: dict[str, Path]) -> Path:
    if name in files:
        return files[name]
    # A name without its folder, or one that is misspelt.
    near = [each for each in files if each.rpartition("/")[2] == name]
    near = near or difflib.get_close_matches(name, files, n=1)
    advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(files)}"
    raise InputError(f"no shipped {what} {name!r}; {advice}")


def locate(given: Path) -> Path:
    """Return the recipe file: that path, else the shipped recipe of that name.

    Raises:
        RecipeError: it is a folder, or a likely misspelling.
    """
    if os.path.isdir(given):
        raise RecipeError([f"{given}: {_of_folder(given)}"])
    if os.path.lexists(given):
        return given
    bare = str(given).removesuffix(".yaml")
    known = names()
    if bare in known:
        return find(bare)
    # Imported on use: `ortlaunch constraints` has to run without dependencies.
    from ortlaunch.recipe.text.words import closest, likeness

    # A bare file name is compared with the files beside it alone, below.
    guess = closest(bare, known) if given.parent.name else None
    if guess:
        raise RecipeError([f"{given}: no such file or shipped recipe; did you mean {guess}?"])
    files = ((max(likeness(given.name, path.name), likeness(given.name, path.stem)), path)
             for path in given.parent.glob("*.y*ml"))  # fmt: skip
    like, beside = max(files, default=(0, given))
    if like >= 0.8:
        raise RecipeError([f"{given}: no such file; did you mean {beside}?"])
    return given


def _of_folder(folder: Path) -> str:
    """Return the advice for a folder in the place of a recipe."""
    if (folder / "plan.json").exists() and (folder / "recipe.yaml").exists():
        return (
            "is the folder of a run; to continue it: "
            f"ortlaunch train {folder / 'recipe.yaml'} --run-dir {folder} "
            "(with more steps: train.max_steps=NUMBER)"
        )
    inside = sorted(path.name for path in folder.glob("*.yaml"))
    of_it = (
        f"give one of its recipes: {', '.join(inside[:8])}"
        if inside
        else "give a recipe, a YAML file"
    )
    return f"is a folder; {of_it}, or a name that `ortlaunch recipes list` prints"


def copy(name: str, target: Path) -> list[Path]:
    """Copy a recipe, the recipes it extends and the modules that they name to `target`.

    Args:
        target: a .yaml file or a folder.

    Returns:
        The new files.

    Raises:
        InputError: a file of that name exists already, or cannot be written.
    """
    source = find(name)
    first = (
        target
        if target.suffix in (".yaml", ".yml") and not target.is_dir()
        else target / source.name
    )
    others = [*_bases(source), *_modules([source, *_bases(source)])]
    pairs = [(source, first), *((other, first.parent / other.name) for other in others)]
    if there := [str(new) for _, new in pairs if new.exists()]:
        raise InputError(f"{', '.join(there)} exists already; choose another name")
    try:
        # One new folder, as cp -r makes; a path with more is a typing error.
        first.parent.mkdir(exist_ok=True)
        for old, new in pairs:
            text = old.read_text(encoding="utf-8")
            # An absolute path, so that an editor finds the schema from any folder.
            write_text_atomically(
                new, re.sub(r"(?<=\$schema=)(\.\./)+", f"{folder().resolve()}/", text)
            )
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return [new for _, new in pairs]


def _bases(path: Path) -> list[Path]:
    match = re.search(r"^extends:\s*(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        return []
    base = path.parent / match[1]
    return [base, *_bases(base)]


def _modules(recipes: list[Path]) -> list[Path]:
    """Return Python files beside recipes that name them, as `module:function` or `module.py`."""
    named = {
        (path.parent, name)
        for path in recipes
        for name in _MODULE.findall(path.read_text(encoding="utf-8"))
    }
    return sorted(
        {folder / f"{name}.py" for folder, name in named if (folder / f"{name}.py").is_file()}
    )
