"""`ortlaunch evaluate`: a checkpoint's weights on the evaluation corpus, without any training."""

from __future__ import annotations

from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.worker import checkpoint
from ortlaunch.worker.evaluation.evaluation import seed_and_evaluate_loss_and_metrics_unless_stopped
from ortlaunch.worker.evaluation.record import build_evaluation_record, evaluation_lines
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.progress import print_wrapped_to_terminal_width
from ortlaunch.worker.training.summary import engine_plan_lines


def run(session: Session) -> None:
    """Evaluate the checkpoint, write evaluation.json and print it."""
    start_checkpoint = session.checkpoint
    samples = session.data.evaluation
    group = session.group
    assert start_checkpoint is not None, "the control side gives a checkpoint"
    assert samples is not None, "the control side has looked for data.evaluation"
    if group.rank == 0:
        print_wrapped_to_terminal_width(
            *engine_plan_lines(session.engine.engine_report_so_far()), *session.engine.notes
        )
    checkpoint.load_checkpoint_print_notes_and_return_loop_state(
        start_checkpoint.folder, session.engine.stepper.named_state(), group
    )
    with session.progress.show_activity_during("evaluating"):
        found_metrics = seed_and_evaluate_loss_and_metrics_unless_stopped(session, samples)
        assert found_metrics is not None, "nobody was asked to stop"
    if group.rank == 0:
        evaluation_record = build_evaluation_record(
            start_checkpoint.step, len(samples), found_metrics
        )
        write_json_atomically(session.run.evaluation, evaluation_record.to_json())
        write_json_atomically(session.run.engine, session.engine.engine_report_so_far().to_json())
        print(
            *evaluation_lines(evaluation_record),
            f"written to {session.run.evaluation}",
            sep="\n",
            flush=True,
        )
