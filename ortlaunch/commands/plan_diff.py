"""What changed between two plans: of a recipe, of a run folder, or kept as JSON. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch import recipe
from ortlaunch.errors import InputError, PlanError
from ortlaunch.plan import Plan
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve import shipped
from ortlaunch.resolve.resolve import resolve
from ortlaunch.run.preview import preview
from ortlaunch.run_folder.folder import RunDir


class Here(NamedTuple):
    """Where both plans are made."""

    options: LaunchOptions
    environ: Mapping[str, str]
    device: str
    """Of the plan that is new; the other recipe's, too, where it says auto."""


def other_plan(path: Path, here: Here) -> Plan:
    """The plan to compare with: a run folder's, a plan.json, or that of a recipe in the same place.

    Raises:
        InputError: it is none of these.
    """
    if not path.is_dir() and path.suffix != ".json":
        return _of_recipe(path, here)
    file = RunDir(path).plan if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        is_recipe = path.suffix == ".json" and "format" not in json.loads(text)
        return _of_recipe(path, here) if is_recipe else Plan.from_json(text)
    except FileNotFoundError:
        raise InputError(
            f"--diff {path}: there is no {file}; give a recipe, a run folder or its plan.json"
        ) from None
    except PlanError as error:
        raise InputError(f"--diff {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"--diff {path}: {file} is no plan of this version ({error!r})") from None


def _of_recipe(path: Path, here: Here) -> Plan:
    chosen = recipe.load(shipped.locate(path)).recipe.launch.device
    same = (f"launch.device={here.device}",) if chosen == "auto" else ()
    return preview(resolve(path, same, here.options, here.environ)).plan


def differences(before: Plan, after: Plan) -> list[str]:
    """`field: old -> new`, in the plan's order."""
    return list(_lines(json.loads(before.to_json()), json.loads(after.to_json()), ""))


def _lines(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from _lines(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif path == "nodes" and before != after:
        yield f"{path}: {_hosts(before)} -> {_hosts(after)}"
    elif before != after:
        yield f"{path}: {json.dumps(before)} -> {json.dumps(after)}"


def _hosts(nodes: Sequence[Mapping[str, object]]) -> str:
    """`4 hosts (node0 8, node1 8, ...)`."""
    named = [f"{node['host']} {node['slots']}" for node in nodes[:4]] + ["..."] * (len(nodes) > 4)
    return f"{len(nodes)} ({', '.join(named)})"
