"""Precision, recall and F1 of whole entities in rows of tags, as CoNLL's conlleval counts them.

An entity is correct if its words and its type are exactly right. The package seqeval computes the
same, but it has had no release since 2020 and installs from source only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ortlaunch.worker.process_group.distributed import DistributedContext

EntitySpan = tuple[int, int, str]
_TAG = re.compile(r"O|[BI]-.+")


def are_classes_iob_tags(class_names: Sequence[str]) -> bool:
    """Return whether all classes are O, B-TYPE or I-TYPE (IOB1, IOB2)."""
    return {*class_names} - {"O"} != set() and all(_TAG.fullmatch(name) for name in class_names)


def entity_spans_of_tags(tags: Iterable[str]) -> set[EntitySpan]:
    """Return the entities of a row: index of the first word, index after the last, and type.

    I-TYPE continues an entity of the same type, else it starts one.
    """
    entities = set[EntitySpan]()
    start = 0
    open_type = ""
    # The added O ends an entity at the end of the row.
    for word_index, tag in enumerate([*tags, "O"]):
        # The type; empty for O.
        entity_type = tag[2:]
        if open_type and (entity_type != open_type or tag.startswith("B-")):
            entities.add((start, word_index, open_type))
            open_type = ""
        if entity_type and not open_type:
            start = word_index
            open_type = entity_type
    return entities


class EntityCounts:
    """Counts of correct, predicted and labelled entities."""

    def __init__(self) -> None:
        self.correct = 0
        self.predicted = 0
        self.labelled = 0

    def count_entities_of_row(
        self, predicted_tags: Iterable[str], labelled_tags: Iterable[str]
    ) -> None:
        """Count one row: `predicted_tags` are the predicted tags, `labelled_tags` the labels."""
        predicted_spans = entity_spans_of_tags(predicted_tags)
        labelled_spans = entity_spans_of_tags(labelled_tags)
        self.correct, self.predicted, self.labelled = (
            self.correct + len(predicted_spans & labelled_spans),
            self.predicted + len(predicted_spans),
            self.labelled + len(labelled_spans),
        )

    def entity_metrics_over_ranks(self, group: DistributedContext) -> dict[str, float]:
        """Return the metrics over all ranks (collective)."""
        correct, predicted, labelled = map(
            sum, zip(*group.gather_numbers([self.correct, self.predicted, self.labelled]))
        )
        # A metric without entities is 0, as conlleval's.
        return {
            "entity_precision": correct / max(1, predicted),
            "entity_recall": correct / max(1, labelled),
            "entity_f1": 2 * correct / max(1, predicted + labelled),
        }
