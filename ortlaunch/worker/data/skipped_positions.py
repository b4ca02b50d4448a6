"""Ranges of samples that training skips.

Each is a bad batch left out by a rollback. Positions go on over all epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from ortlaunch.base.errors import DamagedFile
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from ortlaunch.run_folder.records import BadStep


def read_bad_step_records(run: RunDir) -> Iterator[BadStep]:
    """Yield the recorded bad steps of all starts so far. An incomplete last line is ignored.

    Raises:
        DamagedFile: a complete line cannot be read, so it is unknown which samples it skips.
    """
    field_names = [record_field.name for record_field in fields(BadStep)]
    lines = read_json_lines_with_keys(
        run.bad_steps,
        *(record_field.name for record_field in fields(BadStep) if record_field.default is MISSING),
    )
    if lines.unreadable:
        raise DamagedFile(
            f"{run.bad_steps}: this list of excluded samples is damaged: "
            f"{'; '.join(lines.unreadable)}; remove the line if its samples may be trained on"
        )
    yield from (
        # Fields of later versions are ignored.
        BadStep(**{name: line[name] for name in field_names if name in line})
        for line in lines.values
    )


def samples_trained_in_positions(run: RunDir, position_count: int) -> int:
    """Return how many of the first `position_count` places were not skipped."""
    skipped = SkippedPositions()
    for line in read_bad_step_records(run):
        if line.action == "rollback" and line.places:
            skipped.skip_position_range(*line.places)
    return position_count - skipped.skipped_count_before(position_count)


class SkippedPositions:
    """The set of skipped places; places count from 0 and go on from epoch to epoch."""

    def __init__(self) -> None:
        # Ranges [first, after), ascending; no two of them touch.
        self._skipped_ranges: list[tuple[int, int]] = []

    def skip_position_range(self, first_position: int, end_position: int) -> None:
        """Skip the places [first, after)."""
        separate_ranges = [
            skipped_range
            for skipped_range in self._skipped_ranges
            if skipped_range[1] < first_position or skipped_range[0] > end_position
        ]
        touching_ranges = [
            skipped_range
            for skipped_range in self._skipped_ranges
            if skipped_range not in separate_ranges
        ]
        # Ranges that overlap or touch the new one are merged with it.
        merged_range = (
            min([first_position, *(skipped_range[0] for skipped_range in touching_ranges)]),
            max([end_position, *(skipped_range[1] for skipped_range in touching_ranges)]),
        )
        self._skipped_ranges = sorted([*separate_ranges, merged_range])

    def skipped_count_before(self, position: int) -> int:
        """Return how many places before this one are skipped."""
        return sum(max(0, min(stop, position) - start) for start, stop in self._skipped_ranges)

    def position_of_unskipped_sample(self, first_position: int, sample_number: int) -> int:
        """Return the place of sample `sample_number`.

        Samples that are not skipped count from 0, beginning at place `first_position`.
        """
        position = first_position + sample_number
        # Ascending order matters: each skipped range moves the place, perhaps into the next range.
        for start, stop in self._skipped_ranges:
            if stop > first_position and position >= max(start, first_position):
                position += stop - max(start, first_position)
        return position
