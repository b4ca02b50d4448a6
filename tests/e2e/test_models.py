"""The recipes of recipes/models: each trains at reduced size, on the engine that it states."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from PIL import Image

from ortlaunch.recipe import Recipe, load_recipe
from ortlaunch.resolve import shipped
from ortlaunch.tables.families import FAMILIES
from tests.ort import needs_ort
from tests.training import records, run_here

NAMES = [name for name in shipped.shipped_recipe_names() if name.startswith("models/")]
# One of each kind of model and of data, with all weights or adapters.
IN_CI = {
    "models/llama3-8b", "models/qwen3-8b-lora", "models/gemma3-1b", "models/deberta-v3-base-lora",
    "models/modernbert-base", "models/vit-base", "models/whisper-small-lora",
}  # fmt: skip
OF_OTHER_TASKS = {
    "models/minilm-embedding", "models/minilm-embedding-tiny", "models/minilm-reranker",
    "models/minilm-reranker-tiny", "models/modernbert-retriever", "models/bert-base-squad",
    "models/t5-small-summary",
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SMALL_ENCODER = {
    **{key: value for key, value in SMALL.items() if "key_value" not in key and key != "head_dim"},
}  # fmt: skip
SMALL_WHISPER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 64,
    "max_source_positions": 50, "max_target_positions": 16, "decoder_start_token_id": 1,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip


SMALL_T5 = {
    "model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
QUESTION = {
    "question": "What?", "context": "It is a cat.",
    "answers": {"text": ["a cat"], "answer_start": [6]},
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Instructions, labelled texts, images and recordings, in the formats that the recipes read."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"instruction": f"Add {n} and {n + 1}.", "input": "", "output": str(2 * n + 1)}
        for n in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [
        {"sentence": f"text {n} is {word}", "label": word}
        for n in range(20)
        for word in ("good", "bad")
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    for task, row in (
        ("question-answering", QUESTION),
        ("seq2seq", {"text": "1 2", "target": "1"}),
    ):
        (folder / f"{task}.jsonl").write_text("\n".join([json.dumps(row)] * 8))
    for label in ("dark", "light"):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(8):
            color = (20 * number, 10, 10) if label == "dark" else (250, 20 * number, 250)
            Image.new("RGB", (40, 30), color).save(folder / "images" / label / f"{number}.png")
    with open(folder / "sounds.jsonl", "w") as lines:
        for number in range(12):
            lines.write(json.dumps({"audio": f"{number}.wav", "text": f"tone {number}"}) + "\n")
            sound = numpy.sin(numpy.arange(16_000) * 0.05 * (number + 1)) * 20_000
            with wave.open(str(folder / f"{number}.wav"), "wb") as file:
                file.setparams((1, 2, 16_000, 0, "NONE", ""))
                file.writeframes(sound.astype(numpy.int16).tobytes())
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    words = {"<pad>": 0, "<|startoftranscript|>": 1, "<|endoftext|>": 2, "tone": 3}
    words |= {str(n): 4 + n for n in range(12)}
    bare = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    bare.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>").save_pretrained(
        folder / "words"
    )
    WhisperFeatureExtractor(chunk_length=1).save_pretrained(folder / "whisper")
    size = {"height": 32, "width": 32}
    ViTImageProcessorPil(size=size).save_pretrained(folder / "vit")
    return folder


def reduced(name: str, data: Path) -> Recipe:
    """Return the recipe with a small model of its architecture, small data and three steps."""
    whole = load_recipe(shipped.shipped_recipe_path_or_refuse(name)).recipe
    changes: dict[str, Any] = {
        "precision": "fp32", "zero": None, "parallel": None, "launch": {}, "batch": {"global_size": 4, "micro_size": 2},
        "train.epochs": None, "train.max_steps": 3, "train.evaluate_every_steps": None,
        "data.evaluation": None, "checkpoint.every_steps": None, "log.every_steps": 1,
        "schedule.warmup_steps": None, "schedule.warmup_ratio": None,
    }  # fmt: skip
    if whole.engine.name == "ort":
        changes["engine.parity_steps"] = 3
    family = (whole.model.config or {}).get("model_type")
    if whole.model.traits.media:
        small: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_labels": 2}
        sizes = {key: SMALL[key] for key in whole.model.config or {} if key in SMALL}
        small = SMALL_WHISPER if family == "whisper" else {**sizes, **small}
        changes["model.config"] = {"model_type": family, **small}
        changes |= {"data.train.path": str(data / "images"), "data.processor": str(data / family)}
        if family == "whisper":
            changes |= {
                "data.train.path": str(data / "sounds.jsonl"), "data.tokenizer": str(data / "words"),
                "data.transcript_length": 8,
            }  # fmt: skip
        changes["model.pretrained"] = None
        changes["data.evaluation"] = {"share": 0.25}
        changes["train.evaluate_every_steps"] = 3
    elif whole.model.traits.data_fields:
        config = SMALL_T5 if whole.model.traits.writes else {"model_type": family, **SMALL_ENCODER}
        rows = str(data / f"{whole.model.task}.jsonl")
        changes |= {
            "model.config": config, "data.train": {"format": "jsonl", "path": rows},
            "data.evaluation": {"format": "jsonl", "path": rows}, "train.evaluate_every_steps": 3,
        }  # fmt: skip
        changes |= {"data.stride": 16} if "stride" in whole.model.traits.data_fields else {}
    elif FAMILIES[family].has_llama_layers:
        changes["model.config"] = {"model_type": family, **SMALL}
        changes["data.train"] = {
            "format": "jsonl", "path": str(data / "rows.jsonl"), "prompt": "alpaca"
        }  # fmt: skip
    else:
        changes["model.config"] = {"model_type": family, **SMALL_ENCODER}
        changes["data.train"] = {
            "format": "jsonl", "path": str(data / "texts.jsonl"), "text_column": "sentence"
        }  # fmt: skip
    if not whole.model.traits.media:
        changes |= {
            "model.pretrained": None, "data.sequence_length": 96,
            "data.tokenizer": {"train": "bpe", "vocab_size": 400},
        }  # fmt: skip
    if whole.model.traits.compares:
        changes |= {"data.train": "python-pairs", "checkpoint.keep_best": None}
        changes |= {"batch": {"global_size": 4}, "model.embedding.dimensions": []}
        if whole.model.task == "reranker":
            changes.pop("model.embedding.dimensions")
    if family == "deberta-v2":
        sizes = {**SMALL_ENCODER, "position_buckets": 16, "vocab_size": 400}
        changes["model.config"] = {"model_type": family, **sizes}
        changes["model.pretrained"] = deberta(data / "deberta", sizes)
    return load_recipe(
        shipped.shipped_recipe_path_or_refuse(name),
        [f"{key}={json.dumps(value)}" for key, value in changes.items()],
    ).recipe


def deberta(folder: Path, sizes: dict[str, Any]) -> str:
    """Save a small DeBERTa v3 from random weights, with its positions; return its folder.

    Fields of version 3 that transformers' config has no default for are only read from a file.
    """
    if not folder.exists():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            "deberta-v2", **sizes, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0,
            position_biased_input=False, share_att_key=True, norm_rel_ebd="layer_norm",
            pooler_hidden_size=sizes["hidden_size"],
        )  # fmt: skip
        auto = transformers.AutoModelForSequenceClassification
        auto.from_config(config).save_pretrained(folder)
    return str(folder)


def test_there_are_ten_models_with_two_methods() -> None:
    """Each model has a recipe for all weights and one for adapters."""
    # That of 70 billion parameters is for many hosts, and has all weights alone, as other tasks have.
    names = [name for name in NAMES if name != "models/llama3-70b" and name not in OF_OTHER_TASKS]
    models = [name for name in names if not name.endswith("-lora")]
    assert len(models) == 10
    assert sorted(names) == sorted([*models, *(f"{name}-lora" for name in models)])


@needs_ort
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.ci] if name in IN_CI else []) for name in NAMES],
)
def test_a_curated_recipe_trains(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps train, on ort with the losses and gradients of plain PyTorch."""
    monkeypatch.syspath_prepend(str(shipped.shipped_folder_or_refuse() / "models"))
    recipe = reduced(name, data)
    torch.manual_seed(0)
    run = run_here(tmp_path / "run", recipe)
    losses = [record["loss"] for record in records(run) if "loss" in record]
    assert len(losses) == 3
    engine = json.loads(run.engine.read_text())
    assert engine["engine"]["used"] == recipe.engine.name
    trained = sum(group["values"] for group in engine["optimizer"]["groups"] if group["optimizer"])
    frozen = sum(
        group["values"] for group in engine["optimizer"]["groups"] if not group["optimizer"]
    )
    assert trained > 0
    if recipe.data.evaluation is not None:
        assert any("evaluation_loss" in record for record in records(run))
        # The export is transformers' own, adapters merged.
        architecture = json.loads((run.export / "config.json").read_text())["architectures"][0]
        getattr(transformers, architecture).from_pretrained(run.export)
    # Whisper always freezes the positions of its encoder.
    assert (frozen > trained) is name.endswith("-lora")
    if recipe.engine.name == "ort":
        assert engine["parity"], engine
