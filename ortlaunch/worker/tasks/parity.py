"""`ortlaunch parity`: the first training steps compared with plain PyTorch; nothing is saved."""

from __future__ import annotations

from ortlaunch.base.errors import ParityError
from ortlaunch.worker.session import Session
from ortlaunch.worker.tasks.train import TrainState, train_step
from ortlaunch.worker.training.parity_steps import ParitySteps, is_plain_pytorch
from ortlaunch.worker.training.summary import (
    print_outcome_and_copy_late_modules,
    print_plan_and_copy_user_modules,
)


def run(session: Session) -> None:
    """Compare `engine.parity_steps` steps without saving or exporting anything.

    Raises:
        ParityError: the engine differs from plain PyTorch, or plain PyTorch itself runs.
    """
    print_plan_and_copy_user_modules(session)
    # After an allowed fallback.
    if is_plain_pytorch(session.engine):
        raise ParityError(
            "nothing to compare: ONNX Runtime cannot run this model, so plain PyTorch runs"
        )
    parity_steps = ParitySteps(session, first_step=0, with_table=True)
    state = TrainState()
    while state.step < parity_steps.end_step:
        parity_steps.compare_and_record_step_if_due(state.step)
        # The update of the last step would not be compared.
        if state.step + 1 < parity_steps.end_step:
            train_step(session, state)
        state.step += 1
    print_outcome_and_copy_late_modules(session)
