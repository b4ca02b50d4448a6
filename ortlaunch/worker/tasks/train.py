"""The training loop: batches, passes, optimizer step, log, evaluation and checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ortlaunch.errors import BadStepError, InputError, LastSaveError
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.worker import checkpoint
from ortlaunch.worker.checkpoint.tensor_file import require_storable
from ortlaunch.worker.data import Batches
from ortlaunch.worker.data.own import seed_generators
from ortlaunch.worker.engine.schedule import learning_rate_factor
from ortlaunch.worker.engine.stepping import StepOutcome
from ortlaunch.worker.evaluation.evaluation import evaluate, prefixed_metrics
from ortlaunch.worker.model.named_state import require_same_parameters
from ortlaunch.worker.process_group.agreement import RankAgreement, open_agreement
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.gpus import create_forward_timer
from ortlaunch.worker.supervision.pulse import STEPPING
from ortlaunch.worker.supervision.requests import RankRequest
from ortlaunch.worker.training import best
from ortlaunch.worker.training.bad_steps import BadSteps, RollBack
from ortlaunch.worker.training.checkpoint_exports import CheckpointExports
from ortlaunch.worker.training.finish import export_and_raise_save_error, write_results
from ortlaunch.worker.training.finite import (
    gather_bad_losses,
    nan_buffer_names,
    non_finite_error,
    require_buffers_without_nan,
    require_finite_loss,
    require_finite_weights,
)
from ortlaunch.worker.training.hooks import TrainingHook
from ortlaunch.worker.training.meter import TrainingMeter, sum_losses
from ortlaunch.worker.training.metrics import MetricsWriter, readable_metrics_lines
from ortlaunch.worker.training.parity_steps import create_parity_steps
from ortlaunch.worker.training.profile import StepProfiler
from ortlaunch.worker.training.rebuilding import report_rebuilding
from ortlaunch.worker.training.stopping import answer_save_request, record_stop
from ortlaunch.worker.training.summary import print_plan_and_data


@dataclass
class TrainState:
    """The state that a resumed run needs beside weights and optimizer."""

    step: int = 0
    samples: int = 0
    """Samples of all steps so far; batches may have changed their size."""
    skipped: int = 0
    """Steps whose update the loss scale skipped."""
    learning_rate: float | None = None
    """The learning rate of the last step."""
    left_out: int = 0
    """Bad steps whose update was skipped."""
    best: best.BestMemory = field(default_factory=dict)
    """Evaluations, for checkpoint.keep_best and train.stop_after."""
    streams: Sequence[Sequence[int]] = ()
    """The positions of the streamed sources after these samples."""
    owes_evaluation: bool = False
    """Whether a stop left out the evaluation that is due after this step: the next start begins
    with it."""

    def end_step(self, batches: Batches) -> None:
        """Count a step, whose samples no rank needs any more."""
        self.step += 1
        self.samples = batches.positions_passed(self.step)
        self.streams = batches.release_before(self.samples)


def run(session: Session) -> int:
    """Train and finish the run; after a stop, return the exit status of the stop."""
    print_plan_and_data(session)
    with contextlib.closing(CheckpointExports(session)) as exports:
        with open_agreement(session.group) as rank_agreement:
            try:
                state = train(session, rank_agreement, exports)
            except LastSaveError as error:
                export_and_raise_save_error(session, error)
        if rank_agreement.agreed_stop.stops:
            return rank_agreement.agreed_stop.exit_status
        exports.wait_for_exports()
    write_results(session, state.step, state.best)
    return 0


def train(
    session: Session, rank_agreement: RankAgreement, exports: CheckpointExports
) -> TrainState:
    """Train from the session's checkpoint to `train.max_steps`, or until the ranks agree to stop.

    After a stop all is saved, and `agreed.stopped` has the request.
    """
    best.require_evaluated_metrics(session)
    bad_steps = BadSteps(session)
    hook = TrainingHook(session, rank_agreement)
    # Each RollBack resumes from the newest checkpoint.
    while True:
        with contextlib.suppress(RollBack), contextlib.ExitStack() as ending:
            return _train_until_end(session, rank_agreement, bad_steps, hook, exports, ending)


def _train_until_end(
    session: Session,
    rank_agreement: RankAgreement,
    bad_steps: BadSteps,
    hook: TrainingHook,
    exports: CheckpointExports,
    exit_stack: contextlib.ExitStack,
) -> TrainState:
    recipe = session.recipe
    group = session.group
    engine = session.engine
    state = _load_start_state(session)
    saving = _create_saver(session, state, hook, exports)
    if best.early_stop_message(recipe, state.step, state.best):
        saving.last_step = state.step
    if state.step >= saving.last_step:
        evaluate_without_training(session, state, hook)
        saving.best_step = best.best_checkpoint_step(state.best)
        saving.finish_and_remove_old()
        return state
    metrics = _open_batches_and_metrics(session, state.step, exit_stack)
    meter = TrainingMeter(session)
    compared_steps = create_parity_steps(session, state.step)
    profiler = StepProfiler(session, state.step + 1)
    bad_steps.prepare_for_rollback(saving, state)
    progress = session.progress
    progress.mark_forward_passes(
        engine.stepper.module, create_forward_timer(group.device)
    ) if group.size > 1 else None
    report_rebuilding(engine.record.engine.used, progress.pulse)
    progress.begin_steps(state.step, recipe.train.steps)
    if recipe.engine.name == "inductor":
        progress.show_activity("compiling in the first step")
    engine.plain.hook("on_train_start", engine.stepper.returned_values)
    if state.owes_evaluation:
        with meter.pause_clock():
            rank_request = _evaluate_step(session, state, saving, rank_agreement, hook, metrics)
        # This step's checkpoint exists already.
        saving.best_step = best.best_checkpoint_step(state.best)
        rank_agreement.agreed_stop = record_stop(session, rank_request, state.step)
    while state.step < saving.last_step and not rank_agreement.agreed_stop.stops:
        if compared_steps is not None:
            with meter.pause_clock():
                compared_steps.compare_step(state.step)
        saving.request_save_when_due(rank_agreement)
        exports.end_and_start_exports()
        loss, stepped, learning_rate = _train_or_skip_step(
            session, state, rank_agreement, bad_steps, profiler
        )
        state.end_step(session.batches)
        meter.count_step(loss)
        engine.plain.end_step(state.step, state.samples, engine.stepper.returned_values)
        progress.count_step()
        is_last_step = state.step == recipe.train.steps
        rank_request = rank_agreement.finish_agreement()

        if state.step % recipe.log.every_steps == 0 or is_last_step or rank_request.stops:
            _log_step(session, state, meter, (stepped, learning_rate), hook, metrics)

        state.owes_evaluation = session.data.evaluation is not None and (
            is_last_step
            or _is_step_due(state.step, recipe.train.evaluate_every_steps)
            or session.batches.completes_interval(state.step, recipe.train.evaluate_every_epochs)
        )
        if state.owes_evaluation and not rank_request.stops:
            with meter.pause_clock():
                _require_finite_losses(session, state, meter)
                rank_request = max(
                    rank_request,
                    _evaluate_step(session, state, saving, rank_agreement, hook, metrics),
                )

        if (
            rank_request
            or saving.is_due(state.step)
            or best.best_checkpoint_step(state.best) == state.step
        ):
            with meter.pause_clock(), progress.show_during("saving a checkpoint"):
                _require_finite_losses(session, state, meter)
                rank_request = _save_step(session, state, saving, rank_agreement, rank_request)
        rank_agreement.agreed_stop = record_stop(session, rank_request, state.step)
    engine.plain.hook("on_train_end", engine.stepper.returned_values)
    rank_agreement.agreed_stop = _finish_saves(session, saving, rank_agreement, state.step)
    profiler.write_profile_once()
    if metrics:
        write_json_atomically(session.run.engine, engine.engine_report().to_json())
    return state


def _create_saver(
    session: Session, state: TrainState, hook: TrainingHook, exports: CheckpointExports
) -> checkpoint.CheckpointSaver:
    """Return the checkpoints of a training that begins at `state`."""
    epochs_between_saves = session.recipe.checkpoint.every_epochs

    def notify_completed(step: int) -> None:
        hook.on_checkpoint(step)
        exports.request_exports(step)

    saving = checkpoint.CheckpointSaver(
        session.run,
        session.recipe,
        session.group,
        session.engine.stepper,
        session.identity,
    )
    saving.best_step = best.best_checkpoint_step(state.best)
    saving.nan_buffers = {*nan_buffer_names(session.model)}
    saving.completes_pass = lambda step: session.batches.completes_interval(
        step, epochs_between_saves
    )
    saving.on_completed = notify_completed
    model = session.engine.plain.model
    named_state = session.engine.stepper.named_state()
    require_storable(
        [*((part.name, part.master) for part in named_state.parts), *named_state.buffers.items()]
    )
    trained_parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saving.before_save = lambda: require_same_parameters(model, trained_parameters)
    saving.steps_in_use = exports.steps_in_use
    exports.on_export_ended = saving.remove_old_checkpoints
    return saving


def _require_finite_losses(session: Session, state: TrainState, meter: TrainingMeter) -> None:
    """Check the losses since the last log line, before an evaluation or a checkpoint (collective).

    Raises:
        NonFiniteError: a loss is not finite; all ranks raise the same.
    """
    # Reading a loss waits for the GPU, so that other steps leave it to the next log line.
    if losses := meter.losses:
        first = state.step - len(losses)
        require_finite_loss(meter.mean_loss(), session.group, session.batches, first, losses)


def _log_step(
    session: Session,
    state: TrainState,
    meter: TrainingMeter,
    outcome_and_rate: tuple[Any, float],
    hook: TrainingHook,
    metrics: MetricsWriter | None,
) -> None:
    """Write a line of metrics.jsonl (collective)."""
    losses, step_values, (outcome, learning_rate) = (
        meter.losses,
        meter.read_and_restart(),
        outcome_and_rate,
    )
    require_finite_loss(
        step_values["loss"], session.group, session.batches, state.step - len(losses), losses
    )
    values = {
        **step_values,
        "learning_rate": learning_rate,
        "gradient_norm": outcome.gradient_norm,
        "samples": state.samples,
        "epoch": session.batches.passes_over_data(state.samples),
        "skipped_steps": state.skipped,
        "left_out_steps": state.left_out,
    }
    session.progress.show_loss(values["loss"])
    if metrics:
        metrics.write_step(state.step, values)
        hook.on_step(state.step, values)
        write_json_atomically(session.run.engine, session.engine.engine_report().to_json())


def _evaluate_step(
    session: Session,
    state: TrainState,
    saving: checkpoint.CheckpointSaver,
    rank_agreement: RankAgreement,
    hook: TrainingHook,
    metrics: MetricsWriter | None,
) -> RankRequest:
    """Run the evaluation of a step, until its end or a stop; return the agreed request after it."""
    assert session.data.evaluation is not None
    with session.progress.show_during("evaluating"):
        evaluation_metrics = evaluate(session, session.data.evaluation, rank_agreement)
        if evaluation_metrics is not None:
            state.owes_evaluation = False
            _record_best_evaluation(session, state, saving, evaluation_metrics)
            if metrics:
                metrics.write_step(state.step, prefixed_metrics(evaluation_metrics))
                hook.on_evaluation(state.step, evaluation_metrics)
        # A request may have come during the evaluation.
        return rank_agreement.agree_now()


def _record_best_evaluation(
    session: Session,
    state: TrainState,
    saving: checkpoint.CheckpointSaver,
    evaluation_metrics: dict[str, float],
) -> None:
    """Record the best evaluation, and end the training if no better one is expected."""
    notes = best.missing_metric_messages(
        session.recipe, evaluation_metrics
    ) + best.non_finite_messages(session.recipe, evaluation_metrics)
    session.group.print_once(*(f"{note}: this one is not the best" for note in notes))
    best.update_best_memory(session.recipe, state.best, state.step, evaluation_metrics)
    if best.early_stop_message(session.recipe, state.step, state.best):
        saving.last_step = state.step


def _save_step(
    session: Session,
    state: TrainState,
    saving: checkpoint.CheckpointSaver,
    rank_agreement: RankAgreement,
    rank_request: RankRequest,
) -> RankRequest:
    """Save a checkpoint; return the agreed request after it."""
    with answer_save_request(session, saving, rank_request):
        require_finite_weights(state.step, session.engine.stepper.trained_weights())
        require_buffers_without_nan(state.step, session.model, saving.nan_buffers)
        saving.save_or_start_saving(state.step, asdict(state), rank_request)
    # A save in the background fulfils no request.
    rank_request = max(
        rank_request,
        rank_agreement.clear_save_and_agree()
        if saving.is_request_answered(rank_request)
        else rank_agreement.agree_now(),
    )
    # A stop may have been requested during the save, which may still be written in the background.
    if rank_request.stops:
        with answer_save_request(session, saving, rank_request):
            saving.wait_for_save()
    return rank_request


def _finish_saves(
    session: Session, saving: checkpoint.CheckpointSaver, rank_agreement: RankAgreement, step: int
) -> RankRequest:
    """Wait for the last checkpoint; return the agreed stop, which may have come meanwhile."""
    with session.progress.show_during("saving a checkpoint"):
        saving.finish_and_remove_old()
    return (
        rank_agreement.agreed_stop
        if rank_agreement.agreed_stop.stops
        else record_stop(session, rank_agreement.agree_now(), step)
    )


def _open_batches_and_metrics(
    session: Session, first_step: int, exit_stack: contextlib.ExitStack
) -> MetricsWriter | None:
    """Read batches ahead from this step on; return rank 0's metrics. `exit_stack` closes both."""
    exit_stack.callback(session.batches.close_streams)
    exit_stack.enter_context(session.read_batches_ahead())
    if session.group.rank > 0:
        return None
    metrics = MetricsWriter(session.recipe, session.run, first_step)
    exit_stack.push(
        lambda error_type, *_: metrics.close_file_and_trackers(
            has_failed=error_type not in (None, RollBack)
        )
    )
    return metrics


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the random seed of a step on a rank: a resumed run has the same dropout masks."""
    # A hash, so that neighbours are far apart. ONNX Runtime counts up from the seed, by one for
    # each Dropout. With a seed higher by one, each Dropout would have the mask of the next Dropout
    # in the step before, or on the rank before.
    return int.from_bytes(
        hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest(), "big"
    )


def recipe_learning_rate(recipe: Recipe, step_index: int) -> float:
    """Return the recipe's learning rate at `step_index`, counted from 0."""
    return recipe.optimizer.learning_rate * learning_rate_factor(
        recipe.schedule, step_index, recipe.train.steps
    )


