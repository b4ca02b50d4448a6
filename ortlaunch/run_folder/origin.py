"""What made a checkpoint, as each holds it (training.json): recipe, world, data, frozen weights, code and packages.

Both sides compare it with today's: the control side before a rank starts, ranks once the data are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortlaunch.json_types import Json
from ortlaunch.plan import BatchPlan, Plan
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules import resume_rules
from ortlaunch.recipe.rules.resume_rules import OTHER_RULES, RULES, Change, changes
from ortlaunch.run_folder.folder import RunDir, read_json
from ortlaunch.run_folder.lines import json_lines

ORIGIN = "training.json"
# Whose versions decide numbers; of the others it is said how many changed.
_PACKAGES = ("torch", "onnxruntime-training", "onnxruntime-training-cpu", "transformers", "deepspeed", "peft", "onnx",
             "numpy", "tokenizers", "datasets", "safetensors", "triton")  # fmt: skip
_FORMAT = 1


def origin(
    recipe: Recipe,
    batch: BatchPlan,
    hosts: int,
    device: str,
    environment: Mapping[str, Any],
    git: Mapping[str, object] | None,
) -> Json:
    """Of a run that is about to start.

    Args:
        hosts: how many it runs on.
        environment: as in environment.json.
        git: of the recipe's folder, as in commands.jsonl.
    """
    world = {"ranks": batch.data_parallel_ranks, "hosts": hosts, "device": device}
    samples = {
        name: getattr(batch, name)
        for name in ("global_samples", "micro_samples", "accumulation_steps")
    }
    code = {name: environment.get(name) for name in ("ortlaunch", "python")}
    return {
        "format": _FORMAT,
        "recipe": recipe.model_dump(mode="json"),
        "world": {**world, **samples},
        "code": {**code, **(git or {"commit": None, "dirty": None})},
        "packages": dict(environment.get("packages", {})),
    }


def of_run(run: RunDir, recipe: Recipe) -> dict[str, object]:
    """Of the run that lives in a folder, from what was written there before its ranks started."""
    environment = read_json(run.environment) if run.environment.exists() else {}
    started = json_lines(run.commands, "git").found
    git = started[-1]["git"] if started else None
    if recipe.train.epochs is not None:  # max_steps is what they came to
        recipe = recipe.model_copy(
            update={"train": recipe.train.model_copy(update={"max_steps": None})}
        )
    plan = Plan.read(run.plan)
    return origin(recipe, plan.batch, len(plan.nodes), plan.device, environment, git)


def read(checkpoint: Path) -> Json | None:
    """Of a checkpoint; None: it was written by a version that kept no such thing, or cannot be read."""
    try:
        found = read_json(checkpoint / ORIGIN)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == _FORMAT else None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Every change, by the table; a part that one of them lacks is not compared."""
    found = changes(_filled(before["recipe"]), after["recipe"], RULES)
    parts = [
        part for part in ("world", "data", "weights", "code") if part in before and part in after
    ]
    found += changes(
        {part: before[part] for part in parts}, {part: after[part] for part in parts}, OTHER_RULES
    )
    return found + _packages(before.get("packages", {}), after.get("packages", {}))


def of_evaluation(checkpoint: Path, found: list[Change]) -> list[Change]:
    """Those changes that concern measuring a checkpoint."""
    return resume_rules.of_evaluation(found, RunDir(checkpoint.parents[1]).vocabulary.exists())


def _filled(recipe: Mapping[str, object]) -> Mapping[str, Any]:
    """With the defaults of fields that came later."""
    try:
        filled: Mapping[str, object] = Recipe.model_validate(recipe).model_dump(mode="json")
    except ValueError:  # of a version whose fields were others
        return recipe
    return filled


def _packages(before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    found = (
        changes({"packages": before}, {"packages": after}, OTHER_RULES) if before and after else []
    )
    told = [change for change in found if change.field.partition(".")[2] in _PACKAGES]
    other = len(found) - len(told)
    if other:
        rule = OTHER_RULES["packages"]
        assert not callable(rule)
        told.append(Change(f"packages, {other} others", "old versions", "new versions", rule))
    return told
