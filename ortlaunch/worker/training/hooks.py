"""`train.hook`: a user's class, called at logged steps, evaluations and checkpoints.

The class may stop the run.

It exists on rank 0 alone: its arguments are the same on all ranks, and its effects (a message, a
file, an upload) must happen once. Its return value reaches the other ranks as any request to stop
does.
"""

from __future__ import annotations

import difflib
import os
import socket
import traceback
from collections.abc import Mapping

from ortlaunch.base.errors import HookError, InputError
from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.worker.data.user_data import seed_and_call_user_function
from ortlaunch.worker.process_group.agreement import RankAgreement
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.requests import RankRequest

_METHODS = ("on_step", "on_evaluation", "on_checkpoint")


class TrainingHook:
    """The hook of one training; without `train.hook`, and on other ranks, it does nothing."""

    def __init__(self, session: Session, agreement: RankAgreement) -> None:
        self.name = session.recipe.train.hook
        self.run = session.run
        self.agreement = agreement
        self.last_step = session.recipe.train.steps
        self.hook_object = None
        if self.name is not None and session.group.rank == 0:
            self.hook_object = seed_and_call_user_function(
                "train.hook", self.name, {}, session.recipe.seed
            )
            _refuse_misnamed_hook_methods(self.name, self.hook_object)

    def on_step(self, step: int, metrics_line: Mapping[str, object]) -> None:
        """Call the hook for a logged step, with its line of metrics.jsonl."""
        self._call_hook_and_stop_if_asked("on_step", step, dict(metrics_line))

    def on_evaluation(self, step: int, evaluation_metrics: dict[str, float]) -> None:
        """Call the hook for an evaluation, with the loss and the task's metrics."""
        self._call_hook_and_stop_if_asked("on_evaluation", step, dict(evaluation_metrics))

    def on_checkpoint(self, step: int) -> None:
        """Call the hook for a complete checkpoint, with its folder."""
        self._call_hook_and_stop_if_asked(
            "on_checkpoint", step, str(self.run.checkpoint_folder(step))
        )

    def _call_hook_and_stop_if_asked(
        self, method_name: str, completed_steps: int, second_argument: object
    ) -> None:
        # A hook may define any of the three methods.
        hook_method = getattr(self.hook_object, method_name, None)
        if hook_method is None:
            return
        try:
            returned_value = hook_method(completed_steps, second_argument)
        except Exception as error:
            # The first frame is the call above, which is no help to the hook's author.
            frames = error.__traceback__ and error.__traceback__.tb_next
            where = "".join(traceback.format_exception(type(error), error, frames))
            raise HookError(
                f"train.hook: {self.name}.{method_name} raised {type(error).__name__} "
                f"after step {completed_steps}: {error}\n{where}"
            ) from error
        if returned_value == "stop":
            # As `ortlaunch stop` does; after the last step there is nothing to stop.
            if completed_steps < self.last_step:
                by = f"train.hook ({self.name}.{method_name})"
                write_json_atomically(
                    self.run.stop_request,
                    {"by": by, "pid": os.getpid(), "host": socket.gethostname()},
                )
                self.agreement.add_request(RankRequest.STOP)
        elif returned_value is not None:
            raise HookError(
                f"train.hook: {self.name}.{method_name} returned {returned_value!r}; "
                'it returns "stop", or nothing'
            )


def _refuse_misnamed_hook_methods(hook_name: str, hook_object: object) -> None:
    """Reject a method with a similar name that is never called, such as `on_train_end`.

    Raises:
        InputError: there is such a method, or none that is called.
    """
    methods = [
        method_name
        for method_name in dir(type(hook_object))
        if not method_name.startswith("__") and callable(getattr(type(hook_object), method_name))
    ]
    for method_name in methods:
        # 0.8: close enough for a typing error.
        similar_names = difflib.get_close_matches(method_name, _METHODS, 1, 0.8)
        if method_name not in _METHODS and (similar_names or method_name.startswith("on_")):
            hint = f"; did you mean {similar_names[0]}?" if similar_names else ""
            raise InputError(
                f"train.hook: {hook_name} has {method_name!r}, which is never called; "
                f"valid are {', '.join(_METHODS)}{hint}"
            )
    if not any(hasattr(hook_object, method) for method in _METHODS):
        raise InputError(f"train.hook: {hook_name} has none of {', '.join(_METHODS)}")
