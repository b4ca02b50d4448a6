"""What an evaluation counts: words, sentence pairs and classes, as references give them."""

from __future__ import annotations

import pytest
import torch

from ortlaunch.worker.data import IGNORED
from ortlaunch.worker.evaluation import counts_of, f1_macro


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
    [({"loss": 1}, torch.zeros(3)), ({"logits": torch.zeros(3, 1)}, torch.zeros(3)),
     ({"logits": torch.zeros(3, 1)}, torch.zeros(3, dtype=torch.int64))],
    ids=["no logits", "numbers", "one output"],
)  # fmt: skip
def test_regressions_have_no_classes(output: dict[str, torch.Tensor], labels: torch.Tensor) -> None:
    """Nothing is counted where there is nothing to be right about."""
    assert counts_of(output, {"labels": labels}) == {}
