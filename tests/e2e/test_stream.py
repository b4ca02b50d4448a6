"""A whole training on streamed text, which goes on in another world as if it had not stopped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.runs import EAGER, TWO_RANKS, Train, ended_well, merged

RECIPE = {
    "name": "streamed",
    "model": {
        "task": "causal-lm",
        "config": {
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300,
            "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
        },
    },
    "data": {
        "train": {
            "format": "text", "path": "shards/*.txt", "document": "line",
            "stream": {"buffer": "1MiB", "shuffle": 16},
        },
        "tokenizer": "./words",
        "sequence_length": 16,
    },
    "batch": {"global_size": 12, "micro_size": 6},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
    "schedule": {"name": "constant"},
    "train": {"max_steps": 10},
    "checkpoint": {"every_steps": 3},
    "log": {"every_steps": 1},
}  # fmt: skip


def write_shards(home: Path) -> None:
    """Write files of text, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    chance = random.Random(7)
    (home / "shards").mkdir()
    for shard in range(4):
        lines = (f"{shard} {n} {chance.randrange(10**6)}\n" for n in range(60))
        (home / f"shards/{shard}.txt").write_text("".join(lines))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE({each: n for n, each in enumerate([*alphabet, "</s>"])}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=whole, eos_token="</s>", pad_token="</s>"
    ).save_pretrained(home / "words")


@pytest.mark.slow
def test_a_streamed_training_goes_on_in_another_world(train: Train, home: Path) -> None:
    """Two ranks stop after 4 steps, and one goes on: losses are those of an uninterrupted run."""
    write_shards(home)
    whole = ended_well(train("whole", merged(RECIPE, EAGER)))
    recipe = merged(RECIPE, {**EAGER, "train": {"max_steps": 4}})
    ended_well(train("parts", recipe, *TWO_RANKS))
    # The tokens of the stopped run are gone: the file is read again from the checkpoint's window.
    assert not (home / "parts/stream").exists()
    last = ended_well(train("parts", merged(RECIPE, EAGER)))
    assert "resumed after step 4" in last.out
    for run in (whole, last):
        assert "of the stream's next window; later ones are not audited" in " ".join(
            run.out.split()
        )
    assert last.losses() == pytest.approx(whole.losses(), abs=1e-5)
