"""The origin of a checkpoint (training.json): recipe, world, data, frozen weights, code, packages.

Both sides compare it with the present run: the control side before a rank starts, the ranks after
they have read the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortlaunch.json_types import Json
from ortlaunch.launch_plan import BatchPlan, Plan
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules import resume_rules
from ortlaunch.recipe.rules.resume_rules import OTHER_RULES, RULES, Change, changes
from ortlaunch.run_folder.folder import RunDir, read_json
from ortlaunch.run_folder.lines import json_lines

ORIGIN = "training.json"
# Packages whose versions affect results. Of all others only the number of changes is reported.
_PACKAGES = ("torch", "onnxruntime-training", "onnxruntime-training-cpu", "transformers", "deepspeed", "peft", "onnx",
             "numpy", "tokenizers", "datasets", "safetensors", "triton")  # fmt: skip
# Of training.json; a file of another format is not compared.
_FORMAT = 1


def origin(
    recipe: Recipe,
    batch: BatchPlan,
    hosts: int,
    device: str,
    environment: Mapping[str, Any],
    git: Mapping[str, object] | None,
) -> Json:
    """Return the origin that checkpoints of a run about to start will have.

    Args:
        recipe: the resolved recipe.
        batch: samples and ranks of a step.
        hosts: number of hosts.
        device: cpu or cuda.
        environment: contents of environment.json.
        git: state of the recipe's folder, as in commands.jsonl; None outside a repository.
    """
    world = {"ranks": batch.data_parallel_ranks, "hosts": hosts, "device": device}
    samples = {
        name: getattr(batch, name)
        for name in ("global_samples", "micro_samples", "accumulation_steps")
    }
    packages = environment.get("packages")
    code = {name: environment.get(name) for name in ("ortlaunch", "python")}
    return {
        "format": _FORMAT,
        "recipe": recipe.model_dump(mode="json"),
        "world": {**world, **samples},
        "code": {**code, **(git or {"commit": None, "dirty": None})},
        "packages": packages if isinstance(packages, dict) else {},
    }


def of_run(run: RunDir, recipe: Recipe) -> dict[str, object]:
    """Return the origin of the run in a folder, from the files written before its ranks started."""
    environment = read_json(run.environment) if run.environment.exists() else {}
    started = [line["git"] for line in json_lines(run.commands, "git").found]
    # The newest start is the one whose ranks write the checkpoint.
    git = started[-1] if started and isinstance(started[-1], dict) else None
    # `max_steps` was derived from the epochs, so it is no setting of the user's.
    if recipe.train.epochs is not None:
        recipe = recipe.model_copy(
            update={"train": recipe.train.model_copy(update={"max_steps": None})}
        )
    plan = Plan.read(run.plan)
    return origin(recipe, plan.batch, len(plan.nodes), plan.device, environment, git)


def read(checkpoint: Path) -> Json | None:
    """Return the origin of a checkpoint; None if it cannot be read or an old version wrote none."""
    try:
        found = read_json(checkpoint / ORIGIN)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == _FORMAT else None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return every change between two origins; a part that one of them lacks is not compared."""
    packages = _packages(before.get("packages", {}), after.get("packages", {}))
    parts = [
        part for part in ("world", "data", "weights", "code") if part in before and part in after
    ]
    return [
        *changes(_filled(before["recipe"]), after["recipe"], RULES),
        *(change for change in
          changes({part: before[part] for part in parts}, {part: after[part] for part in parts}, OTHER_RULES)
          if change.field != "data.fingerprint" or not is_same_data(change.before, change.after)),
        *packages,
    ]  # fmt: skip


def is_same_data(one: str | None, other: str | None) -> bool:
    """Return whether two fingerprints may be of the same data, as those of random samples may.

    A fingerprint of samples has a word for each. Most of them must be equal, as a sample may be
    changed at random now and then.
    """
    if one is None or other is None:
        return True
    words, others = one.split(), other.split()
    equal = sum(word == each for word, each in zip(words, others))
    return len(words) == len(others) < 2 * equal


def of_evaluation(checkpoint: Path, found: list[Change]) -> list[Change]:
    """Return those changes that affect an evaluation of the checkpoint."""
    return resume_rules.of_evaluation(found, RunDir(checkpoint.parents[1]).vocabulary.exists())


def _filled(recipe: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the recipe with defaults for fields that newer versions added."""
    try:
        filled: Mapping[str, object] = Recipe.model_validate(recipe).model_dump(mode="json")
    except ValueError:  # an old version had fields that this one rejects
        return recipe
    return filled


def _packages(before: Mapping[str, str], after: Mapping[str, str]) -> list[Change]:
    found = (
        changes({"packages": before}, {"packages": after}, OTHER_RULES) if before and after else []
    )
    told = [change for change in found if change.field.partition(".")[2] in _PACKAGES]
    # A new environment may change a hundred packages; one line counts those without effect.
    if other := len(found) - len(told):
        rule = OTHER_RULES["packages"]
        assert not callable(rule)
        told.append(Change(f"packages, {other} others", "old versions", "new versions", rule))
    return told
