"""`engine.name: auto`: choose the fastest engine whose results match plain PyTorch's.

It is measured once, and the choice is kept. The cache stores a choice under a key of all that
decides speed (see `key`). The run folder has it too, so that a continued run keeps its engine. A
run too short for a measurement takes the engine whose earlier runs are fastest. If fewer than two
engines ran, it takes the default engine, and the cache keeps nothing of this choice.
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

from ortlaunch.base import machine
from ortlaunch.base.cache import (
    cache_file_path_by_hashed_key,
    create_private_cache_folder_or_refuse,
    merge_into_checksum_record_and_protect_files,
    reason_checksums_differ_refreshing_times_if_same,
    require_not_writable_by_others,
)
from ortlaunch.base.errors import EngineError, OrtlaunchError, PlanError
from ortlaunch.base.installed import installed_version_by_package_name
from ortlaunch.base.json_types import Json
from ortlaunch.base.units import clock_duration
from ortlaunch.bench.measure import (
    BenchStopped,
    MeasurementLength,
    PrintLine,
    create_or_reuse_bench_folder,
    measure_variants_and_build_report,
    resolve_variants_or_refuse_if_none_can_run,
)
from ortlaunch.bench.report import (
    MEASURED_STATE,
    PASSING_VERDICTS,
    bench_table_and_notes_text,
    fastest_row_that_passes_parity,
    fastest_variant_tie_and_break_even_lines,
    passes_parity,
    ratio_text,
    shorten_reason,
)
from ortlaunch.bench.variant_job import WARM_UP_STEPS, VariantJob
from ortlaunch.bench.variants import (
    ENGINES,
    Variant,
    overrides_that_replace_engine,
    resolve_variant_or_record_refusal,
)
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.resolve.prepare import difference_texts
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder.bench_row import VariantRow
from ortlaunch.run_folder.cached_prediction import run_seconds_by_engine_of_earlier_runs
from ortlaunch.run_folder.engine_report import Choice, MeasuredEngine
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.run_folder.records import json_values_of_record
from ortlaunch.version import __version__

# Shorter than the bench of `ortlaunch bench`, because training waits for it.
SHORT_LENGTH = MeasurementLength(rounds=3, steps=3)
# The largest share of a run that its measurement may cost.
_MAX_SHARE_OF_RUN = 0.05
# Optimizer steps of a measurement: each turn has one that is not measured.
_MEASURED_STEPS = len(ENGINES) * (
    1 + WARM_UP_STEPS + SHORT_LENGTH.rounds * (1 + SHORT_LENGTH.steps)
)
# The seconds of a measurement beside its steps (three starts, an export, a compilation, two
# comparisons with plain PyTorch), in times of eager's start. An estimate: one measurement, of a
# BERT on a busy machine, took about eight. `benchmarks/models.py --parts auto` records both times.
_START_COUNT = 6
# Fields of `data` that decide the shape of a batch.
_SHAPE_FIELDS = (
    "sequence_length",
    "bucket_lengths",
    "padding",
    "attend_across_documents",
    "packing",
    "tokenizer",
    "processor",
    "transcript_length",
    "target_length",
)
# Fields of `engine` that are not part of the key.
_FIELDS_WITHOUT_SPEED = ("name", "allow_fallback", "parity_steps", "parity_tolerance")
# Packages whose version may change an engine's speed.
_VERSIONED_PACKAGES = (
    "torch",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "transformers",
    "deepspeed",
    "peft",
    "triton",
)


class MeasurementTooLongError(OrtlaunchError):
    """A measurement would cost more than its share of the run; the text has the figures."""


def recorded_or_short_run_choice_and_source_or_none(
    resolved_run: ResolvedRun, run: RunDir
) -> tuple[Choice, str] | None:
    """Return (choice, where it is from), from the run folder or the cache. None: measure it.

    A run of few steps gets the default engine.

    Raises:
        PlanError: it must be measured, and this process is a launcher's rank, which cannot start
            jobs.
    """
    present_digest = choice_key_digest(resolved_run)
    run_choice = (
        Choice.from_choice_json(read_json_or_raise_damaged(run.choice))
        if run.choice.exists()
        else None
    )
    # A run with a checkpoint keeps its engine, even if the machine or a version has changed.
    if run_choice and (run.complete_checkpoints() or run_choice.key == present_digest):
        return run_choice, "at the start of this run"
    known_choice = _cached_or_short_run_choice_and_source(resolved_run)
    if known_choice is None and resolved_run.world.enclosing_rank is not None:
        raise PlanError(
            "engine.name: auto has not been measured for this model, shape and machine, and "
            "ranks of a launcher cannot start a measurement; run `ortlaunch bench "
            f"{resolved_run.command.recipe_path}` once outside the launcher, with the same number of "
            f"ranks, or set engine.name{_nearest_measurement_difference_text_or_empty(resolved_run)}"
        )
    return known_choice


def measure_engines_and_choose_or_default_if_too_long(
    resolved_run: ResolvedRun, print_line: PrintLine
) -> Choice:
    """Measure all engines now, and return the choice.

    Eager is the first to start. If the others are not worth their time, it is the last.

    Raises:
        EngineError: no engine both runs this model and passes parity.
        BenchStopped: the user stopped it with a signal.
    """
    bench_folder = create_or_reuse_bench_folder(
        None, f"{resolved_run.recipe_file.recipe.name}-auto"
    )
    print_line(f"engine auto: measuring once, in {bench_folder}")
    try:
        # The steps to profile are the training's.
        prepared_variants = resolve_variants_or_refuse_if_none_can_run(
            resolved_run.apply_overrides("log.profile_steps=null"), ENGINES[::-1], ()
        )
        report = measure_variants_and_build_report(
            resolved_run,
            prepared_variants,
            SHORT_LENGTH,
            bench_folder,
            print_line,
            partial(_raise_if_measurement_outweighs_run, resolved_run),
        )
    except MeasurementTooLongError as error:
        return _ort_or_eager_choice_without_measurement(resolved_run, str(error))
    except BenchStopped as stopped:
        if resolved_run.traits.saves and stopped.exit_status != 128 + signal.SIGINT:
            # Training has not begun, so nothing is lost: exit as after a save. Ctrl-C keeps its
            # status.
            stopped.exit_status = EXIT_SAVED
        raise
    # Written before the decision, which may raise.
    write_json_atomically(bench_folder / "bench.json", report)
    print_line(bench_table_and_notes_text(report["variants"]))
    return choose_fastest_engine_of_bench_or_raise(
        report["variants"], bench_folder, resolved_run.recipe_file.recipe.train.max_steps
    )


def _cached_or_short_run_choice_and_source(resolved_run: ResolvedRun) -> tuple[Choice, str] | None:
    """Return (choice, where it is from) without a measurement: of the cache, or for few steps."""
    cached_choice = read_cached_choice_or_forget_damaged(resolved_run)
    max_steps = resolved_run.recipe_file.recipe.train.max_steps
    if cached_choice:
        # The run that was measured may have been longer.
        return replace(
            cached_choice,
            chosen=engine_with_shortest_run_or_none(cached_choice.measured, max_steps)
            or cached_choice.chosen,
        ), "cached"
    # With `epochs` the number is unknown until the data are read.
    if max_steps is None or _MAX_SHARE_OF_RUN * max_steps >= _MEASURED_STEPS:
        return None
    if earlier_choice := _choice_by_earlier_runs_or_none(resolved_run, max_steps):
        return earlier_choice, ""
    reason = f"{_MEASURED_STEPS} steps of a measurement are more than {_MAX_SHARE_OF_RUN:.0%} of {max_steps:,}"
    return _ort_or_eager_choice_without_measurement(resolved_run, reason), ""


def _choice_by_earlier_runs_or_none(resolved_run: ResolvedRun, step_count: int) -> Choice | None:
    """Return the engine with the shortest run by its own earlier runs; None without two engines."""
    world = resolved_run.world
    seconds_by_engine = run_seconds_by_engine_of_earlier_runs(
        resolved_run.recipe_file.recipe,
        world.device,
        world.threads or machine.threads_per_rank(world.nodes[0].slots),
        resolved_run.workload.batch,
        step_count,
    )
    # Another environment that shares the cache may have ONNX Runtime.
    fastest_first = [
        name
        for name in sorted(seconds_by_engine, key=lambda name: seconds_by_engine[name])
        if _can_run_engine(resolved_run, name)
    ]
    if len(fastest_first) < 2:
        return None
    figures = ", ".join(f"{name} {seconds_by_engine[name]:.3g} s" for name in fastest_first)
    return Choice(
        "auto", fastest_first[0], f"by earlier runs, for {step_count:,} steps: {figures}", {}
    )


def _raise_if_measurement_outweighs_run(resolved_run: ResolvedRun, variant_job: VariantJob) -> None:
    """Raise TooLong if eager's first steps predict a run that is too short for a measurement."""
    max_steps = resolved_run.recipe_file.recipe.train.max_steps
    if max_steps is None or variant_job.variant.engine != "eager":
        return
    measurement_seconds = (
        _START_COUNT * variant_job.ready_answer["first_step"]["since_launch"]
        + _MEASURED_STEPS * variant_job.ready_answer["step"]
    )
    run_seconds = max_steps * variant_job.ready_answer["step"]
    if measurement_seconds > _MAX_SHARE_OF_RUN * run_seconds:
        raise MeasurementTooLongError(
            f"a measurement of {clock_duration(measurement_seconds)} is more than "
            f"{_MAX_SHARE_OF_RUN:.0%} of {clock_duration(run_seconds)}, as "
            "predicted by eager's first steps"
        )


