"""Samples of a text to read and a text to write; longer texts are named, or cut where it is asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortlaunch.base.errors import InputError, MissingDependency
from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data import IGNORED, collate, cut_padding_to_shortest_fitting_bucket
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.labelled.sequence_pairs import SequencePairs
from ortlaunch.worker.evaluation.written_texts import import_text_metrics_if_model_writes
from ortlaunch.worker.onnx.onnx_export import three_text_batches_of_own_data
from tests.makers import recipe

pytestmark = pytest.mark.usefixtures("own_cache")


def pairs(folder: Path, *rows: tuple[Any, Any], **settings: Any) -> SequencePairs:
    from transformers import BertTokenizerFast

    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdef"]))
    lines = [json.dumps({"text": text, "target": target}) + "\n" for text, target in rows]
    (folder / "x.jsonl").write_text("".join(lines))
    source = Corpus(format="jsonl", path=(str(folder / "x.jsonl"),), source_prefix="f ")
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    return SequencePairs(source, tokenizer, 6, target_length=6, **settings)


def test_pairs(tmp_path: Path) -> None:
    """Labels are padded with -100 and are no shorter where the text that is read is short."""
    samples = pairs(tmp_path, ("a", "a b c"), ("a b", "c"))
    assert samples.sample(0, 0)["input_ids"].tolist() == [2, 9, 4, 3, 0, 0]
    labels = [[2, 4, 5, 6, 3, IGNORED], [2, 6, 3, IGNORED, IGNORED, IGNORED]]
    assert [samples.sample(n, 0)["labels"].tolist() for n in (0, 1)] == labels
    assert [samples.size(n) for n in (0, 1)] == [4, 5]
    # There are as many labels as tokens to read.
    batch = cut_padding_to_shortest_fitting_bucket(collate([samples.sample(0, 0)]), [4])
    assert batch["input_ids"].shape == (1, 4)
    assert batch["labels"].tolist() == labels[:1]
    cut = pairs(tmp_path, ("a b c d e", "e d c b a"), cut_long=True).sample(0, 0)
    assert cut["input_ids"].tolist() == [2, 9, 4, 5, 6, 3]
    assert cut["labels"].tolist() == [2, 8, 7, 6, 5, 3]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("a b c d", "a"), "x.jsonl:2: the text that is read has 7 tokens, and "
                           "data.sequence_length is 6; enlarge it, or cut .* data.cut_long=true"),
        (("a", "a b c d e"), "x.jsonl:2: the text to write has 7 tokens, and data.target_length is 6"),
        ((" ", "a"), "x.jsonl:2: text is ' '; it must be text"),
        (("a", None), "x.jsonl:2: target is None; it must be text"),
    ],
)  # fmt: skip
def test_bad_pairs_are_named(row: tuple[Any, Any], message: str, tmp_path: Path) -> None:
    """A text that is missing or too long is an error with file and line."""
    with pytest.raises(DataError, match=message):
        pairs(tmp_path, ("a", "a"), row)


def test_packages_of_text_metrics_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training whose model writes ends before step 1 where a package of its metrics is missing."""
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    writes = recipe(train={"max_steps": 1, "generate": {}})
    with pytest.raises(MissingDependency, match=r'sacrebleu: pip install "ortlaunch\[metrics\]"'):
        import_text_metrics_if_model_writes(writes)
    assert import_text_metrics_if_model_writes(recipe()) is None


def test_a_model_that_writes_has_no_single_graph() -> None:
    """`export --format onnx` of a model with an encoder and a decoder of text says what does it."""
    model: Any = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    with pytest.raises(InputError, match=r"reads and writes text, .* `optimum-cli export onnx`"):
        three_text_batches_of_own_data(model, recipe())  # type: ignore[arg-type]
