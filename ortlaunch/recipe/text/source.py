"""A recipe file, what it extends, and `key.path=value` overrides -> one tree. Knows nothing of the
recipe's fields."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ortlaunch.recipe.text.place import SECRET, Line, Place, SourceError, dotted
from ortlaunch.recipe.text.tree import Tree, merge
from ortlaunch.recipe.text.yaml_text import MAX_CHARACTERS, parse

_MAX_BYTES = 4 * MAX_CHARACTERS
_MAX_CHAIN = 20  # recipes that extend each other


def read(path: Path, problems: list[Line], seen: Sequence[Path] = ()) -> Tree:
    """Read a recipe file and what it extends; duplicate keys go to `problems`.

    Raises:
        SourceError: the file is missing, is not UTF-8 or YAML, is no mapping, or extends itself.
    """
    tree = parse(text_of(path), str(path), problems)
    if tree.kind == "scalar" and tree.raw is None:
        raise SourceError(
            tree.place, "the recipe is empty; `ortlaunch recipes list` names some to start from"
        )
    if tree.kind != "mapping":
        what = "a list" if tree.kind == "list" else "a single value"
        raise SourceError(
            tree.place, f"a recipe is a mapping of `key: value` lines, this is {what}"
        )
    base = tree.find(("extends",))
    left_out = (
        "extends",
        *(key for key in tree.children if str(key).startswith(("x-", "."))),
    )  # of anchors alone
    for key in left_out:
        tree = tree.without((key,))
    return tree if base is None else merge(_read_base(base, path, problems, seen), tree)


def text_of(path: Path) -> str:
    """A regular file of UTF-8 text.

    Raises:
        SourceError: it is none.
    """
    try:
        data = _bytes(path)
    except (OSError, ValueError) as error:
        raise SourceError(
            Place(str(path)), f"cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        place = Place(str(path), before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        raise SourceError(
            place, f"is not UTF-8 text (byte {data[error.start]:#x}); save it as UTF-8"
        ) from None


def _bytes(path: Path) -> bytes:
    """What a regular file holds; a pipe or a device may block, or never end."""
    kind = path.stat().st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # opening a folder says so itself
        what = "a pipe" if stat.S_ISFIFO(kind) else "a device or a socket"
        raise SourceError(
            Place(str(path)), f"is {what}; a recipe is a regular file, which is read more than once"
        )
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise SourceError(
            Place(str(path), 1, 1), f"has over {_MAX_BYTES:,} bytes, too many for a recipe"
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
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # a name too long, a null character, a loop of links
        found = False
    if not found:
        raise SourceError(place, f"extends: no file {target} (the path is relative to {path})")
    if there in (here, *seen):
        raise SourceError(place, f"extends: {base.scalar} leads back to itself")
    if len(seen) >= _MAX_CHAIN:
        raise SourceError(
            place, f"extends: {_MAX_CHAIN} recipes extend each other up to here; merge some of them"
        )
    return read(target, problems, (*seen, here))


def override(tree: Tree, assignments: Iterable[str], problems: list[Line]) -> Tree:
    """`tree` with every `key.path=value` set; the value is read as YAML and replaces what was
    there."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        place = Place(f"override {path + '=...' if SECRET.search(path.strip()) else assignment!r}")
        names = tuple(name.strip() for name in path.split("."))
        if not equals or not all(names) or path.startswith("-"):
            problems.append(
                Line(place, "write it as key.path=value, for example train.max_steps=100")
            )
            continue
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