def _ort_or_eager_choice_without_measurement(resolved_run: ResolvedRun, reason: str) -> Choice:
    """Return the recipe's default engine, or eager where it cannot run, for this reason."""
    can_run_ort = _can_run_engine(resolved_run, ENGINES[0])
    bench_hint = f"`ortlaunch bench {resolved_run.command.recipe_path}` measures for all later runs"
    return Choice(
        "auto", ENGINES[0] if can_run_ort else "eager", f"not measured: {reason}; {bench_hint}", {}
    )


def _can_run_engine(resolved_run: ResolvedRun, engine_name: str) -> bool:
    variant = resolve_variant_or_record_refusal(Variant(engine_name, ()), resolved_run)
    return variant.resolved_run is not None


def apply_cached_engine_or_note_later_measurement(resolved_run: ResolvedRun) -> ResolvedRun:
    """Return the run with the engine that is known now, or with a note. Measures nothing."""
    known_choice = _cached_or_short_run_choice_and_source(resolved_run)
    if known_choice:
        return apply_engine_choice_and_allow_unmeasured_ort_to_fall_back(
            resolved_run, *known_choice
        )
    note = "engine auto: measured when training starts, then cached; this plan assumes ort"
    return replace(resolved_run, notes=(*resolved_run.notes, note))


