"""Whole entities in rows of tags, as CoNLL's conlleval counts them: the exact words and the type, right or not.

There is seqeval for it, which has been still since 2020 and installs from its source alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ortlaunch.worker.process_group.distributed import DistributedContext

Span = tuple[int, int, str]
_TAG = re.compile(r"O|[BI]-.+")


def are_tags(names: Sequence[str]) -> bool:
    """Whether all classes are O, B-TYPE or I-TYPE (IOB1, IOB2)."""
    return {*names} - {"O"} != set() and all(_TAG.fullmatch(name) for name in names)


def spans(tags: Iterable[str]) -> set[Span]:
    """First word, the one after the last, and type; I-TYPE goes on with an entity of its type, else it begins one."""
    found = set[Span]()
    first = 0
    inside = ""
    for place, tag in enumerate([*tags, "O"]):
        kind = tag[2:]
        if inside and (kind != inside or tag.startswith("B-")):
            found.add((first, place, inside))
            inside = ""
        if kind and not inside:
            first = place
            inside = kind
    return found


class Entities:
    """How many were given rightly, given, and meant."""

    def __init__(self) -> None:
        self.right = 0
        self.given = 0
        self.meant = 0

    def add(self, given: Iterable[str], meant: Iterable[str]) -> None:
        """One row's tags."""
        ours = spans(given)
        theirs = spans(meant)
        self.right, self.given, self.meant = (
            self.right + len(ours & theirs), self.given + len(ours), self.meant + len(theirs)
        )  # fmt: skip

    def read(self, group: DistributedContext) -> dict[str, float]:
        """Of all ranks (collective); 0 where there is none, as conlleval's."""
        right, given, meant = map(
            sum, zip(*group.gather_numbers([self.right, self.given, self.meant]))
        )
        return {
            "entity_precision": right / max(1, given),
            "entity_recall": right / max(1, meant),
            "entity_f1": 2 * right / max(1, given + meant),
        }
