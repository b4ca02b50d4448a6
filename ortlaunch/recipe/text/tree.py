"""A YAML value that remembers where each part of it was written, and how two of them merge."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ortlaunch.recipe.text.place import Key, KeyPath, Place


@dataclass(frozen=True)
class Tree:
    """A value with its place; a mapping or a list has `children`, a scalar has `scalar` and its raw
    text."""

    place: Place
    scalar: Any = None
    raw: str | None = None
    quoted: bool = False
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
        tree = self
        place = self.place
        for key in path:
            child = tree.children.get(key)
            if child is None:
                return place
            tree = child
            place = child.key_place or child.place
        return place

    def without(self, path: KeyPath) -> Tree:
        """A copy that lacks the key at `path`."""
        if not path or path[0] not in self.children:
            return self
        children = dict(self.children)
        child = children.pop(path[0])
        if len(path) > 1:
            children = {**self.children, path[0]: child.without(path[1:])}
        return replace(self, children=children)

    def put(self, path: KeyPath, value: Tree) -> Tree:
        """A copy with `value` at `path`; sections on the way are made."""
        if not path:
            return value
        if self.kind == "list" and path[0] in [str(index) for index in self.children]:
            path = (int(path[0]), *path[1:])
        tree = self if self.kind == "mapping" or path[0] in self.children else _section(value.place)
        below = tree.children.get(path[0]) or _section(value.place)
        return replace(tree, children={**tree.children, path[0]: below.put(path[1:], value)})


def _section(place: Place) -> Tree:
    return Tree(place, kind="mapping", key_place=place)


def merge(base: Tree, top: Tree) -> Tree:
    """`top` over `base`: mappings merge key by key, everything else is replaced.

    A mapping that names another `format` is another thing and replaces the whole.
    """
    if base.kind != "mapping" or top.kind != "mapping" or _other_format(base, top):
        return top
    children = dict(base.children)
    for key, child in top.children.items():
        children[key] = merge(children[key], child) if key in children else child
    return replace(top, children=children)


def _other_format(base: Tree, top: Tree) -> bool:
    old = base.children.get("format")
    new = top.children.get("format")
    return old is not None and new is not None and old.plain() != new.plain()
