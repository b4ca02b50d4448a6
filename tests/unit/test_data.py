"""Order of samples, masked, paired, packed and labelled samples, and the user's own data."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ortlaunch.plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.models import Corpus, MaskedLm
from ortlaunch.worker import data as data_module
from ortlaunch.worker.corpus import DataError
from ortlaunch.worker.data import IGNORED, Batches, Blocks, Data, LabelledTexts, MaskedBlocks, OwnSamples, call, collate

CLS, SEP, MASK, WORDS = 1, 2, 3, 400


class Words:
    """What masking needs of a tokenizer."""

    cls_token, sep_token, mask_token = "[CLS]", "[SEP]", "[MASK]"
    cls_token_id, sep_token_id, mask_token_id = CLS, SEP, MASK

    def __len__(self) -> int:
        return WORDS


def corpus(tokens: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Token ids above the special ones."""
    return np.random.default_rng(seed).integers(10, WORDS, tokens).astype(np.uint32)


def own(count: int) -> OwnSamples:
    """Samples that are their own number."""
    return OwnSamples([{"x": torch.tensor(i)} for i in range(count)])


def batches(count: int, total: int, micro: int, ranks: int, seed: int = 7) -> Batches:
    return Batches(own(count), BatchPlan(total, micro, total // (micro * ranks), ranks, None), seed)


def micro_batches(source: Batches, step: int) -> list[list[int]]:
    """All micro batches of a step, every rank's, pass by pass."""
    b = source.batch
    return [
        source.micro_batch(step, accumulation, rank)["x"].tolist()
        for accumulation in range(b.accumulation_steps)
        for rank in range(b.data_parallel_ranks)
    ]


# ------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("step", [0, 1, 5, 6, 1000])  # 100 samples, 16 a step: step 6 spans two epochs
@pytest.mark.parametrize(("micro", "ranks"), [(4, 1), (4, 2), (4, 4), (2, 4), (8, 2), (16, 1), (1, 1)])
def test_a_step_sees_the_same_samples_on_any_world(micro: int, ranks: int, step: int) -> None:
    """The samples of a step depend on the step alone; with equal micro_size the micro batches are the same too."""
    alone = micro_batches(batches(100, 16, 4, 1), step)
    found = micro_batches(batches(100, 16, micro, ranks), step)
    assert sorted(chain(*found)) == sorted(chain(*alone))
    if micro == 4:
        assert found == alone


def test_an_epoch_sees_each_sample_once_and_the_next_is_shuffled_anew() -> None:
    """Epochs of 100 samples in steps of 16: each sample once an epoch, in another order each time."""
    source = batches(100, 16, 4, 2)
    seen = [number for step in range(19) for micro in micro_batches(source, step) for number in micro][:300]
    epochs = [seen[start : start + 100] for start in (0, 100, 200)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(100))] * 3
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(100))}) == 4


def test_order_is_a_function_of_seed_and_step() -> None:
    """Step 9 asked for first is step 9 after all others, as a resumed run needs; another seed gives another order."""
    after_others = batches(100, 16, 4, 1)
    for step in range(9):
        micro_batches(after_others, step)
    assert micro_batches(after_others, 9) == micro_batches(batches(100, 16, 4, 1), 9)
    assert micro_batches(after_others, 9) != micro_batches(batches(100, 16, 4, 1, seed=8), 9)


def test_a_batch_larger_than_the_data_goes_round() -> None:
    """Three samples fill a batch of eight: each epoch in the batch has all of them."""
    ((found),) = micro_batches(batches(3, 8, 8, 1), 0)
    assert [sorted(found[:3]), sorted(found[3:6])] == [[0, 1, 2]] * 2


# ----------------------------------------------------------------------------------------------------- masking


def masked(seed: int = 0, pairs: bool = False, tokens: int = 60_000, **settings: Any) -> MaskedBlocks:
    return MaskedBlocks(corpus(tokens), 64, Words(), MaskedLm(**settings), seed, pairs)


