"""The training loop: batches, passes, optimizer step, log, evaluation and checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch

from ortlaunch.base.errors import BadStepError, InputError, LastSaveError
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.worker import checkpoint
from ortlaunch.worker.checkpoint.tensor_file import require_storable_in_checkpoint
from ortlaunch.worker.data import Batches
from ortlaunch.worker.data.user_data import seed_all_random_generators
from ortlaunch.worker.engine.schedule import fraction_of_peak_learning_rate
from ortlaunch.worker.engine.stepping import StepOutcome
from ortlaunch.worker.evaluation.evaluation import (
    metrics_with_evaluation_prefix,
    seed_and_evaluate_loss_and_metrics_unless_stopped,
)
from ortlaunch.worker.evaluation.written_texts import import_text_metrics_if_model_writes
from ortlaunch.worker.model.fsdp import free_gathered_weights_if_sharded
from ortlaunch.worker.model.named_state import require_same_trained_parameters
from ortlaunch.worker.model.precision import dtype_of
from ortlaunch.worker.process_group.agreement import RankAgreement, accept_save_and_stop_requests
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.gpus import create_gpu_forward_timer_or_none
from ortlaunch.worker.supervision.pulse import STEPPING
from ortlaunch.worker.supervision.requests import RankRequest
from ortlaunch.worker.training import best_evaluation as best
from ortlaunch.worker.training.bad_steps import BadStepHandler, RollBack
from ortlaunch.worker.training.checkpoint_exports import CheckpointExports
from ortlaunch.worker.training.final_results import (
    write_export_and_print_summary,
    write_export_and_raise_save_error,
)
from ortlaunch.worker.training.finite_checks import (
    build_non_finite_step_error,
    gather_non_finite_losses,
    nan_buffer_names,
    require_buffers_without_nan,
    require_finite_mean_loss,
    require_finite_weights,
)
from ortlaunch.worker.training.hooks import TrainingHook
from ortlaunch.worker.training.meter import TrainingMeter, sum_losses
from ortlaunch.worker.training.metrics_writer import MetricsWriter, readable_metrics_records
from ortlaunch.worker.training.parity_steps import create_parity_steps_or_note_why_not
from ortlaunch.worker.training.profile import StepProfiler
from ortlaunch.worker.training.rebuilding import register_progress_display_of_engine_rebuilds
from ortlaunch.worker.training.stopping import (
    remove_save_request_after_save,
    write_and_print_stop_record_if_stopped,
)
from ortlaunch.worker.training.summary import print_plan_and_copy_user_modules


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
    best: best.BestEvaluations = field(default_factory=dict)
    """Evaluations, for checkpoint.keep_best and train.stop_after."""
    streams: Sequence[Sequence[int]] = ()
    """The positions of the streamed sources after these samples."""
    owes_evaluation: bool = False
    """Whether a stop left out the evaluation that is due after this step: the next start begins
    with it."""

    def count_step_and_release_samples(self, batches: Batches) -> None:
        """Count a step, whose samples no rank needs any more."""
        self.step += 1
        self.samples = batches.positions_before_step(self.step)
        self.streams = batches.release_streamed_samples_and_return_positions(self.samples)


class TrainedStep(NamedTuple):
    """One step of the optimizer."""

    loss: torch.Tensor | None
    """The mean loss of this rank's passes; None if the step was left out."""
    outcome: StepOutcome
    learning_rate: float


def run(session: Session) -> int:
    """Train and finish the run; after a stop, return the exit status of the stop."""
    print_plan_and_copy_user_modules(session)
    with contextlib.closing(CheckpointExports(session)) as exports:
        with accept_save_and_stop_requests(session.group) as rank_agreement:
            try:
                state = train_until_end_or_agreed_stop(session, rank_agreement, exports)
            except LastSaveError as error:
                write_export_and_raise_save_error(session, error)
        if rank_agreement.agreed_stop.stops:
            return rank_agreement.agreed_stop.exit_status
        exports.wait_until_all_exports_end()
        _remove_checkpoints_that_exports_kept(session, state)
    write_export_and_print_summary(session, state.step, state.best)
    return 0