def _learning_rates(session: Session, step_index: int) -> Sequence[float]:
    """Return the learning rates at `step_index`: one for all parameters, or one for each group."""
    if session.engine.scheduler is None:
        return [recipe_learning_rate(session.recipe, step_index)]
    whole_epochs = session.batches.positions_passed(step_index) // len(session.batches.samples)
    return [
        scheduled_rate * session.recipe.optimizer.learning_rate
        for scheduled_rate in session.engine.scheduler.rates_at_step(step_index, whole_epochs)
    ]


def _train_or_skip_step(
    session: Session,
    state: TrainState,
    rank_agreement: RankAgreement,
    bad_steps: BadSteps,
    profiler: StepProfiler,
) -> tuple[torch.Tensor | None, StepOutcome, float]:
    """Run `train_step`; return None instead of the loss if the step was left out."""
    try:
        with profiler.measure_step(state.step + 1):
            return train_step(session, state, rank_agreement, bad_steps)
    except BadStepError as error:
        # The agreement of this step has begun: end it before the collectives of the answer.
        rank_agreement.finish_agreement()
        bad_steps.skip_or_roll_back_step(error, state)
        rank_agreement.send_request()
        return None, StepOutcome(None, skipped=True), _learning_rates(session, state.step)[0]


def train_step(
    session: Session,
    state: TrainState,
    rank_agreement: RankAgreement | None = None,
    bad_steps: BadSteps | None = None,
) -> tuple[torch.Tensor, StepOutcome, float]:
    """Run one optimizer step.

    Returns:
        The mean loss of this rank's passes, the result of the step, and its learning rate.

    Raises:
        BadStepError: the same on all ranks; weights and optimizer are as before the step.
    """
    engine = session.engine
    group = session.group
    learning_rates = _learning_rates(session, state.step)
    state.learning_rate = learning_rates[0]
    if bad_steps is not None:
        bad_steps.copy_buffers_before_step()
    engine.plain.begin_step(
        state.step, session.batches.positions_passed(state.step), engine.stepper.returned_values
    )
    losses = _run_passes(session, state.step)
    # Between passes and update, where the ranks have just waited for each other.
    if rank_agreement is not None:
        rank_agreement.send_request()
    session.progress.pulse.begin_stage(STEPPING)
    if engine.memory_use:
        engine.memory_use.count_live_tensors(engine.stepper)
    if bad_steps is not None:
        bad_steps.raise_if_step_is_bad(state.step, losses)
    outcome = engine.stepper.clip_and_step(*learning_rates)
    if engine.memory_use:
        engine.memory_use.count_live_tensors(engine.stepper)
    if outcome.skipped or outcome.failed:
        step_bad_losses = gather_bad_losses(group, losses)
        if outcome.failed or step_bad_losses:
            # The gradients are cleared: compute them again to name the bad ones.
            _run_passes(session, state.step)
            raise non_finite_error(
                group,
                session.batches,
                state.step,
                step_bad_losses,
                engine.stepper.named_gradients(),
            )
    state.skipped += int(outcome.skipped)
    return sum_losses(losses) / len(losses), outcome, learning_rates[0]


