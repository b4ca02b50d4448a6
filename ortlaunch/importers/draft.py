"""The recipe under construction from another tool's config, and a report on every key. Pure.

Every key ends in exactly one list of the report; none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ortlaunch.base.errors import InputError
from ortlaunch.recipe.fields.field_lookup import (
    first_model_at_path,
    keys_accepted_by_section,
    names_accepted_by_field,
    path_by_unambiguous_field_name,
)
from ortlaunch.recipe.hints.keys_of_other_tools import (
    DIALECTS,
    NO_MODEL_PARALLELISM,
    TRUE_BY_ITSELF,
    USUAL,
)
from ortlaunch.recipe.text.closest_names import closest_or_translated_name_or_none, normalize_word
from ortlaunch.recipe.text.source_location import (
    HIDDEN_VALUE,
    SECRET_NAME,
    SourceLocation,
    parse_key_path,
    values_with_hidden_secrets,
)
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.recipe.text.yaml_text import one_line_yaml_text

# Stands for the value that the config itself gives.
OWN_VALUE = object()
# Prefix of dialect entries for keys that need no setting here; the reason follows.
NOT_NEEDED_PREFIX = "none: "
# Assumed with bf16: path, value and reason, as `Draft.assume_default` accepts them.
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
    """The keys that are not converted yet, and the recipe so far; each part has its location."""

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
        self.unconverted = dict(self.config)
        self.tools = tool_names
        self.import_report = ImportReport()
        self.command_tree = command_tree
        self.base_tree = base_tree
        self.recipe_tree = Tree(config_tree.location, node_type="mapping")
        # Keys that the config leaves to the base; those of one tuple are alternatives.
        self.keys_left_to_base: list[tuple[str, ...]] = []
        # Applied at the end by `convert_remaining_keys_and_set_assumed_values`, for only then is it
        # known which keys the config sets.
        self._assumed_values: list[tuple[str, object, str]] = []

    def add_key(self, config_key: str, node: Tree) -> None:
        """Add a key to the config, as of an older form or from a part of it."""
        self.config[config_key] = self.unconverted[config_key] = node

    def config_value(self, config_key: str) -> Any:
        """Return the value of a key, converted or not; None if it is absent."""
        node = self.config.get(config_key)
        return None if node is None else node.value_without_locations()

    def expected_recipe_value_or_none(self, recipe_key: str) -> Any:
        """Return the value that the recipe will have at a path, as far as it is known."""
        trees = (
            tree.find_subtree(parse_key_path(recipe_key))
            for tree in (self.command_tree, self.recipe_tree, self.base_tree)
        )
        subtree = next((tree for tree in trees if tree is not None), None)
        assumed_values = [
            value for assumed_key, value, _ in self._assumed_values if assumed_key == recipe_key
        ]
        return (
            subtree.value_without_locations()
            if subtree is not None
            else assumed_values[0]
            if assumed_values
            else None
        )

    def put_recipe_value(
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
        new_subtree = (
            value_node
            if recipe_value is OWN_VALUE
            else recipe_value_tree_located_at_node(recipe_value, value_node)
        )
        earlier_subtree = self.recipe_tree.find_subtree(parse_key_path(recipe_key))
        # Two keys of the config with one counterpart: equal values are fine.
        if (
            earlier_subtree is not None
            and earlier_subtree.value_without_locations() == new_subtree.value_without_locations()
        ):
            return self.report_needless(config_key, value_node, f"{recipe_key} has it")
        if earlier_subtree is not None:
            return self.report_dropped(
                config_key, value_node, f"{recipe_key} is set by another key already"
            )
        self.recipe_tree = self.recipe_tree.copy_with_subtree(
            parse_key_path(recipe_key), new_subtree
        )
        result_text = (
            recipe_key
            if recipe_value is OWN_VALUE
            else f"{recipe_key}: {one_line_text(new_subtree)}"
        )
        self.add_remark(
            self.import_report.changed if difference else self.import_report.taken,
            config_key,
            value_node,
            f"{result_text}; {difference}" if difference else result_text,
        )
        return None

    def assume_default(self, recipe_key: str, recipe_value: object, reason: str) -> None:
        """Set a key at the end, unless the config sets it."""
        self._assumed_values.append((recipe_key, recipe_value, reason))

    def report_altered(self, config_key: str, node: Tree, difference: str) -> None:
        """Report a key whose counterpart is set by other keys and differs slightly."""
        self.add_remark(self.import_report.changed, config_key, node, difference)

    def report_dropped(self, config_key: str, node: Tree, reason: str) -> None:
        """Report a key without a counterpart."""
        self.add_remark(self.import_report.dropped, config_key, node, reason)

    def report_needless(self, config_key: str, node: Tree, reason: str) -> None:
        """Report a key for which nothing needs to be set."""
        self.add_remark(self.import_report.needless, config_key, node, reason)

    def report_adapters_unused(self, reason: str) -> None:
        """Report the keys of LoRA as unused, because all weights are trained."""
        for config_key in [key for key in self.unconverted if key.startswith("lora_")]:
            node = self.unconverted[config_key]
            if not is_empty(node):
                self.report_needless(config_key, node, f"of no effect there: {reason}")
                del self.unconverted[config_key]

    def reason_against_false_or_none(self, config_key: str, node: Tree) -> str | None:
        """Return what is done here in any case, if the config turns it off."""
        does_always = TRUE_BY_ITSELF.get(normalize_word(config_key))
        return (
            f"here it is always so: {does_always}" if does_always and node.scalar is False else None
        )

    def convert_remaining_keys_and_set_assumed_values(self) -> None:
        """Convert all other keys by the dialects and the recipe's names, then set the defaults."""
        for config_key, node in self.unconverted.items():
            if reason := self.reason_against_false_or_none(config_key, node):
                self.report_dropped(config_key, node, reason)
            elif is_empty(node):
                self.import_report.empty.append(config_key)
            elif _is_default_without_counterpart(config_key, node):
                self.report_needless(config_key, node, "the tool's default, which asks for nothing")
            else:
                self._convert_key_by_dialect_tables_or_report_dropped(config_key, node)
        self.unconverted = {}
        if self.expected_recipe_value_or_none("precision") == "bf16":
            self.assume_default(*_ENGINE_FOR_BF16)
        for recipe_key, recipe_value, reason in self._assumed_values:
            if self.recipe_tree.find_subtree(parse_key_path(recipe_key)) is None:
                self.recipe_tree = self.recipe_tree.copy_with_subtree(
                    parse_key_path(recipe_key),
                    recipe_value_tree_located_at_node(recipe_value, self.recipe_tree),
                )
                self.import_report.assumed.append(f"{recipe_key}: {recipe_value} ({reason})")

    def _convert_key_by_dialect_tables_or_report_dropped(
        self, config_key: str, value_node: Tree
    ) -> None:
        # The tool's own dialect first: the same key may mean something else in another tool.
        recipe_key = next(
            (
                DIALECTS[tool][normalize_word(config_key)]
                for tool in self.tools
                if normalize_word(config_key) in DIALECTS[tool]
            ),
            None,
        )
        recipe_key = (
            recipe_key or path_by_unambiguous_field_name().get(normalize_word(config_key)) or ""
        )
        if recipe_key.startswith(NOT_NEEDED_PREFIX):
            self.report_needless(config_key, value_node, recipe_key.removeprefix(NOT_NEEDED_PREFIX))
        elif recipe_key == NO_MODEL_PARALLELISM and number_or_none(value_node.scalar) == 1:
            self.report_needless(config_key, value_node, "1 stands for none")
        elif not is_recipe_key(recipe_key):
            self.report_dropped(
                config_key,
                value_node,
                f"no counterpart; nearest: {recipe_key}" if recipe_key else "no counterpart",
            )
        elif names_accepted_by_field(parse_key_path(recipe_key)) and isinstance(
            value_node.scalar, str
        ):
            self._set_closest_accepted_word_or_report_dropped(config_key, value_node, recipe_key)
        else:
            self.put_recipe_value(recipe_key, value_node, config_key)

    def _set_closest_accepted_word_or_report_dropped(
        self, config_key: str, value_node: Tree, recipe_key: str
    ) -> None:
        accepted_words = names_accepted_by_field(parse_key_path(recipe_key))
        closest_word = closest_or_translated_name_or_none(value_node.scalar, accepted_words)
        if closest_word is None:
            return self.report_dropped(
                config_key, value_node, f"{recipe_key} has {', '.join(accepted_words)}"
            )
        return self.put_recipe_value(recipe_key, value_node, config_key, closest_word)

    def add_remark(
        self, remarks: list[Remark], config_key: str, value_node: Tree, result_text: str
    ) -> None:
        # The report is printed and written into the recipe, so it must not have secrets.
        value = (
            HIDDEN_VALUE
            if SECRET_NAME.search(config_key)
            else " ".join(one_line_text(value_node).split())
        )
        remarks.append(
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


def is_recipe_key(key_text: str) -> bool:
    """Return whether a text is exactly a key of the recipe."""
    # Some dialect entries are sentences.
    key_path = parse_key_path(key_text) if key_text and " " not in key_text else ()
    return (
        bool(key_path)
        and first_model_at_path(key_path[:-1]) is not None
        and str(key_path[-1]) in keys_accepted_by_section(key_path[:-1])
    )


def is_empty(node: Tree) -> bool:
    """Return whether a value is null, false or empty."""
    # 0 is a value: a warm-up of 0 steps differs from the default.
    if node.node_type != "scalar":
        return not node.children
    return node.scalar is None or node.scalar is False or node.scalar == ""


def _is_default_without_counterpart(config_key: str, value_node: Tree) -> bool:
    """Return whether a value is the default of a key that has no counterpart."""
    usual_value, value = USUAL.get(normalize_word(config_key)), value_node.value_without_locations()
    # Of a mapping each setting that is given counts.
    if isinstance(usual_value, dict) and isinstance(value, dict):
        return all(
            setting_name in usual_value and usual_value[setting_name] == value[setting_name]
            for setting_name in value
        )
    return usual_value is not None and value == usual_value


def recipe_value_tree_located_at_node(recipe_value: object, located_node: Tree) -> Tree:
    """Return a tree of a recipe's value, with the location of another tool's value."""
    if isinstance(recipe_value, Tree):
        return recipe_value
    if isinstance(recipe_value, dict):
        return Tree(
            located_node.location,
            node_type="mapping",
            key_location=located_node.key_location,
            children={
                key: recipe_value_tree_located_at_node(inner_value, located_node)
                for key, inner_value in recipe_value.items()
            },
        )
    if isinstance(recipe_value, (list, tuple)):
        return Tree(
            located_node.location,
            node_type="list",
            key_location=located_node.key_location,
            children={
                i: recipe_value_tree_located_at_node(inner_value, located_node)
                for i, inner_value in enumerate(recipe_value)
            },
        )
    return Tree(
        located_node.location,
        recipe_value,
        "null" if recipe_value is None else str(recipe_value),
        key_location=located_node.key_location,
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