def apply_engine_choice_and_allow_unmeasured_ort_to_fall_back(
    resolved_run: ResolvedRun, engine_choice: Choice, choice_source: str = ""
) -> ResolvedRun:
    """Return the same run with the chosen engine; its notes name the engine and the reason."""
    engine = engine_choice.chosen
    engine_section = resolved_run.recipe_file.recipe.engine
    overrides = overrides_that_replace_engine(engine, engine_section, keeps_parity_fields=True)
    if engine == "ort" and not engine_choice.measured:
        # No measurement has shown that ONNX Runtime can run this model.
        overrides = (*overrides, "engine.allow_fallback=true")
    note = f"engine auto: {engine}: {engine_choice.why}{f' ({choice_source})' if choice_source else ''}"
    # The recipe gives parity_steps as a number above 0.
    if engine == "eager" and engine_section.parity_steps not in (0, "auto"):
        note += "; engine.parity_steps compares nothing, for plain PyTorch itself runs"
    return replace(
        resolved_run,
        engine_choice=engine_choice,
        engine_note=(*resolved_run.engine_note, note),
    ).apply_auto_results(*overrides)


def read_cached_choice_or_forget_damaged(resolved_run: ResolvedRun) -> Choice | None:
    """Return the choice that was measured for this model, shape and machine, or None."""
    cache_path = _choice_cache_path(resolved_run)
    if not cache_path.exists():
        return None
    # The folder must be this user's. Otherwise another user could choose the engine.
    require_not_writable_by_others(cache_path.parent)
    invalid_reason = reason_checksums_differ_refreshing_times_if_same(
        cache_path.with_suffix(".seal")
    )
    if invalid_reason:
        print(f"{invalid_reason}; forgotten", flush=True)
        # A record that does not match its seal is not trusted.
        cache_path.unlink()
        return None
    return Choice.from_choice_json(read_json_or_raise_damaged(cache_path)["choice"])