def _run_passes(session: Session, step_index: int) -> list[torch.Tensor]:
    """Run forward and backward of each micro batch of this rank; return the weighted losses."""
    engine = session.engine
    group = session.group
    seed_generators(step_seed(session.recipe.seed, step_index, group.rank))
    last_pass = session.plan.batch.accumulation_steps - 1
    engine.stepper.returned_values.begin_step()
    return [
        engine.stepper.micro_step(engine.to_device(batch), pass_index == last_pass, loss_weight)
        for pass_index, (batch, loss_weight) in enumerate(
            session.progress.mark_reading(
                engine.loss_weight.weighted_micro_batches(session.batches, step_index, group)
            )
        )
    ]


def evaluate_without_training(session: Session, state: TrainState, hook: TrainingHook) -> None:
    """Report that all steps are done; run the last evaluation if it is missing."""
    # The run may have been stopped before the end of its last evaluation.
    if session.group.rank == 0:
        early_stop_text = best.early_stop_message(session.recipe, state.step, state.best)
        done_text = f"{state.step} of {session.recipe.train.steps} steps are done"
        print(f"nothing to train: {early_stop_text or done_text}", flush=True)
    if session.data.evaluation is None:
        return
    evaluation_lines = [
        r
        for r in readable_metrics_lines(session.run)
        if r["step"] == state.step and "evaluation_loss" in r
    ]
    if not session.group.gather_numbers([len(evaluation_lines)])[0][0]:
        with session.progress.show_during("evaluating"):
            evaluation_metrics = evaluate(session, session.data.evaluation)
        if evaluation_metrics is not None:
            best.update_best_memory(session.recipe, state.best, state.step, evaluation_metrics)
        if session.group.rank == 0 and evaluation_metrics is not None:
            metrics = MetricsWriter(session.recipe, session.run, state.step)
            metrics.write_step(state.step, prefixed_metrics(evaluation_metrics))
            metrics.close_file_and_trackers()
            hook.on_evaluation(state.step, evaluation_metrics)


