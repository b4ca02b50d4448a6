"""The form of a tool's table: a rule for each key.

A rule is an outcome, several rules, a table for the keys of a section, or a function of the key
that returns one of these. A key that is only renamed needs no rule: it is a row of a table in
recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from ortlaunch.importers.draft import (
    OWN_VALUE,
    Draft,
    is_empty,
    number_or_none,
    one_line_text,
    refusal_error,
)
from ortlaunch.recipe.hints.keys_of_other_tools import TRUE_BY_ITSELF
from ortlaunch.recipe.text.closest_names import normalize_word
from ortlaunch.recipe.text.source_location import Key
from ortlaunch.recipe.text.tree import Tree

# In a table of a section: the rule of all keys that have none of their own.
ANY_KEY = "*"


@dataclass(frozen=True)
class Outcome:
    """The result for a key, which the report has, and perhaps a key of the recipe."""

    result: Literal["put", "assumed", "changed", "dropped", "needless", "empty", "refused"]
    text: str = ""
    """How the meaning differs here, or the reason."""
    recipe_key: str = ""
    recipe_value: object = OWN_VALUE


@dataclass(frozen=True)
class EvenIfEmpty:
    """A rule for a key whose null, false or empty value asks for something."""

    rule: Rule


Rule: TypeAlias = "Outcome | EvenIfEmpty | Sequence[Rule] | Mapping[str, Rule] | Callable[[ConfigKey], Rule | None]"
Condition: TypeAlias = "Callable[[ConfigKey], object]"
Rules: TypeAlias = Mapping[str, Rule]


def put(recipe_key: str, recipe_value: object = OWN_VALUE, difference: str = "") -> Outcome:
    """Set a key of the recipe, to the config's own value by default."""
    return Outcome("put", difference, recipe_key, recipe_value)


def assume(recipe_key: str, recipe_value: object, reason: str) -> Outcome:
    """Set a key of the recipe at the end, unless the config sets it."""
    return Outcome("assumed", reason, recipe_key, recipe_value)


def report_change(difference: str) -> Outcome:
    """Report a key whose counterpart is set by other keys and differs slightly."""
    return Outcome("changed", difference)


def drop(reason: str) -> Outcome:
    """Report a key without a counterpart."""
    return Outcome("dropped", reason)


def needless(reason: str) -> Outcome:
    """Report a key for which nothing needs to be set."""
    return Outcome("needless", reason)


def refuse(reason: str) -> Outcome:
    """Refuse a config with this key: ortlaunch has no such training."""
    return Outcome("refused", reason)


OTHER_OPTIMIZER = "another optimizer: there is none of that name here"
OTHER_SCHEDULE = "another schedule: there is none of that name here"
NO_COUNTERPART = drop("no counterpart")
WITHOUT_EFFECT = Outcome("empty")  # as a key that is null, false or empty


def by_text(rule_by_text: Mapping[str, Rule], other_rule: Rule) -> Rule:
    """Return the rule of a key that depends on its value alone."""
    return lambda key: rule_by_text.get(key.text, other_rule)


def first_of(*choices: tuple[Condition, Rule], otherwise: Rule | None) -> Rule:
    """Return the rule of the first condition that a key meets."""
    return lambda key: next((rule for is_met, rule in choices if is_met(key)), otherwise)


