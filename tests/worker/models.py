"""Small models of transformers' families on the built-in corpus, as recipes and built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import LoadedData, collate
from ortlaunch.worker.model.model import LossModule, seed_and_build_loss_module_on_cpu
from tests import makers

# Small enough that a test's model is built in a moment.
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
BERT = {"model_type": "bert", **SMALL, "max_position_embeddings": 32}
LLAMA = {"model_type": "llama", **SMALL, "max_position_embeddings": 32}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
DISTILBERT = {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
ROBERTA = {"model_type": "roberta", **SMALL, "max_position_embeddings": 40}
MISTRAL = {"model_type": "mistral", **SMALL, "num_key_value_heads": 1}
# Bloom has no sdpa attention.
BLOOM = {"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2}
WORDPIECE = {"train": "wordpiece", "vocab_size": 400}
BPE = {"train": "bpe", "vocab_size": 400}


def recipe(
    task: str, model: dict[str, Any], data: dict[str, Any] | None = None, **more: Any
) -> Recipe:
    """Return a recipe on the built-in corpus."""
    words = BPE if task == "causal-lm" else WORDPIECE
    data = {"train": "python-docs", "tokenizer": words, "sequence_length": 32, **(data or {})}
    return makers.recipe(model={"task": task, **model}, data=data, **more)


def built(
    task: str, config: dict[str, Any], data: dict[str, Any] | None = None, **more: Any
) -> Any:
    """Return the transformers model."""
    chosen = recipe(task, {"config": config, **more}, data)
    return seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen)).model


def first_loss(model: LossModule, data: LoadedData) -> torch.Tensor:
    """Return the loss of the first two training samples."""
    loss: torch.Tensor = model(**collate([data.train.sample(index, 0) for index in range(2)]))
    return loss


def labels(tmp_path: Path, classes: int, name: str = "train") -> dict[str, Any]:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(f'{{"text": "a word {i}", "label": {i}}}\n' for i in range(classes)))
    return {"format": "jsonl", "path": [str(path)]}
