"""The recipe under construction from another tool's config, and a report on every key. Pure.

Every key ends in exactly one list of the report; none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ortlaunch.base.errors import InputError
from ortlaunch.recipe.text.source_location import (
    HIDDEN_VALUE,
    SECRET_NAME,
    Key,
    SourceLocation,
    parse_key_path,
    values_with_hidden_secrets,
)
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.yaml_text import one_line_yaml_text

# Stands for the value that the config itself gives.
OWN_VALUE = object()
# Assumed with `parallel` and with bf16: path, value and reason, as `Draft.assume_default` accepts them.
_ENGINE_FOR_PARALLEL = (
    "engine.name",
    "eager",
    "ONNX Runtime has no FSDP2; parallel=null zero.stage=2 engine.name=ort runs on it",
)
_ENGINE_FOR_BF16 = (
    "engine.name",
    "eager",
    "ONNX Runtime has bf16 on CUDA only; precision=fp32 engine.name=ort runs on it",
)


class Remark(NamedTuple):
    """The result for one key."""

    location: SourceLocation
    key: str
    value: str
    text: str

    def __str__(self) -> str:
        return f"{self.location}: {self.key}: {self.value} -> {self.text}"


@dataclass
class ImportReport:
    """The results for all keys of a config."""

    taken: list[Remark] = field(default_factory=list)
    """Converted keys; the text is the recipe's key."""
    changed: list[Remark] = field(default_factory=list)
    """Converted keys whose meaning differs slightly here."""
    dropped: list[Remark] = field(default_factory=list)
    """Keys without a counterpart."""
    needless: list[Remark] = field(default_factory=list)
    """Keys for which nothing needs to be set."""
    empty: list[str] = field(default_factory=list)
    """Keys that are null, false or empty, so they request nothing."""
    assumed: list[str] = field(default_factory=list)
    """Keys that the config lacks, with the tool's own defaults."""