class ConfigKey(NamedTuple):
    """A key of a config with its value, as a rule sees it."""

    draft: Draft
    path: str
    node: Tree
    siblings: Mapping[str, Tree]
    """All keys of its section, converted or not."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def value(self) -> Any:
        """The value, without locations."""
        return self.node.value_without_locations()

    @property
    def text(self) -> str:
        """The value as one line of text."""
        return one_line_text(self.node)

    @property
    def items(self) -> list[Any]:
        """The values of a list; of another value this value alone."""
        return self.value if isinstance(self.value, list) else [self.value]

    @property
    def numeric_value(self) -> float | None:
        """The value if it is a number."""
        return number_or_none(self.value)

    @property
    def whole_number(self) -> object:
        """The value, as an int where it is a whole number."""
        is_whole = self.numeric_value is not None and self.numeric_value == int(self.numeric_value)
        return int(self.value) if is_whole else self.value

    def is_set(self, recipe_key: str) -> bool:
        """Return whether a key of the config has set a key of the recipe."""
        return self.draft.set_value_or_none(recipe_key) is not None

    def sibling(self, name: str) -> Any:
        """Return the value of another key of the section; None if it is absent."""
        node = self.siblings.get(name)
        return None if node is None else node.value_without_locations()

    def child(self, name: str) -> Any:
        """Return the value of a key of this section; None if it is absent."""
        node = self.node.children.get(name)
        return None if node is None else node.value_without_locations()

    def child_keys(self) -> dict[str, ConfigKey]:
        """Return the keys of this section."""
        nodes = {str(name): node for name, node in self.node.children.items()}
        return {
            name: ConfigKey(self.draft, f"{self.path}.{name}".lstrip("."), node, nodes)
            for name, node in nodes.items()
        }

    def convert_child(self, name: str, rule: Rule) -> None:
        """Apply a rule to a key of this section, if it is there and not empty."""
        child_key = self.child_keys().get(name)
        if child_key is not None and not is_empty(child_key.node):
            apply_rule_and_tell_if_converted(child_key, rule)

    def recipe_value(self, recipe_key: str) -> Any:
        """Return the value that the recipe will have, as far as it is known."""
        return self.draft.expected_recipe_value_or_none(recipe_key)


def whole_config_key(draft: Draft) -> ConfigKey:
    """Return a section of all keys of the config, whose paths are their names."""
    children: dict[Key, Tree] = dict(draft.config.items())
    config_tree = Tree(draft.recipe_tree.location, node_type="mapping", children=children)
    return ConfigKey(draft, "", config_tree, draft.config)


def apply_rule_and_tell_if_converted(key: ConfigKey, rule: Rule | None) -> bool:
    """Apply a rule to a key; a function that returns None leaves it to the rule of all other keys."""
    while callable(rule) or isinstance(rule, EvenIfEmpty):
        rule = rule.rule if isinstance(rule, EvenIfEmpty) else rule(key)
    if isinstance(rule, Mapping) and key.node.node_type != "mapping":
        rule = drop("it is no mapping, as the tool has it")
    if isinstance(rule, Outcome):
        _record_outcome(key, rule)
    elif isinstance(rule, Mapping):
        convert_section_by_rules(key, rule)
    elif isinstance(rule, Sequence):
        for part in rule:
            apply_rule_and_tell_if_converted(key, part)
    return rule is not None


def convert_section_by_rules(key: ConfigKey, rules: Rules) -> None:
    """Convert all keys of a section: first those with a rule, in the order of the rules."""
    child_keys = key.child_keys()
    rule_of_others = rules.get(ANY_KEY, NO_COUNTERPART)
    for name in dict.fromkeys((*(name for name in rules if name in child_keys), *child_keys)):
        child_key, rule = child_keys[name], rules.get(name, rule_of_others)
        does_always = TRUE_BY_ITSELF.get(normalize_word(name))
        if does_always and child_key.value is False:
            rule = drop(f"here it is always so: {does_always}")
        elif is_empty(child_key.node) and not isinstance(rule, EvenIfEmpty):
            rule = WITHOUT_EFFECT
        if not apply_rule_and_tell_if_converted(child_key, rule):
            rule = WITHOUT_EFFECT if is_empty(child_key.node) else rule_of_others
            apply_rule_and_tell_if_converted(child_key, rule)


def section_values_by_rules(key: ConfigKey, rules: Rules) -> dict[str, object]:
    """Return the values that a section becomes; its rules put keys of the result.

    The report has those keys of the section that do not become a value.
    """
    draft = copy(key.draft)
    draft.recipe_tree = Tree(key.node.location, node_type="mapping")
    draft.import_report = replace(draft.import_report, taken=[])
    convert_section_by_rules(key._replace(draft=draft), rules)
    return dict(draft.recipe_tree.value_without_locations())


def rules_without_adapters(draft: Draft, reason: str) -> Rules:
    """Return the rules of the keys of LoRA where all weights are trained."""
    rule = needless(f"of no effect there: {reason}")
    return {name: rule for name in draft.config if name.startswith("lora_")}


def assume_defaults(draft: Draft, recipe_values: Mapping[str, object], reason: str) -> None:
    """Set the tool's defaults, of keys of the recipe, unless the config sets them."""
    for recipe_key, recipe_value in recipe_values.items():
        draft.assume_default(recipe_key, recipe_value, reason)


def _record_outcome(key: ConfigKey, outcome: Outcome) -> None:
    if outcome.result == "put":
        key.draft.put_recipe_value_if_unset(
            outcome.recipe_key, key.node, key.path, outcome.recipe_value, outcome.text
        )
    elif outcome.result == "assumed":
        key.draft.assume_default(outcome.recipe_key, outcome.recipe_value, outcome.text)
    elif outcome.result == "empty":
        key.draft.import_report.empty.append(key.path)
    elif outcome.result == "refused":
        raise refusal_error(key.path, key.node, outcome.text)
    else:
        key.draft.add_remark(outcome.result, key.path, key.node, outcome.text)