def _remove_checkpoints_that_exports_kept(session: Session, train_state: TrainState) -> None:
    if session.group.rank == 0 and session.recipe.checkpoint.export:
        policy = session.recipe.checkpoint
        best_step = best.kept_best_step_or_none(train_state.best)
        checkpoint.remove_old_checkpoints_and_exports(
            session.run,
            policy.keep,
            policy.keep_every,
            () if best_step is None else (best_step,),
        )


def train_until_end_or_agreed_stop(
    session: Session, rank_agreement: RankAgreement, exports: CheckpointExports
) -> TrainState:
    """Train from the session's checkpoint to `train.max_steps`, or until the ranks agree to stop.

    After a stop all is saved, and `agreed.stopped` has the request.
    """
    # Before step 1, as the first evaluation may be hours away.
    import_text_metrics_if_model_writes(session.recipe)
    best.require_best_metrics_by_test_evaluation(session)
    bad_steps = BadStepHandler(session)
    hook = TrainingHook(session, rank_agreement)
    # Each RollBack resumes from the newest checkpoint.
    while True:
        with contextlib.suppress(RollBack), contextlib.ExitStack() as ending:
            return _train_until_end_stop_or_rollback(
                session, rank_agreement, bad_steps, hook, exports, ending
            )


def _train_until_end_stop_or_rollback(
    session: Session,
    rank_agreement: RankAgreement,
    bad_steps: BadStepHandler,
    hook: TrainingHook,
    exports: CheckpointExports,
    exit_stack: contextlib.ExitStack,
) -> TrainState:
    recipe = session.recipe
    engine = session.engine
    state = _load_newest_checkpoint_or_fresh_state(session)
    saving = _create_checkpoint_saver_with_callbacks(session, state, hook, exports)
    # nan is then a mark of their own.
    first_nan_buffers = {*nan_buffer_names(session.model)}
    if best.early_stop_reason_or_none(recipe, state.step, state.best):
        saving.last_step = state.step
    if state.step >= saving.last_step:
        report_no_steps_and_evaluate_if_missing(session, state, hook)
        saving.best_step = best.kept_best_step_or_none(state.best)
        saving.wait_for_save_and_remove_old()
        return state
    metrics = _read_ahead_and_open_metrics_on_rank_0(session, state.step, exit_stack)
    meter = TrainingMeter(
        session.group,
        session.batches,
        engine.stepper.returned_values if engine.plain.has_numbers else None,
        dtype_of(recipe.precision),
        engine.flops_per_token,
    )
    compared_steps = create_parity_steps_or_note_why_not(session, state.step)
    profiler = StepProfiler(session, state.step + 1)
    bad_steps.ensure_checkpoint_for_rollback(saving, state)
    progress = session.progress
    _begin_to_show_steps(session, state.step)
    engine.plain.call_lightning_hook("on_train_start", engine.stepper.returned_values)
    if state.owes_evaluation:
        with meter.exclude_from_training_time():
            rank_request = _evaluate_and_agree_on_request(
                session, state, saving, rank_agreement, hook, metrics
            )
        # This step's checkpoint exists already.
        saving.best_step = best.kept_best_step_or_none(state.best)
        rank_agreement.agreed_stop = write_and_print_stop_record_if_stopped(
            session, rank_request, state.step
        )
    while state.step < saving.last_step and not rank_agreement.agreed_stop.stops:
        if compared_steps is not None:
            with meter.exclude_from_training_time():
                compared_steps.compare_and_record_step_if_due(state.step)
        saving.request_due_save_and_record_ended_background_save(rank_agreement)
        if exports.report_ended_and_start_next_export():
            saving.remove_old_checkpoints_and_exports_on_rank_0()
        trained_step = _train_step_or_skip_bad_one(
            session, state, rank_agreement, bad_steps, profiler
        )
        state.count_step_and_release_samples(session.batches)
        meter.count_step(trained_step.loss)
        engine.plain.end_lightning_step(state.step, state.samples, engine.stepper.returned_values)
        progress.count_step_and_update_bar()
        is_last_step = state.step == recipe.train.steps
        rank_request = rank_agreement.handle_signals_and_wait_for_agreed_request()

        if state.step % recipe.log.every_steps == 0 or is_last_step or rank_request.stops:
            _require_finite_loss_and_log_step(session, state, meter, trained_step, hook, metrics)

        state.owes_evaluation = session.data.evaluation is not None and (
            is_last_step
            or (
                recipe.train.evaluate_every_steps is not None
                and state.step % recipe.train.evaluate_every_steps == 0
            )
            or session.batches.does_step_complete_interval(
                state.step, recipe.train.evaluate_every_epochs
            )
        )
        if state.owes_evaluation and not rank_request.stops:
            with meter.exclude_from_training_time():
                _require_finite_losses(session, state, meter)
                rank_request = max(
                    rank_request,
                    _evaluate_and_agree_on_request(
                        session, state, saving, rank_agreement, hook, metrics
                    ),
                )

        if (
            rank_request
            or saving.is_checkpoint_due_after(state.step)
            or best.kept_best_step_or_none(state.best) == state.step
        ):
            with (
                meter.exclude_from_training_time(),
                progress.show_activity_during("saving a checkpoint"),
            ):
                _require_finite_losses(session, state, meter)
                rank_request = _save_checkpoint_and_agree_on_request(
                    session, state, saving, rank_agreement, rank_request, first_nan_buffers
                )
        rank_agreement.agreed_stop = write_and_print_stop_record_if_stopped(
            session, rank_request, state.step
        )
    engine.plain.call_lightning_hook("on_train_end", engine.stepper.returned_values)
    rank_agreement.agreed_stop = _wait_for_saves_and_record_stop(
        session, saving, rank_agreement, state.step
    )
    profiler.write_profile_or_say_why_not_once()
    if metrics:
        write_json_atomically(session.run.engine, engine.engine_report_so_far().to_json())
    return state


