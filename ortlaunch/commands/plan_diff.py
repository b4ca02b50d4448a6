"""Compare two plans: of a recipe, of a run folder, or from a JSON file. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch import recipe
from ortlaunch.base.errors import InputError, PlanError
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve import shipped
from ortlaunch.resolve.resolve import load_and_resolve_recipe
from ortlaunch.run.preview import apply_known_engine_if_auto_without_measuring
from ortlaunch.run_folder.folder import RunDir


class PlanContext(NamedTuple):
    """The options, environment and device for which both plans are made."""

    options: LaunchOptions
    environ: Mapping[str, str]
    device: str
    """Device of the new plan, and of the other recipe's plan if that recipe has `auto`."""


def plan_of_run_folder_plan_file_or_recipe(compared_path: Path, plan_context: PlanContext) -> Plan:
    """Return the plan to compare with: of a run folder, a plan.json, or a recipe.

    Raises:
        InputError: the path is none of these.
    """
    if not compared_path.is_dir() and compared_path.suffix != ".json":
        return _plan_of_recipe_on_device(compared_path, plan_context)
    plan_path = RunDir(compared_path).plan if compared_path.is_dir() else compared_path
    try:
        text = plan_path.read_text(encoding="utf-8")
        # A recipe may be written in JSON, too; only plans have a field `format`.
        is_recipe = compared_path.suffix == ".json" and "format" not in json.loads(text)
        return (
            _plan_of_recipe_on_device(compared_path, plan_context)
            if is_recipe
            else Plan.from_plan_json_text(text)
        )
    except FileNotFoundError:
        raise InputError(
            f"--diff {compared_path}: no file {plan_path}; give a recipe, a run folder or its plan.json"
        ) from None
    except PlanError as error:
        raise InputError(f"--diff {compared_path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"--diff {compared_path}: {plan_path} is not a plan of this version ({error!r})"
        ) from None


def _plan_of_recipe_on_device(recipe_path: Path, plan_context: PlanContext) -> Plan:
    recipe_device = recipe.load_recipe(
        shipped.recipe_path_or_shipped_recipe(recipe_path)
    ).recipe.launch.device
    # Else a different `auto` could appear as a difference of the recipes.
    device_override = (f"launch.device={plan_context.device}",) if recipe_device == "auto" else ()
    return apply_known_engine_if_auto_without_measuring(
        load_and_resolve_recipe(
            recipe_path, device_override, plan_context.options, plan_context.environ
        )
    ).plan


def plan_differences(old_plan: Plan, new_plan: Plan) -> list[str]:
    """Return `field: old -> new` for each difference, in the plan's order."""
    return list(
        _plan_difference_lines(json.loads(old_plan.to_json()), json.loads(new_plan.to_json()), "")
    )


def _plan_difference_lines(old_value: Any, new_value: Any, field_path: str) -> Iterator[str]:
    if isinstance(old_value, dict) and isinstance(new_value, dict):
        for key in dict.fromkeys((*old_value, *new_value)):
            yield from _plan_difference_lines(
                old_value.get(key), new_value.get(key), f"{field_path}.{key}" if field_path else key
            )
    # All hosts on one line: a cluster has too many for a line each.
    elif field_path == "nodes" and old_value != new_value:
        yield f"{field_path}: {_hosts_text(old_value)} -> {_hosts_text(new_value)}"
    elif old_value != new_value:
        yield f"{field_path}: {json.dumps(old_value)} -> {json.dumps(new_value)}"


def _hosts_text(nodes: Sequence[Mapping[str, object]]) -> str:
    """Return a short text such as `4 (node0 8, node1 8, ...)`."""
    host_texts = [f"{node['host']} {node['slots']}" for node in nodes[:4]] + ["..."] * (
        len(nodes) > 4
    )
    return f"{len(nodes)} ({', '.join(host_texts)})"
