"""Precision, recall and F1 of whole entities in rows of tags, as CoNLL's conlleval counts them.

An entity is correct if its words and its type are exactly right. The package seqeval computes the
same, but it has had no release since 2020 and installs from source only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ortlaunch.worker.process_group.distributed import DistributedContext

Span = tuple[int, int, str]
_TAG = re.compile(r"O|[BI]-.+")


def are_tags(names: Sequence[str]) -> bool:
    """Return whether all classes are O, B-TYPE or I-TYPE (IOB1, IOB2)."""
    return {*names} - {"O"} != set() and all(_TAG.fullmatch(name) for name in names)


def spans(tags: Iterable[str]) -> set[Span]:
    """Return the entities of a row: index of the first word, index after the last, and type.

    I-TYPE continues an entity of the same type, else it starts one.
    """
    found = set[Span]()
    first = 0
    inside = ""
    # The added O ends an entity at the end of the row.
    for place, tag in enumerate([*tags, "O"]):
        # The type; empty for O.
        kind = tag[2:]
        if inside and (kind != inside or tag.startswith("B-")):
            found.add((first, place, inside))
            inside = ""
        if kind and not inside:
            first = place
            inside = kind
    return found


class Entities:
    """Counts of correct, predicted and labelled entities."""

    def __init__(self) -> None:
        self.right = 0
        self.given = 0
        self.meant = 0

    def add(self, given: Iterable[str], meant: Iterable[str]) -> None:
        """Count one row: `given` are the predicted tags, `meant` the labels."""
        ours = spans(given)
        theirs = spans(meant)
        self.right, self.given, self.meant = (
            self.right + len(ours & theirs), self.given + len(ours), self.meant + len(theirs)
        )  # fmt: skip

    def read(self, group: DistributedContext) -> dict[str, float]:
        """Return the metrics over all ranks (collective)."""
        right, given, meant = map(
            sum, zip(*group.gather_numbers([self.right, self.given, self.meant]))
        )
        # A metric without entities is 0, as conlleval's.
        return {
            "entity_precision": right / max(1, given),
            "entity_recall": right / max(1, meant),
            "entity_f1": 2 * right / max(1, given + meant),
        }
