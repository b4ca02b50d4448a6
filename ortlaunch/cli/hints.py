"""Suggestions for unknown options and verbs: a key of the recipe, another option or verb.

The recipe's tables are loaded only for a suggestion, because they slow the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from ortlaunch.base.errors import InputError
from ortlaunch.cli.summaries import SUMMARIES

# Suggestions for verbs of other tools.
_TRAIN_HINT = "train RECIPE"
_EVALUATION_HINT = (
    "evaluate RUN_FOLDER; train evaluates at its end and every train.evaluate_every_steps"
)
_EXPORT_HINT = (
    "export RUN_FOLDER; every training writes its model for transformers to export/ in the run "
    "folder"
)
_RESULT_HINT = (
    "train: every training writes its model for transformers to export/ in the run folder"
)
_HINT_BY_VERB = {
    **dict.fromkeys(("run", "launch", "start", "fit", "finetune", "pretrain", "sft"), _TRAIN_HINT),
    **dict.fromkeys(("eval", "test"), _EVALUATION_HINT),
    **dict.fromkeys(("onnx", "convert", "merge"), _EXPORT_HINT),
    **dict.fromkeys(("save", "predict", "infer", "serve"), _RESULT_HINT),
    **dict.fromkeys(("chat", "sample", "complete"), "generate RUN_FOLDER PROMPT"),
    **dict.fromkeys(("resume", "continue"), "train RUN_FOLDER/recipe.yaml --run-dir RUN_FOLDER"),
    **dict.fromkeys(("check", "lint"), "validate RECIPE"),
    **dict.fromkeys(("dry-run", "dryrun", "estimate", "estimate-memory"), "plan RECIPE"),
    **dict.fromkeys(("benchmark", "profile"), "bench RECIPE"),
    **dict.fromkeys(("install", "build"), "setup"),
    **dict.fromkeys(
        ("show", "cp", "copy", "init", "new"), "recipes list, recipes show, recipes copy"
    ),
    **dict.fromkeys(("ls", "ps", "queue", "jobs", "runs"), "list"),
    **dict.fromkeys(("sbatch", "queue-run", "enqueue"), "submit RECIPE"),
    **dict.fromkeys(("tail", "log"), "logs RUN_FOLDER"),
    **dict.fromkeys(("plot", "curves", "dashboard", "html"), "report RUN_FOLDER..."),
    "help": "--help",
    "version": "--version",
}
# Keys of the recipe, and options of other tools, that are an option here.
_OPTION_BY_KEY = {
    "launch.processes_per_node": "--nproc-per-node", "launch.launcher": "--launcher", "out": "--to", "output": "--to",
}  # fmt: skip
# Other tools accept the config as an option.
_RECIPE_HINT = "give the recipe without an option, as in `ortlaunch train RECIPE`"
_HINT_BY_OPTION = {
    "local_rank": "its launcher must set LOCAL_RANK, too",
    "config": _RECIPE_HINT,
    "config_file": _RECIPE_HINT,
    "recipe": _RECIPE_HINT,
    "config_path": _RECIPE_HINT,
}


# Typer's metavars, such as <list[str]>.
_TYPE_PATTERN = re.compile(r"<(\w+)[^<>]*>")
_PYDANTIC_MESSAGE = re.compile(r"^Input should be (.*?)(, unable to .*)?$")
# Everything else is shown as TEXT.
_METAVAR_BY_TYPE = {"int": "NUMBER", "float": "NUMBER", "path": "PATH"}


class Verb(TyperCommand):
    """A verb with suggestions for unknown options, and readable value names in its help."""

    def get_help(self, ctx: Any) -> str:
        """Return Typer's help with readable types and ranges, such as TEXT for `<list[str]>`."""
        # Of the same width, so that Typer's columns stay aligned.
        help_text = _TYPE_PATTERN.sub(
            lambda type_match: _METAVAR_BY_TYPE.get(type_match[1], "TEXT").ljust(
                len(type_match[0])
            ),
            super().get_help(ctx),
        )
        return re.sub(r"(\d+)<=x<=(\d+)", r"\1 to \2", help_text).replace("x>=", "from ")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Before Typer, whose message for an unknown option has no suggestion from the recipe.
        own_options = {
            name
            for option in self.get_params(ctx)
            for name in (*option.opts, *option.secondary_opts)
        }
        for argument_index, argument in _index_and_text_of_unknown_options(args, own_options):
            if hint := _suggestion_for_unknown_option_or_none(
                argument, args[argument_index + 1 : argument_index + 2], own_options
            ):
                raise InputError(f"no such option: {argument.partition('=')[0]}; {hint}")
        # Other launchers accept `auto` or `gpu` here; Typer would only report no valid integer.
        for argument_index, argument in enumerate(args):
            name, equals_sign, value = argument.partition("=")
            value = value if equals_sign else "".join(args[argument_index + 1 : argument_index + 2])
            if name == "--nproc-per-node" and not value.strip("0").isdecimal():
                default_text = "the default is one rank per GPU, or one"
                raise InputError(
                    f"--nproc-per-node: got {value or 'nothing'}; give a number, 1 or more; {default_text}"
                )
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            # Typer passes pydantic's message on.
            error.message = _PYDANTIC_MESSAGE.sub(r"it must be \1", error.message)
            raise


