"""transformers' models, from configs and from weights: fields, labels, attention and adapters, and their loss."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.errors import InputError
from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import Data, collate
from ortlaunch.worker.model import LossModule, attention_of, build_model
from ortlaunch.worker.pretrained import loading_notes
from tests import makers

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
BERT = {"model_type": "bert", **SMALL, "max_position_embeddings": 32}
LLAMA = {"model_type": "llama", **SMALL, "max_position_embeddings": 32}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
DISTILBERT = {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
ROBERTA = {"model_type": "roberta", **SMALL, "max_position_embeddings": 40}
MISTRAL = {"model_type": "mistral", **SMALL, "num_key_value_heads": 1}
BLOOM = {"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2}  # has no sdpa
WORDPIECE, BPE = {"train": "wordpiece", "vocab_size": 400}, {"train": "bpe", "vocab_size": 400}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for this file, so that its tokenizers are trained once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAUNCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def recipe(task: str, model: dict[str, Any], data: dict[str, Any] | None = None, **more: Any) -> Recipe:
    """A recipe on the built-in corpus."""
    words = BPE if task == "causal-lm" else WORDPIECE
    data = {"train": "python-docs", "tokenizer": words, "sequence_length": 32, **(data or {})}
    return makers.recipe(model={"task": task, **model}, data=data, **more)


def built(task: str, config: dict[str, Any], data: dict[str, Any] | None = None, **more: Any) -> Any:
    """The transformers model."""
    chosen = recipe(task, {"config": config, **more}, data)
    return build_model(chosen, Data(chosen)).model


def first_loss(model: LossModule, data: Data) -> torch.Tensor:
    """The loss of the first two training samples."""
    loss: torch.Tensor = model(**collate([data.train.sample(index, 0) for index in range(2)]))
    return loss


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
    """A model of random weights fits its tokenizer, takes its samples, guesses evenly, and every weight learns."""
    chosen = recipe(task, {"config": config})
    data = Data(chosen)
    model = build_model(chosen, data)
    loss = first_loss(model, data)
    expected = torch.tensor(400.0).log() + (0.69 if task == "pretraining" else 0.0)
    assert loss.shape == ()
    assert abs(float(loss.detach() - expected)) < 0.5
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    inner: Any = model.model
    assert (inner.config.vocab_size, getattr(inner.config, "use_cache", False)) == (400, False)
    assert inner.config.pad_token_id == data.tokenizer.pad_token_id
    assert model.training


@pytest.mark.parametrize("config", [BERT, GPT2], ids=["bert", "gpt2"])
def test_the_seed_decides_the_weights(config: dict[str, Any]) -> None:
    """Same seed, same weights, whatever random numbers were drawn before; another seed, others."""
    task = "causal-lm" if config is GPT2 else "masked-lm"

    def weights(seed: int) -> torch.Tensor:
        torch.rand(seed + 3)
        chosen = recipe(task, {"config": config}, seed=seed)
        return torch.cat([p.detach().flatten() for p in build_model(chosen, Data(chosen)).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPT2, "n_embed": 32}, r"model.config.n_embed: unknown key; did you mean n_embd\?"),
        ({**GPT2, "hidden_dropout_prob": 0.1}, "model.config.hidden_dropout_prob: unknown key"),
        ({**ROBERTA, "hidden_sise": 8}, r"model.config.hidden_sise: unknown key; did you mean hidden_size\?"),
        ({**GPT2, "n_embd": "16"}, "model.config: .*(int|str)"),
        ({**GPT2, "activation_function": "gelux"}, "model.config: KeyError: 'gelux'"),
        ({**GPT2, "n_head": 3}, "model: .*divisible by num_heads"),
        ({"model_type": "gpt22"}, "model.config.model_type: transformers knows no 'gpt22'"),
        ({"model_type": "t5"}, "model: Unrecognized configuration class .*T5Config"),
        ({**GPT2, "vocab_size": 399}, "model.config.vocab_size: got 399, and the tokenizer has 400 words"),
        ({**GPT2, "n_positions": 31}, "data.sequence_length: got 32, and the model has max_position_embeddings: 31"),
    ],
)
def test_configs_that_transformers_would_swallow(config: dict[str, Any], message: str) -> None:
    """Unknown fields of any family, wrong kinds, and models too small for the data end before anything is trained."""
    with pytest.raises(InputError, match=message):
        built("causal-lm", config)


def test_fields_that_are_not_in_every_config_are_known() -> None:
    """Standard names of a family whose own are others, and names that transformers takes everywhere, are no typos."""
    model = built("causal-lm", {"model_type": "gpt2", "hidden_size": 16, "n_layer": 1, "n_head": 2, "num_labels": 3})
    assert (model.config.n_embd, model.config.num_labels) == (16, 3)


def test_the_recipes_vocabulary_wins() -> None:
    """A vocab_size of the recipe is kept where it is large enough; else the tokenizer's, rounded up to 8."""
    assert built("masked-lm", {**BERT, "vocab_size": 500}).config.vocab_size == 500
    assert built("masked-lm", BERT, {"tokenizer": {**WORDPIECE, "vocab_size": 401}}).config.vocab_size == 408


