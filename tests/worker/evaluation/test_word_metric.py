"""`train.metric` of language models: its inputs at each label, on all engines and ranks."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from ortlaunch.worker.data import IGNORED, UserSamples, collate
from ortlaunch.worker.evaluation.evaluation import seed_and_evaluate_loss_and_metrics_unless_stopped
from tests.ort import needs_ort
from tests.worker.evaluation.test_evaluation import SIZES, Ranks, session_of

SEEN: list[tuple[dict[str, Any], dict[str, Any]]] = []


def exact_match(outputs: dict[str, Any], batch: dict[str, Any]) -> dict[str, float]:
    """Return the share of samples that are correct in all of their words, and the worst loss."""
    SEEN.append((outputs, batch))
    counted = outputs["predictions"] != IGNORED
    whole = ((outputs["predictions"] == batch["labels"]) | ~counted).all(1)
    return {"exact_match": float(whole.mean()), "worst": float(np.nanmax(outputs["losses"]))}


class AnyRanks(Ranks):
    """A group whose ranks also exchange other values."""

    def gather(self, mine: Any) -> list[Any]:
        return self.gather_numbers(mine)

    def gather_arrays_on_rank_0(self, mine: Any) -> list[Any]:
        found = self.gather(mine)
        return found if self.rank == 0 else []


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    monkeypatch.setitem(sys.modules, "words_of_a_test", SimpleNamespace(exact_match=exact_match))


METRIC = "words_of_a_test:exact_match"


def llama_and_rows() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """Return a model and five samples of eight words, of which the first few have no labels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    ids = torch.randint(50, (5, 8))
    with torch.no_grad():
        # The only labelled word of sample 3 is predicted correctly.
        ids[3, 7] = model.eval()(ids[3:4]).logits[0, 6].argmax()
    labels = torch.where(torch.arange(8) < torch.tensor([0, 1, 2, 7, 4])[:, None], IGNORED, ids)
    return model, [{"input_ids": one, "labels": other} for one, other in zip(ids, labels)]


@pytest.mark.parametrize(
    ("engine", "chunks"),
    [
        ("eager", "off"),
        ("eager", 2),
        pytest.param("ort", 2, marks=needs_ort),
        pytest.param("inductor", "off", marks=pytest.mark.slow),
    ],
)
def test_the_next_word_on_any_engine_and_ranks(engine: str, chunks: str | int) -> None:
    """Predictions and losses are at the index of the label, and equal those of a plain pass."""
    model, rows = llama_and_rows()
    whole = collate(rows)
    with torch.no_grad():
        logits = model(whole["input_ids"]).logits[:, :-1]
    labels = whole["labels"][:, 1:]
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").numpy()
    session = session_of(
        "causal-lm", copy.deepcopy(model), rows, metric=METRIC, name=engine, chunked_loss=chunks
    )
    assert session.engine.record.chunked_loss.rows == (None if chunks == "off" else 2)
    for size in (1, 2, 4):
        session.group = AnyRanks(size)
        for found in session.group.evaluated(session, UserSamples(rows)):
            assert found is not None
            assert found["exact_match"] == pytest.approx(0.2), size
            assert found["worst"] == pytest.approx(losses.max(), rel=1e-5)
            assert "masked_word_accuracy" not in found
    outputs, batch = SEEN[-1]
    assert [*outputs] == ["predictions", "losses"]
    np.testing.assert_array_equal(batch["labels"], whole["labels"].numpy())
    counted = (labels != IGNORED).numpy()
    likely = logits.argmax(-1).numpy()
    np.testing.assert_array_equal(outputs["predictions"][:, 1:], np.where(counted, likely, IGNORED))
    np.testing.assert_allclose(
        outputs["losses"][:, 1:], np.where(counted, losses, np.nan), rtol=1e-5
    )
    # No word precedes the first one, which is therefore not predicted.
    assert (outputs["predictions"][:, 0] == IGNORED).all()
    assert np.isnan(outputs["losses"][:, 0]).all()


def test_masked_words_and_pairs() -> None:
    """Predictions of masked words are at their own index; scores of sentence pairs are added."""
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig(**SIZES)).eval()
    ids = torch.randint(50, (5, 8))
    labels = torch.where(torch.arange(8) % 3 == 0, ids, IGNORED)
    rows = [
        {"input_ids": i, "labels": w, "next_sentence_label": torch.tensor(1)}
        for i, w in zip(ids, labels)
    ]
    with torch.no_grad():
        whole = model(ids)
    seed_and_evaluate_loss_and_metrics_unless_stopped(
        session := session_of("pretraining", model, rows, metric=METRIC), UserSamples(rows)
    )
    outputs, batch = SEEN[-1]
    likely = torch.where(labels == IGNORED, IGNORED, whole.prediction_logits.argmax(-1))
    np.testing.assert_array_equal(outputs["predictions"], likely.numpy())
    scores = whole.seq_relationship_logits.detach().numpy()
    np.testing.assert_allclose(outputs["seq_relationship_logits"], scores, rtol=1e-5, atol=1e-6)
    assert session.engine.plain.model.training
    assert sorted(batch) == ["input_ids", "labels", "next_sentence_label"]


def test_without_a_metric_no_scores_leave_the_model() -> None:
    """Without `train.metric` a causal model returns no scores."""
    # Its logits would cost memory and time.
    model, rows = llama_and_rows()
    assert not session_of("causal-lm", model, rows).engine.plain.evaluates_with_scores
