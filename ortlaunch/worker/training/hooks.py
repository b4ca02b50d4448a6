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

from ortlaunch.errors import HookError, InputError
from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.worker.data.own import call
from ortlaunch.worker.process_group.agreement import Agreement
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.requests import RankRequest

_METHODS = ("on_step", "on_evaluation", "on_checkpoint")


class Hook:
    """The hook of one training; without `train.hook`, and on other ranks, it does nothing."""

    def __init__(self, session: Session, agreed: Agreement) -> None:
        self.name = session.recipe.train.hook
        self.run = session.run
        self.agreed = agreed
        self.last_step = session.recipe.train.steps
        self.own = None
        if self.name is not None and session.group.rank == 0:
            self.own = call("train.hook", self.name, {}, session.recipe.seed)
            _require_known(self.name, self.own)

    def on_step(self, step: int, values: dict[str, object]) -> None:
        """Call the hook for a logged step, with its line of metrics.jsonl."""
        self._call("on_step", step, dict(values))

    def on_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Call the hook for an evaluation, with the loss and the task's metrics."""
        self._call("on_evaluation", step, dict(values))

    def on_checkpoint(self, step: int) -> None:
        """Call the hook for a complete checkpoint, with its folder."""
        self._call("on_checkpoint", step, str(self.run.checkpoint_folder(step)))

    def _call(self, method: str, step: int, what: object) -> None:
        # A hook may define any of the three methods.
        own = getattr(self.own, method, None)
        if own is None:
            return
        try:
            answer = own(step, what)
        except Exception as error:
            # The first frame is the call above, which is no help to the hook's author.
            frames = error.__traceback__ and error.__traceback__.tb_next
            where = "".join(traceback.format_exception(type(error), error, frames))
            raise HookError(
                f"train.hook: {self.name}.{method} raised {type(error).__name__} "
                f"after step {step}: {error}\n{where}"
            ) from error
        if answer == "stop":
            self._stop(method, step)
        elif answer is not None:
            raise HookError(
                f"train.hook: {self.name}.{method} returned {answer!r}; "
                'it returns "stop", or nothing'
            )

    def _stop(self, method: str, step: int) -> None:
        """Request a stop as `ortlaunch stop` does; after the last step, do nothing."""
        if step < self.last_step:
            by = f"train.hook ({self.name}.{method})"
            write_json_atomically(
                self.run.stop_request, {"by": by, "pid": os.getpid(), "host": socket.gethostname()}
            )
            self.agreed.add(RankRequest.STOP)


def _require_known(name: str, own: object) -> None:
    """Reject a method with a similar name that is never called, such as `on_train_end`.

    Raises:
        InputError: there is such a method, or none that is called.
    """
    methods = [
        each
        for each in dir(type(own))
        if not each.startswith("__") and callable(getattr(type(own), each))
    ]
    for each in methods:
        # 0.8: close enough for a typing error.
        near = difflib.get_close_matches(each, _METHODS, 1, 0.8)
        if each not in _METHODS and (near or each.startswith("on_")):
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(
                f"train.hook: {name} has {each!r}, which is never called; "
                f"valid are {', '.join(_METHODS)}{hint}"
            )
    if not any(hasattr(own, method) for method in _METHODS):
        raise InputError(f"train.hook: {name} has none of {', '.join(_METHODS)}")