def _begin_to_show_steps(session: Session, completed_steps: int) -> None:
    """Show the steps, their forward passes and rebuilds of the engine as progress."""
    progress = session.progress
    engine = session.engine
    if session.group.size > 1:
        progress.register_forward_pass_hooks(
            engine.stepper.module, create_gpu_forward_timer_or_none(session.group.device)
        )
    register_progress_display_of_engine_rebuilds(
        engine.record.engine.used, progress.shared_progress
    )
    progress.begin_steps_and_show_bar(completed_steps, session.recipe.train.steps)
    if session.recipe.engine.name == "inductor":
        progress.begin_and_show_activity("compiling in the first step")


def _create_checkpoint_saver_with_callbacks(
    session: Session, train_state: TrainState, hook: TrainingHook, exports: CheckpointExports
) -> checkpoint.CheckpointSaver:
    def notify_completed(step: int) -> None:
        hook.on_checkpoint(step)
        exports.queue_all_or_missing_exports_on_rank_0(step)

    model = session.engine.plain.model
    named_state = session.engine.stepper.named_state()
    require_storable_in_checkpoint(
        [*((part.name, part.master) for part in named_state.parts), *named_state.buffers.items()]
    )
    trained_parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def require_parameters_of_start() -> None:
        free_gathered_weights_if_sharded(session.engine.plain)
        require_same_trained_parameters(model, trained_parameters)

    return checkpoint.CheckpointSaver(
        session.run,
        session.recipe,
        session.group,
        session.engine.stepper,
        session.identity,
        checkpoint.SaverInputs(
            best.kept_best_step_or_none(train_state.best),
            on_completed=notify_completed,
            before_save=require_parameters_of_start,
            steps_in_use=exports.steps_being_exported,
            completes_interval=lambda step: session.batches.does_step_complete_interval(
                step, session.recipe.checkpoint.every_epochs
            ),
        ),
    )


def _require_finite_losses(session: Session, state: TrainState, meter: TrainingMeter) -> None:
    """Check the losses since the last log line, before an evaluation or a checkpoint (collective).

    Raises:
        NonFiniteError: a loss is not finite; all ranks raise the same.
    """
    # Reading a loss waits for the GPU, so that other steps leave it to the next log line.
    if losses := meter.losses:
        first = state.step - len(losses)
        require_finite_mean_loss(meter.mean_loss(), session.group, session.batches, first, losses)


