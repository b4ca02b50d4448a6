"""What an evaluation counts: words, sentence pairs and classes, as references give them, on any number of ranks."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ortlaunch.rank import Rank
from ortlaunch.worker.data import IGNORED, Batches, OwnSamples, collate
from ortlaunch.worker.distributed import DistributedContext
from ortlaunch.worker.engine import build_engine
from ortlaunch.worker.evaluation import _metrics, counts_of, evaluate, f1_macro, pearson
from ortlaunch.worker.model import LossModule
from ortlaunch.worker.progress import Progress
from tests.makers import plan, recipe


def test_words_and_pairs() -> None:
    """Masked words alone count, with transformers' mean loss; sentence pairs beside them."""
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(0)
    model = BertForPreTraining(
        BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ).eval()
    ids = torch.randint(50, (4, 9))
    labels = torch.where(torch.rand(4, 9) < 0.4, ids, IGNORED)
    with torch.no_grad():
        output = model(ids)
        words = output.prediction_logits
        labels[0, 0] = words[0, 0].argmax()
        pairs = output.seq_relationship_logits.argmax(-1)
        pairs[0] = 1 - pairs[0]
        found = counts_of(output, {"labels": labels, "next_sentence_label": pairs})
    counted = int((labels != IGNORED).sum())
    right = sum(int(words[i, j].argmax() == labels[i, j]) for i in range(4) for j in range(9))
    lost = torch.nn.functional.cross_entropy(words.transpose(1, 2), labels, reduction="mean") * counted
    assert found["words"].tolist() == pytest.approx([right, counted, float(lost)], rel=1e-6)
    assert 0 < right < counted
    assert found["pairs"].tolist() == [3, 4]


def test_classes() -> None:
    """Accuracy and macro F1 are torchmetrics'; a class that was neither given nor meant is none."""
    metrics = pytest.importorskip("torchmetrics.functional.classification")
    logits, labels = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4
    logits[:, 4] = -9
    found = {name: value.tolist() for name, value in counts_of({"logits": logits}, {"labels": labels}).items()}
    expected = metrics.multiclass_f1_score(logits, labels, num_classes=5, average="macro")
    assert f1_macro(found["right"], found["given"], found["meant"]) == pytest.approx(float(expected))
    assert sum(found["right"]) == int((logits.argmax(-1) == labels).sum())
    assert sum(found["meant"]) == 40


@pytest.mark.parametrize(
    ("output", "labels"),
    [({"loss": 1}, torch.zeros(3)), ({"logits": torch.zeros(3, 2)}, torch.zeros(3)),
     ({"logits": torch.zeros(3, 1)}, torch.zeros(3, dtype=torch.int64))],
    ids=["no logits", "other numbers", "one output"],
)  # fmt: skip
def test_regressions_have_no_classes(output: dict[str, torch.Tensor], labels: torch.Tensor) -> None:
    """Nothing is counted where there is nothing to be right about."""
    assert counts_of(output, {"labels": labels}) == {}


def test_numbers() -> None:
    """Mean squared error and Pearson's correlation are torchmetrics'; of what does not vary there is no correlation."""
    metrics = pytest.importorskip("torchmetrics.functional")
    draw = torch.Generator().manual_seed(0)
    meant = 5 + torch.randn(50, generator=draw)
    given = meant + torch.randn(50, generator=draw)
    halves = [
        counts_of({"logits": x[:, None]}, {"labels": y})["sums"] for x, y in zip(given.split(20), meant.split(20))
    ]
    sums = sum(halves).tolist()
    found = _metrics(SimpleNamespace(recipe=recipe(), engine=None), 0.0, {"sums": sums})
    assert found["mse"] == pytest.approx(float(metrics.mean_squared_error(given, meant)), rel=1e-5)
    assert found["pearson"] == pytest.approx(float(metrics.pearson_corrcoef(given, meant)), rel=1e-5)
    constant = counts_of({"logits": given[:, None]}, {"labels": torch.ones(50)})["sums"].tolist()
    assert math.isnan(pearson(*constant))


def test_tagged_words_are_counted_where_they_have_a_tag() -> None:
    """Accuracy and macro F1 over first pieces, as torchmetrics' with ignore_index."""
    metrics = pytest.importorskip("torchmetrics.functional.classification")
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(6, 9, 4, generator=draw), torch.randint(4, (6, 9), generator=draw)
    labels[torch.rand(6, 9, generator=draw) < 0.5] = IGNORED
    counts = counts_of({"logits": logits}, {"labels": labels}, task="token-classification")
    found = _metrics(
        SimpleNamespace(recipe=recipe(), engine=None), 0.0, {name: each.tolist() for name, each in counts.items()}
    )
    both, options = (logits.transpose(1, 2), labels), {"num_classes": 4, "ignore_index": IGNORED}
    accuracy = metrics.multiclass_accuracy(*both, average="micro", **options)
    assert found["classification_accuracy"] == pytest.approx(float(accuracy))
    assert found["f1_macro"] == pytest.approx(float(metrics.multiclass_f1_score(*both, average="macro", **options)))


SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


