"""`ortlaunch import`: convert another tool's config to a recipe, and report on each of its keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.errors import InputError, RecipeError
from ortlaunch.importers import (
    accelerate,
    adapters,
    automodel,
    axolotl,
    deepspeed,
    llama_factory,
    llama_v1,
    oumi,
    sharding,
    torchtune,
    trainer,
)
from ortlaunch.importers.draft import Draft, ImportReport, Remark
from ortlaunch.importers.reading import read_config_tree_or_refuse
from ortlaunch.recipe.check import check_tree_and_drop_wrong_values
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.text.source import (
    read_recipe_tree_with_bases,
    tree_with_overrides_or_problems,
)
from ortlaunch.recipe.text.source_location import (
    ProblemLine,
    SourceError,
    SourceLocation,
    parse_key_path,
    sort_in_reading_order,
)
from ortlaunch.recipe.text.tree import Tree, merge_trees_of_same_format
from ortlaunch.recipe.text.yaml_text import dump_yaml


class _Tool(NamedTuple):
    """A tool whose configs can be converted."""

    convert: Callable[[Draft], None]
    dialects: tuple[str, ...]
    """Its tables in recipe/hints/keys_of_other_tools.py, by priority."""
    identifying_keys: tuple[str, ...]


_TOOLS = {
    "axolotl": _Tool(
        axolotl.convert_axolotl_config,
        ("Axolotl", "Hugging Face"),
        ("base_model", "sequence_len", "micro_batch_size", "datasets"),
    ),
    "llama-factory": _Tool(
        llama_factory.convert_llama_factory_config,
        ("LLaMA-Factory", "Hugging Face"),
        (
            *("finetuning_type", "cutoff_len", "stage", "dataset_dir"),
            *("export_dir", "infer_backend", *llama_v1.SECOND_SCHEMA_KEYS),
        ),
    ),
    "deepspeed": _Tool(
        deepspeed.convert_deepspeed_config,
        ("DeepSpeed",),
        (
            *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"),
            "gradient_clipping",
        ),
    ),
    "torchtune": _Tool(
        torchtune.convert_torchtune_config,
        ("torchtune", "Hugging Face"),
        ("checkpointer", "metric_logger", "enable_activation_checkpointing"),
    ),
    "automodel": _Tool(
        automodel.convert_automodel_config, ("NeMo AutoModel",), ("step_scheduler", "dist_env")
    ),
    "oumi": _Tool(oumi.convert_oumi_config, ("Oumi", "Hugging Face"), ("training",)),
    "accelerate": _Tool(
        accelerate.convert_accelerate_config,
        ("accelerate", "Hugging Face"),
        ("compute_environment", "distributed_type", "main_training_function"),
    ),
    # Last: other tools have keys of Trainer, too, so it counts only if no other tool matches.
    "hf-trainer": _Tool(
        trainer.convert_trainer_config,
        ("Hugging Face",),
        (
            *("per_device_train_batch_size", "num_train_epochs", "output_dir"),
            *("model_name_or_path", "train_file"),
        ),
    ),
}
TOOLS = tuple(_TOOLS)

# What the config sets replaces all of such a group in --base: parts of both would have no meaning.
_EXCLUSIVE_PATHS: tuple[tuple[str, ...], ...] = (
    ("batch",),
    ("schedule",),
    ("data.evaluation",),
    ("zero", "parallel"),
    ("engine.name", "engine.memory_optimization"),
    ("train.max_steps", "train.epochs"),
    ("train.evaluate_every_steps", "train.evaluate_every_epochs"),
    ("checkpoint.every_steps", "checkpoint.every_epochs"),
)
# The first that the config leaves to the base is left out if all three are given.
_BATCH_SIZE_PATHS = ("batch.global_size", "batch.accumulation_steps", "batch.micro_size")
# Keys of tools whose configs cannot be converted.
_UNSUPPORTED_TOOLS = {"job": "torchtitan"}


class ImportedRecipe(NamedTuple):
    """A recipe with the report of its conversion."""

    tool: str
    identifying_keys: tuple[str, ...]
    """The keys that identified the tool; () if the user named it."""
    config_name: str
    recipe_yaml: str
    import_report: ImportReport
    overrides: tuple[str, ...]
    """Overrides of the command line; they replace keys of the config."""

    def __str__(self) -> str:
        """Return the report as text."""
        guess_text = f", by {', '.join(self.identifying_keys)}" if self.identifying_keys else ""
        override_lines = (
            [f"set by the command line, in place of the above: {', '.join(self.overrides)}"]
            if self.overrides
            else []
        )
        return "\n".join(
            [
                f"{self.config_name}: taken as {self.tool}'s{guess_text}",
                *import_report_lines(self.import_report),
                *override_lines,
            ]
        )

    def commented_recipe(self) -> str:
        """Return the recipe as YAML, with the report as comments."""
        return "".join(f"# {line}\n" for line in str(self).splitlines()) + self.recipe_yaml


def convert_config_to_recipe(
    config_path: Path, requested_tool: str | None, base_path: Path | None, overrides: Sequence[str]
) -> ImportedRecipe:
    """Convert a config to a valid recipe.

    Args:
        config_path: the config.
        requested_tool: one of TOOLS; None: guess it from the keys.
        base_path: a recipe with values for keys that the config lacks.
        overrides: KEY=VALUE of the command line.

    Raises:
        RecipeError: the config, the base or their result is wrong; it has every problem.
        InputError: the tool is unknown, or trains in a way that ortlaunch does not have.
    """
    tree = read_config_tree_or_refuse(config_path)
    tool_name, identifying_keys = (
        (requested_tool, ())
        if requested_tool
        else _guess_tool_and_identifying_keys_or_refuse(tree, config_path)
    )
    if tool_name not in _TOOLS:
        raise InputError(f"--from: got {tool_name}; one of {', '.join(TOOLS)}")
    tool = _TOOLS[tool_name]
    base_tree = _read_base_recipe_or_empty(base_path, tree.location)
    draft = Draft(
        tree,
        tool.dialects,
        tree_with_overrides_or_problems(Tree(tree.location, node_type="mapping"), overrides, []),
        base_tree,
    )
    tool.convert(draft)
    sharding.replace_division_that_optimizer_lacks(draft)
    adapters.change_division_that_quantized_weights_lack(draft)
    draft.assume_default(
        "name",
        re.sub(r"[^A-Za-z0-9._-]+", "-", config_path.stem).strip("-._") or "imported",
        "the file's name",
    )
    draft.set_defaults_that_config_leaves_out()
    recipe_values = _check_overridden_recipe_and_return_values(
        _merge_draft_over_base_without_exclusive_keys(base_tree, draft),
        overrides,
        draft.import_report,
    )
    # In the order of the sections in the manual, not of the config.
    ordered_values = {
        name: recipe_values[name] for name in Recipe.model_fields if name in recipe_values
    }
    return ImportedRecipe(
        tool_name,
        identifying_keys,
        str(config_path),
        dump_yaml(ordered_values),
        draft.import_report,
        tuple(overrides),
    )


def _guess_tool_and_identifying_keys_or_refuse(
    config_tree: Tree, config_path: Path
) -> tuple[str, tuple[str, ...]]:
    keys_by_tool = {
        name: tuple(key for key in tool.identifying_keys if key in config_tree.children)
        for name, tool in _TOOLS.items()
    }
    # Its second schema has a key of axolotl's.
    if set(keys_by_tool["llama-factory"]) & set(llama_v1.SECOND_SCHEMA_KEYS):
        return "llama-factory", keys_by_tool["llama-factory"]
    tools = [
        tool for tool, tool_keys in keys_by_tool.items() if tool_keys and tool != "hf-trainer"
    ] or [t for t in keys_by_tool if keys_by_tool[t]]
    if len(tools) != 1:
        reason = (
            f"it has keys of {' and of '.join(tools)}"
            if tools
            else "none of its keys is one by which a tool is known"
        )
        other_tool = next(
            (name for key, name in _UNSUPPORTED_TOOLS.items() if key in config_tree.children), None
        )
        if other_tool is not None and not tools:
            reason = f"{other_tool}'s, as it seems, of which there is no conversion"
        raise InputError(
            f"{config_path}: whose config is it? {reason}; say --from {' | '.join(TOOLS)}"
        )
    return tools[0], keys_by_tool[tools[0]]


def _read_base_recipe_or_empty(base_path: Path | None, config_location: SourceLocation) -> Tree:
    """Return the recipe of --base; an empty one without it."""
    problems: list[ProblemLine] = []
    try:
        base_tree = (
            read_recipe_tree_with_bases(base_path, problems)
            if base_path is not None
            else Tree(config_location, node_type="mapping")
        )
    except SourceError as error:
        raise RecipeError([str(line) for line in (*problems, error.line)]) from None
    if problems:
        raise RecipeError([str(line) for line in problems])
    return base_tree


def _merge_draft_over_base_without_exclusive_keys(base_tree: Tree, draft: Draft) -> Tree:
    """Return the recipe merged over a base."""
    recipe_tree, merged_base = draft.recipe_tree, base_tree
    for paths in _EXCLUSIVE_PATHS:
        if any(map(recipe_tree.find_subtree, map(parse_key_path, paths))):
            for path in paths:
                merged_base = merged_base.remove_key(parse_key_path(path))
    for paths in draft.keys_left_to_base:
        # What the config sets takes precedence over its alternatives in the base.
        if not any(map(recipe_tree.find_subtree, map(parse_key_path, paths))):
            for key_path in map(parse_key_path, paths):
                if base_subtree := base_tree.find_subtree(key_path):
                    merged_base = merged_base.copy_with_subtree(key_path, base_subtree)
    merged_tree = merge_trees_of_same_format(merged_base, recipe_tree)
    # Two sizes of a batch decide the third.
    size_paths = [*map(parse_key_path, _BATCH_SIZE_PATHS)]
    unset_paths = [path for path in size_paths if recipe_tree.find_subtree(path) is None]
    if all(map(merged_tree.find_subtree, size_paths)) and unset_paths:
        merged_tree = merged_tree.remove_key(unset_paths[0])
    return merged_tree


def _check_overridden_recipe_and_return_values(
    recipe_tree: Tree, overrides: Sequence[str], import_report: ImportReport
) -> dict[str, object]:
    """Check a recipe and return its keys.

    Raises:
        RecipeError: the recipe is invalid; it has every problem, and keys without a counterpart.
    """
    problems: list[ProblemLine] = []
    recipe_tree = tree_with_overrides_or_problems(recipe_tree, overrides, problems)
    problems += check_tree_and_drop_wrong_values(recipe_tree).problems
    if problems:
        problem_texts = [
            str(line) for line in sort_in_reading_order(problems, recipe_tree.location.source)
        ]
        hint_text = (
            "give what is missing behind the config, as data.train=python-docs, or by --base RECIPE"
        )
        dropped_texts = [
            f"without a counterpart: {dropped_remark}" for dropped_remark in import_report.dropped
        ]
        raise RecipeError(
            [
                *problem_texts,
                *dropped_texts,
                *([hint_text] if any("is missing" in line for line in problem_texts) else []),
            ]
        )
    return dict(recipe_tree.value_without_locations())


def import_report_lines(import_report: ImportReport) -> Iterator[str]:
    """Yield the lines of a report; what needs attention comes first."""
    yield from _titled_remark_lines("means something else here", import_report.changed)
    yield from _titled_remark_lines("without a counterpart", import_report.dropped)
    yield from _titled_remark_lines("nothing to set", import_report.needless)
    if import_report.assumed:
        yield "not in the config, so set:"
        yield from (f"  {assumed_text}" for assumed_text in import_report.assumed)
    yield from _titled_remark_lines("taken", import_report.taken)
    if import_report.empty:
        yield f"without effect (null, false, empty): {', '.join(import_report.empty)}"


def _titled_remark_lines(title: str, remarks: Sequence[Remark]) -> Iterator[str]:
    if remarks:
        yield f"{title}:"
        yield from (
            f"  line {remark.location.line}: {remark.key}: {remark.value} -> {remark.text}"
            for remark in remarks
        )