def _require_finite_loss_and_log_step(
    session: Session,
    train_state: TrainState,
    meter: TrainingMeter,
    trained_step: TrainedStep,
    hook: TrainingHook,
    metrics: MetricsWriter | None,
) -> None:
    """Write a line of metrics.jsonl (collective)."""
    losses = meter.losses
    step_values = meter.read_loss_and_speed_and_restart()
    require_finite_mean_loss(
        step_values["loss"], session.group, session.batches, train_state.step - len(losses), losses
    )
    values = {
        **step_values,
        "learning_rate": trained_step.learning_rate,
        "gradient_norm": trained_step.outcome.gradient_norm,
        "samples": train_state.samples,
        "epoch": session.batches.passes_over_data_after(train_state.samples),
        "skipped_steps": train_state.skipped,
        "left_out_steps": train_state.left_out,
    }
    session.progress.show_loss_beside_bar(values["loss"])
    if metrics:
        metrics.write_and_print_step(train_state.step, values)
        hook.on_step(train_state.step, values)
        write_json_atomically(session.run.engine, session.engine.engine_report_so_far().to_json())


def _evaluate_and_agree_on_request(
    session: Session,
    train_state: TrainState,
    saving: checkpoint.CheckpointSaver,
    rank_agreement: RankAgreement,
    hook: TrainingHook,
    metrics: MetricsWriter | None,
) -> RankRequest:
    """Run the evaluation of a step, until its end or a stop; return the agreed request after it."""
    assert session.data.evaluation is not None
    with session.progress.show_activity_during("evaluating"):
        evaluation_metrics = seed_and_evaluate_loss_and_metrics_unless_stopped(
            session, session.data.evaluation, rank_agreement
        )
        if evaluation_metrics is not None:
            train_state.owes_evaluation = False
            _update_best_and_end_training_if_no_better_expected(
                session, train_state, saving, evaluation_metrics
            )
            if metrics:
                metrics.write_and_print_step(
                    train_state.step, metrics_with_evaluation_prefix(evaluation_metrics)
                )
                hook.on_evaluation(train_state.step, evaluation_metrics)
        # A request may have come during the evaluation.
        return rank_agreement.agree_on_request_now()


def _update_best_and_end_training_if_no_better_expected(
    session: Session,
    train_state: TrainState,
    saving: checkpoint.CheckpointSaver,
    evaluation_metrics: dict[str, float],
) -> None:
    """Record the best evaluation, and end the training if no better one is expected."""
    notes = best.missing_metric_messages(
        session.recipe, evaluation_metrics
    ) + best.non_finite_metric_messages(session.recipe, evaluation_metrics)
    session.group.print_on_rank_0(*(f"{note}: this one is not the best" for note in notes))
    best.update_best_evaluations(
        session.recipe, train_state.best, train_state.step, evaluation_metrics
    )
    if best.early_stop_reason_or_none(session.recipe, train_state.step, train_state.best):
        saving.last_step = train_state.step


def _save_checkpoint_and_agree_on_request(
    session: Session,
    train_state: TrainState,
    saving: checkpoint.CheckpointSaver,
    rank_agreement: RankAgreement,
    rank_request: RankRequest,
    first_nan_buffers: set[str],
) -> RankRequest:
    with remove_save_request_after_save(session, saving, rank_request):
        require_finite_weights(train_state.step, session.engine.stepper.trained_weights())
        require_buffers_without_nan(train_state.step, session.model, first_nan_buffers)
        saving.wait_then_save_or_start_background_save(
            train_state.step, asdict(train_state), rank_request
        )
    # A save in the background fulfils no request.
    rank_request = max(
        rank_request,
        rank_agreement.clear_save_request_and_agree()
        if saving.does_save_answer_request(rank_request)
        else rank_agreement.agree_on_request_now(),
    )
    # A stop may have been requested during the save, which may still be written in the background.
    if rank_request.stops:
        with remove_save_request_after_save(session, saving, rank_request):
            saving.wait_for_background_save_and_record_result()
    return rank_request


def _wait_for_saves_and_record_stop(
    session: Session,
    saving: checkpoint.CheckpointSaver,
    rank_agreement: RankAgreement,
    completed_steps: int,
) -> RankRequest:
    """Wait for the last checkpoint; return the agreed stop, which may have come meanwhile."""
    with session.progress.show_activity_during("saving a checkpoint"):
        saving.wait_for_save_and_remove_old()
    return (
        rank_agreement.agreed_stop
        if rank_agreement.agreed_stop.stops
        else write_and_print_stop_record_if_stopped(
            session, rank_agreement.agree_on_request_now(), completed_steps
        )
    )


def _read_ahead_and_open_metrics_on_rank_0(
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
            training_failed=error_type not in (None, RollBack)
        )
    )
    return metrics