def _nearest_measurement_difference_text_or_empty(resolved_run: ResolvedRun) -> str:
    """Return how the most similar remembered measurement differs from this run."""
    present_key = values_that_decide_fastest_engine(resolved_run)
    cached_keys = [
        read_json_or_raise_damaged(path)["key"]
        for path in _choice_cache_path(resolved_run).parent.glob("*.json")
    ]
    fewest_differences = min(
        (list(difference_texts(cached_key, present_key)) for cached_key in cached_keys),
        key=len,
        default=[],
    )
    return (
        f"; the nearest measurement differs in {', '.join(fewest_differences[:4])}"
        if fewest_differences
        else ""
    )


def cache_measured_engine_choice_and_add_its_key(
    resolved_run: ResolvedRun, engine_choice: Choice
) -> Choice:
    """Store the choice in the user's cache, for later runs with the same key.

    Returns:
        The choice, with its digest as `key`; one that was not measured as it is, not stored.
    """
    if not engine_choice.measured:
        return engine_choice
    stored_choice = replace(engine_choice, key=choice_key_digest(resolved_run))
    record = {
        "key": values_that_decide_fastest_engine(resolved_run),
        "choice": json_values_of_record(stored_choice),
    }
    create_private_cache_folder_or_refuse("engines")
    cache_path = _choice_cache_path(resolved_run)
    write_json_atomically(cache_path, record)
    merge_into_checksum_record_and_protect_files(cache_path.with_suffix(".seal"), [cache_path])
    return stored_choice


def is_bench_enough_to_choose_engine(bench_report: Json) -> bool:
    """Return whether a bench is at least as long as auto's own, and has an engine to choose."""
    has_enough_steps = (
        bench_report["rounds"] >= SHORT_LENGTH.rounds
        and bench_report["steps"] >= SHORT_LENGTH.steps
    )
    return has_enough_steps and fastest_row_that_passes_parity(bench_report["variants"]) is not None


def engine_with_shortest_run_or_none(
    figures_by_engine: Mapping[str, MeasuredEngine], step_count: int | None
) -> str | None:
    """Return the engine with the shortest run; None if none was measured and passes parity.

    Of engines that cannot be told apart, because the middle halves of their steps overlap, it is the
    one whose first step ends first: compilation costs a short run more than faster steps gain.
    """
    passing_engines = {
        engine_name: engine_figures
        for engine_name, engine_figures in figures_by_engine.items()
        if engine_figures.first_step_seconds is not None
        and (engine_figures.parity or {}).get("verdict") in PASSING_VERDICTS
    }
    if not passing_engines:
        return None
    least_seconds = min(
        engine_figures.run_or_single_step_seconds(step_count, "quartile_3")
        for engine_figures in passing_engines.values()
    )
    indistinguishable_engines = {
        n: engine_figures
        for n, engine_figures in passing_engines.items()
        if engine_figures.run_or_single_step_seconds(step_count, "quartile_1") <= least_seconds
    }
    return min(
        indistinguishable_engines,
        key=lambda engine_name: indistinguishable_engines[engine_name].first_step_seconds or 0.0,
    )