class Verbs(TyperGroup):
    """The verbs, with suggestions for mistyped ones and those of other tools."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb_name = args[0]
        if verb_name not in self.commands and not verb_name.startswith("-"):
            raise InputError(_unknown_verb_message(args, list(self.commands), ctx.command_path))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs; those of `ortlaunch` itself by group."""
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


def _unknown_verb_message(
    arguments: Sequence[str], known_verbs: Sequence[str], command_path: str
) -> str:
    """Return the message for an unknown verb.

    Args:
        arguments: the arguments; the first one is the unknown verb.
        known_verbs: the verbs that exist.
        command_path: the command that has these verbs.
    """
    from ortlaunch.recipe.text.closest_names import word_likeness

    verb_name = arguments[0]
    command_text = f" of {command_path}"
    if command_path == "ortlaunch":
        command_text = ""
        if verb_name in _HINT_BY_VERB:
            return (
                f"no such command: {verb_name}; the nearest is ortlaunch {_HINT_BY_VERB[verb_name]}"
            )
        # `ortlaunch my.yaml`: the verb was left out.
        if verb_name.endswith((".yaml", ".yml")):
            return (
                f"no such command: {verb_name}; to train it: ortlaunch train {' '.join(arguments)}"
            )
    # 1 is equal; words below 0.6 have too little in common.
    similar_verbs = [verb for verb in known_verbs if word_likeness(verb_name, verb) >= 0.6]
    similar_verbs.sort(key=lambda verb: -word_likeness(verb_name, verb))
    suggestion = (
        f"did you mean {' or '.join(similar_verbs[:2])}?"
        if similar_verbs
        else f"commands: {', '.join(known_verbs)}"
    )
    return f"no such command: {verb_name}{command_text}; {suggestion}"


def _index_and_text_of_unknown_options(
    arguments: Sequence[str], own_options: set[str]
) -> Iterator[tuple[int, str]]:
    """Yield index and text of every unknown long option before `--`."""
    for argument_index, argument in enumerate(arguments):
        # All arguments after it are positional.
        if argument == "--":
            return
        if argument.startswith("--") and argument.partition("=")[0] not in own_options:
            yield argument_index, argument


def _suggestion_for_unknown_option_or_none(
    unknown_option: str, next_arguments: Sequence[str], own_options: set[str]
) -> str | None:
    """Return a suggestion for an unknown option; None if Typer itself suggests a similar one.

    Args:
        unknown_option: the option, perhaps with =VALUE.
        next_arguments: the next argument, if there is one.
        own_options: the options of the verb.
    """
    from ortlaunch.recipe.fields.field_lookup import first_model_at_path, keys_accepted_by_section
    from ortlaunch.recipe.hints.did_you_mean import advise_on_unknown_key
    from ortlaunch.recipe.hints.keys_of_other_tools import FOREIGN
    from ortlaunch.recipe.text.closest_names import normalize_word, word_likeness
    from ortlaunch.recipe.text.source_location import format_key_path, parse_key_path

    option_name, equals_sign, value = unknown_option.lstrip("-").partition("=")
    option_name = normalize_word(option_name)
    # `--option VALUE` is understood as well as `--option=VALUE`.
    value = value if equals_sign else next(filter(_looks_like_value, next_arguments), "VALUE")
    same_option = next(
        (
            own_option
            for own_option in own_options
            if normalize_word(own_option.lstrip("-")) == option_name
            or own_option == _OPTION_BY_KEY.get(option_name)
        ),
        None,
    )
    if same_option:
        return f"write {same_option}"
    if option_name in _HINT_BY_OPTION:
        return _HINT_BY_OPTION[option_name]
    *section, last_key = parse_key_path(option_name)
    if first_model_at_path(tuple(section)) and last_key in keys_accepted_by_section(tuple(section)):
        return _recipe_key_suggestion(option_name, value, own_options)
    # A mistyped option of the verb: Typer's own suggestion is right.
    if (
        option_name not in FOREIGN
        and max(word_likeness(option.lstrip("-"), option_name) for option in own_options) > 0.8
    ):
        return None
    advice = advise_on_unknown_key(str(last_key), tuple(section))
    target_key = format_key_path(advice.target_path) if advice.target_path else ""
    if target_key and (
        advice.is_certain
        or target_key in _OPTION_BY_KEY
        or advice.text.endswith(f"use {target_key}")
    ):
        return _recipe_key_suggestion(target_key, value, own_options)
    is_near = (
        advice.target_path is not None
        and word_likeness(str(advice.target_path[-1]), option_name) >= 0.7
    )
    return advice.text if option_name in FOREIGN or is_near else None


def _looks_like_value(text: str) -> bool:
    return not text.startswith("-") and "=" not in text and not text.endswith((".yaml", ".yml"))


def _recipe_key_suggestion(recipe_key: str, value: str, own_options: set[str]) -> str:
    option = _OPTION_BY_KEY.get(recipe_key)
    if option in own_options:
        return f"use {option} {value}"
    return f"give a key of the recipe without dashes: {recipe_key}={value}"
