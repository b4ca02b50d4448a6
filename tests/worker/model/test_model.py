"""Models of transformers from configs: loss, fields, labels, attention and adapters."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import WhisperConfig

from ortlaunch.base.errors import InputError
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.model.model import (
    LossModule,
    build_transformers_config_fitting_data_or_refuse,
    refuse_data_exceeding_model_sizes,
    seed_and_build_loss_module_on_cpu,
)
from tests.makers import bert
from tests.worker.models import (
    BERT,
    BLOOM,
    BPE,
    DISTILBERT,
    GPT2,
    LLAMA,
    MISTRAL,
    ROBERTA,
    WORDPIECE,
    built,
    first_loss,
    labels,
    recipe,
)

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("pretraining", BERT),
        ("masked-lm", BERT),
        ("masked-lm", DISTILBERT),
        ("masked-lm", ROBERTA),
        ("causal-lm", LLAMA),
        ("causal-lm", GPT2),
        ("causal-lm", MISTRAL),
        ("causal-lm", BLOOM),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_families_give_a_loss(task: str, config: dict[str, Any]) -> None:
    """A model of each family fits its tokenizer and data, and all its weights get gradients."""
    # With random weights the loss is that of equal probabilities.
    chosen = recipe(task, {"config": config})
    data = LoadedData(chosen)
    model = seed_and_build_loss_module_on_cpu(chosen, data)
    loss = first_loss(model, data)
    # 400 words are equally likely; ln 2 is the loss of a sentence pair.
    expected = torch.tensor(400.0).log() + (0.69 if task == "pretraining" else 0.0)
    assert loss.shape == ()
    assert abs(float(loss.detach() - expected)) < 0.5
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    inner: Any = model.model
    assert (inner.config.vocab_size, getattr(inner.config, "use_cache", False)) == (400, False)
    assert inner.config.pad_token_id == data.tokenizer.pad_token_id
    assert model.training


def test_a_config_has_no_special_tokens_of_another_tokenizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Defaults outside the vocabulary, as ModernBERT's end 50282, are none; nothing is printed."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    chosen = recipe("masked-lm", {"config": {"model_type": "modernbert", **sizes}})
    data = LoadedData(chosen)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        config = build_transformers_config_fitting_data_or_refuse(chosen, data)
    finally:
        logger.removeHandler(caplog.handler)
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
    assert config.sep_token_id == data.tokenizer.sep_token_id
    assert not caplog.messages


def test_transformers_prints_nothing_of_a_loss_type(caplog: pytest.LogCaptureFixture) -> None:
    """transformers prints no warning of an unknown loss type."""
    # It cannot derive a loss type from the name GPT2LMHeadModel, and warned at the first step.
    logger = logging.getLogger("transformers")
    # The logger of transformers does not propagate to pytest's handler.
    logger.addHandler(caplog.handler)
    try:
        assert built("causal-lm", GPT2).loss_function.__name__ == "ForCausalLMLoss"
    finally:
        logger.removeHandler(caplog.handler)
    assert [record for record in caplog.records if "loss_type" in record.getMessage()] == []


@pytest.mark.parametrize("config", [BERT, GPT2], ids=["bert", "gpt2"])
def test_the_seed_decides_the_weights(config: dict[str, Any]) -> None:
    """The weights depend on the seed only, and not on earlier random numbers."""
    task = "causal-lm" if config is GPT2 else "masked-lm"

    def weights(seed: int) -> torch.Tensor:
        # Random numbers that were drawn before must not matter.
        torch.rand(seed + 3)
        chosen = recipe(task, {"config": config}, seed=seed)
        return torch.cat(
            [
                p.detach().flatten()
                for p in seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen)).parameters()
            ]
        )

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPT2, "n_embed": 32}, r"model.config.n_embed: unknown key; did you mean n_embd\?"),
        ({**GPT2, "hidden_dropout_prob": 0.1}, "model.config.hidden_dropout_prob: unknown key"),
        (
            {**ROBERTA, "hidden_sise": 8},
            r"model.config.hidden_sise: unknown key; did you mean hidden_size\?",
        ),
        ({**GPT2, "n_embd": "16"}, "model.config: .*(int|str)"),
        ({**GPT2, "activation_function": "gelux"}, "model.config: KeyError: 'gelux'"),
        ({**GPT2, "n_head": 3}, "model: .*divisible by num_heads"),
        ({"model_type": "gpt22"}, "model.config.model_type: transformers knows no 'gpt22'"),
        ({"model_type": "t5"}, "model: Unrecognized configuration class .*T5Config"),
        (
            {**GPT2, "vocab_size": 399},
            "model.config.vocab_size: got 399, and the tokenizer has 400 words",
        ),
        (
            {**GPT2, "n_positions": 31},
            "data.sequence_length: got 32, and the model has max_position_embeddings: 31",
        ),
    ],
)
def test_configs_that_transformers_would_swallow(config: dict[str, Any], message: str) -> None:
    """Unknown fields, wrong types, and models too small for the data are refused."""
    with pytest.raises(InputError, match=message):
        built("causal-lm", config)


def test_fields_that_are_not_in_every_config_are_known() -> None:
    """Standard names for a family's own names, and names of all families, are accepted."""
    model = built(
        "causal-lm",
        {"model_type": "gpt2", "hidden_size": 16, "n_layer": 1, "n_head": 2, "num_labels": 3},
    )
    assert (model.config.n_embd, model.config.num_labels) == (16, 3)


