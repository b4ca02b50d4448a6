"""The shipped recipes: in `recipes/` of a checkout, in share/ortlaunch/recipes of an installation."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ortlaunch.errors import InputError
from ortlaunch.recipe.dialects import closest


def folder() -> Path:
    """Where the shipped recipes lie."""
    checkout = Path(__file__).parent.parent / "recipes"
    return checkout if checkout.is_dir() else Path(sys.prefix) / "share" / "ortlaunch" / "recipes"


def names() -> list[str]:
    """`family/recipe` of every one."""
    return sorted(str(path.relative_to(folder()).with_suffix("")) for path in folder().rglob("*.yaml"))


def find(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        InputError: there is none of that name.
    """
    bare = name[: -len(".yaml")] if name.endswith(".yaml") else name
    if bare not in names():
        guess = closest(bare, names())
        raise InputError(
            f"no shipped recipe {name!r}; " + (f"did you mean {guess}?" if guess else f"there are {', '.join(names())}")
        )
    return folder() / f"{bare}.yaml"


def copy(name: str, target: Path) -> list[Path]:
    """Copy a recipe and what it extends to `target`, a .yaml file or a folder; returns the new files.

    Raises:
        InputError: a file of that name is there already.
    """
    source = find(name)
    first = target if target.suffix in (".yaml", ".yml") and not target.is_dir() else target / source.name
    pairs = [(source, first), *((base, first.parent / base.name) for base in _bases(source))]
    there = [str(new) for _, new in pairs if new.exists()]
    if there:
        raise InputError(f"{', '.join(there)} exists already; give another name")
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        for old, new in pairs:
            text = old.read_text(encoding="utf-8")  # an editor finds the schema from anywhere
            new.write_text(text.replace("$schema=../", f"$schema={folder().resolve()}/"), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return [new for _, new in pairs]


def _bases(path: Path) -> list[Path]:
    match = re.search(r"^extends:\s*(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        return []
    base = path.parent / match[1]
    return [base, *_bases(base)]
