"""Stretches of the endless order of samples that no step takes: those of batches that spoiled a training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from ortlaunch.errors import DamagedFile
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import json_lines
from ortlaunch.run_folder.records import BadStep


def recorded(run: RunDir) -> Iterator[BadStep]:
    """The bad steps of earlier starts; a last line that was half written is none.

    Raises:
        DamagedFile: a line before it cannot be read, and which samples it left out is not known.
    """
    known = [each.name for each in fields(BadStep)]
    lines = json_lines(
        run.bad_steps, *(each.name for each in fields(BadStep) if each.default is MISSING)
    )
    if lines.left_out:
        raise DamagedFile(
            f"{run.bad_steps}: it says which samples are not trained on, and is damaged: {'; '.join(lines.left_out)}; "
            "take the line away if they may be trained on"
        )
    yield from (
        BadStep(**{name: line[name] for name in known if name in line}) for line in lines.found
    )


def taken(run: RunDir, seen: int) -> int:
    """Of the first `seen` places in the order of samples, those that steps took."""
    left = LeftOut()
    for line in recorded(run):
        if line.action == "rollback" and line.places:
            left.add(*line.places)
    return seen - left.before(seen)


class LeftOut:
    """Places (from 0, epoch after epoch) that are passed over."""

    def __init__(self) -> None:
        self._stretches: list[
            tuple[int, int]
        ] = []  # [first, after), ascending, apart from each other

    def add(self, first: int, after: int) -> None:
        """Pass over the places from `first` to before `after`."""
        apart = [each for each in self._stretches if each[1] < first or each[0] > after]
        joined = [each for each in self._stretches if each not in apart]
        whole = (
            min([first, *(each[0] for each in joined)]),
            max([after, *(each[1] for each in joined)]),
        )
        self._stretches = sorted([*apart, whole])

    def before(self, place: int) -> int:
        """How many places are passed over before this one."""
        return sum(max(0, min(after, place) - first) for first, after in self._stretches)

    def place(self, begin: int, number: int) -> int:
        """Where the sample `number` (from 0) is that follows on the place `begin`."""
        place = begin + number
        for first, after in self._stretches:
            if after > begin and place >= max(first, begin):
                place += after - max(first, begin)
        return place