class Draft:
    """The config and the recipe so far; each part has its location."""

    def __init__(
        self, config_tree: Tree, tool_names: Sequence[str], command_tree: Tree, base_tree: Tree
    ) -> None:
        """Begin a conversion.

        Args:
            config_tree: the other tool's config.
            tool_names: names of dialects, by priority.
            command_tree: keys of the command line, which replace the config's.
            base_tree: keys of --base.
        """
        self.config = {str(key): node for key, node in config_tree.children.items()}
        self.tools = tool_names
        self.import_report = ImportReport()
        self.command_tree = command_tree
        self.base_tree = base_tree
        self.recipe_tree = Tree(config_tree.location, node_type="mapping")
        # Keys that the config leaves to the base; those of one tuple are alternatives.
        self.keys_left_to_base: list[tuple[str, ...]] = []
        # Set at the end, for only then is it known which keys the config sets.
        self._assumed_values: list[tuple[str, object, str]] = []

    def config_value(self, config_key: str) -> Any:
        """Return the value of a key; None if it is absent."""
        node = self.config.get(config_key)
        return None if node is None else node.value_without_locations()

    def set_value_or_none(self, recipe_key: str) -> Any:
        """Return the value that the config has set in the recipe."""
        subtree = self.recipe_tree.find_subtree(parse_key_path(recipe_key))
        return None if subtree is None else subtree.value_without_locations()

    def expected_recipe_value_or_none(self, recipe_key: str) -> Any:
        """Return the value that the recipe will have at a path, as far as it is known."""
        trees = (
            tree.find_subtree(parse_key_path(recipe_key))
            for tree in (self.command_tree, self.recipe_tree, self.base_tree)
        )
        subtree = next((tree for tree in trees if tree is not None), None)
        if subtree is not None:
            return subtree.value_without_locations()
        return next((value for key, value, _ in self._assumed_values if key == recipe_key), None)

    def put_recipe_value_if_unset(
        self,
        recipe_key: str,
        value_node: Tree,
        config_key: str,
        recipe_value: object = OWN_VALUE,
        difference: str = "",
    ) -> None:
        """Set a key of the recipe, and report the key of the config.

        Args:
            recipe_key: the key of the recipe.
            value_node: the config's value.
            config_key: the config's key, for the report.
            recipe_value: the recipe's value; by default that of `value_node`.
            difference: how the meaning differs here; "": it is the same.
        """
        is_own = recipe_value is OWN_VALUE
        new_subtree = (
            value_node if is_own else recipe_value_tree_located_at_node(recipe_value, value_node)
        )
        key_path = parse_key_path(recipe_key)
        earlier_subtree = self.recipe_tree.find_subtree(key_path)
        if earlier_subtree is None:
            self.recipe_tree = self.recipe_tree.copy_with_subtree(key_path, new_subtree)
            value_text = "" if is_own else f": {one_line_text(new_subtree)}"
            difference_text = f"; {difference}" if difference else ""
            self.add_remark(
                "changed" if difference else "taken",
                config_key,
                value_node,
                f"{recipe_key}{value_text}{difference_text}",
            )
        # Two keys of the config with one counterpart: equal values are fine.
        elif earlier_subtree.value_without_locations() == new_subtree.value_without_locations():
            self.add_remark("needless", config_key, value_node, f"{recipe_key} has it")
        else:
            reason = f"{recipe_key} is set by another key already"
            self.add_remark("dropped", config_key, value_node, reason)

    def assume_default(self, recipe_key: str, recipe_value: object, reason: str) -> None:
        """Set a key at the end, unless the config sets it."""
        self._assumed_values.append((recipe_key, recipe_value, reason))

    def set_defaults_that_config_leaves_out(self) -> None:
        """Set the defaults of those keys that the config does not set."""
        if self.recipe_tree.find_subtree(("parallel",)) is not None:
            self.assume_default(*_ENGINE_FOR_PARALLEL)
        if self.recipe_tree.find_subtree(("model", "quantize")) is not None:
            self.assume_default("engine.name", "eager", "model.quantize requires it")
        if self.expected_recipe_value_or_none("precision") == "bf16":
            self.assume_default(*_ENGINE_FOR_BF16)
        for recipe_key, recipe_value, reason in self._assumed_values:
            if self.recipe_tree.find_subtree(parse_key_path(recipe_key)) is None:
                self.recipe_tree = self.recipe_tree.copy_with_subtree(
                    parse_key_path(recipe_key),
                    recipe_value_tree_located_at_node(recipe_value, self.recipe_tree),
                )
                self.import_report.assumed.append(f"{recipe_key}: {recipe_value} ({reason})")

    def add_remark(
        self, list_name: str, config_key: str, value_node: Tree, result_text: str
    ) -> None:
        """Add a key to a list of the report."""
        # The report is printed and written into the recipe, so it must not have secrets.
        value = (
            HIDDEN_VALUE
            if SECRET_NAME.search(config_key)
            else " ".join(one_line_text(value_node).split())
        )
        getattr(self.import_report, list_name).append(
            Remark(
                value_node.key_location or value_node.location,
                config_key,
                value if len(value) <= 80 else value[:77] + "...",
                result_text,
            )
        )


def refusal_error(config_key: str, node: Tree, reason: str) -> InputError:
    """Return an error for a kind of training that ortlaunch does not have."""
    return InputError(
        f"{node.key_location or node.location}: {config_key}: {one_line_text(node)}: {reason}"
    )


def is_empty(node: Tree) -> bool:
    """Return whether a value is null, false or empty."""
    # 0 is a value: a warm-up of 0 steps differs from the default.
    if node.node_type != "scalar":
        return not node.children
    return node.scalar is None or node.scalar is False or node.scalar == ""


def recipe_value_tree_located_at_node(recipe_value: object, located_node: Tree) -> Tree:
    """Return a tree of a recipe's value, with the location of another tool's value."""
    node_type, items = "scalar", dict[Key, object]()
    if isinstance(recipe_value, dict):
        node_type, items = "mapping", recipe_value
    elif isinstance(recipe_value, (list, tuple)):
        node_type, items = "list", dict(enumerate(recipe_value))
    is_scalar = node_type == "scalar"
    return Tree(
        located_node.location,
        recipe_value if is_scalar else None,
        ("null" if recipe_value is None else str(recipe_value)) if is_scalar else None,
        node_type=node_type,
        key_location=located_node.key_location,
        children={
            key: recipe_value_tree_located_at_node(value, located_node)
            for key, value in items.items()
        },
    )


def one_line_text(node: Tree) -> str:
    """Return a value as one line of text, without secrets."""
    if node.node_type == "scalar":
        return str(node.raw if node.raw is not None else node.scalar)
    text = one_line_yaml_text(values_with_hidden_secrets(node.value_without_locations()))
    return text if len(text) <= 80 else text[:77] + "..."


def number_or_none(value: object) -> float | None:
    """Return a value if it is a number."""
    # bool is a subclass of int.
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