# ------------------------------------------------------------------------------------------------------ labels


def labels(tmp_path: Path, classes: int, name: str = "train") -> dict[str, Any]:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(f'{{"text": "a word {i}", "label": {i}}}\n' for i in range(classes)))
    return {"format": "jsonl", "path": [str(path)]}


@pytest.mark.parametrize(("config", "words"), [(BERT, WORDPIECE), (DISTILBERT, WORDPIECE), (LLAMA, BPE), (GPT2, BPE)])
def test_classes_come_from_the_data(config: dict[str, Any], words: dict[str, Any], tmp_path: Path) -> None:
    """As many outputs as classes in training and evaluation data, and a loss for padded texts of every family."""
    source = {"train": labels(tmp_path, 3), "evaluation": labels(tmp_path, 5, "evaluation"), "tokenizer": words}
    chosen = recipe("sequence-classification", {"config": config}, source)
    data = Data(chosen)
    model = build_model(chosen, data)
    assert abs(float(first_loss(model, data).detach()) - 1.6) < 0.5  # ln 5
    inner: Any = model.model
    assert inner.config.num_labels == 5


@pytest.mark.parametrize(("classes", "asked", "expected"), [(1, None, 2), (3, 4, 4), (3, 3, 3)])
def test_number_of_labels(classes: int, asked: int | None, expected: int, tmp_path: Path) -> None:
    """At least two; the recipe may ask for more than the data has."""
    config = {**BERT, **({"num_labels": asked} if asked else {})}
    model = built("sequence-classification", config, {"train": labels(tmp_path, classes)})
    assert model.config.num_labels == expected


@pytest.mark.parametrize("start", ["config", "pretrained"])
def test_words_of_labels_are_in_the_models_config(start: str, saved: tuple[str, Any], tmp_path: Path) -> None:
    """Saved beside the weights, as transformers' pipelines read them; another number of labels is refused."""
    path, folder = tmp_path / "words.jsonl", saved[0]
    path.write_text("".join(f'{{"text": "a text", "label": "{word}"}}\n' for word in ("no", "yes", "maybe")))
    source = {"train": {"format": "jsonl", "path": [str(path)]}, "tokenizer": folder}
    chosen = {"config": {"config": BERT}, "pretrained": {"pretrained": folder}}[start]
    made = recipe("sequence-classification", chosen, source)
    model: Any = build_model(made, Data(made)).model
    model.config.save_pretrained(tmp_path)
    import transformers

    found = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (found.id2label, found.label2id) == ({0: "maybe", 1: "no", 2: "yes"}, {"maybe": 0, "no": 1, "yes": 2})
    assert model.classifier.out_features == 3
    four = {**chosen, "config": {**chosen.get("config", {}), "num_labels": 4}}
    wrong = recipe("sequence-classification", four, source)
    with pytest.raises(InputError, match=r"model.config.num_labels: got 4, and the labels are 3 words"):
        build_model(wrong, Data(wrong))


def test_too_few_labels(tmp_path: Path) -> None:
    """Fewer outputs than classes are an error that names the row of a label that has none."""
    with pytest.raises(InputError, match=r"model.config.num_labels: got 2, and .*:3 has label 2$"):
        built("sequence-classification", {**BERT, "num_labels": 2}, {"train": labels(tmp_path, 3)})


