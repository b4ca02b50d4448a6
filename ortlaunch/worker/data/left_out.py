"""Ranges of samples that training skips.

Each is a bad batch left out by a rollback. Positions go on over all epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from ortlaunch.errors import DamagedFile
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import read_json_lines
from ortlaunch.run_folder.records import BadStep


def recorded(run: RunDir) -> Iterator[BadStep]:
    """Yield the recorded bad steps of all starts so far. An incomplete last line is ignored.

    Raises:
        DamagedFile: a complete line cannot be read, so it is unknown which samples it skips.
    """
    known = [each.name for each in fields(BadStep)]
    lines = read_json_lines(
        run.bad_steps, *(each.name for each in fields(BadStep) if each.default is MISSING)
    )
    if lines.unreadable:
        raise DamagedFile(
            f"{run.bad_steps}: this list of excluded samples is damaged: "
            f"{'; '.join(lines.unreadable)}; remove the line if its samples may be trained on"
        )
    yield from (
        # Fields of later versions are ignored.
        BadStep(**{name: line[name] for name in known if name in line})
        for line in lines.values
    )


def samples_trained_on(run: RunDir, places: int) -> int:
    """Return how many of the first `places` places were not skipped."""
    left = LeftOut()
    for line in recorded(run):
        if line.action == "rollback" and line.places:
            left.add(*line.places)
    return places - left.before(places)


class LeftOut:
    """The set of skipped places; places count from 0 and go on from epoch to epoch."""

    def __init__(self) -> None:
        # Ranges [first, after), ascending; no two of them touch.
        self._stretches: list[tuple[int, int]] = []

    def add(self, first: int, after: int) -> None:
        """Skip the places [first, after)."""
        apart = [each for each in self._stretches if each[1] < first or each[0] > after]
        joined = [each for each in self._stretches if each not in apart]
        # Ranges that overlap or touch the new one are merged with it.
        whole = (
            min([first, *(each[0] for each in joined)]),
            max([after, *(each[1] for each in joined)]),
        )
        self._stretches = sorted([*apart, whole])

    def before(self, place: int) -> int:
        """Return how many places before this one are skipped."""
        return sum(max(0, min(after, place) - first) for first, after in self._stretches)

    def place(self, begin: int, number: int) -> int:
        """Return the place of sample `number`.

        Samples that are not skipped count from 0, beginning at place `begin`.
        """
        place = begin + number
        # Ascending order matters: each skipped range moves the place, perhaps into the next range.
        for first, after in self._stretches:
            if after > begin and place >= max(first, begin):
                place += after - max(first, begin)
        return place