def _is_step_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def _load_start_state(session: Session) -> TrainState:
    batches = session.batches
    own_newest = checkpoint.agreed_newest_checkpoint(session.run, session.group)
    # After a rollback the run folder has a newer checkpoint than the session.
    start_checkpoint = (
        checkpoint.CompleteCheckpoint(*own_newest) if own_newest else session.checkpoint
    )
    if start_checkpoint is None:
        return TrainState()
    step, folder = start_checkpoint
    if step >= session.recipe.train.steps and folder.parent != session.run.checkpoints:
        raise InputError(
            f"{folder} has {step} of {session.recipe.train.steps} steps: nothing to train; "
            "raise train.max_steps or train.epochs"
        )
    # The samples of so many steps at the present batch size, for the note.
    batches.begin_at(0, 0)
    usual_samples = batches.positions_passed(step)
    loaded_state = checkpoint.load_checkpoint(
        folder, session.engine.stepper.named_state(), session.group
    )
    state = TrainState(**{"samples": start_checkpoint.samples, **loaded_state})
    state.best = best.valid_best_memory(session, state.best)
    # A best evaluation must have its checkpoint in this folder.
    state.owes_evaluation &= folder.parent == session.run.checkpoints
    batches.begin_at(state.step, state.samples)
    batches.seek_streams(state.streams)
    if session.group.rank == 0:
        notes = (
            *_batch_notes(state, batches.batch, usual_samples),
            *_schedule_notes(session.recipe, state),
        )
        print(f"resumed after step {step} from {folder}", *notes, sep="\n", flush=True)
    return state


def _batch_notes(state: TrainState, batch: BatchPlan, usual_samples: int) -> Iterator[str]:
    """Yield a note if earlier steps had other batch sizes.

    `usual_samples` is the number of samples that equally many steps take now.
    """
    if state.samples != usual_samples:
        yield (
            f"a step now has {batch.global_samples:,} samples; the {state.step:,} steps so far "
            f"used {state.samples:,} samples, and the next continues after them"
        )


def _schedule_notes(recipe: Recipe, state: TrainState) -> Iterator[str]:
    """Yield a note if a changed length or schedule makes the learning rate jump."""
    step = state.step
    previous_rate = state.learning_rate
    if (
        previous_rate is None
        # The module's own scheduler computes them.
        or recipe.optimizer.name == "configured"
        or step >= recipe.train.steps
        or math.isclose(previous_rate, recipe_learning_rate(recipe, step - 1))
    ):
        return
    yield (
        f"learning rate: {previous_rate:.4g} at step {step}, {recipe_learning_rate(recipe, step):.4g} at step "
        f"{step + 1}: optimizer.learning_rate, or the length or type of the schedule, has changed"
    )
