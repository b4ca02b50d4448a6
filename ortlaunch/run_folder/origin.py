"""The origin of a checkpoint (training.json): recipe, world, data, frozen weights, code, packages.

Both sides compare it with the present run: the control side before a rank starts, the ranks after
they have read the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortlaunch.base.json_types import Json
from ortlaunch.launch_plan import BatchPlan, Plan
from ortlaunch.recipe import Recipe, read_resolved_recipe_of_run
from ortlaunch.recipe.rules import resume_rules
from ortlaunch.recipe.rules.resume_rules import (
    OTHER_RULES,
    RULES,
    Change,
    changed_leaves_with_rules,
)
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.run_folder.lines import read_json_lines_with_keys

ORIGIN = "training.json"
# Packages whose versions affect results. Of all others only the number of changes is reported.
_PACKAGES = ("torch", "onnxruntime-training", "onnxruntime-training-cpu", "transformers", "deepspeed", "peft", "onnx",
             "numpy", "tokenizers", "datasets", "safetensors", "triton")  # fmt: skip


def origin_of_run_to_start(
    recipe: Recipe,
    batch: BatchPlan,
    host_count: int,
    device: str,
    environment: Mapping[str, Any],
    git_state: Mapping[str, object] | None,
) -> dict[str, object]:
    """Return the origin that checkpoints of a run about to start will have.

    Args:
        recipe: the resolved recipe.
        batch: samples and ranks of a step.
        host_count: number of hosts.
        device: cpu or cuda.
        environment: contents of environment.json.
        git_state: state of the recipe's folder, as in commands.jsonl; None outside a repository.
    """
    world = {"ranks": batch.data_parallel_ranks, "hosts": host_count, "device": device}
    samples = {
        name: getattr(batch, name)
        for name in ("global_samples", "micro_samples", "accumulation_steps")
    }
    packages = environment.get("packages")
    code = {name: environment.get(name) for name in ("ortlaunch", "python")}
    return {
        "recipe": recipe.model_dump(mode="json"),
        "world": {**world, **samples},
        "code": {**code, **(git_state or {"commit": None, "dirty": None})},
        "packages": packages if isinstance(packages, dict) else {},
    }


def build_origin_of_started_run(run: RunDir, recipe: Recipe) -> dict[str, object]:
    """Return the origin of the run in a folder, from the files written before its ranks started."""
    environment = read_json_or_raise_damaged(run.environment) if run.environment.exists() else {}
    git_states = [line["git"] for line in read_json_lines_with_keys(run.commands, "git").values]
    # The newest start is the one whose ranks write the checkpoint.
    git_state = git_states[-1] if git_states and isinstance(git_states[-1], dict) else None
    # `max_steps` was derived from the epochs, so it is no setting of the user's.
    if recipe.train.epochs is not None:
        recipe = recipe.model_copy(
            update={"train": recipe.train.model_copy(update={"max_steps": None})}
        )
    plan = Plan.read(run.plan)
    return origin_of_run_to_start(
        recipe, plan.batch, len(plan.nodes), plan.device, environment, git_state
    )


def read_checkpoint_origin_or_none(checkpoint_folder: Path) -> Json | None:
    """Return the origin of a checkpoint; None if it cannot be read."""
    try:
        origin_record: Json = read_json_or_raise_damaged(checkpoint_folder / ORIGIN)
    except (OSError, ValueError):
        return None
    return origin_record


def recipe_data_and_package_changes_between_origins(
    earlier_origin: Mapping[str, Any], present_origin: Mapping[str, Any]
) -> list[Change]:
    """Return every change between two origins; a part that one of them lacks is not compared."""
    packages = _changes_of_main_packages_and_other_count(
        earlier_origin.get("packages", {}), present_origin.get("packages", {})
    )
    parts = [
        part
        for part in ("world", "data", "weights", "code")
        if part in earlier_origin and part in present_origin
    ]
    earlier_parts = {part: earlier_origin[part] for part in parts}
    present_parts = {part: present_origin[part] for part in parts}
    return [
        *changed_leaves_with_rules(earlier_origin["recipe"], present_origin["recipe"], RULES),
        *(
            change
            for change in changed_leaves_with_rules(earlier_parts, present_parts, OTHER_RULES)
            if change.field != "data.fingerprint"
            or not may_fingerprints_be_of_same_data(change.old_value, change.new_value)
        ),
        *packages,
    ]


def may_fingerprints_be_of_same_data(
    fingerprint: str | None, other_fingerprint: str | None
) -> bool:
    """Return whether two fingerprints may be of the same data, as those of random samples may.

    A fingerprint of samples has a word for each. Most of them must be equal, as a sample may be
    changed at random now and then.
    """
    if fingerprint is None or other_fingerprint is None:
        return True
    sample_words, others = fingerprint.split(), other_fingerprint.split()
    equal = sum(word == other_word for word, other_word in zip(sample_words, others))
    return len(sample_words) == len(others) < 2 * equal


def changes_affecting_evaluation(checkpoint: Path, origin_changes: list[Change]) -> list[Change]:
    """Return those changes that affect an evaluation of the checkpoint."""
    return resume_rules.changes_concerning_evaluation_with_own_rules(
        origin_changes, RunDir(checkpoint.parents[1]).vocabulary.exists()
    )


def _changes_of_main_packages_and_other_count(
    earlier_versions: Mapping[str, str], present_versions: Mapping[str, str]
) -> list[Change]:
    package_changes = (
        changed_leaves_with_rules(
            {"packages": earlier_versions}, {"packages": present_versions}, OTHER_RULES
        )
        if earlier_versions and present_versions
        else []
    )
    reported_changes = [
        change for change in package_changes if change.field.partition(".")[2] in _PACKAGES
    ]
    # A new environment may change a hundred packages; one line counts those without effect.
    if other_count := len(package_changes) - len(reported_changes):
        rule = OTHER_RULES["packages"]
        assert not callable(rule)
        reported_changes.append(
            Change(f"packages, {other_count} others", "old versions", "new versions", rule)
        )
    return reported_changes


def planned_or_recorded_step_count_or_none(run: RunDir) -> int | None:
    """Return the number of steps that the run has at its end; None if unknown."""
    if not run.recipe.exists():
        return None
    max_steps = read_resolved_recipe_of_run(run.recipe).train.max_steps
    # For a length in epochs, the ranks compute the steps and write them to a file.
    return (
        max_steps
        if max_steps is not None or not run.steps.exists()
        else int(read_json_or_raise_damaged(run.steps)["max_steps"])
    )
