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
from ortlaunch.worker.engine.schedule import factor
from ortlaunch.worker.engine.stepping import Stepped
from ortlaunch.worker.evaluation.evaluation import evaluate, evaluation_names
from ortlaunch.worker.model.named_state import require_same_parameters
from ortlaunch.worker.process_group.agreement import Agreement, agreement
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.gpus import forward_timer
from ortlaunch.worker.supervision.pulse import STEPPING
from ortlaunch.worker.supervision.requests import RankRequest
from ortlaunch.worker.training import best
from ortlaunch.worker.training.bad_steps import BadSteps, RollBack
from ortlaunch.worker.training.checkpoint_exports import CheckpointExports
from ortlaunch.worker.training.finish import export_unsaved, finish
from ortlaunch.worker.training.finite import (
    bad_losses,
    bad_step,
    nan_buffers,
    require_buffers,
    require_finite_loss,
    require_finite_weights,
)
from ortlaunch.worker.training.hooks import Hook
from ortlaunch.worker.training.meter import Meter, sum_of
from ortlaunch.worker.training.metrics import Metrics, records
from ortlaunch.worker.training.parity_steps import parity_steps
from ortlaunch.worker.training.profile import StepProfiler
from ortlaunch.worker.training.rebuilding import report_rebuilding
from ortlaunch.worker.training.stopping import saved_for, stop
from ortlaunch.worker.training.summary import announce


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
    best: best.Memory = field(default_factory=dict)
    """Evaluations, for checkpoint.keep_best and train.stop_after."""
    streams: Sequence[Sequence[int]] = ()
    """The positions of the streamed sources after these samples."""
    owes_evaluation: bool = False
    """Whether a stop left out the evaluation that is due after this step: the next start begins
    with it."""

    def end_step(self, batches: Batches) -> None:
        """Count a step, whose samples no rank needs any more."""
        self.step += 1
        self.samples = batches.places_passed(self.step)
        self.streams = batches.passed(self.samples)


def run(session: Session) -> int:
    """Train and finish the run; after a stop, return the exit status of the stop."""
    announce(session)
    with contextlib.closing(CheckpointExports(session)) as exports:
        with agreement(session.group) as agreed:
            try:
                state = train(session, agreed, exports)
            except LastSaveError as error:
                export_unsaved(session, error)
        if agreed.stopped.stops:
            return agreed.stopped.exit_status
        exports.wait()
    finish(session, state.step, state.best)
    return 0


def train(session: Session, agreed: Agreement, exports: CheckpointExports) -> TrainState:
    """Train from the session's checkpoint to `train.max_steps`, or until the ranks agree to stop.

    After a stop all is saved, and `agreed.stopped` has the request.
    """
    best.require_metrics(session)
    bad_steps = BadSteps(session)
    hook = Hook(session, agreed)
    # Each RollBack resumes from the newest checkpoint.
    while True:
        with contextlib.suppress(RollBack), contextlib.ExitStack() as ending:
            return _train(session, agreed, bad_steps, hook, exports, ending)


