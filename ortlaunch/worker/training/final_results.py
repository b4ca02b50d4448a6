"""Write the results after the last step: export/, memory.json, summary.json and the final lines."""

from __future__ import annotations

import itertools
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from ortlaunch.base.errors import CheckpointError, LastSaveError, NonFiniteError
from ortlaunch.base.units import clock_duration, human_bytes, number_or_none
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.cached_prediction import (
    cache_measured_seconds_if_writable,
    read_cached_prediction_or_none,
)
from ortlaunch.run_folder.folder import RunDir, write_json_atomically
from ortlaunch.run_folder.records import (
    BestEvaluation,
    Prediction,
    StoppedEarly,
    Summary,
    json_values_of_record,
)
from ortlaunch.tables.metrics import METRICS
from ortlaunch.worker.checkpoint import (
    CompleteCheckpoint,
    failed_save_count,
    load_checkpoint_print_notes_and_return_loop_state,
)
from ortlaunch.worker.checkpoint.saver import KEEP
from ortlaunch.worker.checkpoint.verify import gather_checkpoint_damage_or_empty
from ortlaunch.worker.data.skipped_positions import read_bad_step_records
from ortlaunch.worker.engine.memory_use import memory_summary_text
from ortlaunch.worker.export.export import write_final_run_export_on_rank_0
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.pulse import TRAINING
from ortlaunch.worker.training import best_evaluation as best
from ortlaunch.worker.training import checkpoint_exports
from ortlaunch.worker.training.metrics_writer import (
    EVALUATION,
    names_of_present_user_values,
    readable_metrics_records,
)
from ortlaunch.worker.training.summary import print_outcome_and_copy_late_modules

# Predictions of a quiet machine are within 20 % (docs/evidence/measuring.md); beside other work twice as long and more.
_WRONG_RATIO = 2


def write_export_and_print_summary(
    session: Session, last_step: int, best_evaluations: best.BestEvaluations
) -> None:
    """Write the export, the memory record and the summary (collective). Rank 0 prints the summary.

    Args:
        session: the training.
        last_step: the last step.
        best_evaluations: the best evaluations so far, for keep_best and stop_after.
    """
    recipe = session.recipe
    run = session.run
    group = session.group
    engine = session.engine
    lines = []
    best_evaluation = _load_best_if_exported_and_return_its_record(
        session, last_step, best_evaluations
    )
    if engine.memory_use is not None:
        # Recorded before the export, because the export's own memory use must not count.
        memory_record = engine.memory_use.gather_memory_report(session.plan, group)
        # Before the export, which switches the chunked loss off.
        steps = _cache_measured_and_return_step_durations(session) if group.rank == 0 else {}
        _unchunk_loss_and_write_export(session)
        if unjudged_reason := group.gather(
            _reason_export_is_unjudged_or_empty(recipe, run, best_evaluations)
        )[0]:
            raise NonFiniteError(
                f"{unjudged_reason}; {run.export} has the weights after step {last_step}"
            )
        trained = engine.memory_use.records > 0
        lines = [memory_summary_text(memory_record)] if trained else []
        if group.rank == 0:
            # If this start made no step, keep the memory.json of the earlier start that trained.
            if trained or not run.memory.exists():
                write_json_atomically(run.memory, json_values_of_record(memory_record))
            summary = build_run_summary(
                run, len(session.data.train), session.progress.seconds_by_activity()
            )
            summary = replace(
                summary,
                best=best_evaluation,
                stopped_early=_early_stop_record_or_none(recipe, last_step, best_evaluations),
                epochs=session.batches.passes_over_data_after(summary.samples),
                **steps,
            )
            shutil.rmtree(run.stream, ignore_errors=True)
            write_json_atomically(run.summary, json_values_of_record(summary))
            loading_code = _python_code_to_load_export(recipe, run, session.model)
            lines += [
                *filter(
                    None, [best.early_stop_reason_or_none(recipe, last_step, best_evaluations)]
                ),
                *training_summary_lines(summary),
                *_best_checkpoint_lines(run, best_evaluation),
                f"export: {run.export}",
                f"  {loading_code}",
            ]
    print_outcome_and_copy_late_modules(session, lines)


def write_export_and_raise_save_error(session: Session, save_error: LastSaveError) -> NoReturn:
    """Write the trained model although its checkpoint could not be saved (collective).

    Raises:
        CheckpointError: always, because there is no checkpoint to continue from.
    """
    session.group.print_on_rank_0(
        f"NOT SAVED: {save_error}; the export is written (checkpoint.on_failure: continue)"
    )
    _unchunk_loss_and_write_export(session)
    raise CheckpointError(
        f"{save_error}\nThe export of the last step is whole: {session.run.export}"
    ) from None


