"""How a run ended, as one value: concluded once, stored in job.json, rendered by cause_text.py.

`ortlaunch.diagnose.conclude` computes it. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.run_folder.cause_text import (
    ADVICE_PREFIX,
    COMMAND_PREFIX,
    CONTINUE_PREFIX,
    VERDICT_PREFIX,
    command_end_sentence,
)
from ortlaunch.run_folder.records import record_from_json_values

# Causes of ends at which nothing went wrong.
_GOOD_CAUSES = (Cause.ENDED_WELL, Cause.STOPPED, Cause.RUNNING)
# Lines of the user's exception that begin like ortlaunch's own output. They are indented, so that
# a reader or a script does not take them for ortlaunch's.
_LIKE_OURS = re.compile(f"^(?={COMMAND_PREFIX}|{VERDICT_PREFIX}|{ADVICE_PREFIX})", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """The end of a run, or of one start of its ranks."""

    exit_status: int
    """Exit status of the run's command."""
    message: str
    """The command's sentence on the end, and the location of the logs."""
    failure: Failure | None = None
    """The cause, with its rank, host and line in the user's files; null if the run ended well."""
    explanation: str = ""
    """The cause for a person; empty if nothing went wrong, or if the message has it."""
    traceback: str = ""
    """Traceback of the first failure, without frames of libraries; empty if it was printed before."""
    advice: tuple[str, ...] = ()
    """Suggestions, the most useful first."""
    memory_table: tuple[str, ...] = ()
    """If the run lacked memory: the plan's estimate, and settings that need less."""
    notes: tuple[str, ...] = ()
    """Further sentences of the command, such as why it does not start the ranks again."""
    stopped_by: str | None = None
    """Who requested the stop of the run."""
    can_continue: bool = False
    """Whether the run stopped on request, with a checkpoint from which it continues."""
    continue_command: str | None = None
    """The command that continues the run."""

    @classmethod
    def of_failure_detected_by_command(
        cls, exit_status: int, failure: Failure, text_after_sentence: str = ""
    ) -> Verdict:
        """Return the verdict on a failure that the command detected, not a rank."""
        return cls(exit_status, f"{command_end_sentence(failure)}{text_after_sentence}", failure)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """Return the verdict that job.json has.

        Raises:
            TypeError: a value is missing, or its type is not the field's.
        """
        failure_values = values.get("failure")
        failure = failure_values and record_from_json_values(
            Failure, {**failure_values, "cause": Cause(failure_values.get("cause"))}
        )
        return record_from_json_values(cls, {**values, "failure": failure})

    @property
    def cause(self) -> Cause:
        """The cause of the end."""
        if self.failure is None:
            return Cause.UNKNOWN if self.exit_status else Cause.ENDED_WELL
        return self.failure.cause_or_out_of_memory_if_killed

    @property
    def is_failure(self) -> bool:
        """Whether something went wrong; a stop on request is no failure."""
        return self.exit_status != 0 and self.cause not in _GOOD_CAUSES

    def with_note(self, note: str) -> Verdict:
        """Return the verdict with one more sentence of the command."""
        return replace(self, notes=(*self.notes, note))

    def __str__(self) -> str:
        """Return the text that `train` prints."""
        return self.render()

    def render(self, has_details: bool = True) -> str:
        """Return the text of `train`, `status`, and of a `RunError` in Python.

        Args:
            has_details: whether the traceback and the table of memory are in it.
        """
        return "\n".join(self._lines(has_details))

    def _lines(self, has_details: bool) -> Iterator[str]:
        if has_details and self.traceback:
            yield _LIKE_OURS.sub("  ", self.traceback)
            yield ""
        if self.explanation:
            yield f"{VERDICT_PREFIX}{self.explanation}"
            yield from self.memory_table if has_details else ()
            yield from (f"{ADVICE_PREFIX}{suggestion}" for suggestion in self.advice)
        prefix = COMMAND_PREFIX if self.exit_status else ""
        yield from (f"{prefix}{sentence}" for sentence in (self.message, *self.notes))
        if self.continue_command:
            yield f"{CONTINUE_PREFIX}{self.continue_command}"