def _train(
    session: Session,
    agreed: Agreement,
    bad_steps: BadSteps,
    hook: Hook,
    exports: CheckpointExports,
    ending: contextlib.ExitStack,
) -> TrainState:
    recipe = session.recipe
    group = session.group
    engine = session.engine
    state = _resume(session)
    saving = _saving(session, state, hook, exports)
    if best.stops_early(recipe, state.step, state.best):
        saving.last_step = state.step
    if state.step >= saving.last_step:
        nothing_to_train(session, state, hook)
        saving.best = best.kept_step(state.best)
        saving.finish()
        return state
    metrics = _open(session, state.step, ending)
    meter = Meter(session)
    parity = parity_steps(session, state.step)
    profiler = StepProfiler(session, state.step + 1)
    bad_steps.begin(saving, state)
    progress = session.progress
    progress.watch(engine.stepper.module, forward_timer(group.device)) if group.size > 1 else None
    report_rebuilding(engine.record.engine.used, progress.pulse)
    progress.begin(state.step, recipe.train.steps)
    if recipe.engine.name == "inductor":
        progress.doing("compiling in the first step")
    engine.plain.hook("on_train_start", engine.stepper.numbers)
    if state.owes_evaluation:
        with meter.paused():
            asked = _evaluate(session, state, saving, agreed, hook, metrics)
        # This step's checkpoint exists already.
        saving.best = best.kept_step(state.best)
        agreed.stopped = stop(session, asked, state.step)
    while state.step < saving.last_step and not agreed.stopped.stops:
        if parity is not None:
            with meter.paused():
                parity.check(state.step)
        saving.request_when_due(agreed)
        exports.advance()
        loss, stepped, rate = _step(session, state, agreed, bad_steps, profiler)
        state.end_step(session.batches)
        meter.took(loss)
        engine.plain.end_step(state.step, state.samples, engine.stepper.numbers)
        progress.step()
        last = state.step == recipe.train.steps
        asked = agreed.end()

        if state.step % recipe.log.every_steps == 0 or last or asked.stops:
            _log(session, state, meter, (stepped, rate), hook, metrics)

        state.owes_evaluation = session.data.evaluation is not None and (
            last
            or _due(state.step, recipe.train.evaluate_every_steps)
            or session.batches.completes(state.step, recipe.train.evaluate_every_epochs)
        )
        if state.owes_evaluation and not asked.stops:
            with meter.paused():
                asked = max(asked, _evaluate(session, state, saving, agreed, hook, metrics))

        if asked or saving.is_due(state.step) or best.kept_step(state.best) == state.step:
            with meter.paused(), progress.during("saving a checkpoint"):
                asked = _save(session, state, saving, agreed, asked)
        agreed.stopped = stop(session, asked, state.step)
    engine.plain.hook("on_train_end", engine.stepper.numbers)
    agreed.stopped = _saves_through(session, saving, agreed, state.step)
    profiler.finish()
    if metrics:
        write_json_atomically(session.run.engine, engine.report().to_json())
    return state


def _saving(
    session: Session, state: TrainState, hook: Hook, exports: CheckpointExports
) -> checkpoint.Saving:
    """Return the checkpoints of a training that begins at `state`."""
    every = session.recipe.checkpoint.every_epochs

    def completed(step: int) -> None:
        hook.on_checkpoint(step)
        exports.add(step)

    saving = checkpoint.Saving(
        session.run,
        session.recipe,
        session.group,
        session.engine.stepper,
        session.identity,
    )
    saving.best = best.kept_step(state.best)
    saving.nan_buffers = {*nan_buffers(session.model)}
    saving.completes_pass = lambda step: session.batches.completes(step, every)
    saving.completed = completed
    model = session.engine.plain.model
    named = session.engine.stepper.named_state()
    require_storable([*((part.name, part.master) for part in named.parts), *named.buffers.items()])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saving.begins = lambda: require_same_parameters(model, trained)
    saving.in_use = exports.in_use
    exports.released = saving.prune
    return saving


def _log(
    session: Session,
    state: TrainState,
    meter: Meter,
    took: tuple[Any, float],
    hook: Hook,
    metrics: Metrics | None,
) -> None:
    """Write a line of metrics.jsonl (collective)."""
    losses, read, (stepped, rate) = meter.losses, meter.read(), took
    require_finite_loss(
        read["loss"], session.group, session.batches, state.step - len(losses), losses
    )
    values = {
        **read,
        "learning_rate": rate,
        "gradient_norm": stepped.gradient_norm,
        "samples": state.samples,
        "epoch": session.batches.epoch(state.samples),
        "skipped_steps": state.skipped,
        "left_out_steps": state.left_out,
    }
    session.progress.show_loss(values["loss"])
    if metrics:
        metrics.write(state.step, values)
        hook.on_step(state.step, values)
        write_json_atomically(session.run.engine, session.engine.report().to_json())


def _evaluate(
    session: Session,
    state: TrainState,
    saving: checkpoint.Saving,
    agreed: Agreement,
    hook: Hook,
    metrics: Metrics | None,
) -> RankRequest:
    """Run the evaluation of a step, until its end or a stop; return the agreed request after it."""
    assert session.data.evaluation is not None
    with session.progress.during("evaluating"):
        evaluated = evaluate(session, session.data.evaluation, agreed)
        if evaluated is not None:
            state.owes_evaluation = False
            _take_up(session, state, saving, evaluated)
            if metrics:
                metrics.write(state.step, evaluation_names(evaluated))
                hook.on_evaluation(state.step, evaluated)
        # A request may have come during the evaluation.
        return agreed.now()


def _take_up(
    session: Session, state: TrainState, saving: checkpoint.Saving, evaluated: dict[str, float]
) -> None:
    """Record the best evaluation, and end the training if no better one is expected."""
    notes = best.without(session.recipe, evaluated) + best.not_finite(session.recipe, evaluated)
    session.group.print_once(*(f"{each}: this one is not the best" for each in notes))
    best.record(session.recipe, state.best, state.step, evaluated)
    if best.stops_early(session.recipe, state.step, state.best):
        saving.last_step = state.step


