"""Advice about an unknown key: the key that the user most likely meant.

recipe/text/words.py compares spellings, keys_of_other_tools.py has the keys of other tools.
"""

from __future__ import annotations

from typing import NamedTuple

from ortlaunch.recipe.fields.deepspeed_keys import PATH_BY_SETTING
from ortlaunch.recipe.fields.families import CONFIG_FIELDS
from ortlaunch.recipe.fields.field_lookup import (
    first_model_at_path,
    nested_field_path,
    section_keys,
    unique_field_paths,
)
from ortlaunch.recipe.hints.keys_of_other_tools import FOREIGN
from ortlaunch.recipe.text.place import KeyPath, format_key_path, parse_key_path
from ortlaunch.recipe.text.words import normalize_word, word_likeness

# Least likeness of a suggested key: below it, keys count as unrelated.
_LEAST_LIKENESS = 0.65


class Advice(NamedTuple):
    """The advice about an unknown key, and the key that was meant.

    `sure`: the value may be used as that key's; else the key is only known to be involved.
    """

    text: str
    target_path: KeyPath | None = None
    is_certain: bool = False


def advise_on_unknown_key(key: str, section: KeyPath) -> Advice:
    """Return the advice about a key that `section` does not have."""
    # YAML reads {a: 1,000} as the keys `a` and `000`.
    if key.isdecimal():
        return Advice("a comma inside { } separates keys; write the number without commas, as 1000")
    if section == ("log",) and normalize_word(key) in ("tensorboard", "wandb", "mlflow"):
        return Advice(f"write log.trackers: [{normalize_word(key)}]", ("log", "trackers"))
    # Exact matches come first: a guess must not hide them.
    exact_advice = (
        _nested_key_advice(key, section)
        or _other_tool_advice(key, section)
        or _other_section_advice(normalize_word(key), section)
    )
    if exact_advice:
        return exact_advice
    normal_key = normalize_word(key)
    if normal_key in section_keys(section):
        return Advice(
            f"did you mean {format_key_path((*section, normal_key))}?",
            (*section, normal_key),
            is_certain=True,
        )
    return _similar_key_advice(key, section) or Advice(
        "valid here: " + ", ".join(sorted(section_keys(section)))
    )


def _nested_key_advice(key: str, section: KeyPath) -> Advice | None:
    outer_key, dot, inner_key = key.partition(".")
    if not dot or outer_key not in section_keys(section):
        return None
    return Advice(
        f"nest the keys in a file: write `{outer_key}:`, and `{inner_key}:` under it",
        (*section, *parse_key_path(key)),
        is_certain=True,
    )


def _other_tool_advice(key: str, section: KeyPath) -> Advice | None:
    key = normalize_word(key)
    foreign_key = FOREIGN.get(f"{format_key_path(section)}.{key}") or FOREIGN.get(key)
    if foreign_key is None:
        return None
    # The form of these texts is described in keys_of_other_tools.py.
    if foreign_key.recipe_key_or_remedy.startswith("none: "):
        return Advice(
            f"{foreign_key.tool}'s {key} is not needed here: {foreign_key.recipe_key_or_remedy[6:]}"
        )
    if foreign_key.recipe_key_or_remedy.startswith("no: "):
        return Advice(foreign_key.recipe_key_or_remedy[4:])
    # The key comes first; a remark in parentheses may follow.
    target = parse_key_path(foreign_key.recipe_key_or_remedy.split()[0].rstrip(",:"))
    # An entry may also be a sentence, whose first word is no key.
    is_known_key = first_model_at_path(target[:-1]) and target[-1] in section_keys(target[:-1])
    return Advice(
        f"{foreign_key.tool}'s {key}; use {foreign_key.recipe_key_or_remedy}",
        target if is_known_key else None,
    )


def _other_section_advice(key: str, section: KeyPath) -> Advice | None:
    """Return the advice about a key of the recipe, a config or DeepSpeed in the wrong section."""
    if key == "extends":
        return Advice("it is valid only at the top of a file")
    config_path = f"model.config.{key}" if key in CONFIG_FIELDS else None
    field_path = (
        (config_path if section[:1] == ("model",) else None)
        or unique_field_paths().get(key)
        or config_path
    )
    if field_path is None and key in PATH_BY_SETTING:
        field_path = PATH_BY_SETTING[key]
    nested_path = nested_field_path(section, key) if section else None
    if field_path is None and nested_path:
        return Advice(f"it belongs at {format_key_path(nested_path)}", nested_path)
    if field_path is None or parse_key_path(field_path)[:-1] == section:
        return None
    return Advice(f"it belongs at {field_path}", parse_key_path(field_path), is_certain=True)


def _similar_key_advice(key: str, section: KeyPath) -> Advice | None:
    """Return the advice about the most similar key, or None.

    Keys of this section come before keys of other sections, and these before keys of other tools.
    """
    rated_advice = [
        (
            # Bonus for the section that the user wrote the key in.
            word_likeness(key, name) + 0.1,
            Advice(
                f"did you mean {format_key_path((*section, name))}?",
                (*section, name),
                is_certain=True,
            ),
        )
        for name in section_keys(section)
    ]
    rated_advice += [
        (word_likeness(key, name), Advice(f"did you mean {path}?", parse_key_path(path)))
        for name, path in unique_field_paths().items()
    ]
    for name in FOREIGN:
        # Keys that are foreign in one section only have a dot; they are no candidates.
        likeness_to_key = 0.0 if "." in name else word_likeness(key, name) - 0.05
        advice = _other_tool_advice(name, section) if likeness_to_key >= _LEAST_LIKENESS else None
        if advice:
            rated_advice.append(
                (likeness_to_key, advice._replace(text=f"did you mean {name}? {advice.text}"))
            )
    best_likeness, advice = max(rated_advice, key=lambda option: option[0])
    return advice if best_likeness >= _LEAST_LIKENESS else None