# -------------------------------------------------------------------------------------------------- pretrained


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Folder and weights of a saved BERT and its tokenizer."""
    folder = tmp_path_factory.mktemp("saved")
    chosen = recipe("masked-lm", {"config": BERT}, seed=5)
    data = Data(chosen)
    model: Any = build_model(chosen, data).model
    model.save_pretrained(folder)
    data.tokenizer.save_pretrained(folder)
    return str(folder), model


def test_weights_of_a_folder(saved: tuple[str, Any]) -> None:
    """`pretrained` gives the saved weights, whatever the seed; `config` changes single fields."""
    folder, model = saved
    chosen = recipe(
        "masked-lm",
        {"pretrained": folder, "config": {"model_type": "bert", "hidden_dropout_prob": 0.3}},
        {"tokenizer": folder},
    )
    again: Any = build_model(chosen, Data(chosen)).model
    theirs, ours = model.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert (again.config.hidden_dropout_prob, again.config.use_cache) == (0.3, False)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What transformers says of what it loads."""
    found: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("transformers.modeling_utils"), Listening()
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def test_what_was_not_loaded_is_told_in_our_words(
    saved: tuple[str, Any], tmp_path: Path, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A head that starts at random and weights that are left out are named; transformers' report and bars are not."""
    folder, _ = saved
    data = {"train": labels(tmp_path, 2), "tokenizer": folder}
    chosen = recipe("sequence-classification", {"pretrained": folder}, data)
    model = build_model(chosen, Data(chosen))
    assert model.loaded is not None
    assert {"classifier.bias", "classifier.weight"} <= set(model.loaded["missing"])
    assert all(name.startswith("cls.predictions.") for name in model.loaded["unexpected"])
    missing, unexpected = loading_notes(model.loaded)
    assert re.fullmatch(
        r"model.pretrained: \d of the model's weights are not in it and start at random: .*classifier.bias.*", missing
    )
    assert re.fullmatch(r"model.pretrained: \d of its weights are not used: cls.predictions.*", unexpected)
    assert loading_notes(None) == loading_notes({"missing": [], "unexpected": [], "resized": []}) == ()
    assert (said, *capfd.readouterr()) == ([], "", "")


def test_part_of_a_model_is_refused(saved: tuple[str, Any], tmp_path: Path) -> None:
    """Layers that are missing, or one too many, and a task's head that is not there; unless it is asked for."""

    def loaded(folder: str, layers: int, task: str = "masked-lm", **more: Any) -> LossModule:
        model = {"pretrained": folder, "config": {"num_hidden_layers": layers}, **more}
        chosen = recipe(task, model, {"tokenizer": saved[0]})
        return build_model(chosen, Data(chosen))

    with pytest.raises(InputError, match=r"16 of the model's weights are not in it: bert.*; to .*allow_partial: true"):
        loaded(saved[0], 2)
    two = loaded(saved[0], 2, allow_partial=True)
    assert two.loaded is not None
    assert len(two.loaded["missing"]) == 16
    inner: Any = two.model
    inner.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"16 of its weights have no place in the model: bert.encoder.layer.1"):
        loaded(str(tmp_path), 1)
    with pytest.raises(InputError, match=r"4 of the model's weights are not in it: .*cls.seq_relationship.bias"):
        loaded(saved[0], 1, "pretraining")
    assert loaded(str(tmp_path), 1, allow_partial=True).loaded != two.loaded


def test_a_resized_vocabulary(saved: tuple[str, Any], tmp_path: Path, said: list[str]) -> None:
    """Words that a tokenizer has more: how many the model needs is told, and with so many the old ones are kept."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(saved[0])
    tokenizer.add_tokens(["ortlaunch", "ortmodule"])
    tokenizer.save_pretrained(tmp_path)
    data = {"tokenizer": str(tmp_path)}
    small = recipe("masked-lm", {"pretrained": saved[0]}, data)
    with pytest.raises(InputError, match=r"got 400, and the tokenizer has 402 words; 408 adds new ones"):
        build_model(small, Data(small))
    chosen = recipe("masked-lm", {"pretrained": saved[0], "config": {"vocab_size": 408}}, data)
    found = [build_model(chosen, Data(chosen)) for _ in range(2)]
    model: Any = found[0].model
    words, old = model.get_input_embeddings().weight, saved[1].get_input_embeddings().weight
    assert (model.config.vocab_size, words.shape, model.cls.predictions.bias.shape) == (408, (408, 16), (408,))
    assert torch.equal(words[:400], old)
    assert all(torch.equal(a, b) for a, b in zip(found[0].parameters(), found[1].parameters()))  # as on each rank
    assert first_loss(found[0], Data(chosen)).shape == ()
    assert loading_notes(found[0].loaded) == (
        "model.pretrained: its vocabulary is resized, 400 words to 408; new words start near the others' mean",
    )
    assert said == []


def test_weights_that_are_cut_off(saved: tuple[str, Any], tmp_path: Path) -> None:
    """As a download that broke: an error of ours with the folder."""
    shutil.copytree(saved[0], tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    chosen = recipe("masked-lm", {"pretrained": str(tmp_path / "cut")}, {"tokenizer": saved[0]})
    with pytest.raises(InputError, match=r"model.pretrained: .*cut has weights that cannot be read: "):
        build_model(chosen, Data(chosen))


def test_weights_of_another_shape(saved: tuple[str, Any], said: list[str]) -> None:
    """Weights that do not fit are an error that names them."""
    chosen = recipe("masked-lm", {"pretrained": saved[0], "config": {"intermediate_size": 48}}, {"tokenizer": saved[0]})
    with pytest.raises(
        InputError, match=r"model.pretrained: .*intermediate.dense.weight( is \[32, 16\], the model's \[48, 16\]|;)"
    ):
        build_model(chosen, Data(chosen))
    assert said == []


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ({"pretrained": "/nowhere/at/all"}, {}, "model.pretrained: "),
        (
            {"config": {"hiden_dropout_prob": 0}},
            {},
            r"hiden_dropout_prob: unknown key; did you mean hidden_dropout_prob\?",
        ),
        ({"config": {"model_type": "roberta"}}, {}, "got roberta, and model.pretrained is of type bert"),
        ({}, {"tokenizer": {"train": "wordpiece", "vocab_size": 450}}, "got 400, and the tokenizer has 450 words"),
        ({}, {"sequence_length": 33}, "got 33, and the model has max_position_embeddings: 32"),
    ],
)
def test_what_does_not_fit_the_folder(
    saved: tuple[str, Any], model: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    """A folder that is none, and a config, a tokenizer or a length that its model cannot take."""
    chosen = recipe("masked-lm", {"pretrained": saved[0], **model}, {"tokenizer": saved[0], **data})
    with pytest.raises(InputError, match=message):
        build_model(chosen, Data(chosen))


def test_a_pretrained_model_without_padding_word(saved: tuple[str, Any], tmp_path: Path) -> None:
    """A language model that never padded classifies batches: it learns the tokenizer's padding word."""
    import transformers

    chosen = recipe("causal-lm", {"config": LLAMA})
    folder = tmp_path / "llama"
    language: Any = build_model(chosen, Data(chosen)).model
    language.config.pad_token_id = None
    language.save_pretrained(folder)
    tokenizer = Data(chosen).tokenizer
    tokenizer.save_pretrained(folder)
    assert transformers.AutoConfig.from_pretrained(folder).pad_token_id is None
    data = {"train": labels(tmp_path, 2), "tokenizer": str(folder)}
    chosen = recipe("sequence-classification", {"pretrained": str(folder)}, data)
    model = build_model(chosen, Data(chosen))
    assert first_loss(model, Data(chosen)).shape == ()
    inner: Any = model.model
    assert inner.config.pad_token_id == tokenizer.pad_token_id