def original(sample: Any) -> torch.Tensor:
    """The input before masking."""
    return torch.where(sample["labels"] == IGNORED, sample["input_ids"], sample["labels"])


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("settings", "predictions"),
    [
        ({}, 10),  # 15 % of 64, rounded
        ({"max_predictions": 4}, 4),
        ({"max_predictions": 40}, 10),
        ({"probability": 0.001}, 1),
        ({"probability": 0.99}, None),
    ],
)
def test_every_sample_has_the_same_number_of_predictions(
    pairs: bool, settings: dict[str, Any], predictions: int | None
) -> None:
    """Exactly so many, so that the mean over micro batches is the mean over the batch; never [CLS] or [SEP]."""
    samples = masked(pairs=pairs, **settings)
    expected = predictions or samples.body
    for index in range(40):
        sample = samples.sample(index, epoch=0)
        labels = sample["labels"]
        assert int((labels != IGNORED).sum()) == expected
        assert not set(labels[labels != IGNORED].tolist()) & {CLS, SEP, MASK}
        assert len(sample["input_ids"]) == len(labels) == 64


def test_masked_words_are_80_10_10() -> None:
    """Of the chosen words 80 % are masked, 10 % replaced by words from the whole vocabulary, 10 % left, in 5 sigma."""
    samples = masked()
    inputs, labels = [], []
    for index in range(len(samples)):
        sample = samples.sample(index, epoch=3)
        chosen = sample["labels"] != IGNORED
        inputs.append(sample["input_ids"][chosen])
        labels.append(sample["labels"][chosen])
    found, truth = torch.cat(inputs), torch.cat(labels)
    count = len(found)
    assert count > 9000
    other = (found != MASK) & (found != truth)
    for share, expected in (
        ((found == MASK), 0.8 + 0.1 / WORDS),
        ((found == truth), 0.1 + 0.1 / WORDS),
        (other, 0.1 * (1 - 2 / WORDS)),
    ):
        assert abs(float(share.float().mean()) - expected) < 5 * (expected * (1 - expected) / count) ** 0.5
    assert found[other].min() < 20
    assert found[other].max() > WORDS - 20


def test_every_place_is_chosen_alike() -> None:
    """No place of the sequence is preferred: counts over many samples stay in 5 sigma of even."""
    samples = masked()
    counts = sum((samples.sample(i, epoch=0)["labels"] != IGNORED).int() for i in range(len(samples)))
    assert isinstance(counts, torch.Tensor)
    expected = len(samples) * 10 / 62
    assert counts[[0, 63]].tolist() == [0, 0]
    assert (counts[1:63] - expected).abs().max() < 5 * expected**0.5


@pytest.mark.parametrize("pairs", [False, True])
def test_masking_is_a_function_of_seed_epoch_and_index(pairs: bool) -> None:
    """The same sample in any order of asking and any process; other masks in another epoch or with another seed."""

    def ids(samples: MaskedBlocks, index: int, epoch: int) -> list[int]:
        return list(samples.sample(index, epoch)["input_ids"].tolist())

    first, second = masked(pairs=pairs), masked(pairs=pairs)
    forward = [ids(first, i, 2) for i in range(9)]
    assert [ids(second, i, 2) for i in reversed(range(9))] == forward[::-1]
    assert ids(first, 4, 3) != forward[4]
    assert ids(masked(seed=1, pairs=pairs), 4, 2) != forward[4]


def test_masked_blocks_follow_each_other() -> None:
    """Without masks the samples are [CLS] words [SEP], the words the corpus in order, none left out."""
    samples = masked()
    texts = [original(samples.sample(i, epoch=0)) for i in range(len(samples))]
    assert {(int(text[0]), int(text[-1])) for text in texts} == {(CLS, SEP)}
    words = torch.cat([text[1:-1] for text in texts]).numpy()
    np.testing.assert_array_equal(words, samples.tokens[: len(words)])
    assert len(samples.tokens) - len(words) < samples.body


