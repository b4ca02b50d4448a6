"""One task at a time in a thread besides training; wait() raises its exception."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundTask:
    """A task in a thread, which training starts and checks."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        # A daemon thread does not keep a failed process alive.
        self._thread = threading.Thread(
            target=self._run_and_keep_error, args=(work,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run_and_keep_error(self, work: Callable[[], object]) -> None:
        try:
            work()
        # wait() raises it in the training loop.
        except BaseException as error:
            self._error = error

    def has_ended(self) -> bool:
        """Return whether the task has ended, so that wait() returns at once."""
        return not self._thread.is_alive()

    def wait_and_raise_its_error(self) -> None:
        """Wait until the task ends.

        Raises:
            CheckpointError: the checkpoint could not be written; other errors pass, too.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
