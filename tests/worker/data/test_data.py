"""The data of a recipe: samples of each step, samples of texts by task, and the user's own data."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from datasets import Dataset
from pandas import DataFrame
from torch.utils.data import DataLoader

from ortlaunch.launch_plan import BatchPlan
from ortlaunch.worker.data import (
    Batches,
    LoadedData,
    UserSamples,
    collate,
    seed_and_call_user_function,
)
from ortlaunch.worker.data.file_rows import DataError
from tests.makers import recipe

Corpora = Callable[[str, str], dict[str, Any]]


class Numbers:
    """Any number of samples; each is its own index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": index}


def own(count: int) -> UserSamples:
    return UserSamples(Numbers(count))


def batches(count: int, total: int, micro: int, ranks: int, seed: int = 7) -> Batches:
    return Batches(own(count), BatchPlan(total, micro, total // (micro * ranks), ranks, None), seed)


def micro_batches(source: Batches, step: int) -> list[list[int]]:
    """Return the micro batches of a step for every rank, pass by pass."""
    b = source.batch
    return [
        source.read_micro_batch_and_count_tokens(step, accumulation, rank)["x"].tolist()
        for accumulation in range(b.accumulation_steps)
        for rank in range(b.data_parallel_ranks)
    ]


# ------------------------------------------------------------------------------------------------------- order


# With 100 samples and 16 in a step, step 6 spans two epochs.
@pytest.mark.parametrize("step", [0, 1, 5, 6, 1000])
@pytest.mark.parametrize("count", [100, 500_000_000])
@pytest.mark.parametrize(
    ("micro", "ranks"), [(4, 1), (4, 2), (4, 4), (2, 4), (8, 2), (16, 1), (1, 1)]
)
def test_a_step_sees_the_same_samples_on_any_world(
    micro: int, ranks: int, step: int, count: int
) -> None:
    """A step has the same samples for any ranks; with equal micro_size the same micro batches."""
    alone = micro_batches(batches(count, 16, 4, 1), step)
    found = micro_batches(batches(count, 16, micro, ranks), step)
    assert sorted(chain(*found)) == sorted(chain(*alone))
    # The order of samples within a step is the same, too.
    if micro == 4:
        assert found == alone


def test_an_epoch_sees_each_sample_once_and_the_next_is_shuffled_anew() -> None:
    """Each epoch has each sample once, in a new order."""
    source = batches(100, 16, 4, 2)
    # 19 steps of 16 samples cover three epochs of 100.
    seen = [
        number for step in range(19) for micro in micro_batches(source, step) for number in micro
    ][:300]
    epochs = [seen[start : start + 100] for start in (0, 100, 200)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(100))] * 3
    # Three different orders, none of them sorted.
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(100))}) == 4


@pytest.mark.parametrize("count", [100, 500_000_000])
def test_order_is_a_function_of_seed_and_step(count: int) -> None:
    """Step 9 is the same with and without the steps before it, and differs with another seed."""
    # A resumed run begins in the middle.
    after_others = batches(count, 16, 4, 1)
    for step in range(9):
        micro_batches(after_others, step)
    assert micro_batches(after_others, 9) == micro_batches(batches(count, 16, 4, 1), 9)
    assert micro_batches(after_others, 9) != micro_batches(batches(count, 16, 4, 1, seed=8), 9)


def test_a_batch_larger_than_the_data_goes_round() -> None:
    """A batch larger than the data has each sample once for each epoch in it."""
    ((found),) = micro_batches(batches(3, 8, 8, 1), 0)
    assert [sorted(found[:3]), sorted(found[3:6])] == [[0, 1, 2]] * 2


# ------------------------------------------------------------------------------------------------------- texts