def test_pairs_are_two_segments_that_follow_each_other_or_not() -> None:
    """[CLS] first [SEP] second [SEP] at full length; half of the seconds, those with label 1, are from elsewhere."""
    samples = masked(pairs=True)
    labels, cuts = [], set()
    for index in range(len(samples)):
        sample = samples.sample(index, epoch=0)
        text, segments = original(sample), sample["token_type_ids"]
        ends = torch.nonzero(text == SEP).flatten().tolist()
        assert (len(text), int(text[0]), len(ends), ends[1]) == (64, CLS, 2, 63)
        assert segments.tolist() == [0] * (ends[0] + 1) + [1] * (63 - ends[0])
        words = torch.cat([text[1 : ends[0]], text[ends[0] + 1 : 63]]).numpy()
        here = samples.tokens[index * samples.body : (index + 1) * samples.body]
        related = bool((words == here).all())
        assert (words[: ends[0] - 1] == here[: ends[0] - 1]).all()
        assert int(sample["next_sentence_label"]) == (0 if related else 1)
        labels.append(int(not related))
        cuts.add(ends[0] - 1)
    assert abs(np.mean(labels) - 0.5) < 5 * 0.5 / len(labels) ** 0.5
    assert (min(cuts), max(cuts)) == (61 // 4, 61 * 3 // 4)


@pytest.mark.parametrize("missing", ["cls_token", "sep_token", "mask_token"])
def test_masking_needs_its_words(missing: str) -> None:
    """A tokenizer without [MASK], as GPT-2's, is refused by name."""
    words = Words()
    setattr(words, missing, None)
    with pytest.raises(DataError, match=f"data.tokenizer has no {missing}, .*train wordpiece"):
        MaskedBlocks(corpus(100), 64, words, MaskedLm(), 0, False)


# ----------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize(("tokens", "blocks"), [(640, 10), (639, 9), (7, 0)])
def test_blocks_are_consecutive(tokens: int, blocks: int) -> None:
    """Causal samples are the corpus in order, window by window; labels are the words themselves, the mask all ones."""
    text = corpus(tokens)
    samples = Blocks(text, 64, with_mask=True)
    assert len(samples) == blocks
    for index in range(blocks):
        sample = samples.sample(index, epoch=index)
        np.testing.assert_array_equal(sample["input_ids"].numpy(), text[64 * index : 64 * (index + 1)])
        assert torch.equal(sample["labels"], sample["input_ids"])
        assert torch.equal(sample["attention_mask"], torch.ones(64, dtype=torch.int64))


# ------------------------------------------------------------------------------------------------------- texts


def recipe(task: str, data: dict[str, Any], **model: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "t",
            "model": {
                "task": task,
                **({"factory": "m:f"} if task == "custom" else {"config": {"model_type": "bert"}}),
                **model,
            },
            "data": data,
            "batch": {"global_size": 4, "micro_size": 2},
            "optimizer": {"learning_rate": 0.1},
            "train": {"max_steps": 1},
        }
    )


