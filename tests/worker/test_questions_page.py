"""The example of docs/guides/questions.md with class weights is code that trains as one whole batch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from tests.training import train_here

PAGE = (Path(__file__).parents[2] / "docs/guides/questions.md").read_text(encoding="utf-8")


def test_class_weights_add_up_over_micro_batches(tmp_path: Path) -> None:
    """With the weights as `train.loss_weight` the loss is that of the whole batch."""
    code = re.search(r"```python\n(# my_model.py\n.*?)```", PAGE, re.DOTALL)
    assert code is not None
    page: dict[str, Any] = {}
    exec(code[1], page)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ngood\nbad\nfilm\n")
    BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    # Dropout draws by micro batch.
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=8, intermediate_size=8, **sizes, **still)  # type: ignore[arg-type]
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    # Weights 3, 1, 1, 1: the micro batches count unequally.
    rows = [{"text": f"{word} film", "label": word} for word in ("bad", "good", "good", "good")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    samples = page["rows"](tmp_path / "train.jsonl", tmp_path)
    losses = []
    for micro in (4, 2):
        trained = train_here(
            tmp_path / str(micro),
            page["Weighted"](tmp_path),
            samples,
            batch={"global_size": 4, "micro_size": micro},
            train={"max_steps": 1, "loss_weight": "class_weight"},
        )
        losses += [value for _, value in trained.values("loss")]
    # The first loss, computed by hand.
    torch.manual_seed(0)
    model = page["Weighted"](tmp_path).eval()
    batch = {name: torch.tensor([each[name] for each in samples]) for name in samples[0]}
    weights = batch.pop("class_weight")
    scores = model(**batch)["logits"].log_softmax(1)
    by_class = torch.tensor(page["WEIGHTS"])
    each = 0.9 * weights * -scores.gather(1, batch["labels"][:, None])[:, 0]
    smooth = 0.1 / 2 * (-scores * by_class).sum(1)
    assert losses == pytest.approx([float((each + smooth).sum() / weights.sum())] * 2, rel=1e-6)
