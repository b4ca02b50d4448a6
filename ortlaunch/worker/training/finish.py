"""Write the results after the last step: export/, memory.json, summary.json and the final lines."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from ortlaunch.errors import CheckpointError, LastSaveError, NonFiniteError
from ortlaunch.evaluation_metrics import METRICS
from ortlaunch.planning.prediction import cached, record_step
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import RunDir, write_json_atomically
from ortlaunch.run_folder.records import (
    BestEvaluation,
    Prediction,
    StoppedEarly,
    Summary,
    as_json,
)
from ortlaunch.units import clock_duration, human_bytes, number_or_none
from ortlaunch.worker.checkpoint import failures, load, samples_seen
from ortlaunch.worker.checkpoint.saving import KEEP
from ortlaunch.worker.checkpoint.verify import damage
from ortlaunch.worker.data.left_out import recorded
from ortlaunch.worker.engine.memory_use import memory_line
from ortlaunch.worker.export.export import export
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.session import Session
from ortlaunch.worker.training import best, checkpoint_exports
from ortlaunch.worker.training.metrics import EVALUATION, own_names, records
from ortlaunch.worker.training.summary import print_outcome


def finish(session: Session, step: int, memory: best.Memory) -> None:
    """Write the export, the memory record and the summary (collective). Rank 0 prints the summary.

    Args:
        session: the training.
        step: the last step.
        memory: the best evaluations so far, for keep_best and stop_after.
    """
    recipe = session.recipe
    run = session.run
    group = session.group
    engine = session.engine
    lines = []
    kept = _take_best(session, step, memory)
    if engine.memory is not None:
        # Recorded before the export, because the export's own memory use must not count.
        used = engine.memory.record(session.plan, group)
        # Before the export, which switches the chunked loss off.
        steps = _steps(session) if group.rank == 0 else {}
        _export(session)
        if wrong := group.gather(_not_judged(recipe, run, memory))[0]:
            raise NonFiniteError(f"{wrong}; {run.export} has the weights after step {step}")
        trained = engine.memory.records > 0
        lines = [memory_line(used)] if trained else []
        if group.rank == 0:
            # If this start made no step, keep the memory.json of the earlier start that trained.
            write_json_atomically(
                run.memory, as_json(used)
            ) if trained or not run.memory.exists() else None
            summary = summarize(run, len(session.data.train), session.progress.seconds())
            summary = replace(
                summary,
                best=kept,
                stopped_early=_early(recipe, step, memory),
                epochs=session.batches.epoch(summary.samples),
                **steps,
            )
            shutil.rmtree(run.stream, ignore_errors=True)
            write_json_atomically(run.summary, as_json(summary))
            loaded_by = _loaded_by(recipe, run, session.model)
            lines += filter(None, [best.stops_early(recipe, step, memory)])
            lines += [
                *summary_lines(summary),
                *_best_lines(run, kept),
                f"export: {run.export}",
                f"  {loaded_by}",
            ]
    print_outcome(session, lines)


def export_unsaved(session: Session, error: LastSaveError) -> NoReturn:
    """Write the trained model although its checkpoint could not be saved (collective).

    Raises:
        CheckpointError: always, because there is no checkpoint to continue from.
    """
    session.group.print_once(
        f"NOT SAVED: {error}; the export is written (checkpoint.on_failure: continue)"
    )
    _export(session)
    raise CheckpointError(
        f"{error}\nThe export of the last step is whole: {session.run.export}"
    ) from None


def _export(session: Session) -> None:
    session.progress.doing("writing the export")
    # An exported model computes its loss as usual, not in chunks.
    session.model.chunk(None)
    export(
        session.recipe,
        session.run,
        session.group,
        session.engine.stepper,
        session.model,
        session.data,
    )


def _take_best(session: Session, step: int, memory: best.Memory) -> BestEvaluation | None:
    """Return the best evaluation if `keep_best` is set. With its `export`, load those weights."""
    asked = session.recipe.checkpoint.keep_best
    found = memory.get(KEEP)
    if asked is None or found is None or found["step"] is None:
        return None
    if asked.export:
        folder = session.run.checkpoint_folder(found["step"])
        if wrong := damage(folder, session.group):
            raise CheckpointError(
                f"{folder}, the best checkpoint, needed for the export, is damaged: {wrong}"
            )
        load(folder, session.engine.stepper.named_state(), session.group)
    is_exported = asked.export or found["step"] == step
    return BestEvaluation(found["metric"], found["value"], found["step"], is_exported)


def _not_judged(recipe: Recipe, run: RunDir, memory: best.Memory) -> str:
    """Return why the evaluations do not judge the exported weights; "" if they do."""
    asked = recipe.checkpoint.keep_best
    found = memory.get(KEEP)
    if asked and found and found["step"] is None:
        return (
            f"checkpoint.keep_best: no evaluation had a finite {asked.metric}, so none is the best"
        )
    if asked and found and asked.export:
        return ""
    last = {name: value for record in records(run) for name, value in record.items()}
    loss = number_or_none(last.get("evaluation_loss", 0))
    return "" if loss is None or math.isfinite(loss) else f"the last evaluation's loss is {loss}"


def _early(recipe: Recipe, step: int, memory: best.Memory) -> StoppedEarly | None:
    asked = recipe.train.stop_after
    found = memory.get(best.STOP)
    if asked is None or found is None or not best.stops_early(recipe, step, memory):
        return None
    return StoppedEarly(
        asked.metric, asked.direction, asked.evaluations, found["value"], found["step"]
    )


def _best_lines(run: RunDir, kept: BestEvaluation | None) -> list[str]:
    if kept is None:
        return []
    exported = " (exported)" if kept.exported else ""
    return [
        f"best {kept.metric} {kept.value:.6g} after step {kept.step}: "
        f"{run.checkpoint_folder(kept.step)}{exported}"
    ]


def _steps(session: Session) -> dict[str, Any]:
    """Return the summary's duration of a step, measured and, if `plan --predict` was run, predicted.

    The measured duration corrects later predictions.
    """
    seconds = session.progress.step_seconds()
    steps: dict[str, Any] = {"step_seconds": seconds}
    found = cached(session.recipe, session.plan)
    if found is None:
        return steps
    engine = session.engine.record.engine.used
    if seconds is not None:
        record_step(session.recipe, session.plan, engine, seconds)
    if found.doubt:
        return {**steps, "not_predicted": f"{found.doubt} (ortlaunch plan --predict)"}
    memory = found.engines[engine]["memory"]
    return {**steps, "predicted": Prediction(found.seconds(engine), memory)}


def _prediction_lines(summary: Summary) -> list[str]:
    """Return the measured and the predicted duration of a step."""
    if summary.step_seconds is None:
        return []
    line = f"a step: {summary.step_seconds:.3g} s"
    if found := summary.predicted:
        return [
            f"{line}, predicted {found.step_seconds:.3g} s and {human_bytes(found.memory)} a rank"
        ]
    return [f"{line}, not predicted: {summary.not_predicted}" if summary.not_predicted else line]


def summarize(run: RunDir, samples: int, seconds: dict[str, float]) -> Summary:
    """Return the run's totals, from the newest checkpoint and metrics.jsonl.

    `seconds` is the time of this start only.
    """
    (steps, folder), kept = run.complete_checkpoints()[-1], records(run)
    seen = samples_seen(folder)
    # Keep the newest value of each name, because not every line has every name.
    last = {name: value for record in kept for name, value in record.items()}
    if "elapsed_seconds" not in last:
        print(
            f"{run.metrics} was removed during training: {run.summary.name} has no loss, and "
            "only this start's time"
        )
    return Summary(
        steps=steps,
        samples=seen,
        epochs=round(seen / samples, 4),
        loss=last.get("loss"),
        evaluation_loss=last.get("evaluation_loss"),
        training_seconds=last.get("elapsed_seconds", seconds.get("training", 0.0)),
        bad_steps=dict(Counter(line.action for line in recorded(run) if line.action != "stop")),
        seconds=seconds,
        failed_saves=failures(run),
        failed_exports=checkpoint_exports.failures(run),
        evaluation=_evaluated(last) or None,
    )


def _evaluated(last: Mapping[str, Any]) -> dict[str, float]:
    """Return the newest value of each evaluation metric except the loss.

    The user's own metrics are included.
    """
    names = [*(EVALUATION + name for name in METRICS if name != "loss"), *own_names(last)]
    return {
        name.removeprefix(EVALUATION): last[name]
        for name in names
        if name in last and name.startswith(EVALUATION)
    }


def summary_lines(summary: Summary) -> list[str]:
    """Return the summary as lines to print."""
    losses = [
        f"{words} {float(loss):.4f}"
        for loss, words in (
            (summary.loss, "final loss"),
            (summary.evaluation_loss, "evaluation loss"),
        )
        if loss is not None
    ]
    for name, value in (summary.evaluation or {}).items():
        form = METRICS[name].shown if name in METRICS else f"{name} {{:.4g}}"
        losses.append(form.format(float(value)))
    return [
        f"trained {summary.steps:,} steps: {summary.samples:,} samples, {summary.epochs:.3g} epochs, "
        f"in {clock_duration(summary.training_seconds)}",
        *_prediction_lines(summary),
        *([", ".join(losses)] if losses else []),
        *([f"{summary.failed_saves} saves failed: saves.jsonl"] if summary.failed_saves else []),
        *([f"{summary.failed_exports} exports failed: exports.jsonl"] if summary.failed_exports else []),
        *_bad_steps(summary.bad_steps),
    ]  # fmt: skip


def _bad_steps(actions: dict[str, int]) -> list[str]:
    """Return a list with one line about skipped and rolled-back steps; empty if there are none."""
    words = {"skip": "skipped", "rollback": "rolled back and left out"}
    found = ", ".join(f"{number} {words[action]}" for action, number in actions.items())
    return [f"bad steps: {found}; see bad_steps.jsonl"] if found else []


def _loaded_by(recipe: Recipe, run: RunDir, trained: LossModule) -> str:
    """Return Python code that loads the export.

    `your_model` and `base_model` stand for the user's own object.
    """
    model: Any = trained.model
    if not hasattr(model, "save_pretrained"):
        return f'safetensors.torch.load_model(your_model, "{run.export / "model.safetensors"}")'
    if recipe.model.lora and not recipe.model.lora.merge:
        # The adapters are those of a base with the vocabulary of the training.
        words = model.get_base_model().get_input_embeddings().weight.shape[0]
        resize = f"base_model.resize_token_embeddings({words}); "
        resized = resize if trained.loaded and trained.loaded["resized"] else ""
        return f'{resized}peft.PeftModel.from_pretrained(base_model, "{run.export}")'
    # With merged LoRA, load with the class of the model that peft wraps.
    whole = model.get_base_model() if recipe.model.lora else model
    return f'transformers.{type(whole).__name__}.from_pretrained("{run.export}")'
