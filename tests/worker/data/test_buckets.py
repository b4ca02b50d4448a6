"""`data.bucket_lengths`: the same samples in a step with less padding, for any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe.fields.data import Corpus, Data
from ortlaunch.worker.data import (
    Batches,
    LabelledTexts,
    Mixture,
    cut_padding_to_shortest_fitting_bucket,
)

BUCKETS = (4, 8)


pytestmark = pytest.mark.usefixtures("own_cache")


def labelled(path: Path, texts: Sequence[str], side: str) -> LabelledTexts:
    """Return samples of these texts, padded on this side."""
    path.write_text(
        "".join(json.dumps({"text": text, "label": n % 2}) + "\n" for n, text in enumerate(texts))
    )
    backend = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", padding_side=side
    )
    return LabelledTexts(Corpus(format="jsonl", path=(str(path),)), tokenizer, 12)


@pytest.fixture(params=["right", "left"])
def texts(request: Any, tmp_path: Path) -> LabelledTexts:
    """Samples of 1 to 12 tokens; some texts are longer and cut at 12."""
    return labelled(
        tmp_path / "a.jsonl",
        [" ".join("ab"[n % 2] * (1 + n * n % 15)) for n in range(48)],
        request.param,
    )


def step_of(batches: Batches, step: int) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
    """Return the samples and the batch of every micro batch of a step."""
    plan = batches.batch
    places = [
        (step, n, rank)
        for n in range(plan.accumulation_steps)
        for rank in range(plan.data_parallel_ranks)
    ]
    return [
        (
            batches.sample_indices_of_micro_batch(*place),
            batches.read_micro_batch_and_count_tokens(*place),
        )
        for place in places
    ]


def test_a_step_has_the_same_samples_with_less_padding(texts: LabelledTexts) -> None:
    """With buckets a step has the same samples, sorted by length and cut to the smallest bucket."""
    for ranks in (1, 2):
        plan = BatchPlan(16, 4, 4 // ranks, ranks, None)
        without = Batches(texts, plan, 7)
        with_buckets = Batches(texts, plan, 7, BUCKETS)
        for step in range(4):
            taken = step_of(with_buckets, step)
            assert sorted(i for indices, _ in taken for i in indices) == sorted(
                without.sample_indices_of_step(step)
            )
            sizes = [max(texts.size(index) for index in indices) for indices, _ in taken]
            # The shortest micro batches come first, by bucket.
            assert sizes == sorted(sizes, key=lambda size: (size > 4) + (size > 8))
            for size, (_, batch) in zip(sizes, taken):
                length = next(length for length in (*BUCKETS, 12) if length >= size)
                assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, length)
                assert int(batch["attention_mask"].sum(1).max()) == size
    # 1 + n * n % 15 for n from 0 to 3.
    assert [texts.size(index) for index in range(4)] == [1, 2, 5, 10]
    assert Mixture([texts, texts], [1, 1]).size(48 + 2) == 5


def test_padding_to_the_longest(texts: LabelledTexts) -> None:
    """`padding: longest` cuts each micro batch to a multiple of 8, or leaves the full length."""
    data = {"train": {"format": "jsonl", "path": "a"}, "tokenizer": "x", "padding": "longest"}
    # The full length needs no bucket of its own.
    assert [
        *Data.model_validate(
            {**data, "sequence_length": 24}
        ).padding_bucket_or_multiple_of_8_lengths
    ] == [8, 16]
    lengths = Data.model_validate(
        {**data, "sequence_length": 12}
    ).padding_bucket_or_multiple_of_8_lengths
    plan = BatchPlan(16, 4, 2, 2, None)
    longest = Batches(texts, plan, 7, lengths)
    fixed = Batches(texts, plan, 7)
    for step in range(4):
        taken = step_of(longest, step)
        assert sorted(i for indices, _ in taken for i in indices) == sorted(
            fixed.sample_indices_of_step(step)
        )
        for indices, batch in taken:
            assert batch["input_ids"].shape[1] == (8 if max(map(texts.size, indices)) <= 8 else 12)


@pytest.mark.parametrize("side", ["right", "left"])
def test_an_empty_text_costs_the_others_nothing(side: str, tmp_path: Path) -> None:
    """An empty text does not disturb the padding side of other texts in its batch."""
    texts = labelled(tmp_path / "a.jsonl", ["a b a", "", "a b", ""], side)
    batches = Batches(texts, BatchPlan(4, 4, 1, 1, None), 7, BUCKETS)
    for chosen, expected in ((range(4), [3, 0, 2, 0]), ((1, 3), [0, 0])):
        found = batches.stack_and_cut_padding([texts.sample(index, 0) for index in chosen])
        assert found["attention_mask"].shape[1] == 4
        assert (
            found["attention_mask"].sum(1).tolist()
            == (found["input_ids"] > 0).sum(1).tolist()
            == expected
        )


def test_gradients_are_the_same(texts: LabelledTexts) -> None:
    """Gradients of a whole step are equal with and without buckets, up to float32 rounding."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = BertForSequenceClassification(BertConfig(vocab_size=8, **sizes)).eval()
    found = []
    if texts.sample(0, 0)["attention_mask"][0] == 0:
        pytest.skip("absolute positions count padding on the left")
    for buckets in ((), BUCKETS):
        model.zero_grad()
        for _, batch in step_of(Batches(texts, BatchPlan(16, 4, 4, 1, None), 7, buckets), 0):
            # The mean of the four micro batches of a step.
            (model(**batch).loss / 4).backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_what_has_no_mask_is_left_alone() -> None:
    """Batches without a mask, and tensors of another length than the texts, are not cut."""
    assert cut_padding_to_shortest_fitting_bucket({"x": torch.ones(2, 9)}, (4,))["x"].shape == (
        2,
        9,
    )
    mask = torch.tensor([[1, 1, 0, 0, 0, 0]])
    found = cut_padding_to_shortest_fitting_bucket(
        {"attention_mask": mask, "labels": torch.ones(1), "y": torch.ones(1, 2)}, (4,)
    )
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "attention_mask": (1, 4), "labels": (1,), "y": (1, 2)
    }  # fmt: skip