def _unchunk_loss_and_write_export(session: Session) -> None:
    session.progress.begin_and_show_activity("writing the export")
    # An exported model computes its loss as usual, not in chunks.
    session.model.chunk_head_or_restore_it(None)
    write_final_run_export_on_rank_0(
        session.recipe,
        session.run,
        session.group,
        session.engine.stepper,
        session.model,
        session.data,
    )


def _load_best_if_exported_and_return_its_record(
    session: Session, last_step: int, best_evaluations: best.BestEvaluations
) -> BestEvaluation | None:
    """Return the best evaluation if `keep_best` is set. With its `export`, load those weights."""
    keep_best = session.recipe.checkpoint.keep_best
    best_entry = best_evaluations.get(KEEP)
    if keep_best is None or best_entry is None or best_entry["step"] is None:
        return None
    if keep_best.export:
        folder = session.run.checkpoint_folder(best_entry["step"])
        if damage_reason := gather_checkpoint_damage_or_empty(folder, session.group):
            raise CheckpointError(
                f"{folder}, the best checkpoint, needed for the export, is damaged: {damage_reason}"
            )
        load_checkpoint_print_notes_and_return_loop_state(
            folder, session.engine.stepper.named_state(), session.group
        )
    is_exported = keep_best.export or best_entry["step"] == last_step
    return BestEvaluation(
        best_entry["metric"], best_entry["value"], best_entry["step"], is_exported
    )


def _reason_export_is_unjudged_or_empty(
    recipe: Recipe, run: RunDir, best_evaluations: best.BestEvaluations
) -> str:
    """Return why the evaluations do not judge the exported weights; "" if they do."""
    keep_best = recipe.checkpoint.keep_best
    best_entry = best_evaluations.get(KEEP)
    if keep_best and best_entry and best_entry["step"] is None:
        return f"checkpoint.keep_best: no evaluation had a finite {keep_best.metric}, so none is the best"
    if keep_best and best_entry and keep_best.export:
        return ""
    last = {
        name: value for record in readable_metrics_records(run) for name, value in record.items()
    }
    loss = number_or_none(last.get("evaluation_loss", 0))
    return "" if loss is None or math.isfinite(loss) else f"the last evaluation's loss is {loss}"


def _early_stop_record_or_none(
    recipe: Recipe, last_step: int, best_evaluations: best.BestEvaluations
) -> StoppedEarly | None:
    stop_request = recipe.train.stop_after
    best_entry = best_evaluations.get(best.STOP)
    if (
        stop_request is None
        or best_entry is None
        or not best.early_stop_reason_or_none(recipe, last_step, best_evaluations)
    ):
        return None
    return StoppedEarly(
        stop_request.metric,
        stop_request.direction,
        stop_request.evaluations,
        best_entry["value"],
        best_entry["step"],
    )


def _best_checkpoint_lines(run: RunDir, best_evaluation: BestEvaluation | None) -> list[str]:
    if best_evaluation is None:
        return []
    exported = " (exported)" if best_evaluation.exported else ""
    return [
        f"best {best_evaluation.metric} {best_evaluation.value:.6g} after step {best_evaluation.step}: "
        f"{run.checkpoint_folder(best_evaluation.step)}{exported}"
    ]


def _cache_measured_and_return_step_durations(session: Session) -> dict[str, Any]:
    """Return the summary's duration of a step, measured and, if `plan --predict` was run, predicted.

    The measured duration corrects later predictions.
    """
    seconds = session.progress.median_step_seconds_or_none()
    steps: dict[str, Any] = {"step_seconds": seconds}
    cached_prediction = read_cached_prediction_or_none(session.recipe, session.plan)
    engine = session.engine.record.engine.used
    if seconds is not None:
        phases = session.progress.seconds_by_activity().items()
        start_seconds = sum(
            phase_seconds
            for _, phase_seconds in itertools.takewhile(lambda phase: phase[0] != TRAINING, phases)
        )
        cache_measured_seconds_if_writable(
            session.recipe, session.plan, engine, seconds, start_seconds
        )
    if cached_prediction is None:
        return steps
    if cached_prediction.reason_seconds_are_doubtful:
        return {
            **steps,
            "not_predicted": f"{cached_prediction.reason_seconds_are_doubtful} (ortlaunch plan --predict)",
        }
    return {
        **steps,
        "predicted": Prediction(
            cached_prediction.measured_or_corrected_step_seconds(engine),
            cached_prediction.engines[engine]["memory"],
        ),
    }


