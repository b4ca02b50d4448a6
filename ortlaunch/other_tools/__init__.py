"""`ortlaunch import`: convert another tool's config to a recipe, and report on each of its keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ortlaunch.errors import InputError, RecipeError
from ortlaunch.other_tools import (
    accelerate,
    axolotl,
    deepspeed,
    llama_factory,
    llama_v1,
    torchtune,
    trainer,
)
from ortlaunch.other_tools.draft import Draft, ImportReport, Remark
from ortlaunch.other_tools.reading import config
from ortlaunch.recipe.check import check
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.text.place import Line, Place, SourceError, in_reading_order, keys
from ortlaunch.recipe.text.source import override, read
from ortlaunch.recipe.text.tree import Tree, merge
from ortlaunch.recipe.text.yaml_text import dump

# The converter of each tool, and its tables in recipe/hints/keys_of_other_tools.py, by priority.
_TOOLS = {
    "axolotl": (axolotl.convert, ("Axolotl", "Hugging Face")),
    "llama-factory": (llama_factory.convert, ("LLaMA-Factory", "Hugging Face")),
    "deepspeed": (deepspeed.convert, ("DeepSpeed",)),
    "torchtune": (torchtune.convert, ("torchtune", "Hugging Face")),
    "accelerate": (accelerate.convert, ("accelerate", "Hugging Face")),
    "hf-trainer": (trainer.convert, ("Hugging Face",)),
}
TOOLS = tuple(_TOOLS)
# Keys that identify a tool. LLaMA-Factory's configs have keys of Trainer, too, so Trainer counts
# only if no other tool matches.
_MARKS = {
    "axolotl": ("base_model", "sequence_len", "micro_batch_size", "datasets"),
    "llama-factory": (
        *("finetuning_type", "cutoff_len", "stage", "dataset_dir"),
        *("export_dir", "infer_backend", *llama_v1.MARKS),
    ),
    "accelerate": ("compute_environment", "distributed_type", "main_training_function"),
    "deepspeed": (
        "zero_optimization",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_clipping",
    ),
    "torchtune": ("checkpointer", "metric_logger", "enable_activation_checkpointing"),
    "hf-trainer": (
        "per_device_train_batch_size",
        "num_train_epochs",
        "output_dir",
        "model_name_or_path",
        "train_file",
    ),
}

# What the config sets replaces all of such a group in --base: parts of both would have no meaning.
_EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("batch",),
    ("schedule",),
    ("data.evaluation",),
    ("train.max_steps", "train.epochs"),
    ("train.evaluate_every_steps", "train.evaluate_every_epochs"),
    ("checkpoint.every_steps", "checkpoint.every_epochs"),
)
# The first that the config leaves to the base is left out if all three are given.
_SIZES = ("batch.global_size", "batch.accumulation_steps", "batch.micro_size")
# Keys of tools whose configs cannot be converted.
_OTHERS = {"step_scheduler": "NeMo AutoModel", "training": "Oumi", "job": "torchtitan"}


class Imported(NamedTuple):
    """A recipe with the report of its conversion."""

    tool: str
    marks: tuple[str, ...]
    """The keys that identified the tool; () if the user named it."""
    name: str
    recipe: str
    account: ImportReport
    overrides: tuple[str, ...]
    """Overrides of the command line; they replace keys of the config."""

    def __str__(self) -> str:
        """Return the report as text."""
        guessed = f", by {', '.join(self.marks)}" if self.marks else ""
        over = (
            [f"set by the command line, in place of the above: {', '.join(self.overrides)}"]
            if self.overrides
            else []
        )
        return "\n".join(
            [f"{self.name}: taken as {self.tool}'s{guessed}", *lines(self.account), *over]
        )

    def file(self) -> str:
        """Return the recipe as YAML, with the report as comments."""
        return "".join(f"# {line}\n" for line in str(self).splitlines()) + self.recipe


def import_config(
    path: Path, tool: str | None, base: Path | None, overrides: Sequence[str]
) -> Imported:
    """Convert a config to a valid recipe.

    Args:
        path: the config.
        tool: one of TOOLS; None: guess it from the keys.
        base: a recipe with values for keys that the config lacks.
        overrides: KEY=VALUE of the command line.

    Raises:
        RecipeError: the config, the base or their result is wrong; it has every problem.
        InputError: the tool is unknown, or trains in a way that ortlaunch does not have.
    """
    tree = config(path)
    found, marks = (tool, ()) if tool else _guess(tree, path)
    if found not in _TOOLS:
        raise InputError(f"--from: got {found}; one of {', '.join(TOOLS)}")
    convert, words = _TOOLS[found]
    below = _base(base, tree.place)
    draft = Draft(tree, words, override(Tree(tree.place, kind="mapping"), overrides, []), below)
    convert(draft)
    draft.assume(
        "name",
        re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "imported",
        "the file's name",
    )
    # Last: the converters above have taken the keys that need more than a table.
    draft.rest()
    whole = _checked(_over(below, draft), overrides, draft.account)
    # In the order of the sections in the manual, not of the config.
    ordered = {name: whole[name] for name in Recipe.model_fields if name in whole}
    return Imported(found, marks, str(path), dump(ordered), draft.account, tuple(overrides))


def _guess(tree: Tree, path: Path) -> tuple[str, tuple[str, ...]]:
    seen = {
        tool: tuple(key for key in marks if key in tree.children) for tool, marks in _MARKS.items()
    }
    # Its second schema has a key of axolotl's.
    if set(seen["llama-factory"]) & set(llama_v1.MARKS):
        return "llama-factory", seen["llama-factory"]
    tools = [tool for tool, marks in seen.items() if marks and tool != "hf-trainer"] or [
        t for t in seen if seen[t]
    ]
    if len(tools) != 1:
        why = (
            f"it has keys of {' and of '.join(tools)}"
            if tools
            else "none of its keys is one by which a tool is known"
        )
        other = next((name for key, name in _OTHERS.items() if key in tree.children), None)
        if other is not None and not tools:
            why = f"{other}'s, as it seems, of which there is no conversion"
        raise InputError(f"{path}: whose config is it? {why}; say --from {' | '.join(TOOLS)}")
    return tools[0], seen[tools[0]]


def _base(path: Path | None, place: Place) -> Tree:
    """Return the recipe of --base; an empty one without it."""
    problems: list[Line] = []
    try:
        below = read(path, problems) if path is not None else Tree(place, kind="mapping")
    except SourceError as error:
        raise RecipeError([str(line) for line in (*problems, error.line)]) from None
    if problems:
        raise RecipeError([str(line) for line in problems])
    return below


def _over(base: Tree, draft: Draft) -> Tree:
    """Return the recipe merged over a base."""
    recipe, below = draft.recipe, base
    for paths in _EXCLUSIVE:
        if any(recipe.find(keys(path)) is not None for path in paths):
            for path in paths:
                below = below.without(keys(path))
    for paths in draft.kept:
        # What the config sets takes precedence over its alternatives in the base.
        if all(recipe.find(keys(path)) is None for path in paths):
            for path in paths:
                there = base.find(keys(path))
                below = below if there is None else below.put(keys(path), there)
    whole = merge(below, recipe)
    # Two sizes of a batch decide the third.
    if all(whole.find(keys(path)) is not None for path in _SIZES):
        free = [path for path in _SIZES if recipe.find(keys(path)) is None]
        whole = whole.without(keys(free[0])) if free else whole
    return whole


def _checked(tree: Tree, overrides: Sequence[str], account: ImportReport) -> dict[str, object]:
    """Check a recipe and return its keys.

    Raises:
        RecipeError: the recipe is invalid; it has every problem, and keys without a counterpart.
    """
    problems: list[Line] = []
    tree = override(tree, overrides, problems)
    problems += check(tree).problems
    if problems:
        said = [str(line) for line in in_reading_order(problems, tree.place.source)]
        hint = (
            "give what is missing behind the config, as data.train=python-docs, or by --base RECIPE"
        )
        dropped = [f"without a counterpart: {each}" for each in account.dropped]
        raise RecipeError(
            [*said, *dropped, *([hint] if any("is missing" in line for line in said) else [])]
        )
    return dict(tree.plain())


def lines(account: ImportReport) -> Iterator[str]:
    """Yield the lines of a report; what needs attention comes first."""
    yield from _list("means something else here", account.changed)
    yield from _list("without a counterpart", account.dropped)
    yield from _list("nothing to set", account.needless)
    if account.assumed:
        yield "not in the config, so set:"
        yield from (f"  {each}" for each in account.assumed)
    yield from _list("taken", account.taken)
    if account.empty:
        yield f"without effect (null, false, empty): {', '.join(account.empty)}"


def _list(title: str, remarks: Sequence[Remark]) -> Iterator[str]:
    if remarks:
        yield f"{title}:"
        yield from (
            f"  line {each.place.line}: {each.key}: {each.value} -> {each.text}" for each in remarks
        )