def data_of(task: str, **data: Any) -> LoadedData:
    """Return the data of a recipe for this task."""
    model = {"factory": "m:f"} if task == "custom" else {"config": {"model_type": "bert"}}
    return LoadedData(recipe(model={"task": task, **model}, data=data))


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpora:
    """Return a function that writes a text file and returns it as a corpus, with a new cache."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))

    def write(name: str, text: str) -> dict[str, Any]:
        (tmp_path / name).write_text(text)
        return {"format": "text", "path": [str(tmp_path / name)]}

    return write


@pytest.mark.parametrize(
    ("task", "trained", "keys"),
    [
        ("masked-lm", "wordpiece", {"input_ids", "labels"}),
        (
            "pretraining",
            "wordpiece",
            {"input_ids", "attention_mask", "labels", "token_type_ids", "next_sentence_label"},
        ),
        ("causal-lm", "bpe", {"input_ids", "labels", "attention_mask"}),
        ("custom", "bpe", {"input_ids", "labels"}),
    ],
)
def test_text_becomes_samples_of_the_task(
    task: str, trained: str, keys: set[str], corpus: Corpora
) -> None:
    """Samples of each task have the names that its models expect, and one length."""
    data = data_of(
        task,
        train=corpus("a.txt", "the cat sat on the mat and looked at the moon\n\n" * 30),
        evaluation=corpus("b.txt", "the moon looked at the cat\n\n" * 20),
        tokenizer={"train": trained, "vocab_size": 300},
        sequence_length=16,
    )
    assert data.evaluation is not None
    assert len(data.evaluation) < len(data.train)
    for samples in (data.train, data.evaluation):
        sample = samples.sample(len(samples) - 1, 0)
        assert set(sample) == keys
        assert {len(value) for value in sample.values() if value.dim()} == {16}
    ends = sum(
        data.train.sample(i, 0)["input_ids"].tolist().count(data.tokenizer.eos_token_id)
        for i in range(3)
    )
    # Models that continue text have an end mark between documents.
    assert (ends > 0) == (trained == "bpe")


@pytest.fixture
def llama_like(tmp_path: Path, corpus: Corpora) -> Callable[[bool], str]:
    """Return a function that saves a BPE tokenizer with or without <s> before a text."""

    def save(begins: bool) -> str:
        from tokenizers.processors import TemplateProcessing

        words = {"train": "bpe", "vocab_size": 300}
        tokenizer = data_of(
            "causal-lm", train=corpus("w.txt", "a b " * 40), tokenizer=words, sequence_length=8
        ).tokenizer
        if begins:
            template = TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
            )
            tokenizer.backend_tokenizer.post_processor = template
        tokenizer.save_pretrained(tmp_path / f"begins-{begins}")
        return str(tmp_path / f"begins-{begins}")

    return save


def test_documents_begin_as_a_pretrained_tokenizer_begins_them(
    llama_like: Callable[[bool], str], corpus: Corpora
) -> None:
    """Packed documents begin with the begin mark of a pretrained tokenizer, if it has one."""
    source = corpus("a.txt", "a b a b\n\n" * 40)
    found = []
    # The first tokenizer again, to show that the cache keeps the two apart.
    for begins in (False, True, False):
        words = llama_like(begins)
        data = data_of("causal-lm", train=source, tokenizer=words, sequence_length=20)
        ids = data.train.sample(0, 0)["input_ids"].tolist()
        end = data.tokenizer.eos_token_id
        begin = data.tokenizer.bos_token_id
        # At the beginning of the sample, after an end mark, and in all.
        found.append([ids[0] == begin, ids[ids.index(end) + 1] == begin, ids.count(begin)])
    assert found == [[False, False, 0], [True, True, ids.count(end)], [False, False, 0]]


def test_a_corpus_shorter_than_a_sample_is_an_error(corpus: Corpora) -> None:
    """A corpus with fewer tokens than one sample is an error with both numbers."""
    short = corpus("a.txt", "one two three")
    with pytest.raises(DataError, match=r"has \d+ tokens, fewer than one sample of 64"):
        data_of("masked-lm", train=short, tokenizer={"train": "wordpiece"}, sequence_length=64)


# ---------------------------------------------------------------------------------------------------- own data


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that writes the user's module `own_module` on Python's path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    # Cached bytecode would be used for another module that is written in the same second.
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
        (
            FUNCTION,
            "other_module:make",
            {},
            "data.factory: no module 'other_module' beside the recipe",
        ),
        (FUNCTION, "own_module.part:make", {}, "data.factory: no module 'own_module.part' beside"),
        (
            FUNCTION,
            "own_module:maker",
            {},
            "data.factory: module 'own_module' has no function 'maker'",
        ),
        (
            "make = 3",
            "own_module:make",
            {},
            "data.factory: module 'own_module' has no function 'make'",
        ),
        (
            FUNCTION,
            "own_module:make",
            {},
            r"own_module:make\(a, b=2\) and its `arguments` differ: missing a req",
        ),
        (
            FUNCTION,
            "own_module:make",
            {"a": 1, "c": 3},
            "differ: got an unexpected keyword argument 'c'",
        ),
    ],
)
def test_a_factory_that_is_not_there(
    module: Any, text: str, target: str, arguments: dict[str, Any], message: str
) -> None:
    """A missing module or function, or arguments that do not match, are named."""
    module(text)
    with pytest.raises(DataError, match=message):
        seed_and_call_user_function("data.factory", target, arguments, 0)


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
    """An error inside the user's module is raised unchanged."""
    module(text)
    # A module that is missing within the user's module is not the module of the recipe.
    with pytest.raises(error, match=message) as caught:
        seed_and_call_user_function("data.factory", "own_module:make", {}, 0)
    assert not isinstance(caught.value, DataError)


def test_a_factory_gets_its_arguments(module: Any) -> None:
    """Arguments of the recipe are passed to the function by name."""
    module(FUNCTION)
    assert seed_and_call_user_function("data.factory", "own_module:make", {"b": 5, "a": 1}, 0) == [
        1,
        5,
    ]


