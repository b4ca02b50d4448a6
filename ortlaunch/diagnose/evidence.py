"""Read the files of a run folder that concern its end, once, without interpreting them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.json_types import Json, open_regular_file_or_refuse
from ortlaunch.launch_plan import Plan
from ortlaunch.run_folder.error_record import ErrorRecord, read_error_records
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import JsonLines, parse_line_into_values_or_unreadable

_LAST_LINES = 12  # enough for the end of a traceback
# A log may be gigabytes; only its end is read.
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True)
class Evidence:
    """The recorded facts about a run's end."""

    run: RunDir
    state: str
    """The state, as `ortlaunch status` prints it."""
    exit_status: int | None
    """The exit status of the command; None if it has not ended."""
    last_output: str
    """The last output of the command; "" if it printed nothing."""
    failure: Failure | None
    """The failure that the command recorded."""
    records: list[ErrorRecord]
    """Error records of failed ranks, of a hang and of a lost host; primary ones first, in the order in which
    they were written."""

    @property
    def causing_error_record_or_none(self) -> ErrorRecord | None:
        """The error record of the cause; None if no rank wrote one of its own."""
        # A secondary record is an error that another rank's failure caused.
        own_record = next((record for record in self.records[:1] if not record.secondary), None)
        # Launchers, too, request a stop of ranks. So the record of a stopped rank counts only if
        # the command attributes the end to that rank.
        is_blamed = (
            self.failure is not None
            and self.failure.cause is Cause.STOPPED
            and self.failure.rank is not None
        )
        is_stop = own_record is not None and own_record.cause is Cause.STOPPED
        return None if is_stop and not is_blamed else own_record

    @property
    def plan(self) -> Plan | None:
        """The plan; None if the run ended before it was written."""
        return Plan.read(self.run.plan) if self.run.plan.exists() else None


def read_run_evidence(
    run: RunDir, state_name: str, exit_status: int | None, last_output: str, failure: Failure | None
) -> Evidence:
    """Read the error records of the ranks and combine them with the command's facts."""
    return Evidence(
        run,
        state_name,
        exit_status,
        last_output,
        failure,
        sorted(read_error_records(run), key=lambda record: record.likeliest_cause_first_sort_key),
    )


def last_error_lines(run: RunDir, rank: int) -> list[str]:
    """Return the last lines of a rank's error log."""
    return _tail_lines(run.rank_log_path(rank, "err"))[-_LAST_LINES:]


def json_lines_with_keys_in_file_tail(file_path: Path, *required_keys: str) -> list[Json]:
    """Return the last complete JSON lines of a file that contain all of these keys."""
    parsed_lines = JsonLines([], [])
    # The first line may be cut by the tail and the last half written;
    # `parse_line_into_values_or_unreadable` drops both.
    for line in _tail_lines(file_path):
        parse_line_into_values_or_unreadable(
            parsed_lines, file_path.name, line.encode(), *required_keys
        )
    return parsed_lines.values


def _tail_lines(file_path: Path) -> list[str]:
    with contextlib.suppress(OSError), open_regular_file_or_refuse(file_path) as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
    return []