def _save(
    session: Session,
    state: TrainState,
    saving: checkpoint.Saving,
    agreed: Agreement,
    asked: RankRequest,
) -> RankRequest:
    """Save a checkpoint; return the agreed request after it."""
    with saved_for(session, saving, asked):
        require_finite_weights(state.step, session.engine.stepper.weights())
        require_buffers(state.step, session.model, saving.nan_buffers)
        saving.save(state.step, asdict(state), asked)
    # A save in the background fulfils no request.
    asked = max(asked, agreed.saved() if saving.answers(asked) else agreed.now())
    # A stop may have been requested during the save, which may still be written in the background.
    if asked.stops:
        with saved_for(session, saving, asked):
            saving.wait()
    return asked


def _saves_through(
    session: Session, saving: checkpoint.Saving, agreed: Agreement, step: int
) -> RankRequest:
    """Wait for the last checkpoint; return the agreed stop, which may have come meanwhile."""
    with session.progress.during("saving a checkpoint"):
        saving.finish()
    return agreed.stopped if agreed.stopped.stops else stop(session, agreed.now(), step)


def _open(session: Session, step: int, ending: contextlib.ExitStack) -> Metrics | None:
    """Read batches ahead from this step on; return rank 0's metrics. `ending` closes both."""
    ending.callback(session.batches.close)
    ending.enter_context(session.reading_ahead())
    if session.group.rank > 0:
        return None
    metrics = Metrics(session.recipe, session.run, step)
    ending.push(lambda kind, *_: metrics.close(failed=kind not in (None, RollBack)))
    return metrics


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the random seed of a step on a rank: a resumed run has the same dropout masks."""
    # A hash, so that neighbours are far apart. ONNX Runtime counts up from the seed, by one for
    # each Dropout. With a seed higher by one, each Dropout would have the mask of the next Dropout
    # in the step before, or on the rank before.
    return int.from_bytes(
        hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).digest(), "big"
    )


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the recipe's learning rate at `step`, counted from 0."""
    return recipe.optimizer.learning_rate * factor(recipe.schedule, step, recipe.train.steps)


def _rates(session: Session, step: int) -> Sequence[float]:
    """Return the learning rates at `step`: one for all parameters, or one for each group."""
    if session.engine.scheduler is None:
        return [learning_rate(session.recipe, step)]
    epochs = session.batches.places_passed(step) // len(session.batches.samples)
    return [
        rate * session.recipe.optimizer.learning_rate
        for rate in session.engine.scheduler.rates(step, epochs)
    ]


def _step(
    session: Session,
    state: TrainState,
    agreed: Agreement,
    bad_steps: BadSteps,
    profiler: StepProfiler,
) -> tuple[torch.Tensor | None, Stepped, float]:
    """Run `train_step`; return None instead of the loss if the step was left out."""
    try:
        with profiler.step(state.step + 1):
            return train_step(session, state, agreed, bad_steps)
    except BadStepError as error:
        # The agreement of this step has begun: end it before the collectives of the answer.
        agreed.end()
        bad_steps.answer(error, state)
        agreed.begin()
        return None, Stepped(None, skipped=True), _rates(session, state.step)[0]


def train_step(
    session: Session,
    state: TrainState,
    agreed: Agreement | None = None,
    bad_steps: BadSteps | None = None,
) -> tuple[torch.Tensor, Stepped, float]:
    """Run one optimizer step.

    Returns:
        The mean loss of this rank's passes, the result of the step, and its learning rate.

    Raises:
        BadStepError: the same on all ranks; weights and optimizer are as before the step.
    """
    engine = session.engine
    group = session.group
    rates = _rates(session, state.step)
    state.learning_rate = rates[0]
    if bad_steps is not None:
        bad_steps.before()
    engine.plain.begin_step(
        state.step, session.batches.places_passed(state.step), engine.stepper.numbers
    )
    losses = _passes(session, state.step)
    # Between passes and update, where the ranks have just waited for each other.
    if agreed is not None:
        agreed.begin()
    session.progress.pulse.at(STEPPING)
    if engine.memory:
        engine.memory.record_usage(engine.stepper)
    if bad_steps is not None:
        bad_steps.check(state.step, losses)
    stepped = engine.stepper.apply(*rates)
    if engine.memory:
        engine.memory.record_usage(engine.stepper)
    if stepped.skipped or stepped.failed:
        bad = bad_losses(group, losses)
        if stepped.failed or bad:
            # The gradients are cleared: compute them again to name the bad ones.
            _passes(session, state.step)
            raise bad_step(group, session.batches, state.step, bad, engine.stepper.gradients())
    state.skipped += int(stepped.skipped)
    return sum_of(losses) / len(losses), stepped, rates[0]