def random_seed_of_step(recipe_seed: int, step_index: int, rank: int) -> int:
    """Return the random seed of a step on a rank: a resumed run has the same dropout masks."""
    # A hash, so that neighbours are far apart. ONNX Runtime counts up from the seed, by one for
    # each Dropout. With a seed higher by one, each Dropout would have the mask of the next Dropout
    # in the step before, or on the rank before.
    return int.from_bytes(
        hashlib.blake2b(f"{recipe_seed} {step_index} {rank}".encode(), digest_size=7).digest(),
        "big",
    )


def recipe_learning_rate(recipe: Recipe, step_index: int) -> float:
    """Return the recipe's learning rate at `step_index`, counted from 0."""
    return recipe.optimizer.learning_rate * fraction_of_peak_learning_rate(
        recipe.schedule, step_index, recipe.train.steps
    )


def _advance_scheduler_and_read_learning_rates(
    session: Session, step_index: int
) -> Sequence[float]:
    """Return the learning rates at `step_index`: one for all parameters, or one for each group."""
    if session.engine.scheduler is None:
        return [recipe_learning_rate(session.recipe, step_index)]
    whole_epochs = session.batches.positions_before_step(step_index) // len(session.batches.samples)
    return [
        scheduled_rate * session.recipe.optimizer.learning_rate
        for scheduled_rate in session.engine.scheduler.advance_or_restart_and_read_learning_rates(
            step_index, whole_epochs
        )
    ]


def _train_step_or_skip_bad_one(
    session: Session,
    train_state: TrainState,
    rank_agreement: RankAgreement,
    bad_steps: BadStepHandler,
    profiler: StepProfiler,
) -> TrainedStep:
    """Run `train_step`; its loss is None if the step was left out."""
    try:
        with profiler.time_or_profile_step(train_state.step + 1):
            return train_step(session, train_state, rank_agreement, bad_steps)
    except BadStepError as error:
        # The agreement of this step has begun: end it before the collectives of the answer.
        rank_agreement.handle_signals_and_wait_for_agreed_request()
        bad_steps.skip_roll_back_or_end_run(error, train_state)
        rank_agreement.start_request_all_reduce()
        return TrainedStep(
            None,
            StepOutcome(None, skipped=True),
            _advance_scheduler_and_read_learning_rates(session, train_state.step)[0],
        )


def train_step(
    session: Session,
    train_state: TrainState,
    rank_agreement: RankAgreement | None = None,
    bad_steps: BadStepHandler | None = None,
) -> TrainedStep:
    """Run one optimizer step.

    Raises:
        BadStepError: the same on all ranks; weights and optimizer are as before the step.
    """
    engine = session.engine
    group = session.group
    learning_rates = _advance_scheduler_and_read_learning_rates(session, train_state.step)
    train_state.learning_rate = learning_rates[0]
    if bad_steps is not None:
        bad_steps.copy_buffers_before_step()
    engine.plain.begin_lightning_step(
        train_state.step,
        session.batches.positions_before_step(train_state.step),
        engine.stepper.returned_values,
    )
    losses = _seed_and_run_passes_and_list_losses(session, train_state.step)
    # Between passes and update, where the ranks have just waited for each other.
    if rank_agreement is not None:
        rank_agreement.start_request_all_reduce()
    session.progress.shared_progress.end_stage_and_begin_next(STEPPING)
    if engine.memory_use:
        engine.memory_use.count_live_tensors_in_first_two_steps(engine.stepper)
    if bad_steps is not None:
        bad_steps.raise_if_step_is_bad(train_state.step, losses)
    outcome = engine.stepper.clip_step_and_clear_gradients(*learning_rates)
    if engine.memory_use:
        engine.memory_use.count_live_tensors_in_first_two_steps(engine.stepper)
    if outcome.skipped or outcome.failed:
        step_bad_losses = gather_non_finite_losses(group, losses)
        if outcome.failed or step_bad_losses:
            # The gradients are cleared: compute them again to name the bad ones.
            _seed_and_run_passes_and_list_losses(session, train_state.step)
            raise build_non_finite_step_error(
                group,
                session.batches,
                train_state.step,
                step_bad_losses,
                engine.stepper.named_gradients(),
            )
    train_state.skipped += int(outcome.skipped)
    return TrainedStep(sum_losses(losses) / len(losses), outcome, learning_rates[0])


