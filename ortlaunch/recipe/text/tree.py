"""A YAML value with the place of each of its parts, and the merge of two such values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ortlaunch.recipe.text.place import Key, KeyPath, Place


@dataclass(frozen=True)
class Tree:
    """A value with its place; mappings and lists have `children`, scalars `scalar` and raw text."""

    place: Place
    scalar: Any = None
    raw: str | None = None
    quoted: bool = False
    # scalar, mapping or list.
    kind: str = "scalar"
    children: dict[Key, Tree] = field(default_factory=dict)
    # None where no key precedes the value in its file: items of lists, and the whole document.
    key_place: Place | None = None

    def plain(self) -> Any:
        """Return the value without places."""
        if self.kind == "mapping":
            return {key: child.plain() for key, child in self.children.items()}
        if self.kind == "list":
            return [child.plain() for child in self.children.values()]
        return self.scalar

    def find(self, path: KeyPath) -> Tree | None:
        """Return the subtree at `path`, or None."""
        tree: Tree | None = self
        for key in path:
            tree = tree.children.get(key) if tree else None
        return tree

    def where(self, path: KeyPath) -> Place:
        """Return the place of the key at `path`, or of the nearest section above it that exists."""
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
        """Return a copy without the key at `path`."""
        if not path or path[0] not in self.children:
            return self
        children = dict(self.children)
        child = children.pop(path[0])
        if len(path) > 1:
            children = {**self.children, path[0]: child.without(path[1:])}
        return replace(self, children=children)

    def put(self, path: KeyPath, value: Tree) -> Tree:
        """Return a copy with `value` at `path`; missing sections on the path are created."""
        if not path:
            return value
        # An override names an item as `data.train.0.weight`: the index is text there.
        if self.kind == "list" and path[0] in [str(index) for index in self.children]:
            path = (int(path[0]), *path[1:])
        # A scalar on the path is replaced by a section.
        tree = self if self.kind == "mapping" or path[0] in self.children else _section(value.place)
        below = tree.children.get(path[0]) or _section(value.place)
        return replace(tree, children={**tree.children, path[0]: below.put(path[1:], value)})


def _section(place: Place) -> Tree:
    return Tree(place, kind="mapping", key_place=place)


def merge(base: Tree, top: Tree) -> Tree:
    """Merge `top` over `base`: mappings merge key by key, everything else is replaced.

    A mapping with another `format` replaces the whole base: the base's fields belong to its own
    format.
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
