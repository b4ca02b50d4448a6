"""Suggestions for unknown options and verbs: a key of the recipe, another option or verb.

The recipe's tables are loaded only for a suggestion, because they slow the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from ortlaunch.cli.summaries import SUMMARIES
from ortlaunch.errors import InputError

# Suggestions for verbs of other tools.
_TRAIN = "train RECIPE"
_EVALUATION = "evaluate RUN_FOLDER; train evaluates at its end and every train.evaluate_every_steps"
_EXPORT = (
    "export RUN_FOLDER; every training writes its model for transformers to export/ in the run "
    "folder"
)
_RESULT = "train: every training writes its model for transformers to export/ in the run folder"
_VERBS = {
    **dict.fromkeys(("run", "launch", "start", "fit", "finetune", "pretrain", "sft"), _TRAIN),
    **dict.fromkeys(("eval", "test"), _EVALUATION),
    **dict.fromkeys(("onnx", "convert", "merge"), _EXPORT),
    **dict.fromkeys(("save", "predict", "infer", "serve"), _RESULT),
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
_OPTIONS = {
    "launch.processes_per_node": "--nproc-per-node", "launch.launcher": "--launcher", "out": "--to", "output": "--to",
}  # fmt: skip
# Other tools accept the config as an option.
_RECIPE = "give the recipe without an option, as in `ortlaunch train RECIPE`"
_WORDS = {
    "local_rank": "its launcher must set LOCAL_RANK, too",
    "config": _RECIPE,
    "config_file": _RECIPE,
    "recipe": _RECIPE,
    "config_path": _RECIPE,
}


# Typer's metavars, such as <list[str]>.
_TYPE = re.compile(r"<(\w+)[^<>]*>")
_PYDANTIC = re.compile(r"^Input should be (.*?)(, unable to .*)?$")
# Everything else is shown as TEXT.
_TYPES = {"int": "NUMBER", "float": "NUMBER", "path": "PATH"}


class Verb(TyperCommand):
    """A verb with suggestions for unknown options, and readable value names in its help."""

    def get_help(self, ctx: Any) -> str:
        """Return Typer's help with readable types and ranges, such as TEXT for `<list[str]>`."""
        # Of the same width, so that Typer's columns stay aligned.
        text = _TYPE.sub(
            lambda found: _TYPES.get(found[1], "TEXT").ljust(len(found[0])), super().get_help(ctx)
        )
        return re.sub(r"(\d+)<=x<=(\d+)", r"\1 to \2", text).replace("x>=", "from ")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Before Typer, whose message for an unknown option has no suggestion from the recipe.
        ours = {
            name
            for option in self.get_params(ctx)
            for name in (*option.opts, *option.secondary_opts)
        }
        for number, word in _unknown(args, ours):
            if hint := _hint(word, args[number + 1 : number + 2], ours):
                raise InputError(f"no such option: {word.partition('=')[0]}; {hint}")
        # Other launchers accept `auto` or `gpu` here; Typer would only report no valid integer.
        for number, word in enumerate(args):
            name, equals, value = word.partition("=")
            value = value if equals else "".join(args[number + 1 : number + 2])
            if name == "--nproc-per-node" and not value.strip("0").isdecimal():
                usual = "the default is one rank per GPU, or one"
                raise InputError(
                    f"--nproc-per-node: got {value or 'nothing'}; give a number, 1 or more; {usual}"
                )
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            # Typer passes pydantic's message on.
            error.message = _PYDANTIC.sub(r"it must be \1", error.message)
            raise


class Verbs(TyperGroup):
    """The verbs, with suggestions for mistyped ones and those of other tools."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            raise InputError(_not_a_verb(args, list(self.commands), ctx.command_path))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs; those of `ortlaunch` itself by group."""
        # A family such as `recipes` has few verbs and no groups.
        if ctx.parent is not None:
            return super().format_commands(ctx, formatter)
        for group in dict.fromkeys(summary.group for summary in SUMMARIES.values()):
            with formatter.section(group):
                formatter.write_dl(
                    [(verb, one.text) for verb, one in SUMMARIES.items() if one.group == group]
                )
        return None


def _not_a_verb(args: Sequence[str], ours: Sequence[str], above: str) -> str:
    """Return the message for an unknown verb.

    Args:
        args: the arguments; the first one is the unknown verb.
        ours: the verbs that exist.
        above: the command that has these verbs.
    """
    from ortlaunch.recipe.text.words import likeness

    name = args[0]
    whose = f" of {above}"
    if above == "ortlaunch":
        whose = ""
        if name in _VERBS:
            return f"no such command: {name}; the nearest is ortlaunch {_VERBS[name]}"
        # `ortlaunch my.yaml`: the verb was left out.
        if name.endswith((".yaml", ".yml")):
            return f"no such command: {name}; to train it: ortlaunch train {' '.join(args)}"
    # 1 is equal; words below 0.6 have too little in common.
    near = [verb for verb in ours if likeness(name, verb) >= 0.6]
    near.sort(key=lambda verb: -likeness(name, verb))
    said = f"did you mean {' or '.join(near[:2])}?" if near else f"commands: {', '.join(ours)}"
    return f"no such command: {name}{whose}; {said}"


def _unknown(args: Sequence[str], ours: set[str]) -> Iterator[tuple[int, str]]:
    """Yield index and text of every unknown long option before `--`."""
    for number, word in enumerate(args):
        # All arguments after it are positional.
        if word == "--":
            return
        if word.startswith("--") and word.partition("=")[0] not in ours:
            yield number, word


def _hint(word: str, after: Sequence[str], ours: set[str]) -> str | None:
    """Return a suggestion for an unknown option; None if Typer itself suggests a similar one.

    Args:
        word: the option, perhaps with =VALUE.
        after: the next argument, if there is one.
        ours: the options of the verb.
    """
    from ortlaunch.recipe.fields.field_lookup import names_in, section_at
    from ortlaunch.recipe.hints.did_you_mean import advise
    from ortlaunch.recipe.hints.keys_of_other_tools import FOREIGN
    from ortlaunch.recipe.text.place import dotted, keys
    from ortlaunch.recipe.text.words import likeness, normal

    name, equals, value = word.lstrip("-").partition("=")
    name = normal(name)
    # `--option VALUE` is understood as well as `--option=VALUE`.
    value = value if equals else next(filter(_is_value, after), "VALUE")
    same = next(
        (one for one in ours if normal(one.lstrip("-")) == name or one == _OPTIONS.get(name)), None
    )
    if same:
        return f"write {same}"
    if name in _WORDS:
        return _WORDS[name]
    *section, last = keys(name)
    if section_at(tuple(section)) and last in names_in(tuple(section)):
        return _as_key(name, value, ours)
    # A mistyped option of the verb: Typer's own suggestion is right.
    if name not in FOREIGN and max(likeness(option.lstrip("-"), name) for option in ours) > 0.8:
        return None
    advice = advise(str(last), tuple(section))
    target = dotted(advice.target) if advice.target else ""
    if target and (advice.sure or target in _OPTIONS or advice.text.endswith(f"use {target}")):
        return _as_key(target, value, ours)
    is_near = advice.target is not None and likeness(str(advice.target[-1]), name) >= 0.7
    return advice.text if name in FOREIGN or is_near else None


def _is_value(text: str) -> bool:
    return not text.startswith("-") and "=" not in text and not text.endswith((".yaml", ".yml"))


def _as_key(key: str, value: str, ours: set[str]) -> str:
    option = _OPTIONS.get(key)
    if option in ours:
        return f"use {option} {value}"
    return f"give a key of the recipe without dashes: {key}={value}"
