"""A recipe file, the recipes that it extends, and `key.path=value` overrides, as one tree.

Independent of the recipe's fields.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ortlaunch.errors import IS_LFS_POINTER, LFS_POINTER
from ortlaunch.recipe.text.place import SECRET, Line, Place, SourceError, dotted
from ortlaunch.recipe.text.python_values import plain
from ortlaunch.recipe.text.tree import Tree, merge
from ortlaunch.recipe.text.yaml_text import MAX_CHARACTERS, parse

# UTF-8 has up to four bytes for a character.
_MAX_BYTES = 4 * MAX_CHARACTERS
# Maximum length of a chain of recipes that extend each other.
_MAX_CHAIN = 20


def read(path: Path, problems: list[Line], seen: Sequence[Path] = ()) -> Tree:
    """Read a recipe file and the recipes that it extends; duplicate keys go to `problems`.

    Raises: SourceError: the file is missing, is not UTF-8 or YAML, is no mapping, or extends
    itself.
    """
    return _whole(parse(text_of(path), str(path), problems), path, problems, seen)


def read_values(values: Mapping[str, object], problems: list[Line]) -> Tree:
    """Return the tree of a recipe that is a mapping in Python; raises as `read`.

    `extends` in it is relative to the current folder. Every place is the text `recipe`.
    """
    name = "recipe"
    wrong: list[str] = []
    # JSON is YAML, so that values have the same rules as in a file.
    text = json.dumps(plain(values, (), wrong))
    if wrong:
        problems += [Line(Place(name), each) for each in wrong[1:]]
        raise SourceError(Place(name), wrong[0])
    return _whole(_placed(parse(text, name, problems), Place(name)), Path(name), problems, ())


def _whole(tree: Tree, path: Path, problems: list[Line], seen: Sequence[Path]) -> Tree:
    """Return the tree of a recipe, merged over those of the recipes that it extends."""
    if tree.kind == "scalar" and tree.raw is None:
        raise SourceError(
            tree.place, "the recipe is empty; `ortlaunch recipes list` prints examples"
        )
    if tree.kind != "mapping":
        what = "a list" if tree.kind == "list" else "a single value"
        raise SourceError(
            tree.place, f"a recipe is a mapping of `key: value` lines, this is {what}"
        )
    base = tree.find(("extends",))
    # Keys that begin with `x-` or `.` only hold YAML anchors.
    for key in (
        "extends",
        *(key for key in tree.children if str(key).startswith(("x-", "."))),
    ):
        tree = tree.without((key,))
    return tree if base is None else merge(_read_base(base, path, problems, seen), tree)


def text_of(path: Path) -> str:
    """Return the text of a regular file.

    Raises: SourceError: the file cannot be read, or is not UTF-8.
    """
    try:
        data = _bytes(path)
    except (OSError, ValueError) as error:
        raise SourceError(
            Place(str(path)), f"cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if data.startswith(LFS_POINTER):
        raise SourceError(Place(str(path)), IS_LFS_POINTER)
    try:
        # Editors on Windows may write a byte order mark.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        place = Place(str(path), before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        raise SourceError(
            place, f"is not UTF-8 text (byte {data[error.start]:#x}); save it as UTF-8"
        ) from None


def _bytes(path: Path) -> bytes:
    """Return a regular file's bytes; a pipe or a device may block, or never end."""
    kind = path.stat().st_mode
    # A folder passes: opening it raises a clear error.
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        what = "a pipe" if stat.S_ISFIFO(kind) else "a device or a socket"
        raise SourceError(
            Place(str(path)), f"is {what}; a recipe is a regular file, which is read more than once"
        )
    with path.open("rb") as file:
        # One byte more than the limit shows that the file exceeds it.
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise SourceError(
            Place(str(path), 1, 1), f"has more than {_MAX_BYTES:,} bytes, too many for a recipe"
        )
    return data


def _read_base(base: Tree, path: Path, problems: list[Line], seen: Sequence[Path]) -> Tree:
    place = base.key_place or base.place
    if not isinstance(base.scalar, str) or not base.scalar:
        got = base.raw or ("nothing" if base.kind == "scalar" else base.plain())
        raise SourceError(place, f"extends: got {got}; give the path of one recipe file")
    target = path.parent / base.scalar
    try:
        here, there, found = path.resolve(), target.resolve(), target.is_file()
    # A name that is too long, a null character, a loop of links.
    except (OSError, ValueError, RuntimeError):
        found = False
    if not found:
        raise SourceError(place, f"extends: no file {target} (the path is relative to {path})")
    if there in (here, *seen):
        raise SourceError(place, f"extends: {base.scalar} extends itself through other files")
    if len(seen) >= _MAX_CHAIN:
        raise SourceError(
            place, f"extends: {_MAX_CHAIN} recipes extend each other up to here; merge some of them"
        )
    return read(target, problems, (*seen, here))


def override(tree: Tree, assignments: Iterable[str], problems: list[Line]) -> Tree:
    """Return `tree` with every `key.path=value` set; values are YAML and replace the old ones."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        # A secret's value is not printed.
        place = Place(f"override {path + '=...' if SECRET.search(path.strip()) else assignment!r}")
        names = tuple(name.strip() for name in path.split("."))
        if not equals or not all(names) or path.startswith("-"):
            problems.append(
                Line(place, "write it as key.path=value, for example train.max_steps=100")
            )
            continue
        # Places inside the value are replaced by the override itself.
        found: list[Line] = []
        try:
            value = parse(text, "", found, within=names)
        except SourceError as error:
            problems.append(Line(place, error.line.text))
            continue
        problems += [Line(place, line.text) for line in found]
        if value.kind == "scalar" and value.raw is None:
            name = dotted(names)
            problems.append(Line(place, f"{name}: has no value; write {name}=null to unset it"))
        else:
            tree = tree.put(names, _placed(value, place))
    return tree


def _placed(tree: Tree, place: Place) -> Tree:
    children = {key: _placed(child, place) for key, child in tree.children.items()}
    return replace(tree, place=place, key_place=place, children=children)