@pytest.mark.parametrize("length", [-1, 1.5, 10**30])
def test_a_length_that_is_no_number_of_samples(length: float) -> None:
    """A `__len__` that Python does not take is an error of the user's data."""

    class Odd:
        def __len__(self) -> Any:
            return length

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(DataError, match="returned Odd, whose __len__ is no number of samples: "):
        UserSamples(Odd())


class Ordered(torch.utils.data.IterableDataset[int]):
    """Samples in one order, with a length; torch's class has a `__getitem__` that raises."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter([1])


ROWS = [{"x": [1.0, 2.0], "y": 3}, {"x": [4.0, 5.0], "y": 6}]
COLUMNS = {"x": [[1.0, 2.0], [4.0, 5.0]], "y": [3, 6]}


def test_own_data_that_is_empty() -> None:
    """A data set without samples says so."""
    with pytest.raises(
        DataError, match=r"^data\.train\.factory returned list, which is empty; it must"
    ):
        UserSamples([], recipe_key="data.train.factory")


@pytest.mark.parametrize(
    ("items", "form"),
    [
        (None, ""),
        (3, ""),
        ([], ""),
        (iter(ROWS), "list(samples)"),
        (Ordered(), "list(samples)"),
        (Dataset.from_list(ROWS).to_iterable_dataset(), "list(samples)"),
        (COLUMNS, "[dict(zip(columns, row)) for row in zip(*columns.values())]"),
        ({"train": ROWS}, "return one of its values"),
        (DataFrame(ROWS), "table.to_dict('records')"),
        (pyarrow.Table.from_pylist(ROWS), "table.to_pylist()"),
        (DataLoader(ROWS), "loader.dataset"),  # type: ignore[arg-type]
    ],
    ids=lambda value: type(value).__name__,
)
def test_own_data_must_be_samples(items: Any, form: str) -> None:
    """An object without samples by number is refused with its type and the form that works."""
    key = "data.evaluation.factory"
    message = f"{key} returned {type(items).__name__}.* (must have|return).*{re.escape(form)}"
    with pytest.raises(DataError, match=message):
        UserSamples(items, recipe_key=key)
    # The form is code, which gives samples.
    if "(" in form or "." in form:
        values = dict.fromkeys(("samples", "columns", "table", "loader"), items)
        made = eval(form, values)
        assert (
            len(made) == len(items) if hasattr(items, "__len__") and items is not COLUMNS else made
        )


def test_a_data_set_of_hugging_face_is_samples() -> None:
    """A `datasets.Dataset` is taken as it is; its lists become tensors."""
    samples = UserSamples(Dataset.from_list(ROWS))
    batch = collate([samples.sample(index, 0) for index in range(2)])
    assert {name: each.tolist() for name, each in batch.items()} == COLUMNS


@pytest.mark.parametrize("item", [3, torch.ones(2), (1, 2), "text"])
def test_a_sample_must_be_a_mapping(item: Any) -> None:
    """A sample that is no mapping is refused, as it does not name the arguments of forward."""
    with pytest.raises(
        DataError,
        match=f"sample 0 of data.train.factory is a {type(item).__name__}; it must be a mapping",
    ):
        UserSamples([item]).sample(0, 0)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [{"x": torch.ones(2)}, {"x": torch.ones(3)}],
            r"differ in the shape of 'x': \[\(2,\), \(3,\)\]; pad them",
        ),
        ([{"x": 1}, {"y": 1}], "differ in their names: not all have 'x'"),
        ([{"x": "text"}], "'x' of a sample cannot become a tensor"),
        ([{"x": None}], "'x' of a sample cannot become a tensor"),
        ([{"x": [[1], [1, 2]]}], "'x' of a sample cannot become a tensor"),
    ],
)
def test_samples_that_do_not_stack(samples: list[Any], message: str) -> None:
    """Samples of one batch that differ in names or shapes are an error with the difference."""
    with pytest.raises(DataError, match=message):
        collate(samples)


def test_numbers_lists_and_arrays_become_tensors() -> None:
    """Tensors, numbers, lists and arrays of samples become tensors of a batch."""
    batch = collate(
        [{"a": 1, "b": [1.0, 2.0], "c": np.ones(2, np.float32), "d": torch.ones(1)}] * 2
    )
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "a": (2,),
        "b": (2, 2),
        "c": (2, 2),
        "d": (2, 1),
    }
    assert batch["a"].dtype == torch.int64


def test_own_data_through_a_recipe(module: Any) -> None:
    """The recipe's factories make training and evaluation samples without a tokenizer."""
    module("def make(n):\n    return [{'x': i} for i in range(n)]\n")
    source = {"format": "custom", "factory": "own_module:make", "arguments": {"n": 5}}
    data = data_of("custom", train=source, evaluation={**source, "arguments": {"n": 3}})
    assert data.tokenizer is None
    assert data.evaluation is not None
    assert (len(data.train), len(data.evaluation)) == (5, 3)
    assert data.train.sample(4, epoch=9) == {"x": 4}