def test_the_recipes_vocabulary_wins() -> None:
    """The recipe's vocab_size is used, else the tokenizer's size, rounded up to a multiple of 8."""
    assert built("masked-lm", {**BERT, "vocab_size": 500}).config.vocab_size == 500
    assert (
        built("masked-lm", BERT, {"tokenizer": {**WORDPIECE, "vocab_size": 401}}).config.vocab_size
        == 408
    )


# ------------------------------------------------------------------------------------------------------ labels


@pytest.mark.parametrize(
    ("config", "words"), [(BERT, WORDPIECE), (DISTILBERT, WORDPIECE), (LLAMA, BPE), (GPT2, BPE)]
)
def test_classes_come_from_the_data(
    config: dict[str, Any], words: dict[str, Any], tmp_path: Path
) -> None:
    """A model has one output per class of training and evaluation data, and accepts padding."""
    source = {
        "train": labels(tmp_path, 3),
        "evaluation": labels(tmp_path, 5, "evaluation"),
        "tokenizer": words,
    }
    chosen = recipe("sequence-classification", {"config": config}, source)
    data = LoadedData(chosen)
    model = seed_and_build_loss_module_on_cpu(chosen, data)
    # ln 5 is 1.6.
    assert abs(float(first_loss(model, data).detach()) - 1.6) < 0.5
    inner: Any = model.model
    assert inner.config.num_labels == 5


def test_a_first_token_that_the_vocabulary_lacks() -> None:
    """A start token of transformers' default is named with its field and the vocabulary."""
    data: Any = SimpleNamespace(tokenizer=None, classes=0)
    found = r"^model.config.decoder_start_token_id: got 50257, and the vocabulary has 272 tokens"
    with pytest.raises(InputError, match=found):
        refuse_data_exceeding_model_sizes(bert(), data, WhisperConfig(vocab_size=272))
    refuse_data_exceeding_model_sizes(
        bert(), data, WhisperConfig(vocab_size=272, decoder_start_token_id=1)
    )


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        ("sequence-classification", {}, "data.tokenizer: does not end texts with an end mark"),
        ("sequence-classification", {"special_tokens": {"eos_token": "[SEP]"}}, ""),
        ("seq2seq", {"target_length": 65}, "data.target_length: got 65, and the model has max_pos"),
        ("seq2seq", {"target_length": 64}, ""),
    ],
)
def test_models_with_a_decoder_and_their_data(
    task: str, words: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """They read a class at the end mark, and have places for a text to write."""
    config = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
              "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
              "decoder_ffn_dim": 16, "max_position_embeddings": 64}  # fmt: skip
    rows = tmp_path / "x.jsonl"
    rows.write_text("".join(f'{{"text": "a", "label": {n}, "target": "b"}}\n' for n in (0, 1)))
    data = {"train": {"format": "jsonl", "path": [str(rows)]}, "tokenizer": WORDPIECE, **words}
    with pytest.raises(InputError, match=message) if message else contextlib.nullcontext():
        built(task, config, data)


def test_marks_of_a_new_model_are_the_tokenizers(tmp_path: Path) -> None:
    """Marian begins a text with its padding token, and ends it with a token that is forced."""
    sizes = (
        "encoder_layers",
        "decoder_layers",
        "encoder_attention_heads",
        "decoder_attention_heads",
    )
    config = {"model_type": "marian", "d_model": 16, **dict.fromkeys(sizes, 1), "encoder_ffn_dim": 16,
              "decoder_ffn_dim": 16, "max_position_embeddings": 128}  # fmt: skip
    (tmp_path / "x.jsonl").write_text('{"text": "a", "target": "b"}')
    data = {"train": {"format": "jsonl", "path": [str(tmp_path / "x.jsonl")]},
            "tokenizer": WORDPIECE, "special_tokens": {"eos_token": "[SEP]"}}  # fmt: skip
    found = built("seq2seq", config, data).config
    assert (found.decoder_start_token_id, found.forced_eos_token_id) == (
        found.pad_token_id,
        found.eos_token_id,
    )


