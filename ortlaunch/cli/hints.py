"""What was meant by an option or a verb that is none of ours: a key of the recipe, another option, another tool's word.

Loads the recipe's tables only where there is something to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from ortlaunch.cli.summaries import SUMMARIES
from ortlaunch.errors import InputError

# Verbs of other tools.
_TRAIN = "train RECIPE"
_EVALUATION = "evaluate RUN_FOLDER; train evaluates at its end, and each train.evaluate_every_steps"
_EXPORT = (
    "export RUN_FOLDER; every training leaves its model in export/ of the run folder, "
    "as transformers loads it"
)
_RESULT = (
    "train: every training leaves its model in export/ of the run folder, as transformers loads it"
)
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
    **dict.fromkeys(("ls", "ps", "queue", "jobs"), "list"),
    **dict.fromkeys(("sbatch", "queue-run", "enqueue"), "submit RECIPE"),
    **dict.fromkeys(("tail", "log"), "logs RUN_FOLDER"),
    **dict.fromkeys(("plot", "curves", "compare", "dashboard", "html"), "report RUN_FOLDER..."),
    "help": "--help",
    "version": "--version",
}
# Where an option does what a key of the recipe, or an option of another tool, does.
_OPTIONS = {
    "launch.processes_per_node": "--nproc-per-node", "launch.launcher": "--launcher", "out": "--to", "output": "--to",
}  # fmt: skip
_RECIPE = "the recipe is given without an option, as in `ortlaunch train RECIPE`"
_WORDS = {"config": _RECIPE, "config_file": _RECIPE, "recipe": _RECIPE, "config_path": _RECIPE}


_TYPE = re.compile(r"<(\w+)[^<>]*>")
_TYPES = {"int": "NUMBER", "float": "NUMBER", "path": "PATH"}


class Verb(TyperCommand):
    """A verb that says more of an unknown option than that it is none, and names the values of its options readably."""

    def get_help(self, ctx: Any) -> str:
        """Typer's, with `<list[str]>` and its like as words of the same width, and ranges such as `x>=1` in words."""
        text = _TYPE.sub(
            lambda found: _TYPES.get(found[1], "TEXT").ljust(len(found[0])), super().get_help(ctx)
        )
        return re.sub(r"(\d+)<=x<=(\d+)", r"\1 to \2", text).replace("x>=", "from ")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours = {
            name
            for option in self.get_params(ctx)
            for name in (*option.opts, *option.secondary_opts)
        }
        for number, word in _unknown(args, ours):
            hint = _hint(word, args[number + 1 : number + 2], ours)
            if hint:
                raise InputError(f"there is no option {word.partition('=')[0]}; {hint}")
        for number, word in enumerate(args):
            name, equals, value = word.partition("=")
            value = value if equals else "".join(args[number + 1 : number + 2])
            if name == "--nproc-per-node" and not value.isdecimal():
                usual = "without it there is one rank for each GPU, or one"
                raise InputError(
                    f"--nproc-per-node: got {value or 'nothing'}; give a number from 1 on; {usual}"
                )
        return super().parse_args(ctx, args)


class Verbs(TyperGroup):
    """The verbs, with hints for mistyped ones and those of other tools."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            raise InputError(_not_a_verb(args, list(self.commands), ctx.command_path))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """In groups, where they are the verbs of ortlaunch itself."""
        if ctx.parent is not None:
            return super().format_commands(ctx, formatter)
        for group in dict.fromkeys(summary.group for summary in SUMMARIES.values()):
            with formatter.section(group):
                formatter.write_dl(
                    [(verb, one.text) for verb, one in SUMMARIES.items() if one.group == group]
                )
        return None


def _not_a_verb(args: Sequence[str], ours: Sequence[str], above: str) -> str:
    """What may have been meant by the first word; `above` is the command that has the verbs `ours`."""
    from ortlaunch.recipe.text.words import likeness

    name = args[0]
    whose = f" of {above}"
    if above == "ortlaunch":
        whose = ""
        if name in _VERBS:
            return f"there is no verb {name}; what comes nearest is ortlaunch {_VERBS[name]}"
        if name.endswith((".yaml", ".yml")):
            return f"{name} is no verb; to train it: ortlaunch train {' '.join(args)}"
    near = [verb for verb in ours if likeness(name, verb) >= 0.6]
    near.sort(key=lambda verb: -likeness(name, verb))
    said = f"did you mean {' or '.join(near[:2])}?" if near else f"the verbs are {', '.join(ours)}"
    return f"there is no verb {name}{whose}; {said}"


def _unknown(args: Sequence[str], ours: set[str]) -> Iterator[tuple[int, str]]:
    """Place and text of every long option that the verb has not, up to `--`."""
    for number, word in enumerate(args):
        if word == "--":
            return
        if word.startswith("--") and word.partition("=")[0] not in ours:
            yield number, word


def _hint(word: str, after: Sequence[str], ours: set[str]) -> str | None:
    """What to write in place of an option; None where its name alone is wrong and Typer knows a near one."""
    from ortlaunch.recipe.fields.fields import names_in, section_at
    from ortlaunch.recipe.hints.advice import advise
    from ortlaunch.recipe.hints.dialects import FOREIGN
    from ortlaunch.recipe.text.place import dotted, keys
    from ortlaunch.recipe.text.words import likeness, normal

    name, equals, value = word.lstrip("-").partition("=")
    name = normal(name)
    value = value if equals else next(filter(_is_value, after), "VALUE")
    same = next(
        (one for one in ours if normal(one.lstrip("-")) == name or one == _OPTIONS.get(name)), None
    )
    if same:
        return f"it is written {same}"
    if name in _WORDS:
        return _WORDS[name]
    *section, last = keys(name)
    if section_at(tuple(section)) and last in names_in(tuple(section)):
        return _as_key(name, value, ours)
    if name not in FOREIGN and max(likeness(option.lstrip("-"), name) for option in ours) > 0.8:
        return None
    advice = advise(str(last), tuple(section))
    target = dotted(advice.target) if advice.target else ""
    if target and (
        advice.sure or target in _OPTIONS or advice.text.endswith(f"here it is {target}")
    ):
        return _as_key(target, value, ours)
    is_near = advice.target is not None and likeness(str(advice.target[-1]), name) >= 0.7
    return advice.text if name in FOREIGN or is_near else None


def _is_value(text: str) -> bool:
    return not text.startswith("-") and "=" not in text and not text.endswith((".yaml", ".yml"))


def _as_key(key: str, value: str, ours: set[str]) -> str:
    option = _OPTIONS.get(key)
    if option in ours:
        return f"it is {option} {value} here"
    return f"a key of the recipe is given without dashes: {key}={value}"
