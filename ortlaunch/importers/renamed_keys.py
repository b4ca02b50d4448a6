"""Convert a config by a tool's rules.

Keys that are only renamed are rows of the tables in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

from ortlaunch.importers.draft import Draft
from ortlaunch.importers.rules import (
    ANY_KEY,
    NO_COUNTERPART,
    ConfigKey,
    Rule,
    Rules,
    convert_section_by_rules,
    drop,
    needless,
    put,
    whole_config_key,
)
from ortlaunch.recipe.fields.field_lookup import (
    first_model_at_path,
    keys_accepted_by_section,
    names_accepted_by_field,
    path_by_unambiguous_field_name,
)
from ortlaunch.recipe.hints.keys_of_other_tools import DIALECTS, NO_MODEL_PARALLELISM, USUAL
from ortlaunch.recipe.text.closest_names import closest_or_translated_name_or_none, normalize_word
from ortlaunch.recipe.text.source_location import parse_key_path

# Prefix of dialect entries for keys that need no setting here; the reason follows.
_NOT_NEEDED_PREFIX = "none: "


def convert_config_by_rules(draft: Draft, rules: Rules) -> None:
    """Convert all keys of a config; those without a rule by the dialects and the recipe's names."""
    convert_section_by_rules(whole_config_key(draft), {**rules, ANY_KEY: _renamed_key})


def _renamed_key(key: ConfigKey) -> Rule:
    word = normalize_word(key.path)
    if _is_default_without_counterpart(key.value, USUAL.get(word)):
        return needless("the tool's default, which asks for nothing")
    # The tool's own dialect first: the same key may mean something else in another tool.
    meanings = [DIALECTS[tool][word] for tool in key.draft.tools if word in DIALECTS[tool]]
    recipe_key = (*meanings, path_by_unambiguous_field_name().get(word, ""))[0]
    if recipe_key.startswith(_NOT_NEEDED_PREFIX):
        return needless(recipe_key.removeprefix(_NOT_NEEDED_PREFIX))
    if recipe_key == NO_MODEL_PARALLELISM and key.numeric_value == 1:
        return needless("1 stands for none")
    if not is_recipe_key(recipe_key):
        return drop(f"no counterpart; nearest: {recipe_key}") if recipe_key else NO_COUNTERPART
    accepted_words = names_accepted_by_field(parse_key_path(recipe_key))
    if not accepted_words or not isinstance(key.value, str):
        return put(recipe_key)
    closest_word = closest_or_translated_name_or_none(key.value, accepted_words)
    if closest_word is None:
        return drop(f"{recipe_key} has {', '.join(accepted_words)}")
    return put(recipe_key, closest_word)


def is_recipe_key(key_text: str) -> bool:
    """Return whether a text is exactly a key of the recipe."""
    # Some dialect entries are sentences.
    key_path = parse_key_path(key_text) if key_text and " " not in key_text else ()
    return (
        bool(key_path)
        and first_model_at_path(key_path[:-1]) is not None
        and str(key_path[-1]) in keys_accepted_by_section(key_path[:-1])
    )


def _is_default_without_counterpart(value: object, usual_value: object) -> bool:
    # Of a mapping each setting that is given counts.
    if isinstance(usual_value, dict) and isinstance(value, dict):
        return value.items() <= usual_value.items()
    return usual_value is not None and value == usual_value