@pytest.mark.parametrize(
    ("task", "trained", "keys"),
    [
        ("masked-lm", "wordpiece", {"input_ids", "labels"}),
        ("pretraining", "wordpiece", {"input_ids", "labels", "token_type_ids", "next_sentence_label"}),
        ("causal-lm", "bpe", {"input_ids", "labels", "attention_mask"}),
        ("custom", "bpe", {"input_ids", "labels"}),
    ],
)
def test_text_becomes_samples_of_the_task(
    task: str, trained: str, keys: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task on text gets the names that its models take, all of one length; evaluation has its own corpus."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("the cat sat on the mat and looked at the moon\n\n" * 30)
    (tmp_path / "b.txt").write_text("the moon looked at the cat\n\n" * 20)
    source = {"format": "text", "path": [str(tmp_path / "a.txt")]}
    evaluation = {"format": "text", "path": [str(tmp_path / "b.txt")]}
    tokenizer = {"train": trained, "vocab_size": 300}
    data = Data(
        recipe(task, {"train": source, "evaluation": evaluation, "tokenizer": tokenizer, "sequence_length": 16})
    )
    assert data.evaluation is not None
    for samples in (data.train, data.evaluation):
        sample = samples.sample(len(samples) - 1, 0)
        assert set(sample) == keys
        assert {len(value) for value in sample.values() if value.dim()} == {16}
    ends = sum(data.train.sample(i, 0)["input_ids"].tolist().count(data.tokenizer.eos_token_id) for i in range(3))
    assert (ends > 0) == (trained == "bpe")  # an end mark between documents, for models that go on with text


def test_a_corpus_shorter_than_a_sample_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than one sample: said with both numbers, before anything is built."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("one two three")
    source = {"format": "text", "path": [str(tmp_path / "a.txt")]}
    with pytest.raises(DataError, match=r"the corpus has \d+ tokens, fewer than one sample of 64"):
        Data(recipe("masked-lm", {"train": source, "tokenizer": {"train": "wordpiece"}, "sequence_length": 64}))


# ------------------------------------------------------------------------------------------------------ labels


def labelled(path: Path, lines: str, **columns: str) -> LabelledTexts:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path.write_text(lines)
    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<s>")
    return LabelledTexts(Corpus(format="jsonl", path=(str(path),), **columns), tokenizer, 4)


def test_labelled_texts(tmp_path: Path) -> None:
    """Texts are cut or padded to one length, with a mask and their class; no end mark is invented."""
    samples = labelled(
        tmp_path / "x.jsonl",
        '{"body": "a b", "stars": 0}\n{"body": "a b c a b c", "stars": 4}\n',
        text_column="body",
        label_column="stars",
    )
    assert (len(samples), samples.classes) == (2, 5)
    short, long = samples.sample(0, 0), samples.sample(1, 0)
    assert {name: value.tolist() for name, value in short.items()} == {
        "input_ids": [1, 2, 0, 0],
        "attention_mask": [1, 1, 0, 0],
        "labels": 0,
    }
    assert (long["input_ids"].tolist(), int(long["labels"])) == ([1, 2, 3, 1], 4)


GOOD = '{"text": "a", "label": 1}\n'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a"}', "no column 'label' in row 1; it has text"),
        ('{"label": 1}', "no column 'text' in row 1; it has label"),
        ('{"text": "a", "label": "good"}', "row 1: label is 'good'; a class is an integer from 0"),
        ('{"text": "a", "label": 0.5}', "row 1: label is 0.5; a class is an integer from 0"),
        ('{"text": "a", "label": true}', "row 1: label is True; a class is an integer from 0"),
        ('{"text": ["a", "b"], "label": 1}', r"row 1: text is \['a', 'b'\]; it must be text"),
        (GOOD + '{"text": "a", "label": -1}', "row 2: label is -1; a class is an integer from 0"),
        (GOOD + '{"text": "a", "label": null}', "row 2: label is None; a class is an integer from 0"),
        (GOOD * 2 + '{"text": null, "label": 1}', "row 3: text is None; it must be text"),
        ("", "has no rows"),
    ],
)
def test_bad_rows_are_named(lines: str, message: str, tmp_path: Path) -> None:
    """A row without text or without a class is told by its number, and so is that there are none."""
    with pytest.raises(DataError, match=message):
        labelled(tmp_path / "x.jsonl", lines)