def test_labels_of_sets_are_floats() -> None:
    """Whole numbers as labels of custom samples are an error with the right form."""
    from transformers import BertConfig, BertForSequenceClassification

    fields = {"problem_type": "multi_label_classification", "hidden_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 1, "intermediate_size": 16, "vocab_size": 30}  # fmt: skip
    module = LossModule(BertForSequenceClassification(BertConfig(**fields)))
    with pytest.raises(InputError, match=r"are torch.int64; custom samples .* 1.0 or 0.0"):
        module(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.tensor([[0, 1]]))


@pytest.mark.parametrize(("classes", "asked", "expected"), [(1, None, 2), (3, 4, 4), (3, 3, 3)])
def test_number_of_labels(classes: int, asked: int | None, expected: int, tmp_path: Path) -> None:
    """A model has at least two labels, and more than the data if the recipe sets so."""
    config = {**BERT, **({"num_labels": asked} if asked else {})}
    model = built("sequence-classification", config, {"train": labels(tmp_path, classes)})
    assert model.config.num_labels == expected


def test_too_few_labels(tmp_path: Path) -> None:
    """Fewer outputs than classes are an error that names a row with such a label."""
    with pytest.raises(InputError, match=r"model.config.num_labels: got 2, and .*:3 has label 2$"):
        built("sequence-classification", {**BERT, "num_labels": 2}, {"train": labels(tmp_path, 3)})


# --------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("engine", ["ort", "eager"])
@pytest.mark.parametrize(
    ("config", "expected"), [(BERT, "sdpa"), (BLOOM, "eager")], ids=["BERT", "Bloom"]
)
def test_attention_of_the_model(engine: str, config: dict[str, Any], expected: str) -> None:
    """`auto` is sdpa, also with dropout on engine ort, or eager for a family without sdpa."""
    config = {**config, "attention_probs_dropout_prob": 0.1} if config is BERT else config
    chosen = recipe(
        "causal-lm" if config["model_type"] == "bloom" else "masked-lm",
        {"config": config},
        engine={"name": engine},
    )
    model: Any = seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen)).model
    assert model.config._attn_implementation == expected


# ------------------------------------------------------------------------------------------------------------ LoRA


def test_lora_trains_adapters_only(recwarn: pytest.WarningsRecorder) -> None:
    """Only the adapters of the named layers are trained, and the first loss is the base's.

    Warnings of peft's deprecated names are not shown to the user.
    """
    base = built("causal-lm", LLAMA)
    adapted = built(
        "causal-lm", LLAMA, lora={"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    )
    assert [warning for warning in recwarn if warning.category is FutureWarning] == []
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert sorted(name.split("self_attn.")[1] for name in trained) == [
        f"{layer}.lora_{side}.default.weight"
        for layer in ("q_proj", "v_proj")
        for side in ("A", "B")
    ]
    # Adapters of rank 4 for weights of 16 x 16.
    assert {tuple(p.shape) for p in trained.values()} == {(4, 16), (16, 4)}
    ids = torch.arange(64).reshape(2, 32)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    torch.testing.assert_close(LossModule(adapted)(**batch), LossModule(base)(**batch))


def test_lora_takes_all_linear_layers_but_the_head() -> None:
    """`all-linear`, as peft names it, adds adapters to all linear layers except the head."""
    adapted = built("causal-lm", LLAMA, lora={"target_modules": "all-linear"})
    names = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_lora_with_whole_modules_and_single_weights() -> None:
    """Whole modules train beside the adapters; experts in one tensor get adapters; both merge."""
    experts = {"model_type": "mixtral", **{k: v for k, v in LLAMA.items() if k != "model_type"},
               "num_local_experts": 2, "num_key_value_heads": 2}  # fmt: skip
    lora = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"],
            "modules_to_save": ["lm_head"]}  # fmt: skip
    adapted = built("causal-lm", experts, lora=lora)
    names = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name.split("layers.0.")[-1].removeprefix("base_model.model.") for name in names} >= {
        "self_attn.q_proj.lora_A.default.weight",
        "mlp.experts.lora_A.default.weight",
        "lm_head.modules_to_save.default.weight",
    }
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if name in names:
                p.add_(0.1)
    ids = torch.arange(64).reshape(2, 32)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    loss = LossModule(adapted)(**batch)
    whole: Any = adapted
    torch.testing.assert_close(LossModule(whole.merge_and_unload())(**batch), loss)


def test_lora_names_layers_that_are_not_there() -> None:
    """A target that no layer has is an error with the layers that exist, beside a right one, too."""
    for targets in (["nowhere"], ["c_attn", "nowhere"]):
        with pytest.raises(InputError) as caught:
            built("causal-lm", GPT2, lora={"target_modules": targets})
        assert str(caught.value) == (
            "model.lora.target_modules: the model has no layer nowhere; its layers with a weight "
            "matrix are c_attn, c_fc, c_proj, lm_head, wpe, wte"
        )
