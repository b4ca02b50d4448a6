"""`engine.name: auto`: the fastest engine that computes what plain PyTorch computes, measured once and remembered.

A choice is remembered in ortlaunch's cache by everything that decides speed (`key`), and in the run folder, so that a
run that goes on keeps its engine.
"""

from __future__ import annotations

import hashlib
import json
import platform
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ortlaunch import __version__, machine
from ortlaunch.bench.measure import Length, Stopped, measure, new_folder, prepared
from ortlaunch.bench.report import MEASURED, fastest, passes, short_reason, table, times
from ortlaunch.bench.variants import ENGINES, engine_overrides
from ortlaunch.cache import cache_folder, cache_root, changed, require_own, seal
from ortlaunch.errors import EngineError, PlanError
from ortlaunch.json_types import Json
from ortlaunch.ortmodule.build import extensions
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.resolve.prepare import differences
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder.engine_report import Choice, MeasuredEngine
from ortlaunch.run_folder.folder import RunDir, read_json, write_json
from ortlaunch.run_folder.records import as_json

SHORT = Length(rounds=3, steps=3)
_SHAPES = ("sequence_length", "bucket_lengths", "padding", "attend_across_documents", "tokenizer")
# Fields of `engine` that change no measured figure.
_NO_SPEED = ("name", "allow_fallback", "parity_steps", "parity_tolerance")
_PACKAGES = ("torch", "onnxruntime-training", "onnxruntime-training-cpu", "transformers", "deepspeed", "peft", "triton")


def choose(resolved: ResolvedRun, run: RunDir, check: Callable[[], object]) -> ResolvedRun:
    """The run with its engine: the run folder's, else the remembered one, else the one that is measured now.

    Args:
        check: called before anything is measured; raises where the run could not start anyway.

    Raises:
        PlanError: there is nothing to go by, and this process is a rank already, which can start no jobs.
        EngineError: no engine runs this model and passes parity.
    """
    kept = read_json(run.choice) if run.choice.exists() else None
    if kept and (run.complete_checkpoints() or kept["key"] == digest(resolved)):
        return decided(resolved, kept, "as this run began")
    found = remembered(resolved)
    if found:
        return decided(resolved, found, "cached")
    if resolved.world.inside is not None:
        raise PlanError(
            "engine.name: auto has not been measured for this model, shape and machine, and a launcher's rank can "
            f"start no jobs; run `ortlaunch bench {resolved.command.path}` once outside of the launcher, with as many "
            f"ranks, or name the engine{_nearest(resolved)}"
        )
    check()
    folder = new_folder(None, f"{resolved.plan.name}-auto")
    _say(f"engine auto: measuring once, in {folder}")
    try:
        report = measure(resolved, prepared(resolved, ENGINES, ()), SHORT, folder, _say)
    except Stopped as stopped:
        if resolved.plan.saves and stopped.exit_status != 128 + signal.SIGINT:
            stopped.exit_status = EXIT_SAVED  # nothing has begun, so that all is saved
        raise
    write_json(folder / "bench.json", report)
    _say(table(report["variants"]))
    return decided(resolved, _remember(resolved, report, folder))


def _say(text: str) -> None:
    print(text, flush=True)


def preview(resolved: ResolvedRun) -> ResolvedRun:
    """The plan of a recipe with engine auto, without measuring: with the remembered engine if there is one."""
    found = remembered(resolved)
    if found:
        return decided(resolved, found, "cached")
    note = "engine auto: measured when training starts, and remembered; until then planned as for ort"
    return resolved._replace(notes=(*resolved.notes, note))


def decided(resolved: ResolvedRun, choice: Json, source: str = "") -> ResolvedRun:
    """The same run with the chosen engine; its notes say which and why."""
    engine, before = choice["chosen"], resolved.file.recipe.engine
    chosen = resolved.with_choice(*engine_overrides(engine, before, parity=True))
    note = f"engine auto: {engine}: {choice['why']}{f' ({source})' if source else ''}"
    if engine == "eager" and before.parity_steps not in (0, "auto"):
        note += "; engine.parity_steps compares nothing, for plain PyTorch itself runs"
    return chosen._replace(choice=choice, notes=(*chosen.notes, note))


def remembered(resolved: ResolvedRun) -> Json | None:
    """The choice that was measured for this model, shape and machine, if one was."""
    path = _path(resolved)
    if not path.exists():
        return None
    require_own(path.parent)
    why = changed(path.with_suffix(".seal"))
    if why:
        _say(f"{why}; forgotten")
        path.unlink()
        return None
    found: Json = read_json(path)["choice"]
    return found