class Ranks:
    """Group of one rank after the other: what each sends is kept, and in a second round all of it is there."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.sent, self.call = size, 0, dict[tuple[int, int], list[float]](), 0

    def gather_numbers(self, mine: list[float]) -> list[list[float]]:
        self.call += 1
        self.sent[self.rank, self.call] = mine
        return [self.sent.get((rank, self.call), mine) for rank in range(self.size)]

    def evaluated(self, session: Any, samples: Any) -> list[dict[str, float] | None]:
        """What each rank finds."""
        for _ in range(2):
            found = []
            for rank in range(self.size):
                self.rank, self.call = rank, 0
                found.append(evaluate(session, samples))
        return found


def session_of(task: str, model: Any, rows: list[dict[str, torch.Tensor]], **engine: Any) -> Any:
    made = recipe(
        model={"task": task, "config": {"model_type": "bert", **SIZES}}, batch={"global_size": 3, "micro_size": 3},
        engine={"name": "eager", **engine},
    )  # fmt: skip
    planned, alone = plan(made), DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    batches, wrapped = Batches(OwnSamples(rows), planned.batch, 0), LossModule(model.train())
    built = build_engine(made, planned, wrapped, alone, batches.micro_batch(0, 0, 0))
    return SimpleNamespace(
        engine=built, recipe=made, plan=planned, progress=Progress(rank=1), group=alone, batches=batches
    )


@pytest.mark.parametrize("chunks", ["off", 2])
def test_one_number_on_any_ranks(chunks: str | int) -> None:
    """Eight samples with unequal labels, on 1, 2 and 4 ranks whose last batches are short or empty: as at once.

    With the loss in chunks, too, though the model then hands out no logits; and the model is left as it trains.
    """
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig(**SIZES, hidden_dropout_prob=0.5))
    ids = torch.randint(50, (8, 8))
    labels = torch.where(torch.arange(8) < torch.arange(8)[:, None] % 4 + 1, ids, IGNORED)
    with torch.no_grad():
        labels[:, 0] = model.eval()(ids).prediction_logits[:, 0].argmax(-1)  # some are right
    rows = [{"input_ids": i, "labels": w, "next_sentence_label": torch.tensor(1)} for i, w in zip(ids, labels)]
    with torch.no_grad():
        whole = model(**collate(rows))
    places = labels != IGNORED
    lost = torch.nn.functional.cross_entropy(whole.prediction_logits[places], labels[places])
    right = (whole.prediction_logits.argmax(-1) == labels)[places].float().mean()
    pairs = (whole.seq_relationship_logits.argmax(-1) == 1).float().mean()
    expected = {
        "perplexity": float(lost.exp()), "masked_word_accuracy": float(right), "next_sentence_accuracy": float(pairs)
    }  # fmt: skip
    session = session_of("pretraining", model, rows, chunked_loss=chunks)
    assert session.engine.record.chunked_loss.rows == (None if chunks == "off" else 2)
    for size in (1, 2, 4):
        session.group = Ranks(size)
        for found in session.group.evaluated(session, OwnSamples(rows)):
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5), size
    assert model.training
    assert 0 < expected["masked_word_accuracy"] < 1


def test_classes_on_any_ranks() -> None:
    """Accuracy and macro F1 of seven samples are scikit-learn's, or a plain loop's, on 1, 2 and 4 ranks."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3))
    rows = [{"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(i % 3)} for i in range(7)]
    with torch.no_grad():
        given = model.eval()(collate(rows)["input_ids"]).logits.argmax(-1).tolist()
    meant = [int(row["labels"]) for row in rows]
    session = session_of("sequence-classification", model, rows)
    for size in (1, 2, 4):
        session.group = Ranks(size)
        for found in session.group.evaluated(session, OwnSamples(rows)):
            right = sum(one == other for one, other in zip(given, meant)) / 7
            assert found["classification_accuracy"] == pytest.approx(right)
            assert found["f1_macro"] == pytest.approx(f1_by_hand(given, meant))


def test_metrics_are_of_the_engines_own_pass() -> None:
    """Engine ort hands out what it evaluated, head in chunks or not; PyTorch neither passes nor exports once more."""
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ids = torch.randint(50, (5, 8))  # the last batch is one short
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    cases = (
        ("causal-lm", lambda _: llama, list(ids), {}),  # asks the size of a batch in Python
        ("sequence-classification", BertForSequenceClassification, [torch.tensor(i % 3) for i in range(5)], {}),
        ("masked-lm", BertForMaskedLM, list(ids), {}),
        ("masked-lm", BertForMaskedLM, list(ids), {"chunked_loss": 2}),
    )
    for task, kind, labels, engine in cases:
        model = kind(BertConfig(**SIZES, num_labels=3))
        rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels)]
        session = session_of(task, copy.deepcopy(model), rows, **engine)
        expected = evaluate(session, OwnSamples(rows))
        passes: list[Any] = []
        model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        session = session_of(task, model, rows, name="ort", **engine)
        evaluate(session, OwnSamples(rows))  # exports
        passes.clear()
        assert evaluate(session, OwnSamples(rows)) == pytest.approx(expected, rel=1e-5), task
        assert not passes, task


def f1_by_hand(given: list[int], meant: list[int]) -> float:
    try:
        from sklearn.metrics import f1_score
    except ImportError:
        each = []
        for kind in {*given, *meant}:
            hits = sum(one == other == kind for one, other in zip(given, meant))
            each.append(2 * hits / (given.count(kind) + meant.count(kind)))
        return sum(each) / len(each)
    return float(f1_score(meant, given, average="macro", zero_division=0))
