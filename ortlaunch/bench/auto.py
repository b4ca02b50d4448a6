"""`engine.name: auto`: choose the fastest engine whose results match plain PyTorch's.

It is measured once, and the choice is kept. The cache stores a choice under a key of all that
decides speed (see `key`). The run folder has it too, so that a continued run keeps its engine. A
run too short for a measurement takes the default engine, and the cache keeps nothing of it.
"""

from __future__ import annotations

import hashlib
import platform
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ortlaunch import machine
from ortlaunch.bench.measure import BenchStopped, Length, PrintLine, measure, new_folder, prepared
from ortlaunch.bench.report import (
    MEASURED,
    PASSING,
    fastest,
    passes,
    short_reason,
    table,
    times,
    verdict,
)
from ortlaunch.bench.turns import WARM_UP_STEPS, VariantJob
from ortlaunch.bench.variants import ENGINES, Variant, engine_overrides, resolve_variant
from ortlaunch.cache import (
    cache_record_path,
    make_cache_folder,
    reason_seal_is_invalid,
    require_not_writable_by_others,
    seal_files,
)
from ortlaunch.errors import EngineError, OrtlaunchError, PlanError
from ortlaunch.json_types import Json
from ortlaunch.ortmodule.build import extensions
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.resolve.prepare import differences
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder.engine_report import Choice, MeasuredEngine
from ortlaunch.run_folder.folder import RunDir, read_own_json, write_json_atomically
from ortlaunch.run_folder.records import as_json
from ortlaunch.units import clock_duration
from ortlaunch.version import __version__

# Shorter than the bench of `ortlaunch bench`, because training waits for it.
SHORT = Length(rounds=3, steps=3)
# The largest share of a run that its measurement may cost.
_SHARE = 0.05
# Optimizer steps of a measurement: each turn has one that is not measured.
_STEPS = len(ENGINES) * (1 + WARM_UP_STEPS + SHORT.rounds * (1 + SHORT.steps))
# The seconds of a measurement beside its steps (three starts, an export, a compilation, two
# comparisons with plain PyTorch), in times of eager's start. An estimate: one measurement, of a
# BERT on a busy machine, took about eight. `benchmarks/models.py --parts auto` records both times.
_STARTS = 6
# Fields of `data` that decide the shape of a batch.
_SHAPES = (
    "sequence_length",
    "bucket_lengths",
    "padding",
    "attend_across_documents",
    "packing",
    "tokenizer",
    "processor",
    "transcript_length",
)
# Fields of `engine` that are not part of the key.
_NO_SPEED = ("name", "allow_fallback", "parity_steps", "parity_tolerance")
# Packages whose version may change an engine's speed.
_PACKAGES = (
    "torch",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "transformers",
    "deepspeed",
    "peft",
    "triton",
)


class TooLong(OrtlaunchError):
    """A measurement would cost more than its share of the run; the text has the figures."""


def recorded_choice(resolved: ResolvedRun, run: RunDir) -> tuple[Choice, str] | None:
    """Return (choice, where it is from), from the run folder or the cache. None: measure it.

    A run of few steps gets the default engine.

    Raises:
        PlanError: it must be measured, and this process is a launcher's rank, which cannot start
            jobs.
    """
    today = digest(resolved)
    kept = Choice.from_record(read_own_json(run.choice)) if run.choice.exists() else None
    # A run with a checkpoint keeps its engine, even if the machine or a version has changed.
    if kept and (run.complete_checkpoints() or kept.key == today):
        return kept, "at the start of this run"
    known = _known(resolved)
    if known is None and resolved.world.inside is not None:
        raise PlanError(
            "engine.name: auto has not been measured for this model, shape and machine, and "
            "ranks of a launcher cannot start a measurement; run `ortlaunch bench "
            f"{resolved.command.path}` once outside the launcher, with the same number of "
            f"ranks, or set engine.name{_nearest(resolved)}"
        )
    return known


def measured(resolved: ResolvedRun, print_line: PrintLine) -> Choice:
    """Measure all engines now, and return the choice.

    Eager is the first to start. If the others are not worth their time, it is the last.

    Raises:
        EngineError: no engine both runs this model and passes parity.
        BenchStopped: the user stopped it with a signal.
    """
    folder = new_folder(None, f"{resolved.file.recipe.name}-auto")
    print_line(f"engine auto: measuring once, in {folder}")
    try:
        # The steps to profile are the training's.
        found = prepared(resolved.with_overrides("log.profile_steps=null"), ENGINES[::-1], ())
        report = measure(
            resolved, found, SHORT, folder, print_line, partial(_require_worth, resolved)
        )
    except TooLong as error:
        return _unmeasured(resolved, str(error))
    except BenchStopped as stopped:
        if resolved.traits.saves and stopped.exit_status != 128 + signal.SIGINT:
            # Training has not begun, so nothing is lost: exit as after a save. Ctrl-C keeps its
            # status.
            stopped.exit_status = EXIT_SAVED
        raise
    # Written before the decision, which may raise.
    write_json_atomically(folder / "bench.json", report)
    print_line(table(report["variants"]))
    return decide(report["variants"], folder, resolved.file.recipe.train.max_steps)


