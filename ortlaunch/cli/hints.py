"""Typer's verbs with two additions: keys of the recipe typed as options, and groups in --help."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from ortlaunch.base.errors import InputError
from ortlaunch.cli.summaries import SUMMARIES


class Verb(TyperCommand):
    """A verb that suggests the recipe's key for an unknown option, as for --max-steps."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        # Typer's error for an unknown option has another module in each version of Typer.
        except Exception as error:
            if hasattr(error, "possibilities"):
                _raise_with_recipe_key_if_meant(error)
            raise


class Verbs(TyperGroup):
    """A family of verbs; those of `ortlaunch` itself are listed by group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        # A family such as `recipes` has few verbs and no groups.
        if ctx.parent is not None:
            return super().format_commands(ctx, formatter)
        for group in dict.fromkeys(summary.group for summary in SUMMARIES.values()):
            with formatter.section(group):
                formatter.write_dl(
                    [
                        (verb, verb_summary.text)
                        for verb, verb_summary in SUMMARIES.items()
                        if verb_summary.group == group
                    ]
                )
        return None


def _raise_with_recipe_key_if_meant(error: Any) -> None:
    """Raise the advice about an unknown option that is a key of the recipe or of another tool.

    Args:
        error: Typer's error; its `possibilities` are similar options of the verb.

    Raises:
        InputError: the option is a key, or like one and like no option of the verb.
    """
    # They load the recipe's tables, which slow the start.
    from ortlaunch.recipe.fields.field_lookup import first_model_at_path
    from ortlaunch.recipe.hints.did_you_mean import advise_on_unknown_key
    from ortlaunch.recipe.hints.keys_of_other_tools import FOREIGN
    from ortlaunch.recipe.text.closest_names import normalize_word, word_likeness
    from ortlaunch.recipe.text.source_location import format_key_path, parse_key_path

    *section, key = map(str, parse_key_path(normalize_word(error.option_name.lstrip("-"))))
    if key == "config":
        raise InputError(f"no such option: {error.option_name}; give the recipe without an option")
    option_likenesses = [
        word_likeness(key, option.lstrip("-")) for option in error.possibilities or ()
    ]
    if 1.0 in option_likenesses or not first_model_at_path(tuple(section)):
        return
    advice = advise_on_unknown_key(key, tuple(section))
    recipe_key = format_key_path(advice.target_path or ("KEY",))
    key_likeness = word_likeness(key, str(parse_key_path(recipe_key)[-1]))
    if key in FOREIGN or key_likeness >= max(0.7, *option_likenesses, 0):
        suggestion = (
            advice.text
            if key in FOREIGN and not advice.text.endswith(recipe_key)
            else f"give a key of the recipe without dashes: {recipe_key}=VALUE"
        )
        raise InputError(f"no such option: {error.option_name}; {suggestion}") from None