def _seed_and_run_passes_and_list_losses(session: Session, step_index: int) -> list[torch.Tensor]:
    """Run forward and backward of each micro batch of this rank; return the weighted losses."""
    engine = session.engine
    group = session.group.data_parallel
    # Ranks that compute the same layers draw the same dropout.
    seed_all_random_generators(random_seed_of_step(session.recipe.seed, step_index, group.rank))
    last_pass = session.plan.batch.accumulation_steps - 1
    engine.stepper.returned_values.begin_step()
    return [
        engine.stepper.run_micro_batch(
            engine.to_device(batch), pass_index == last_pass, loss_weight
        )
        for pass_index, (batch, loss_weight) in enumerate(
            session.progress.iterate_marking_read_time(
                engine.loss_weight.micro_batches_with_loss_factors(
                    session.batches, step_index, group
                )
            )
        )
    ]


def report_no_steps_and_evaluate_if_missing(
    session: Session, train_state: TrainState, hook: TrainingHook
) -> None:
    """Report that all steps are done; run the last evaluation if it is missing."""
    # The run may have been stopped before the end of its last evaluation.
    if session.group.rank == 0:
        early_stop_text = best.early_stop_reason_or_none(
            session.recipe, train_state.step, train_state.best
        )
        done_text = f"{train_state.step} of {session.recipe.train.steps} steps are done"
        print(f"nothing to train: {early_stop_text or done_text}", flush=True)
    if session.data.evaluation is None:
        return
    evaluation_lines = [
        r
        for r in readable_metrics_records(session.run)
        if r["step"] == train_state.step and "evaluation_loss" in r
    ]
    if not session.group.gather_numbers([len(evaluation_lines)])[0][0]:
        with session.progress.show_activity_during("evaluating"):
            evaluation_metrics = seed_and_evaluate_loss_and_metrics_unless_stopped(
                session, session.data.evaluation
            )
        if evaluation_metrics is not None:
            best.update_best_evaluations(
                session.recipe, train_state.best, train_state.step, evaluation_metrics
            )
        if session.group.rank == 0 and evaluation_metrics is not None:
            metrics = MetricsWriter(session.recipe, session.run, train_state.step)
            metrics.write_and_print_step(
                train_state.step, metrics_with_evaluation_prefix(evaluation_metrics)
            )
            metrics.close_file_and_trackers()
            hook.on_evaluation(train_state.step, evaluation_metrics)


def _load_newest_checkpoint_or_fresh_state(session: Session) -> TrainState:
    batches = session.batches
    own_newest = checkpoint.newest_checkpoint_seen_by_rank_0(session.run, session.group)
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
    batches.begin_step_after_positions(0, 0)
    usual_samples = batches.positions_before_step(step)
    loaded_state = checkpoint.load_checkpoint_print_notes_and_return_loop_state(
        folder, session.engine.stepper.named_state(), session.group
    )
    state = TrainState(**loaded_state)
    state.best = best.best_evaluations_without_stale_ones(session, state.best)
    # A best evaluation must have its checkpoint in this folder.
    state.owes_evaluation &= folder.parent == session.run.checkpoints
    batches.begin_step_after_positions(state.step, state.samples)
    batches.seek_streams(state.streams)
    if session.group.rank == 0:
        notes = (
            *_changed_batch_size_notes(state, batches.batch, usual_samples),
            *_learning_rate_jump_notes(session.recipe, state),
        )
        print(f"resumed after step {step} from {folder}", *notes, sep="\n", flush=True)
    return state


def _changed_batch_size_notes(
    train_state: TrainState, batch_plan: BatchPlan, samples_at_present_batch_size: int
) -> Iterator[str]:
    """Yield a note if earlier steps had other batch sizes.

    `samples_at_present_batch_size` is the number of samples that equally many steps take now.
    """
    if train_state.samples != samples_at_present_batch_size:
        yield (
            f"a step now has {batch_plan.global_samples:,} samples; the {train_state.step:,} steps so far "
            f"used {train_state.samples:,} samples, and the next continues after them"
        )


def _learning_rate_jump_notes(recipe: Recipe, train_state: TrainState) -> Iterator[str]:
    """Yield a note if a changed length or schedule makes the learning rate jump."""
    step = train_state.step
    previous_rate = train_state.learning_rate
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