def _nearest(resolved: ResolvedRun) -> str:
    """What keeps the most similar remembered measurement from being this one's."""
    asked = key(resolved)
    known = [read_json(path)["key"] for path in _path(resolved).parent.glob("*.json")]
    apart = min((list(differences(other, asked)) for other in known), key=len, default=[])
    return f"; the nearest that was measured differs in {', '.join(apart[:4])}" if apart else ""


def remember(resolved: ResolvedRun, report: Json, folder: Path) -> None:
    """After a bench of all engines that measured no less than auto itself would: auto will take its answer."""
    long_enough = report["rounds"] >= SHORT.rounds and report["steps"] >= SHORT.steps
    if long_enough and fastest(report["variants"]) is not None:
        choice = _remember(resolved, report, folder)
        _say(f"engine.name: auto will take {choice['chosen']} for this recipe on this machine")


def _remember(resolved: ResolvedRun, report: Json, folder: Path) -> dict[str, object]:
    choice = {**decide(report["variants"]), "bench": str(folder.resolve()), "key": digest(resolved)}
    _keep(resolved, choice)
    return choice


def _keep(resolved: ResolvedRun, choice: Json) -> None:
    cache_folder("engines")
    write_json(_path(resolved), {"key": key(resolved), "choice": choice})
    seal(_path(resolved).with_suffix(".seal"), [_path(resolved)])


def decide(rows: Sequence[Json]) -> Json:
    """The choice and its reason, from a bench's variants.

    Raises:
        EngineError: none of them can be chosen.
    """
    best = fastest(rows)
    if best is None:
        raise EngineError("engine.name: auto: no engine can train this model here\n" + "\n".join(_left_out(rows)))
    beaten = [times(best, row) for row in rows if row is not best and passes(row)]
    measured = f"measured {', '.join(beaten)} on {time.strftime('%Y-%m-%d')}" if beaten else "the only one that can be"
    why = "; ".join([measured, *_left_out(rows)])
    return dict(as_json(Choice("auto", best["engine"], why, {row["engine"]: _brief(row) for row in rows})))


def _left_out(rows: Sequence[Json]) -> Iterator[str]:
    for row in rows:
        if row["state"] != MEASURED:
            yield f"{row['engine']} {row['state']}: {short_reason(row['reason'])}"
        elif not passes(row):
            yield f"{row['engine']} left out: parity: {row['parity']['verdict']}: {row['parity'].get('why')}"


def _brief(row: Json) -> MeasuredEngine:
    if row["state"] != MEASURED:
        return MeasuredEngine(row["state"], short_reason(row["reason"]))
    return MeasuredEngine(row["state"], None, row["seconds"], row["samples_per_second"], row["parity"])


def _path(resolved: ResolvedRun) -> Path:
    return cache_root() / "engines" / f"{digest(resolved)}.json"


def digest(resolved: ResolvedRun) -> str:
    """The key as a file's name."""
    return hashlib.sha256(json.dumps(key(resolved), sort_keys=True).encode()).hexdigest()[:32]


def key(resolved: ResolvedRun) -> Json:
    """All that decides which engine is fastest, as plain values."""
    recipe, plan = resolved.file.recipe, resolved.plan
    whole = recipe.model_dump(mode="json")
    own = recipe.data.factories
    return {
        "model": whole["model"],
        "data": {name: whole["data"][name] for name in _SHAPES},
        "custom_data": whole["data"]["train"] if own else None,
        "code": [_code(plan.modules, each) for each in (recipe.model.factory, *own) if each],
        "batch": [plan.batch.micro_samples, plan.batch.accumulation_steps],
        "precision": recipe.precision,
        "zero": whole["zero"],
        "optimizer": recipe.optimizer.name,
        "engine": {name: value for name, value in whole["engine"].items() if name not in _NO_SPEED},
        "ranks": [node.slots for node in plan.nodes],
        "device": plan.device,
        "threads": plan.threads,
        "hardware": machine.hardware(),
        "versions": {"ortlaunch": __version__, "python": platform.python_version(), **extensions.versions(_PACKAGES)},
    }


def _code(modules: str, factory: str) -> str:
    """Digest of the user's module where it lies beside the recipe; one that is installed goes by its name."""
    base = Path(modules, *factory.partition(":")[0].split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return factory
