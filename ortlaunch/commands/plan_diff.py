"""Compare two plans: of a recipe, of a run folder, or from a JSON file. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch import recipe
from ortlaunch.errors import InputError, PlanError
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve import shipped
from ortlaunch.resolve.resolve import resolve
from ortlaunch.run.preview import choose_engine_without_measuring
from ortlaunch.run_folder.folder import RunDir


class PlanContext(NamedTuple):
    """The options, environment and device for which both plans are made."""

    options: LaunchOptions
    environ: Mapping[str, str]
    device: str
    """Device of the new plan, and of the other recipe's plan if that recipe has `auto`."""


def other_plan(path: Path, context: PlanContext) -> Plan:
    """Return the plan to compare with: of a run folder, a plan.json, or a recipe.

    Raises:
        InputError: the path is none of these.
    """
    if not path.is_dir() and path.suffix != ".json":
        return _of_recipe(path, context)
    file = RunDir(path).plan if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        # A recipe may be written in JSON, too; only plans have a field `format`.
        is_recipe = path.suffix == ".json" and "format" not in json.loads(text)
        return _of_recipe(path, context) if is_recipe else Plan.from_json(text)
    except FileNotFoundError:
        raise InputError(
            f"--diff {path}: no file {file}; give a recipe, a run folder or its plan.json"
        ) from None
    except PlanError as error:
        raise InputError(f"--diff {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"--diff {path}: {file} is not a plan of this version ({error!r})"
        ) from None


def _of_recipe(path: Path, context: PlanContext) -> Plan:
    chosen = recipe.load(shipped.locate(path)).recipe.launch.device
    # Else a different `auto` could appear as a difference of the recipes.
    same = (f"launch.device={context.device}",) if chosen == "auto" else ()
    return choose_engine_without_measuring(
        resolve(path, same, context.options, context.environ)
    ).plan


def differences(before: Plan, after: Plan) -> list[str]:
    """Return `field: old -> new` for each difference, in the plan's order."""
    return list(_lines(json.loads(before.to_json()), json.loads(after.to_json()), ""))


def _lines(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from _lines(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    # All hosts on one line: a cluster has too many for a line each.
    elif path == "nodes" and before != after:
        yield f"{path}: {_hosts(before)} -> {_hosts(after)}"
    elif before != after:
        yield f"{path}: {json.dumps(before)} -> {json.dumps(after)}"


def _hosts(nodes: Sequence[Mapping[str, object]]) -> str:
    """Return a short text such as `4 (node0 8, node1 8, ...)`."""
    named = [f"{node['host']} {node['slots']}" for node in nodes[:4]] + ["..."] * (len(nodes) > 4)
    return f"{len(nodes)} ({', '.join(named)})"
