"""A YAML value with the place of each of its parts, and the merge of two such values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ortlaunch.recipe.text.source_location import Key, KeyPath, SourceLocation


@dataclass(frozen=True)
class Tree:
    """A value with its place; mappings and lists have `children`, scalars `scalar` and raw text."""

    location: SourceLocation
    scalar: Any = None
    raw: str | None = None
    quoted: bool = False
    # scalar, mapping or list.
    node_type: str = "scalar"
    children: dict[Key, Tree] = field(default_factory=dict)
    # None where no key precedes the value in its file: items of lists, and the whole document.
    key_location: SourceLocation | None = None

    def value_without_locations(self) -> Any:
        """Return the value without places."""
        if self.node_type == "mapping":
            return {key: child.value_without_locations() for key, child in self.children.items()}
        if self.node_type == "list":
            return [child.value_without_locations() for child in self.children.values()]
        return self.scalar

    def find_subtree(self, key_path: KeyPath) -> Tree | None:
        """Return the subtree at `key_path`, or None."""
        tree: Tree | None = self
        for key in key_path:
            tree = tree.children.get(key) if tree else None
        return tree

    def nearest_key_location(self, key_path: KeyPath) -> SourceLocation:
        """Return the place of the key at `key_path`, or of the nearest section above it that exists."""
        tree = self
        location = self.location
        for key in key_path:
            child = tree.children.get(key)
            if child is None:
                return location
            tree = child
            location = child.key_location or child.location
        return location

    def remove_key(self, key_path: KeyPath) -> Tree:
        """Return a copy without the key at `key_path`."""
        if not key_path or key_path[0] not in self.children:
            return self
        children = dict(self.children)
        child = children.pop(key_path[0])
        if len(key_path) > 1:
            children = {**self.children, key_path[0]: child.remove_key(key_path[1:])}
        return replace(self, children=children)

    def copy_with_subtree(self, key_path: KeyPath, subtree: Tree) -> Tree:
        """Return a copy with `subtree` at `key_path`; missing sections on the path are created."""
        if not key_path:
            return subtree
        # An override names an item as `data.train.0.weight`: the index is text there.
        if self.node_type == "list" and key_path[0] in [str(index) for index in self.children]:
            key_path = (int(key_path[0]), *key_path[1:])
        # A scalar on the path is replaced by a section.
        section = (
            self
            if self.node_type == "mapping" or key_path[0] in self.children
            else _empty_section(subtree.location)
        )
        child = section.children.get(key_path[0]) or _empty_section(subtree.location)
        return replace(
            section,
            children={
                **section.children,
                key_path[0]: child.copy_with_subtree(key_path[1:], subtree),
            },
        )


def _empty_section(location: SourceLocation) -> Tree:
    return Tree(location, node_type="mapping", key_location=location)


def merge_trees_of_same_format(base_tree: Tree, top_tree: Tree) -> Tree:
    """Merge `top_tree` over `base_tree`: mappings merge key by key, everything else is replaced.

    A mapping with another `format` replaces the whole base: the base's fields belong to its own
    format.
    """
    if (
        base_tree.node_type != "mapping"
        or top_tree.node_type != "mapping"
        or _has_other_format(base_tree, top_tree)
    ):
        return top_tree
    children = dict(base_tree.children)
    for key, child in top_tree.children.items():
        children[key] = (
            merge_trees_of_same_format(children[key], child) if key in children else child
        )
    return replace(top_tree, children=children)


def _has_other_format(base_tree: Tree, top_tree: Tree) -> bool:
    base_format = base_tree.children.get("format")
    top_format = top_tree.children.get("format")
    return (
        base_format is not None
        and top_format is not None
        and base_format.value_without_locations() != top_format.value_without_locations()
    )