def _known(resolved: ResolvedRun) -> tuple[Choice, str] | None:
    """Return (choice, where it is from) without a measurement: of the cache, or for few steps."""
    found = remembered(resolved)
    steps = resolved.file.recipe.train.max_steps
    if found:
        # The run that was measured may have been longer.
        return replace(found, chosen=shortest(found.measured, steps) or found.chosen), "cached"
    # With `epochs` the number is unknown until the data are read.
    if steps is None or _SHARE * steps >= _STEPS:
        return None
    share = f"{_STEPS} steps of a measurement are more than {_SHARE:.0%} of {steps:,}"
    return _unmeasured(resolved, share), ""


def _require_worth(resolved: ResolvedRun, job: VariantJob) -> None:
    """Raise TooLong if eager's first steps predict a run that is too short for a measurement."""
    steps = resolved.file.recipe.train.max_steps
    if steps is None or job.variant.engine != "eager":
        return
    cost = _STARTS * job.ready["first_step"]["since_launch"] + _STEPS * job.ready["step"]
    run = steps * job.ready["step"]
    if cost > _SHARE * run:
        raise TooLong(
            f"a measurement of {clock_duration(cost)} is more than {_SHARE:.0%} of {clock_duration(run)}, as "
            "predicted by eager's first steps"
        )


def _unmeasured(resolved: ResolvedRun, why: str) -> Choice:
    """Return the recipe's default engine, or eager where it cannot run, for this reason."""
    runs = resolve_variant(Variant(ENGINES[0], ()), resolved).resolved is not None
    bench = f"`ortlaunch bench {resolved.command.path}` measures for all later runs"
    return Choice("auto", ENGINES[0] if runs else "eager", f"not measured: {why}; {bench}", {})


