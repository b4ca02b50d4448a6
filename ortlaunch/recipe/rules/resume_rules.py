"""Changes since a checkpoint was written, and what a resumption does with each.

The rules of the recipe's fields stand at the fields (recipe/fields/section.py). A test checks that no
field lacks one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from pydantic import BaseModel

from ortlaunch.recipe.fields.field_lookup import section_models_in_annotation
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import (
    APPLIED,
    EFFECT,
    REFUSED,
    ChangeRule,
    RuleOrFunction,
    effect_rule,
)
from ortlaunch.recipe.text.yaml_text import one_line_yaml_text


def _resume_rule_of_each_field(
    model: type[BaseModel], section_path: str = ""
) -> Iterator[tuple[str, RuleOrFunction]]:
    """Yield the path of each field with its rule; a field without a rule is left out.

    A mapping of the user's own (model.config) is one field, and so is the held-out corpus.
    """
    for name, field in model.model_fields.items():
        path = f"{section_path}{name}"
        child_models = [*section_models_in_annotation(field.annotation)]
        own_rules = (
            part for part in field.metadata if isinstance(part, (ChangeRule, FunctionType))
        )
        rule = next(own_rules, getattr(model, "resume_rule", None))
        # A section that can have no other value needs none.
        if rule is not None and field.annotation not in child_models:
            yield path, rule
        for child_model in child_models if path != "data.evaluation" else ():
            yield from _resume_rule_of_each_field(child_model, f"{path}.")


RULES: dict[str, RuleOrFunction] = dict(_resume_rule_of_each_field(Recipe))
# Values that are no fields of the recipe: the resolved world, the data as they were read, code and
# packages.
OTHER_RULES: dict[str, RuleOrFunction] = {
    # What the global size of the recipe became.
    "world": APPLIED,
    "world.global_samples": effect_rule("the next step uses the samples that follow"),
    "data.samples": ChangeRule(REFUSED, "data", "that many had been read"),
    "data.fingerprint": ChangeRule(REFUSED, "data", "the samples differ"),
    "data.held_out": ChangeRule(
        REFUSED, "data", "other samples are held out, and it trained on some of them"
    ),
    "data.order": ChangeRule(
        REFUSED, "data", "in the current epoch some samples would repeat and others be skipped"
    ),
    "weights.frozen": ChangeRule(
        REFUSED, "model", "a checkpoint lacks the frozen weights, and they were different"
    ),
    "code": APPLIED,
    "packages": APPLIED,
}
# Fields without effect on an evaluation, which trains no step.
_TRAINING_FIELDS = (
    "batch",
    "world",
    "optimizer",
    "schedule",
    "train.max_steps",
    "train.epochs",
    "data.order",
)
# The training data affect an evaluation only through the tokenizer and labels made of them.
_DATA_FIELDS = ("data.train", "data.samples", "data.fingerprint")
_OTHER_MODEL = ChangeRule(REFUSED, explanation="the weights belong to a different model")
_OTHER_DATA = ChangeRule(
    REFUSED, explanation="its tokens and labels may come from this data, and the run has no copy"
)
# Names that `--allow` accepts.
ALLOW_NAMES = ("data", "loss", "model", "optimizer", "precision")


class LeafChange(NamedTuple):
    """A value that differs between two nested mappings."""

    path: str
    """Its keys, joined by dots."""
    old_value: Any
    new_value: Any


class Change(NamedTuple):
    """A value that differs from that of the checkpoint."""

    field: str
    old_value: Any
    new_value: Any
    rule: ChangeRule

    @property
    def change_text(self) -> str:
        """The change without a verdict."""
        return (
            f"{self.field}: {_value_text_without_empty_keys(self.old_value)} -> "
            f"{_value_text_without_empty_keys(self.new_value)}"
        )

    def summary_line(self, allowed_names: tuple[str, ...] = ()) -> str:
        """Return the change as a line for the user."""
        message = f"{self.change_text}: {self._verdict_with_allow_option(allowed_names)}"
        return f"{message} ({self.rule.explanation})" if self.rule.explanation else message

    def _verdict_with_allow_option(self, allowed_names: tuple[str, ...]) -> str:
        if self.rule.verdict != REFUSED:
            return self.rule.verdict
        allow_name = self.rule.allow_name
        if not allow_name:
            return REFUSED
        return (
            f"{EFFECT}, with --allow {allow_name}"
            if allow_name in allowed_names
            else f"{REFUSED} without --allow {allow_name}"
        )

    def is_refused(self, allowed_names: tuple[str, ...]) -> bool:
        """Return whether the change is refused and not allowed by name."""
        return self.rule.verdict == REFUSED and self.rule.allow_name not in allowed_names


def _value_text_without_empty_keys(value: Any) -> str:
    """Return a value as a recipe writes it; keys without a value are left out.

    A list of one text is shown as that text, because both forms mean the same.
    """
    if isinstance(value, Mapping):
        value = {key: item for key, item in value.items() if item not in (None, {}, [])}
    is_single_text = (
        isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], str)
    )
    text = value[0] if is_single_text else value
    return (
        repr(text)
        if isinstance(text, (str, int, float)) and not isinstance(text, bool)
        else one_line_yaml_text(text)
    )


def changed_leaves_with_rules(
    old_values: Mapping[str, Any],
    new_values: Mapping[str, Any],
    rules: Mapping[str, RuleOrFunction],
) -> list[Change]:
    """Return every leaf that differs, in the order of `old_values`, each with its rule."""
    return [
        Change(
            *leaf, rule_of_field_or_nearest_parent(leaf.path, rules, leaf.old_value, leaf.new_value)
        )
        for leaf in changed_leaves(old_values, new_values)
        if not _are_absolute_paths_of_same_files(leaf.old_value, leaf.new_value)
    ]


def _are_absolute_paths_of_same_files(old_value: Any, new_value: Any) -> bool:
    """Return whether both values are absolute paths of the same files, one perhaps through a link."""
    if isinstance(old_value, (list, tuple)) and isinstance(new_value, (list, tuple)):
        return len(old_value) == len(new_value) > 0 and all(
            map(_are_absolute_paths_of_same_files, old_value, new_value)
        )
    return (
        isinstance(old_value, str)
        and isinstance(new_value, str)
        and os.path.isabs(old_value)
        and os.path.realpath(old_value) == os.path.realpath(new_value)
    )


def changes_concerning_evaluation_with_own_rules(
    all_changes: list[Change], keeps_vocabulary: bool
) -> list[Change]:
    """Return the changes that concern an evaluation.

    Changes of the model are refused, all others take effect.

    Args: found: all changes since the checkpoint was written. keeps_vocabulary: whether the run
    keeps its tokenizer and labels. All runs do, but a checkpoint that was copied without its run
    folder does not have them.
    """
    ignored_fields = (*_TRAINING_FIELDS, *_DATA_FIELDS) if keeps_vocabulary else _TRAINING_FIELDS
    return [
        change._replace(rule=_change_rule_for_evaluation(change))
        for change in all_changes
        if not _is_at_or_below(change.field, ignored_fields)
    ]


def _change_rule_for_evaluation(change: Change) -> ChangeRule:
    if _is_at_or_below(change.field, _DATA_FIELDS):
        return _OTHER_DATA
    is_refused = change.rule.verdict == REFUSED
    return (
        _OTHER_MODEL
        if change.rule.allow_name == "model"
        else ChangeRule(EFFECT)
        if is_refused
        else change.rule
    )


def _is_at_or_below(field_path: str, ancestor_paths: tuple[str, ...]) -> bool:
    return any(
        field_path == ancestor_path or field_path.startswith(f"{ancestor_path}.")
        for ancestor_path in ancestor_paths
    )


def rule_of_field_or_nearest_parent(
    field_path: str, rules: Mapping[str, RuleOrFunction], old_value: Any, new_value: Any
) -> ChangeRule:
    """Return the field's rule, or that of the nearest mapping above it that has one."""
    while field_path and field_path not in rules:
        field_path = field_path.rpartition(".")[0]
    # Fields that other versions of ortlaunch wrote.
    rule = rules.get(field_path, ChangeRule(EFFECT, explanation="unknown to this version"))
    return rule if isinstance(rule, ChangeRule) else rule(old_value, new_value)


def changed_leaves(old_value: Any, new_value: Any, dotted_path: str = "") -> Iterator[LeafChange]:
    """Yield every leaf that differs."""
    if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
        # Keys of both, in order, each once.
        for key in dict.fromkeys((*old_value, *new_value)):
            yield from changed_leaves(
                old_value.get(key),
                new_value.get(key),
                f"{dotted_path}.{key}" if dotted_path else key,
            )
    elif old_value != new_value:
        yield LeafChange(dotted_path, old_value, new_value)
