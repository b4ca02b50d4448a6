"""Entities in rows of tags, by CoNLL's definition and as conlleval counts them."""

from __future__ import annotations

import random
import warnings

import pytest
import seqeval.metrics
import seqeval.scheme

from ortlaunch.worker.evaluation.entities import (
    EntityCounts,
    are_classes_entity_tags,
    entity_spans_of_tags,
)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O O", set()),
        ("B-PER I-PER O B-LOC", {(0, 2, "PER"), (3, 4, "LOC")}),
        ("B-PER B-PER", {(0, 1, "PER"), (1, 2, "PER")}),
        ("I-PER I-PER", {(0, 2, "PER")}),
        ("O I-LOC O", {(1, 2, "LOC")}),
        ("B-PER I-LOC I-LOC", {(0, 1, "PER"), (1, 3, "LOC")}),
        ("I-PER B-PER I-PER", {(0, 1, "PER"), (1, 3, "PER")}),
        ("B-A-B I-A-B", {(0, 2, "A-B")}),
        ("", set()),
    ],
)  # fmt: skip
def test_spans(tags: str, expected: set[tuple[int, int, str]]) -> None:
    """B starts an entity; I continues one of its type, else starts one; a row's end ends one."""
    assert entity_spans_of_tags(tags.split()) == expected


def test_whole_entities_are_right_or_not() -> None:
    """An entity is correct only if its words and its type are exactly right."""
    # By hand: of four labelled and three predicted entities one is correct. Half of one is not, nor
    # is one of another type.
    found = EntityCounts()
    found.count_entities_of_row(
        ["B-PER", "I-PER", "O", "B-LOC", "O"], ["B-PER", "I-PER", "O", "B-ORG", "O"]
    )
    found.count_entities_of_row(["B-LOC", "O", "O"], ["B-LOC", "I-LOC", "B-PER"])
    assert found.entity_metrics_over_ranks(Alone()) == pytest.approx(
        {
            "entity_precision": 1 / 3,
            "entity_recall": 1 / 4,
            "entity_f1": 2 / 7,
            "entity_f1_strict": 2 / 7,
        }
    )


@pytest.mark.parametrize(
    ("prefixes", "scheme"), [("BI", "IOB2"), ("BILU", "BILOU"), ("BIES", "IOBES")]
)
def test_entities_are_seqevals(prefixes: str, scheme: str) -> None:
    """Random rows of tags, mostly with faults, have seqeval's metrics, by default and strict.

    Its default mode knows no L and U, which are E and S by another name.
    """
    names = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("X", "Y"))]
    generator = random.Random(3)
    meant = [generator.choices(names, k=generator.randint(1, 6)) for _ in range(400)]
    # Some rows are right.
    given = [
        [generator.choice([name, *names]) for name in row] if generator.random() < 0.7 else row
        for row in meant
    ]
    found = EntityCounts(names)
    for given_row, meant_row in zip(given, meant):
        found.count_entities_of_row(given_row, meant_row)
    with warnings.catch_warnings():
        # Of a type that is never predicted.
        warnings.simplefilter("ignore")
        strict = {"mode": "strict", "scheme": getattr(seqeval.scheme, scheme)}
        renamed = [
            [[tag.replace("L-", "E-").replace("U-", "S-") for tag in row] for row in rows]
            for rows in (meant, given)
        ]
        expected = {
            "entity_precision": seqeval.metrics.precision_score(*renamed),
            "entity_recall": seqeval.metrics.recall_score(*renamed),
            "entity_f1": seqeval.metrics.f1_score(*renamed),
            "entity_f1_strict": seqeval.metrics.f1_score(meant, given, **strict),
        }
    assert found.entity_metrics_over_ranks(Alone()) == pytest.approx(expected)
    assert 0.2 < expected["entity_f1"] != expected["entity_f1_strict"]


def test_no_entity_at_all() -> None:
    """Without entities all metrics are 0, as conlleval's."""
    found = EntityCounts()
    found.count_entities_of_row(["O"], ["O"])
    assert set(found.entity_metrics_over_ranks(Alone()).values()) == {0}


@pytest.mark.parametrize(
    ("names", "expected"),
    [(("B-X", "I-X", "O"), True), (("O", "B-X"), True), (("I-X",), True), (("O",), False), ((), False),
     (("O", "S-X"), True), (("O", "X-A"), False), (("B-", "O"), False), (("NOUN", "VERB"), False),
     (("LABEL_0", "LABEL_1"), False)],
)  # fmt: skip
def test_which_names_are_tags(names: tuple[str, ...], expected: bool) -> None:
    """Names are tags if all of them are O, or B-TYPE, I-TYPE and so on."""
    assert are_classes_entity_tags(names) == expected


class Alone:
    """A group of one rank."""

    def gather_numbers(self, mine: list[float]) -> list[list[float]]:
        return [mine]
