"""YAML text -> a tree of values that remember where they were written.

Owns reading, `extends`, merging and `key.path=value` overrides. Knows nothing of the recipe's fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import yaml

Key = Union[str, int]
KeyPath = tuple[Key, ...]

# PyYAML follows YAML 1.1, where `1e-5` is a word because its mantissa has no point.
_FLOAT_WITHOUT_POINT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+")
# `24:00:00` is 86400 in YAML 1.1 and `010` is 8: nobody who writes a recipe means that.
_SURPRISING_INTEGER = re.compile(r"[-+]?(0[0-9]+|[0-9]+(:[0-9]+)+(\.[0-9]*)?)")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Place(NamedTuple):
    """Where something was written: a file's line and column (from 1), or an override."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass
class Tree:
    """A value with its place; a mapping or a list has `children`, a scalar has `scalar` and its raw text."""

    place: Place
    scalar: Any = None
    raw: str | None = None
    kind: str = "scalar"  # scalar | mapping | list
    children: dict[Key, Tree] = field(default_factory=dict)
    key_place: Place | None = None

    def plain(self) -> Any:
        """The value without places."""
        if self.kind == "mapping":
            return {key: child.plain() for key, child in self.children.items()}
        if self.kind == "list":
            return [child.plain() for child in self.children.values()]
        return self.scalar

    def find(self, path: KeyPath) -> Tree | None:
        """The subtree at `path`, or None."""
        tree: Tree | None = self
        for key in path:
            tree = tree.children.get(key) if tree else None
        return tree

    def where(self, path: KeyPath) -> Place:
        """Where `path` was written: its key, else the nearest section that was written."""
        tree, place = self, self.place
        for key in path:
            child = tree.children.get(key)
            if child is None:
                return place
            tree, place = child, child.key_place or child.place
        return place

    def without(self, path: KeyPath) -> Tree:
        """A copy that lacks the key at `path`."""
        if not path or path[0] not in self.children:
            return self
        children = dict(self.children)
        if len(path) == 1:
            del children[path[0]]
        else:
            children[path[0]] = children[path[0]].without(path[1:])
        return Tree(self.place, self.scalar, self.raw, self.kind, children, self.key_place)


class SourceError(Exception):
    """The text cannot be read at all; `problem` is the whole line for the user."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(problem)


def read(path: Path, problems: list[str], seen: Sequence[Path] = ()) -> Tree:
    """Read a recipe file and what it extends; duplicate keys go to `problems`.

    Raises:
        SourceError: the file is missing, is not UTF-8 or YAML, is no mapping, or extends itself.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    tree = parse(text, str(path), problems)
    if tree.kind != "mapping":
        raise SourceError(f"{path}:1:1: a recipe is a mapping of `key: value` lines, this is a {tree.kind}")
    base = tree.children.pop("extends", None)
    return tree if base is None else merge(_read_base(base, path, problems, (*seen, path.resolve())), tree)


def _read_base(base: Tree, path: Path, problems: list[str], seen: Sequence[Path]) -> Tree:
    if not isinstance(base.scalar, str):
        raise SourceError(f"{base.place}: extends: got {base.plain()!r}; give the path of one recipe file")
    target = path.parent / base.scalar
    if target.resolve() in seen:
        raise SourceError(f"{base.place}: extends: {base.scalar} leads back to itself")
    if not target.is_file():
        raise SourceError(f"{base.place}: extends: no file {target} (the path is relative to {path})")
    return read(target, problems, seen)