def test_no_rows_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split without rows has no classes, and is said to be empty."""
    monkeypatch.setattr(data_module, "rows", lambda source: iter(()))
    with pytest.raises(DataError, match="the corpus for sequence-classification has no rows"):
        LabelledTexts(Corpus(format="hub", name="some/set"), Words(), 4)


# ---------------------------------------------------------------------------------------------------- own data


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the user's module `own_module` where Python finds it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text: str) -> None:
        sys.modules.pop("own_module", None)
        (tmp_path / "own_module.py").write_text(text)

    yield write
    sys.modules.pop("own_module", None)


FUNCTION = "def make(a, b=2):\n    return [a, b]\n"


@pytest.mark.parametrize(
    ("text", "target", "arguments", "message"),
    [
        (FUNCTION, "other_module:make", {}, "data.factory: no module 'other_module' beside the recipe"),
        (FUNCTION, "own_module.part:make", {}, "data.factory: no module 'own_module.part' beside"),
        (FUNCTION, "own_module:maker", {}, "data.factory: module 'own_module' has no function 'maker'"),
        ("make = 3", "own_module:make", {}, "data.factory: module 'own_module' has no function 'make'"),
        (FUNCTION, "own_module:make", {}, r"own_module:make\(a, b=2\) and its `arguments` differ: missing a req"),
        (FUNCTION, "own_module:make", {"a": 1, "c": 3}, "differ: got an unexpected keyword argument 'c'"),
    ],
)
def test_a_factory_that_is_not_there(
    module: Any, text: str, target: str, arguments: dict[str, Any], message: str
) -> None:
    """The module, the function or the arguments that do not fit are named."""
    module(text)
    with pytest.raises(DataError, match=message):
        call("data.factory", target, arguments)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("import own_modul", ModuleNotFoundError, "own_modul"),
        ("import torch\ntorch.no_such_name", AttributeError, "no_such_name"),
        ("def make():\n    return {}['key']", KeyError, "key"),
        ("def make():\n    return len(3)", TypeError, "int"),
    ],
)
def test_an_error_of_the_users_own_code_stays_what_it_is(
    module: Any, text: str, error: type[Exception], message: str
) -> None:
    """What goes wrong inside the user's module is not taken for a missing module or function."""
    module(text)
    with pytest.raises(error, match=message) as caught:
        call("data.factory", "own_module:make", {})
    assert not isinstance(caught.value, DataError)


def test_a_factory_gets_its_arguments(module: Any) -> None:
    """Arguments of the recipe reach the function by name."""
    module(FUNCTION)
    assert call("data.factory", "own_module:make", {"b": 5, "a": 1}) == [1, 5]


@pytest.mark.parametrize("items", [None, 3, [], iter([1]), {1, 2}])
def test_own_data_must_be_samples(items: Any) -> None:
    """What has no length or no items is refused with its type."""
    with pytest.raises(DataError, match=f"data.factory returned {type(items).__name__}; it must have samples"):
        OwnSamples(items)


@pytest.mark.parametrize("item", [3, torch.ones(2), (1, 2), "text"])
def test_a_sample_must_be_a_mapping(item: Any) -> None:
    """A tensor or a tuple does not say which argument of forward it is."""
    with pytest.raises(DataError, match=f"sample 0 of data.factory is a {type(item).__name__}; it must be a mapping"):
        OwnSamples([item]).sample(0, 0)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": torch.ones(2)}, {"x": torch.ones(3)}], r"differ in the shape of 'x': \[\(2,\), \(3,\)\]; pad them"),
        ([{"x": 1}, {"y": 1}], "differ in their names: not all have 'x'"),
        ([{"x": "text"}], "'x' of a sample is no tensor, nor what becomes one"),
        ([{"x": None}], "'x' of a sample is no tensor, nor what becomes one"),
        ([{"x": [[1], [1, 2]]}], "'x' of a sample is no tensor, nor what becomes one"),
    ],
)
def test_samples_that_do_not_stack(samples: list[Any], message: str) -> None:
    """Samples of one batch have the same names and shapes, or the difference is told."""
    with pytest.raises(DataError, match=message):
        collate(samples)


def test_numbers_lists_and_arrays_become_tensors() -> None:
    """A sample may hold tensors, numbers, lists and arrays."""
    batch = collate([{"a": 1, "b": [1.0, 2.0], "c": np.ones(2, np.float32), "d": torch.ones(1)}] * 2)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "a": (2,),
        "b": (2, 2),
        "c": (2, 2),
        "d": (2, 1),
    }
    assert batch["a"].dtype == torch.int64


def test_own_data_through_a_recipe(module: Any) -> None:
    """The recipe's factories give training and evaluation samples, without a tokenizer."""
    module("def make(n):\n    return [{'x': i} for i in range(n)]\n")
    source = {"format": "custom", "factory": "own_module:make", "arguments": {"n": 5}}
    data = Data(recipe("custom", {"train": source, "evaluation": {**source, "arguments": {"n": 3}}}))
    assert data.tokenizer is None
    assert data.evaluation is not None
    assert (len(data.train), len(data.evaluation)) == (5, 3)
    assert data.train.sample(4, epoch=9) == {"x": 4}