def _step_duration_lines(summary: Summary) -> list[str]:
    if summary.step_seconds is None:
        return []
    line = f"a step: {summary.step_seconds:.3g} s"
    if prediction := summary.predicted:
        ratio = prediction.step_seconds / summary.step_seconds
        doubt = (
            ""
            if 1 / _WRONG_RATIO < ratio < _WRONG_RATIO
            else f"; the prediction was wrong, {ratio:.2g} times the step: this run or the measurement for it "
            "probably had other work beside it (again: ortlaunch plan --predict)"
        )
        return [
            f"{line}, predicted {prediction.step_seconds:.3g} s and {human_bytes(prediction.memory)} a rank{doubt}"
        ]
    return [f"{line}, not predicted: {summary.not_predicted}" if summary.not_predicted else line]


def build_run_summary(
    run: RunDir, samples_per_epoch: int, seconds_by_activity: dict[str, float]
) -> Summary:
    """Return the run's totals, from the newest checkpoint and metrics.jsonl.

    `seconds_by_activity` is the time of this start only.
    """
    checkpoint = CompleteCheckpoint(*run.complete_checkpoints()[-1])
    metrics_records = readable_metrics_records(run)
    # Keep the newest value of each name, because not every line has every name.
    last = {name: value for record in metrics_records for name, value in record.items()}
    if "elapsed_seconds" not in last:
        print(
            f"{run.metrics} was removed during training: {run.summary.name} has no loss, and "
            "only this start's time"
        )
    return Summary(
        steps=checkpoint.step,
        samples=checkpoint.samples,
        epochs=round(checkpoint.samples / samples_per_epoch, 4),
        loss=last.get("loss"),
        evaluation_loss=last.get("evaluation_loss"),
        training_seconds=last.get("elapsed_seconds", seconds_by_activity.get("training", 0.0)),
        bad_steps=dict(
            Counter(line.action for line in read_bad_step_records(run) if line.action != "stop")
        ),
        seconds=seconds_by_activity,
        failed_saves=failed_save_count(run),
        failed_exports=checkpoint_exports.unrepeated_failed_export_count(run),
        evaluation=_evaluation_metrics_besides_loss(last) or None,
    )


def _evaluation_metrics_besides_loss(newest_value_by_name: Mapping[str, Any]) -> dict[str, float]:
    """Return the newest value of each evaluation metric except the loss.

    The user's own metrics are included.
    """
    names = [
        *(EVALUATION + name for name in METRICS if name != "loss"),
        *names_of_present_user_values(newest_value_by_name),
    ]
    return {
        name.removeprefix(EVALUATION): newest_value_by_name[name]
        for name in names
        if name in newest_value_by_name and name.startswith(EVALUATION)
    }


def training_summary_lines(summary: Summary) -> list[str]:
    """Return the summary as lines to print."""
    losses = [
        f"{loss_label} {float(loss):.4f}"
        for loss, loss_label in (
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
        *_step_duration_lines(summary),
        *([", ".join(losses)] if losses else []),
        *([f"{summary.failed_saves} saves failed: saves.jsonl"] if summary.failed_saves else []),
        *([f"{summary.failed_exports} exports failed: exports.jsonl"] if summary.failed_exports else []),
        *_bad_step_lines(summary.bad_steps),
    ]  # fmt: skip


def _bad_step_lines(count_by_action: dict[str, int]) -> list[str]:
    """Return a list with one line about skipped and rolled-back steps; empty if there are none."""
    label_by_action = {"skip": "skipped", "rollback": "rolled back and left out"}
    counts_text = ", ".join(
        f"{step_count} {label_by_action[action]}" for action, step_count in count_by_action.items()
    )
    return [f"bad steps: {counts_text}; see bad_steps.jsonl"] if counts_text else []


def _python_code_to_load_export(recipe: Recipe, run: RunDir, trained_module: LossModule) -> str:
    """Return Python code that loads the export.

    `your_model` and `base_model` stand for the user's own object.
    """
    model: Any = trained_module.model
    if not hasattr(model, "save_pretrained"):
        return f'safetensors.torch.load_model(your_model, "{run.export / "model.safetensors"}")'
    if recipe.model.lora and not recipe.model.lora.merge:
        # The adapters are those of a base with the vocabulary of the training.
        vocabulary_size = model.get_base_model().get_input_embeddings().weight.shape[0]
        resize = f"base_model.resize_token_embeddings({vocabulary_size}); "
        resized = resize if trained_module.loaded and trained_module.loaded["resized"] else ""
        return f'{resized}peft.PeftModel.from_pretrained(base_model, "{run.export}")'
    if recipe.model.traits.compares:
        class_name = {"embedding": "SentenceTransformer", "reranker": "CrossEncoder"}
        return f'sentence_transformers.{class_name[recipe.model.traits.compares]}("{run.export}")'
    # With merged LoRA, load with the class of the model that peft wraps.
    loadable_model = model.get_base_model() if recipe.model.lora else model
    return f'transformers.{type(loadable_model).__name__}.from_pretrained("{run.export}")'
