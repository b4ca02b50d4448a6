"""One thing at a time done by a thread beside training; what it raises is raised where it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Begun by training, ended by a thread; training asks whether it has."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # the loop's to raise
            self._error = error

    def has_ended(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            CheckpointError: what was written is none; or whatever else ended the thread.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
