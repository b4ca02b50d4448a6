"""Precision, recall and F1 of whole entities in rows of tags, as CoNLL's conlleval counts them.

An entity is correct if its words and its type are exactly right. The package seqeval computes the
same, by default and in its mode strict; tests compare with it. It has had no release since 2020 and
installs from source only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ortlaunch.worker.process_group.distributed import DistributedContext

EntitySpan = tuple[int, int, str]
# Of IOB1 and IOB2, of BILOU, and of IOBES, where E and S are L and U.
_TAG = re.compile(r"O|[BILUES]-.+")


def are_classes_entity_tags(class_names: Sequence[str]) -> bool:
    """Return whether all classes are O, or a type with B-, I-, L-, U-, E- or S- before it."""
    return {*class_names} - {"O"} != set() and all(_TAG.fullmatch(name) for name in class_names)


def entity_spans_of_tags(tags: Iterable[str]) -> set[EntitySpan]:
    """Return the entities of a row: index of the first word, index after the last, and type.

    B and S start an entity, and E and S end one; another tag continues an entity of the same type,
    else it starts one. So conlleval and seqeval count. Their rules know no L and U, which are E and S
    here: seqeval's default loses entities of BILOU.
    """
    entities = set[EntitySpan]()
    start = 0
    open_type = prefix = ""
    # The added O ends an entity at the end of the row.
    for word_index, tag in enumerate([*tags, "O"]):
        # The type; empty for O.
        entity_type = tag[2:]
        previous_prefix, prefix = prefix, tag[0]
        if open_type and (
            entity_type != open_type or prefix in "BSU" or previous_prefix in ("E", "L", "S", "U")
        ):
            entities.add((start, word_index, open_type))
            open_type = ""
        if entity_type and not open_type:
            start = word_index
            open_type = entity_type
    return entities


def strict_entity_spans_of_tags(tags: Iterable[str], has_end_tags: bool) -> set[EntitySpan]:
    """Return the entities of a row that are tagged without a fault, as seqeval's mode strict.

    Args:
        tags: tags of a row.
        has_end_tags: whether the scheme is BILOU or IOBES, and not IOB2. B-TYPE, I-TYPE is then no
            entity without L-TYPE or E-TYPE.
    """
    entities = set[EntitySpan]()
    open_start_and_type: tuple[int, str] | None = None
    # The added O ends an entity at the end of the row.
    for word_index, tag in enumerate([*tags, "O"]):
        prefix, entity_type = tag[0], tag[2:]
        continues = (
            open_start_and_type is not None
            and prefix in "ILE"
            and entity_type == open_start_and_type[1]
        )
        is_end = prefix in "LE" if continues else not has_end_tags
        if open_start_and_type is not None and is_end:
            entities.add((open_start_and_type[0], word_index + continues, open_start_and_type[1]))
        if prefix in "US":
            entities.add((word_index, word_index + 1, entity_type))
        if prefix == "B":
            open_start_and_type = word_index, entity_type
        elif not continues or is_end:
            open_start_and_type = None
    return entities


class EntityCounts:
    """Counts of correct, predicted and labelled entities.

    Args:
        class_names: the classes, of which the scheme of strict counts follows.
    """

    def __init__(self, class_names: Sequence[str] = ()) -> None:
        self._has_end_tags = any(name[0] in "LUES" for name in class_names)
        # Correct, predicted, labelled; the same of strict counts.
        self._counts = [0.0] * 6

    def count_entities_of_row(
        self, predicted_tags: Iterable[str], labelled_tags: Iterable[str]
    ) -> None:
        """Count one row: `predicted_tags` are the predicted tags, `labelled_tags` the labels."""
        rows = [*predicted_tags], [*labelled_tags]
        for offset, (predicted, labelled) in enumerate(
            (
                map(entity_spans_of_tags, rows),
                (strict_entity_spans_of_tags(row, self._has_end_tags) for row in rows),
            )
        ):
            for index, spans in enumerate((predicted & labelled, predicted, labelled)):
                self._counts[3 * offset + index] += len(spans)

    def entity_metrics_over_ranks(self, group: DistributedContext) -> dict[str, float]:
        """Return the metrics over all ranks (collective)."""
        correct, predicted, labelled, *strict = map(sum, zip(*group.gather_numbers(self._counts)))
        # A metric without entities is 0, as conlleval's.
        return {
            "entity_precision": correct / max(1, predicted),
            "entity_recall": correct / max(1, labelled),
            "entity_f1": 2 * correct / max(1, predicted + labelled),
            "entity_f1_strict": 2 * strict[0] / max(1, strict[1] + strict[2]),
        }
