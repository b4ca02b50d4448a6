"""Samples of data.train that are held out for evaluation: disjoint, and the same in every start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe.fields.data import Corpus, HeldOut
from ortlaunch.worker.data import Batches, LabelledTexts, Mixture, UserSamples
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.identity import data_identity_record
from ortlaunch.worker.data.labelled_samples import renumber_labels_and_list_class_names
from ortlaunch.worker.data.mixture import split_held_out_samples
from ortlaunch.worker.data.samples import Samples
from tests.worker.data.test_labelled import words


def own(size: int, first: int = 0) -> UserSamples:
    return UserSamples([{"x": first + number} for number in range(size)], is_mapping=True)


def values(samples: Samples) -> list[int]:
    return [int(samples.sample(index, 0)["x"]) for index in range(len(samples))]


@pytest.mark.parametrize("size", [10, 1000, 70_000])
def test_a_share_is_disjoint_and_of_the_seed(size: int) -> None:
    """Both parts make the whole, in its order; another seed holds out others."""
    kept, held = split_held_out_samples(own(size), HeldOut(share=0.1), 7)
    assert len(held) == size // 10
    assert sorted(values(kept) + values(held)) == list(range(size))
    assert values(kept) == sorted(values(kept))
    assert values(
        split_held_out_samples(own(size), HeldOut(samples=size // 10), 7).held_out
    ) == values(held)
    assert values(split_held_out_samples(own(size), HeldOut(share=0.1), 8).held_out) != values(held)


def test_of_a_mixture_each_source_gives_its_share() -> None:
    """A mixture stays one, with its weights; its sources give samples by their size."""
    whole = Mixture([own(300), own(100, 300), own(2, 400)], [1.0, 5.0, 1.0])
    kept, held = split_held_out_samples(whole, HeldOut(samples=40), 7)
    assert isinstance(kept, Mixture)
    assert list(kept.weights) == [1.0, 5.0, 1.0]
    assert sorted(values(kept) + values(held)) == list(range(402))
    assert (len(held), sum(value < 300 for value in values(held))) == (40, 30)


@pytest.mark.parametrize(("ranks", "begun"), [(1, 0), (3, 0), (2, 4)])
def test_no_world_trains_on_the_held_out(ranks: int, begun: int) -> None:
    """Each step has the same samples in any world and after a resume; an epoch has all but those."""
    kept, held = split_held_out_samples(own(100), HeldOut(share=0.1), 7)

    def steps(world: int, first: int) -> list[list[int]]:
        batches = Batches(kept, BatchPlan(6, 6 // world, 1, world, None), 7)
        batches.begin_step_after_positions(first, 6 * first)
        return [
            [
                int(x)
                for rank in range(world)
                for x in batches.read_micro_batch_and_count_tokens(step, 0, rank)["x"]
            ]
            for step in range(first, 15)
        ]

    whole = steps(1, 0)
    assert steps(ranks, begun) == whole[begun:]
    assert sorted(sum(whole, values(held))) == list(range(100))


def test_nothing_left_to_train_on() -> None:
    """Holding out all samples is an error with both numbers."""
    with pytest.raises(DataError, match=r"500 samples would be held out, and .* has 100: none"):
        split_held_out_samples(own(100), HeldOut(samples=500), 7)


def test_the_identity_has_the_held_out_samples() -> None:
    """A checkpoint records how many are held out; a run that holds out none has no such entry."""
    kept = split_held_out_samples(own(100), HeldOut(share=0.2), 7).training
    assert data_identity_record(kept) | {"fingerprint": None} == {
        "samples": 80,
        "fingerprint": None,
        "order": "shuffle",
        "held_out": 20,
    }
    assert "held_out" not in data_identity_record(own(100))


@pytest.mark.usefixtures("own_cache")
def test_labels_of_a_part_are_numbered_once(tmp_path: Path) -> None:
    """Both parts of texts with classes have the numbers of all their names, batches too."""
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "a b", "label": name} for name in ("no", "yes") * 10]
    path.write_text("\n".join(map(json.dumps, rows)))
    source = Corpus(format="jsonl", path=(str(path),))
    kept, held = split_held_out_samples(LabelledTexts(source, words(), 4), HeldOut(share=0.5), 7)
    assert renumber_labels_and_list_class_names(kept, held) == ["no", "yes"]
    labels = [int(part.sample(at, 0)["labels"]) for part in (kept, held) for at in range(10)]
    assert sorted(labels) == [0] * 10 + [1] * 10