def parse(text: str, source: str, problems: list[str]) -> Tree:
    """Parse one YAML document."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)
        raise SourceError(f"{place}: is not YAML: {_syntax_hint(error, text, mark)}") from None
    except yaml.YAMLError as error:
        raise SourceError(f"{source}: is not YAML: {str(error).splitlines()[0]}") from None
    if node is None:
        return Tree(Place(source, 1, 1), kind="mapping")
    return _Builder(loader, source, problems).build(node)


def _syntax_hint(error: yaml.MarkedYAMLError, text: str, mark: Any) -> str:
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    what = error.problem or "syntax error"
    if "\t" in line:
        return f"{what}; this line holds a tab: indent with spaces"
    if "mapping values are not allowed" in what:
        return f"{what}; quote a value that contains ': ', and check the indentation"
    if "expected a single document" in what or "expected <document start>" in what:
        return f"{what}; a recipe is one document, without a second `---`"
    return what


class _Builder:
    """YAML nodes -> Tree, with the loader's own reading of scalars but for YAML 1.1's traps."""

    def __init__(self, loader: Any, source: str, problems: list[str]) -> None:
        self.loader, self.source, self.problems = loader, source, problems
        self.open: list[yaml.Node] = []

    def place(self, node: yaml.Node) -> Place:
        return Place(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def build(self, node: yaml.Node) -> Tree:
        if any(node is parent for parent in self.open):
            raise SourceError(f"{self.place(node)}: this anchor contains itself")
        if isinstance(node, yaml.ScalarNode):
            return Tree(self.place(node), self.scalar(node), node.value)
        self.open.append(node)
        try:
            return self.mapping(node) if isinstance(node, yaml.MappingNode) else self.sequence(node)
        finally:
            self.open.pop()

    def sequence(self, node: yaml.Node) -> Tree:
        children: dict[Key, Tree] = {i: self.build(child) for i, child in enumerate(node.value)}
        return Tree(self.place(node), kind="list", children=children)

    def mapping(self, node: yaml.Node) -> Tree:
        tree = Tree(self.place(node), kind="mapping")
        merged = Tree(self.place(node), kind="mapping")
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise SourceError(f"{self.place(key_node)}: a key must be a word")
            value = self.build(value_node)
            if key_node.tag == "tag:yaml.org,2002:merge":
                for base in [value] if value.kind == "mapping" else list(value.children.values())[::-1]:
                    merged = merge(merged, base)
                continue
            value = Tree(value.place, value.scalar, value.raw, value.kind, value.children, self.place(key_node))
            self.add(tree, key_node.value, value)
        return merge(merged, tree) if merged.children else tree

    def add(self, tree: Tree, key: str, value: Tree) -> None:
        first = tree.children.get(key)
        if first is not None and first.key_place:
            self.problems.append(
                f"{value.key_place}: {key}: this key is already given in line {first.key_place.line}; keep one"
            )
        tree.children[key] = value

    def scalar(self, node: yaml.ScalarNode) -> Any:
        if node.style is None:  # plain, without quotes
            if _FLOAT_WITHOUT_POINT.fullmatch(node.value):
                return float(node.value)
            if _SURPRISING_INTEGER.fullmatch(node.value) or node.tag.endswith(":timestamp"):
                return node.value
        try:
            return self.loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            what = getattr(error, "problem", None) or str(error)
            raise SourceError(f"{self.place(node)}: cannot read {node.value!r}: {what}") from None


def merge(base: Tree, top: Tree) -> Tree:
    """`top` over `base`: mappings merge key by key, everything else is replaced.

    A mapping that names another `format` is another thing and replaces the whole.
    """
    if base.kind != "mapping" or top.kind != "mapping" or _other_format(base, top):
        return top
    children = dict(base.children)
    for key, child in top.children.items():
        children[key] = merge(children[key], child) if key in children else child
    return Tree(top.place, kind="mapping", children=children, key_place=top.key_place)


def _other_format(base: Tree, top: Tree) -> bool:
    old, new = base.children.get("format"), top.children.get("format")
    return old is not None and new is not None and old.plain() != new.plain()


def override(tree: Tree, assignments: Iterable[str], problems: list[str]) -> Tree:
    """`tree` with every `key.path=value` set; the value is read as YAML and replaces what was there."""
    for assignment in assignments:
        source = f"override {assignment!r}"
        dotted, equals, text = assignment.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            problems.append(f"{source}: write it as key.path=value, for example train.max_steps=100")
        elif not text.strip():
            problems.append(f"{source}: has no value; write {dotted}=null to unset it")
        else:
            try:
                value = parse(text, source, problems)
            except SourceError as error:
                problems.append(error.problem)
                continue
            tree = put(tree, keys, _placed(value, Place(source)))
    return tree


def _placed(tree: Tree, place: Place) -> Tree:
    children = {key: _placed(child, place) for key, child in tree.children.items()}
    return Tree(place, tree.scalar, tree.raw, tree.kind, children, place)


def put(tree: Tree, keys: Sequence[str], value: Tree) -> Tree:
    """A copy of `tree` with `value` at the path `keys`; sections on the way are made."""
    children = dict(tree.children) if tree.kind == "mapping" else {}
    key = keys[0]
    if len(keys) == 1:
        children[key] = value
    else:
        below = children.get(key) or Tree(value.place, kind="mapping", key_place=value.place)
        children[key] = put(below, keys[1:], value)
    return Tree(tree.place, kind="mapping", children=children, key_place=tree.key_place)


def walk(tree: Tree, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Tree]]:
    """Every subtree with its path, top down."""
    yield path, tree
    for key, child in tree.children.items():
        yield from walk(child, (*path, key))
