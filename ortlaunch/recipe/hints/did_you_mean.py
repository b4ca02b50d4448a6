"""Advice about an unknown key: the key that the user most likely meant.

recipe/text/closest_names.py compares spellings, keys_of_other_tools.py has the keys of other tools.
"""

from __future__ import annotations

from typing import NamedTuple

from ortlaunch.recipe.fields.deepspeed_keys import PATH_BY_SETTING
from ortlaunch.recipe.fields.field_lookup import (
    first_model_at_path,
    keys_accepted_by_section,
    path_by_unambiguous_field_name,
    path_of_field_in_child_section,
)
from ortlaunch.recipe.hints.keys_of_other_tools import FOREIGN
from ortlaunch.recipe.text.closest_names import normalize_word, word_likeness
from ortlaunch.recipe.text.source_location import KeyPath, format_key_path, parse_key_path
from ortlaunch.tables.families import CONFIG_FIELDS

# Least likeness of a suggested key: below it, keys count as unrelated.
_LEAST_LIKENESS = 0.65


class Advice(NamedTuple):
    """The advice about an unknown key, and the key that was meant.

    `sure`: the value may be used as that key's; else the key is only known to be involved.
    """

    text: str
    target_path: KeyPath | None = None
    is_certain: bool = False


def advise_on_unknown_key(unknown_key: str, section_path: KeyPath) -> Advice:
    """Return the advice about a key that `section_path` does not have."""
    # YAML reads {a: 1,000} as the keys `a` and `000`.
    if unknown_key.isdecimal():
        return Advice("a comma inside { } separates keys; write the number without commas, as 1000")
    if section_path == ("log",) and normalize_word(unknown_key) in (
        "tensorboard",
        "wandb",
        "mlflow",
    ):
        return Advice(f"write log.trackers: [{normalize_word(unknown_key)}]", ("log", "trackers"))
    # Exact matches come first: a guess must not hide them.
    exact_advice = (
        _advice_to_nest_dotted_key(unknown_key, section_path)
        or _advice_on_key_of_other_tool(unknown_key, section_path)
        or _advice_on_key_of_other_section(normalize_word(unknown_key), section_path)
    )
    if exact_advice:
        return exact_advice
    normal_key = normalize_word(unknown_key)
    if normal_key in keys_accepted_by_section(section_path):
        return Advice(
            f"did you mean {format_key_path((*section_path, normal_key))}?",
            (*section_path, normal_key),
            is_certain=True,
        )
    return _advice_on_most_similar_key(unknown_key, section_path) or Advice(
        "valid here: " + ", ".join(sorted(keys_accepted_by_section(section_path)))
    )


def _advice_to_nest_dotted_key(unknown_key: str, section_path: KeyPath) -> Advice | None:
    outer_key, dot, inner_key = unknown_key.partition(".")
    if not dot or outer_key not in keys_accepted_by_section(section_path):
        return None
    return Advice(
        f"nest the keys in a file: write `{outer_key}:`, and `{inner_key}:` under it",
        (*section_path, *parse_key_path(unknown_key)),
        is_certain=True,
    )


def _advice_on_key_of_other_tool(foreign_key_name: str, section_path: KeyPath) -> Advice | None:
    foreign_key_name = normalize_word(foreign_key_name)
    foreign_key = FOREIGN.get(f"{format_key_path(section_path)}.{foreign_key_name}") or FOREIGN.get(
        foreign_key_name
    )
    if foreign_key is None:
        return None
    # The form of these texts is described in keys_of_other_tools.py.
    if foreign_key.recipe_key_or_remedy.startswith("none: "):
        return Advice(
            f"{foreign_key.tool}'s {foreign_key_name} is not needed here: {foreign_key.recipe_key_or_remedy[6:]}"
        )
    if foreign_key.recipe_key_or_remedy.startswith("no: "):
        return Advice(foreign_key.recipe_key_or_remedy[4:])
    # The key comes first; a remark in parentheses may follow.
    target = parse_key_path(foreign_key.recipe_key_or_remedy.split()[0].rstrip(",:"))
    # An entry may also be a sentence, whose first word is no key.
    is_known_key = first_model_at_path(target[:-1]) and target[-1] in keys_accepted_by_section(
        target[:-1]
    )
    return Advice(
        f"{foreign_key.tool}'s {foreign_key_name}; use {foreign_key.recipe_key_or_remedy}",
        target if is_known_key else None,
    )


def _advice_on_key_of_other_section(unknown_key: str, section_path: KeyPath) -> Advice | None:
    """Return the advice about a key of the recipe, a config or DeepSpeed in the wrong section."""
    if unknown_key == "extends":
        return Advice("it is valid only at the top of a file")
    config_path = f"model.config.{unknown_key}" if unknown_key in CONFIG_FIELDS else None
    field_path = (
        (config_path if section_path[:1] == ("model",) else None)
        or path_by_unambiguous_field_name().get(unknown_key)
        or config_path
    )
    if field_path is None and unknown_key in PATH_BY_SETTING:
        field_path = PATH_BY_SETTING[unknown_key]
    nested_path = (
        path_of_field_in_child_section(section_path, unknown_key) if section_path else None
    )
    if field_path is None and nested_path:
        return Advice(f"it belongs at {format_key_path(nested_path)}", nested_path)
    if field_path is None or parse_key_path(field_path)[:-1] == section_path:
        return None
    return Advice(f"it belongs at {field_path}", parse_key_path(field_path), is_certain=True)


def _advice_on_most_similar_key(unknown_key: str, section_path: KeyPath) -> Advice | None:
    """Return the advice about the most similar key, or None.

    Keys of this section come before keys of other sections, and these before keys of other tools.
    """
    rated_advice = [
        (
            # Bonus for the section that the user wrote the key in.
            word_likeness(unknown_key, name) + 0.1,
            Advice(
                f"did you mean {format_key_path((*section_path, name))}?",
                (*section_path, name),
                is_certain=True,
            ),
        )
        for name in keys_accepted_by_section(section_path)
    ]
    rated_advice += [
        (word_likeness(unknown_key, name), Advice(f"did you mean {path}?", parse_key_path(path)))
        for name, path in path_by_unambiguous_field_name().items()
    ]
    for name in FOREIGN:
        # Keys that are foreign in one section only have a dot; they are no candidates.
        likeness_to_key = 0.0 if "." in name else word_likeness(unknown_key, name) - 0.05
        advice = (
            _advice_on_key_of_other_tool(name, section_path)
            if likeness_to_key >= _LEAST_LIKENESS
            else None
        )
        if advice:
            rated_advice.append(
                (likeness_to_key, advice._replace(text=f"did you mean {name}? {advice.text}"))
            )
    best_likeness, advice = max(rated_advice, key=lambda option: option[0])
    return advice if best_likeness >= _LEAST_LIKENESS else None