def preview(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with the engine that is known now, or with a note. Measures nothing."""
    known = _known(resolved)
    if known:
        return applied(resolved, *known)
    note = "engine auto: measured when training starts, then cached; this plan assumes ort"
    return replace(resolved, notes=(*resolved.notes, note))


def applied(resolved: ResolvedRun, choice: Choice, source: str = "") -> ResolvedRun:
    """Return the same run with the chosen engine; its notes name the engine and the reason."""
    engine = choice.chosen
    before = resolved.file.recipe.engine
    overrides = engine_overrides(engine, before, parity=True)
    if engine == "ort" and not choice.measured:
        # No measurement has shown that ONNX Runtime can run this model.
        overrides = (*overrides, "engine.allow_fallback=true")
    note = f"engine auto: {engine}: {choice.why}{f' ({source})' if source else ''}"
    # The recipe gives parity_steps as a number above 0.
    if engine == "eager" and before.parity_steps not in (0, "auto"):
        note += "; engine.parity_steps compares nothing, for plain PyTorch itself runs"
    return resolved.with_engine(choice, note, *overrides)


def remembered(resolved: ResolvedRun) -> Choice | None:
    """Return the choice that was measured for this model, shape and machine, or None."""
    path = _path(resolved)
    if not path.exists():
        return None
    # The folder must be this user's. Otherwise another user could choose the engine.
    require_not_writable_by_others(path.parent)
    why = reason_seal_is_invalid(path.with_suffix(".seal"))
    if why:
        print(f"{why}; forgotten", flush=True)
        # A record that does not match its seal is not trusted.
        path.unlink()
        return None
    return Choice.from_record(read_own_json(path)["choice"])


def _nearest(resolved: ResolvedRun) -> str:
    """Return how the most similar remembered measurement differs from this run."""
    asked = key(resolved)
    known = [read_own_json(path)["key"] for path in _path(resolved).parent.glob("*.json")]
    apart = min((list(differences(other, asked)) for other in known), key=len, default=[])
    return f"; the nearest measurement differs in {', '.join(apart[:4])}" if apart else ""


def remember(resolved: ResolvedRun, choice: Choice) -> Choice:
    """Store the choice in the user's cache, for later runs with the same key.

    Returns:
        The choice, with its digest as `key`; one that was not measured as it is, not stored.
    """
    if not choice.measured:
        return choice
    kept = replace(choice, key=digest(resolved))
    record = {"key": key(resolved), "choice": as_json(kept)}
    make_cache_folder("engines")
    path = _path(resolved)
    write_json_atomically(path, record)
    seal_files(path.with_suffix(".seal"), [path])
    return kept


def long_enough(report: Json) -> bool:
    """Return whether a bench is at least as long as auto's own, and has an engine to choose."""
    shortest = report["rounds"] >= SHORT.rounds and report["steps"] >= SHORT.steps
    return shortest and fastest(report["variants"]) is not None


def shortest(figures: Mapping[str, MeasuredEngine], steps: int | None) -> str | None:
    """Return the engine with the shortest run; None if none was measured and passes parity.

    Of engines that cannot be told apart, because the middle halves of their steps overlap, it is the
    one whose first step ends first: compilation costs a short run more than faster steps gain.
    """
    able = {
        name: each
        for name, each in figures.items()
        if each.first_step_seconds is not None and (each.parity or {}).get("verdict") in PASSING
    }
    if not able:
        return None
    least = min(each.run_seconds(steps, "quartile_3") for each in able.values())
    rivals = {n: each for n, each in able.items() if each.run_seconds(steps, "quartile_1") <= least}
    return min(rivals, key=lambda name: rivals[name].first_step_seconds or 0.0)


def decide(rows: Sequence[Json], folder: Path, steps: int | None = None) -> Choice:
    """Return the choice and its reason, from the variants of a bench in `folder`.

    Args:
        rows: the variants.
        folder: the bench's folder.
        steps: optimizer steps of the run; None: unknown.

    Raises:
        EngineError: none of them can be chosen.
    """
    figures = {row["engine"]: _brief(row) for row in rows}
    chosen = shortest(figures, steps)
    best = next((row for row in rows if row["engine"] == chosen), None)
    if best is None:
        raise EngineError(
            "engine.name: auto: no engine can train this model here\n" + "\n".join(_left_out(rows))
        )
    beaten = [times(best, row) for row in rows if row is not best and passes(row)]
    measured = (
        f"measured {', '.join(beaten)} on {time.strftime('%Y-%m-%d')}"
        if beaten
        else "the only available engine"
    )
    # A later choice for a run of another length has the same reasons.
    why = "; ".join([measured, *verdict(rows)[1:], *_left_out(rows)])
    return Choice("auto", best["engine"], why, figures, str(folder.resolve()))


def _left_out(rows: Sequence[Json]) -> Iterator[str]:
    """Yield the reason for each engine that cannot be chosen."""
    for row in rows:
        if row["state"] != MEASURED:
            yield f"{row['engine']} {row['state']}: {short_reason(row['reason'])}"
        elif not passes(row):
            yield (
                f"{row['engine']} left out: parity: {row['parity']['verdict']}: "
                f"{row['parity'].get('why')}"
            )


def _brief(row: Json) -> MeasuredEngine:
    if row["state"] != MEASURED:
        return MeasuredEngine(row["state"], short_reason(row["reason"]))
    return MeasuredEngine(
        row["state"],
        None,
        row["seconds"],
        row["samples_per_second"],
        row["parity"],
        row["first_step"]["since_launch"],
    )


def _path(resolved: ResolvedRun) -> Path:
    return cache_record_path("engines", key(resolved))


def digest(resolved: ResolvedRun) -> str:
    """Return the key's digest, which names its file."""
    return _path(resolved).stem


def key(resolved: ResolvedRun) -> Json:
    """Return everything that decides which engine is fastest, as plain values."""
    recipe = resolved.file.recipe
    world = resolved.world
    whole = recipe.model_dump(mode="json")
    functions = (recipe.model.factory, recipe.engine.postprocess, *recipe.data.factories)
    return {
        "model": whole["model"],
        "data": {name: whole["data"][name] for name in _SHAPES},
        "custom_data": whole["data"]["train"] if recipe.data.factories else None,
        "code": [_code(resolved.command.modules, each) for each in functions if each],
        "batch": [resolved.work.batch.micro_samples, resolved.work.batch.accumulation_steps],
        "precision": recipe.precision,
        "zero": whole["zero"],
        "optimizer": recipe.optimizer.name,
        "engine": {name: value for name, value in whole["engine"].items() if name not in _NO_SPEED},
        # Ranks per host, without host names: hosts of the same hardware have the same speed.
        "ranks": [host.slots for host in world.hosts],
        "device": world.device,
        "threads": world.threads,
        "hardware": machine.hardware_record(),
        "versions": {
            "ortlaunch": __version__,
            "python": platform.python_version(),
            **extensions.installed_versions(_PACKAGES),
        },
    }


def _code(modules: Path, factory: str) -> str:
    """Return the digest of the user's module file, or of all modules of a package.

    If there is no such file, return the factory's name.
    """
    base = Path(modules, *factory.partition(":")[0].split("."))
    files = [path for path in (base.with_suffix(".py"),) if path.exists()] or sorted(
        base.rglob("*.py")
    )
    if not files:
        return factory
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(modules)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