def choose_fastest_engine_of_bench_or_raise(
    variant_rows: Sequence[VariantRow], bench_folder: Path, step_count: int | None = None
) -> Choice:
    """Return the choice and its reason, from the variants of a bench in `bench_folder`.

    Args:
        variant_rows: the variants.
        bench_folder: the bench's folder.
        step_count: optimizer steps of the run; None: unknown.

    Raises:
        EngineError: none of them can be chosen.
    """
    figures_by_engine = {
        row["engine"]: _measured_engine_of_variant_row(row) for row in variant_rows
    }
    engine_name = engine_with_shortest_run_or_none(figures_by_engine, step_count)
    best_row = next((row for row in variant_rows if row["engine"] == engine_name), None)
    if best_row is None:
        raise EngineError(
            "engine.name: auto: no engine can train this model here\n"
            + "\n".join(_reasons_engines_cannot_be_chosen(variant_rows))
        )
    comparison_texts = [
        ratio_text(best_row, row)
        for row in variant_rows
        if row is not best_row and passes_parity(row)
    ]
    measurement_text = (
        f"measured {', '.join(comparison_texts)} on {time.strftime('%Y-%m-%d')}"
        if comparison_texts
        else "the only available engine"
    )
    # A later choice for a run of another length has the same reasons.
    reason = "; ".join(
        [
            measurement_text,
            *fastest_variant_tie_and_break_even_lines(variant_rows)[1:],
            *_reasons_engines_cannot_be_chosen(variant_rows),
        ]
    )
    return Choice(
        "auto", best_row["engine"], reason, figures_by_engine, str(bench_folder.resolve())
    )


def _reasons_engines_cannot_be_chosen(variant_rows: Sequence[VariantRow]) -> Iterator[str]:
    for row in variant_rows:
        if row["state"] != MEASURED_STATE:
            yield f"{row['engine']} {row['state']}: {shorten_reason(row['reason'])}"
        elif not passes_parity(row):
            yield (
                f"{row['engine']} left out: parity: {row['parity']['verdict']}: "
                f"{row['parity'].get('why')}"
            )


def _measured_engine_of_variant_row(variant_row: VariantRow) -> MeasuredEngine:
    if variant_row["state"] != MEASURED_STATE:
        return MeasuredEngine(variant_row["state"], shorten_reason(variant_row["reason"]))
    return MeasuredEngine(
        variant_row["state"],
        None,
        variant_row["seconds"],
        variant_row["samples_per_second"],
        variant_row["parity"],
        variant_row["first_step"]["since_launch"],
    )


def _choice_cache_path(resolved_run: ResolvedRun) -> Path:
    return cache_file_path_by_hashed_key("engines", values_that_decide_fastest_engine(resolved_run))


def choice_key_digest(resolved_run: ResolvedRun) -> str:
    """Return the key's digest, which names its file."""
    return _choice_cache_path(resolved_run).stem


def values_that_decide_fastest_engine(resolved_run: ResolvedRun) -> dict[str, object]:
    """Return everything that decides which engine is fastest, as plain values."""
    recipe = resolved_run.recipe_file.recipe
    world = resolved_run.world
    recipe_values = recipe.model_dump(mode="json")
    user_functions = (recipe.model.factory, recipe.engine.postprocess, *recipe.data.factories)
    return {
        "model": recipe_values["model"],
        "data": {name: recipe_values["data"][name] for name in _SHAPE_FIELDS},
        "custom_data": recipe_values["data"]["train"] if recipe.data.factories else None,
        "code": [
            _user_module_digest_or_factory_name(resolved_run.command.modules_folder, function_name)
            for function_name in user_functions
            if function_name
        ],
        "batch": [
            resolved_run.workload.batch.micro_samples,
            resolved_run.workload.batch.accumulation_steps,
        ],
        "precision": recipe.precision,
        "zero": recipe_values["zero"],
        "parallel": recipe_values["parallel"],
        "optimizer": recipe.optimizer.name,
        "engine": {
            name: value
            for name, value in recipe_values["engine"].items()
            if name not in _FIELDS_WITHOUT_SPEED
        },
        # Ranks per host, without host names: hosts of the same hardware have the same speed.
        "ranks": [host.slots for host in world.hosts],
        "device": world.device,
        "threads": world.threads,
        "hardware": machine.hardware_record(),
        "versions": {
            "ortlaunch": __version__,
            "python": platform.python_version(),
            **installed_version_by_package_name(_VERSIONED_PACKAGES),
        },
    }


def _user_module_digest_or_factory_name(modules_folder: Path, factory_name: str) -> str:
    """Return the digest of the user's module file, or of all modules of a package.

    If there is no such file, return the factory's name.
    """
    module_path = Path(modules_folder, *factory_name.partition(":")[0].split("."))
    files = [path for path in (module_path.with_suffix(".py"),) if path.exists()] or sorted(
        module_path.rglob("*.py")
    )
    if not files:
        return factory_name
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(modules_folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