def _passes(session: Session, step: int) -> list[torch.Tensor]:
    """Run forward and backward of each micro batch of this rank; return the weighted losses."""
    engine = session.engine
    group = session.group
    seed_generators(step_seed(session.recipe.seed, step, group.rank))
    last = session.plan.batch.accumulation_steps - 1
    engine.stepper.numbers.begin()
    return [
        engine.stepper.micro_step(engine.to_device(batch), accumulation == last, weight)
        for accumulation, (batch, weight) in enumerate(
            session.progress.reading(engine.loss_weight.passes(session.batches, step, group))
        )
    ]


def nothing_to_train(session: Session, state: TrainState, hook: Hook) -> None:
    """Report that all steps are done; run the last evaluation if it is missing."""
    # The run may have been stopped before the end of its last evaluation.
    if session.group.rank == 0:
        early = best.stops_early(session.recipe, state.step, state.best)
        done = f"{state.step} of {session.recipe.train.steps} steps are done"
        print(f"nothing to train: {early or done}", flush=True)
    if session.data.evaluation is None:
        return
    mine = [r for r in records(session.run) if r["step"] == state.step and "evaluation_loss" in r]
    if not session.group.gather_numbers([len(mine)])[0][0]:
        with session.progress.during("evaluating"):
            evaluated = evaluate(session, session.data.evaluation)
        if evaluated is not None:
            best.record(session.recipe, state.best, state.step, evaluated)
        if session.group.rank == 0 and evaluated is not None:
            metrics = Metrics(session.recipe, session.run, state.step)
            metrics.write(state.step, evaluation_names(evaluated))
            metrics.close()
            hook.on_evaluation(state.step, evaluated)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _resume(session: Session) -> TrainState:
    batches = session.batches
    own = checkpoint.newest_of_all(session.run, session.group)
    # After a rollback the run folder has a newer checkpoint than the session.
    found = checkpoint.CompleteCheckpoint(*own) if own else session.checkpoint
    if found is None:
        return TrainState()
    step, folder = found
    if step >= session.recipe.train.steps and folder.parent != session.run.checkpoints:
        raise InputError(
            f"{folder} has {step} of {session.recipe.train.steps} steps: nothing to train; "
            "raise train.max_steps or train.epochs"
        )
    # The samples of so many steps at the present batch size, for the note.
    batches.go_on(0, 0)
    usual = batches.places_passed(step)
    loaded = checkpoint.load(folder, session.engine.stepper.named_state(), session.group)
    state = TrainState(**{"samples": found.samples, **loaded})
    state.best = best.remembered(session, state.best)
    # A best evaluation must have its checkpoint in this folder.
    state.owes_evaluation &= folder.parent == session.run.checkpoints
    batches.go_on(state.step, state.samples)
    batches.seek(state.streams)
    if session.group.rank == 0:
        notes = *_batch_notes(state, batches.batch, usual), *_schedule_notes(session.recipe, state)
        print(f"resumed after step {step} from {folder}", *notes, sep="\n", flush=True)
    return state


def _batch_notes(state: TrainState, batch: BatchPlan, usual: int) -> Iterator[str]:
    """Yield a note if earlier steps had other batch sizes.

    `usual` is the number of samples that equally many steps take now.
    """
    if state.samples != usual:
        yield (
            f"a step now has {batch.global_samples:,} samples; the {state.step:,} steps so far "
            f"used {state.samples:,} samples, and the next continues after them"
        )


def _schedule_notes(recipe: Recipe, state: TrainState) -> Iterator[str]:
    """Yield a note if a changed length or schedule makes the learning rate jump."""
    step = state.step
    before = state.learning_rate
    if (
        before is None
        # The module's own scheduler computes them.
        or recipe.optimizer.name == "configured"
        or step >= recipe.train.steps
        or math.isclose(before, learning_rate(recipe, step - 1))
    ):
        return
    yield (
        f"learning rate: {before:.4g} at step {step}, {learning_rate(recipe, step):.4g} at step "
        f"{step + 1}: optimizer.learning_rate, or the length or type of the schedule, has changed"
    )