# --------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize(
    ("asked", "engine", "expected"),
    [
        ("auto", {"name": "ort"}, None),
        ("auto", {"name": "eager"}, None),
        ("auto", {"name": "ort", "efficient_attention": True}, "eager"),
        ("auto", {"name": "ort", "triton": True, "flash_attention": True}, "eager"),
        ("sdpa", {"name": "ort"}, "sdpa"),
        ("eager", {"name": "inductor"}, "eager"),
    ],
)
def test_attention(asked: str, engine: dict[str, Any], expected: str | None) -> None:
    """auto is transformers' choice but where written-out attention is to be replaced; what is asked for is kept."""
    assert attention_of(recipe("masked-lm", {"config": BERT, "attention": asked}, engine=engine)) == expected


@pytest.mark.parametrize("engine", ["ort", "eager"])
@pytest.mark.parametrize(("config", "expected"), [(BERT, "sdpa"), (BLOOM, "eager")], ids=["BERT", "Bloom"])
def test_attention_of_the_model(engine: str, config: dict[str, Any], expected: str) -> None:
    """auto is sdpa, also with dropout on engine ort; a family without it takes its own."""
    config = {**config, "attention_probs_dropout_prob": 0.1} if config is BERT else config
    chosen = recipe(
        "causal-lm" if config["model_type"] == "bloom" else "masked-lm", {"config": config}, engine={"name": engine}
    )
    model: Any = build_model(chosen, Data(chosen)).model
    assert model.config._attn_implementation == expected


# ------------------------------------------------------------------------------------------------------------ LoRA


def test_lora_trains_adapters_only() -> None:
    """Only the adapters of the named layers are trained; the base is frozen, and the loss is the base's at first."""
    base = built("causal-lm", LLAMA)
    adapted = built("causal-lm", LLAMA, lora={"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]})
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert sorted(name.split("self_attn.")[1] for name in trained) == [
        f"{layer}.lora_{side}.default.weight" for layer in ("q_proj", "v_proj") for side in ("A", "B")
    ]
    assert {tuple(p.shape) for p in trained.values()} == {(4, 16), (16, 4)}
    ids = torch.arange(64).reshape(2, 32)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    torch.testing.assert_close(LossModule(adapted)(**batch), LossModule(base)(**batch))


def test_lora_takes_all_linear_layers_but_the_head() -> None:
    """By peft's own word for them."""
    adapted = built("causal-lm", LLAMA, lora={"target_modules": "all-linear"})
    names = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_lora_names_layers_that_are_not_there() -> None:
    """A target that no layer has is an error with the key."""
    with pytest.raises(InputError, match=r"model.lora.target_modules: .*nowhere"):
        built("causal-lm", GPT2, lora={"target_modules": ["nowhere"]})
