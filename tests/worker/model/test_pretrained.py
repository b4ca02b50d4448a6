"""Weights of a folder: loaded, missing, unused and wrong ones, and resized vocabularies."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ortlaunch.base.errors import InputError
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.model.model import LossModule, seed_and_build_loss_module_on_cpu
from ortlaunch.worker.model.pretrained import notes_on_weights_not_loaded, weight_files_or_none
from tests.worker.models import BERT, BPE, LLAMA, WORDPIECE, first_loss, labels, recipe

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Folder and weights of a saved BERT and its tokenizer."""
    folder = tmp_path_factory.mktemp("saved")
    chosen = recipe("masked-lm", {"config": BERT}, seed=5)
    data = LoadedData(chosen)
    model: Any = seed_and_build_loss_module_on_cpu(chosen, data).model
    model.save_pretrained(folder)
    data.tokenizer.save_pretrained(folder)
    return str(folder), model


def test_weights_of_a_folder(saved: tuple[str, Any]) -> None:
    """`pretrained` loads the saved weights, with any seed; `config` changes single fields."""
    folder, model = saved
    chosen = recipe(
        "masked-lm",
        {"pretrained": folder, "config": {"model_type": "bert", "hidden_dropout_prob": 0.3}},
        {"tokenizer": folder},
    )
    again: Any = seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen)).model
    theirs = model.state_dict()
    ours = again.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert (again.config.hidden_dropout_prob, again.config.use_cache) == (0.3, False)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The messages of transformers about loaded weights."""
    found: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger = logging.getLogger("transformers.modeling_utils")
    handler = Listening()
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def test_what_was_not_loaded_is_told_in_our_words(
    saved: tuple[str, Any], tmp_path: Path, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights that start at random or are not used are reported, without transformers' report."""
    folder, _ = saved
    data = {"train": labels(tmp_path, 2), "tokenizer": folder}
    chosen = recipe("sequence-classification", {"pretrained": folder}, data)
    model = seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))
    assert model.loaded is not None
    assert {"classifier.bias", "classifier.weight"} <= set(model.loaded["missing"])
    assert all(name.startswith("cls.predictions.") for name in model.loaded["unexpected"])
    missing, unexpected = notes_on_weights_not_loaded(model.loaded)
    assert re.fullmatch(
        r"model.pretrained: \d of the model's weights are not in it and start at random: "
        r".*classifier.bias.*",
        missing,
    )
    assert re.fullmatch(
        r"model.pretrained: \d of its weights are not used: cls.predictions.*", unexpected
    )
    assert (
        notes_on_weights_not_loaded(None)
        == notes_on_weights_not_loaded({"missing": [], "unexpected": [], "resized": []})
        == ()
    )
    assert (said, *capfd.readouterr()) == ([], "", "")


def test_part_of_a_model_is_refused(saved: tuple[str, Any], tmp_path: Path) -> None:
    """Missing or additional layers and a missing head are refused without `allow_partial`."""

    def loaded(folder: str, layers: int, task: str = "masked-lm", **more: Any) -> LossModule:
        model = {"pretrained": folder, "config": {"num_hidden_layers": layers}, **more}
        chosen = recipe(task, model, {"tokenizer": saved[0]})
        return seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))

    with pytest.raises(
        InputError,
        match=r"16 of the model's weights are not in it: bert.*; to .*allow_partial: true",
    ):
        loaded(saved[0], 2)
    two = loaded(saved[0], 2, allow_partial=True)
    assert two.loaded is not None
    # A layer of BERT has 16 weights.
    assert len(two.loaded["missing"]) == 16
    inner: Any = two.model
    inner.save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"16 of its weights do not exist in the model: bert.encoder.layer.1"
    ):
        loaded(str(tmp_path), 1)
    with pytest.raises(
        InputError, match=r"4 of the model's weights are not in it: .*cls.seq_relationship.bias"
    ):
        loaded(saved[0], 1, "pretraining")
    assert loaded(str(tmp_path), 1, allow_partial=True).loaded != two.loaded


def test_a_resized_vocabulary(saved: tuple[str, Any], tmp_path: Path, said: list[str]) -> None:
    """A larger vocabulary keeps the old words; a model that is too small names the needed size."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(saved[0])
    tokenizer.add_tokens(["ortlaunch", "ortmodule"])
    tokenizer.save_pretrained(tmp_path)
    data = {"tokenizer": str(tmp_path)}
    small = recipe("masked-lm", {"pretrained": saved[0]}, data)
    with pytest.raises(
        InputError, match=r"got 400, and the tokenizer has 402 words; 408 adds new ones"
    ):
        seed_and_build_loss_module_on_cpu(small, LoadedData(small))
    chosen = recipe("masked-lm", {"pretrained": saved[0], "config": {"vocab_size": 408}}, data)
    found = [seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen)) for _ in range(2)]
    model: Any = found[0].model
    words = model.get_input_embeddings().weight
    old = saved[1].get_input_embeddings().weight
    assert (model.config.vocab_size, words.shape, model.cls.predictions.bias.shape) == (
        408,
        (408, 16),
        (408,),
    )
    assert torch.equal(words[:400], old)
    # All ranks must get the same weights.
    assert all(torch.equal(a, b) for a, b in zip(found[0].parameters(), found[1].parameters()))
    assert first_loss(found[0], LoadedData(chosen)).shape == ()
    assert notes_on_weights_not_loaded(found[0].loaded) == (
        "model.pretrained: its vocabulary is resized, 400 tokens to 408; new tokens start near "
        "the others' mean",
    )
    assert said == []


def test_weights_that_are_cut_off(saved: tuple[str, Any], tmp_path: Path) -> None:
    """Truncated weights are an error that names the folder."""
    # An interrupted download leaves such a file.
    shutil.copytree(saved[0], tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    chosen = recipe("masked-lm", {"pretrained": str(tmp_path / "cut")}, {"tokenizer": saved[0]})
    with pytest.raises(
        InputError, match=r"model.pretrained: .*cut has weights that cannot be read: "
    ):
        seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))


def test_weights_of_another_shape(saved: tuple[str, Any], said: list[str]) -> None:
    """Weights that do not fit are an error that names them."""
    chosen = recipe(
        "masked-lm",
        {"pretrained": saved[0], "config": {"intermediate_size": 48}},
        {"tokenizer": saved[0]},
    )
    with pytest.raises(
        InputError,
        match=r"model.pretrained: .*intermediate.dense.weight"
        # transformers 4.52 gives the name without the shapes.
        r"( is \[32, 16\], the model's \[48, 16\]|;)",
    ):
        seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))
    assert said == []


def test_a_head_of_another_number_of_labels_is_new(
    saved: tuple[str, Any], tmp_path: Path, said: list[str]
) -> None:
    """A classifier that gets another number of classes keeps its body and has a new head."""
    two = recipe(
        "sequence-classification",
        {"pretrained": saved[0]},
        {"train": labels(tmp_path, 2), "tokenizer": saved[0]},
    )
    first: Any = seed_and_build_loss_module_on_cpu(two, LoadedData(two)).model
    first.save_pretrained(tmp_path / "two")
    pretrained = {"pretrained": str(tmp_path / "two")}
    three = recipe(
        "sequence-classification", pretrained, {"train": labels(tmp_path, 3), "tokenizer": saved[0]}
    )
    found = [seed_and_build_loss_module_on_cpu(three, LoadedData(three)) for _ in range(2)]
    model: Any = found[0].model
    assert model.classifier.weight.shape == (3, 16)
    # transformers draws new weights with a standard deviation of 0.02.
    assert 0.005 < float(model.classifier.weight.std()) < 0.05
    assert all(torch.equal(a, b) for a, b in zip(model.bert.parameters(), first.bert.parameters()))
    # All ranks must get the same weights.
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found[1].parameters()))
    (note,) = notes_on_weights_not_loaded(found[0].loaded)
    assert re.fullmatch(
        r"model.pretrained: its output layer has a different number of labels; the model's starts at random: "
        r"classifier.bias( is \[2\], the model's \[3\])?; classifier.weight.*", note,
    )  # fmt: skip
    wider = {**pretrained, "config": {"intermediate_size": 48}}
    wrong = recipe(
        "sequence-classification", wider, {"train": labels(tmp_path, 3), "tokenizer": saved[0]}
    )
    with pytest.raises(
        InputError,
        match=r"weights differ in shape from model.config: bert.encoder.layer.0.intermediate[^;]*; bert",
    ):
        seed_and_build_loss_module_on_cpu(wrong, LoadedData(wrong))
    assert said == []


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ({"pretrained": "/nowhere/at/all"}, {}, "model.pretrained: got /nowhere/at/all: "),
        (
            {"config": {"hiden_dropout_prob": 0}},
            {},
            r"hiden_dropout_prob: unknown key; did you mean hidden_dropout_prob\?",
        ),
        (
            {"config": {"model_type": "roberta"}},
            {},
            "got roberta, and model.pretrained is of type bert",
        ),
        (
            {},
            {"tokenizer": {"train": "wordpiece", "vocab_size": 450}},
            "got 400, and the tokenizer has 450 words",
        ),
        ({}, {"sequence_length": 33}, "got 33, and the model has max_position_embeddings: 32"),
    ],
)
def test_what_does_not_fit_the_folder(
    saved: tuple[str, Any], model: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    """A missing folder, and a config, tokenizer or length that do not fit, are refused."""
    chosen = recipe("masked-lm", {"pretrained": saved[0], **model}, {"tokenizer": saved[0], **data})
    with pytest.raises(InputError, match=message):
        seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))


def test_a_pretrained_model_without_padding_word(saved: tuple[str, Any], tmp_path: Path) -> None:
    """A pretrained model without a padding token gets the tokenizer's."""
    import transformers

    chosen = recipe("causal-lm", {"config": LLAMA})
    folder = tmp_path / "llama"
    language: Any = seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen)).model
    language.config.pad_token_id = None
    language.save_pretrained(folder)
    tokenizer = LoadedData(chosen).tokenizer
    tokenizer.save_pretrained(folder)
    assert transformers.AutoConfig.from_pretrained(folder).pad_token_id is None
    data = {"train": labels(tmp_path, 2), "tokenizer": str(folder)}
    chosen = recipe("sequence-classification", {"pretrained": str(folder)}, data)
    model = seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))
    assert first_loss(model, LoadedData(chosen)).shape == ()
    inner: Any = model.model
    assert inner.config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("start", ["config", "pretrained"])
def test_words_of_labels_are_in_the_models_config(
    start: str, saved: tuple[str, Any], tmp_path: Path
) -> None:
    """Names of labels are in the model's config; another number of labels is refused."""
    # transformers' pipelines read the names from there.
    path = tmp_path / "words.jsonl"
    folder = saved[0]
    path.write_text(
        "".join(f'{{"text": "a text", "label": "{word}"}}\n' for word in ("no", "yes", "maybe"))
    )
    source = {"train": {"format": "jsonl", "path": [str(path)]}, "tokenizer": folder}
    chosen: dict[str, Any] = {"config": {"config": BERT}, "pretrained": {"pretrained": folder}}[
        start
    ]
    made = recipe("sequence-classification", chosen, source)
    model: Any = seed_and_build_loss_module_on_cpu(made, LoadedData(made)).model
    model.config.save_pretrained(tmp_path)
    import transformers

    found = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (found.id2label, found.label2id) == (
        {0: "maybe", 1: "no", 2: "yes"},
        {"maybe": 0, "no": 1, "yes": 2},
    )
    assert model.classifier.out_features == 3
    four = {**chosen, "config": {**chosen.get("config", {}), "num_labels": 4}}
    wrong = recipe("sequence-classification", four, source)
    with pytest.raises(
        InputError, match=r"model.config.num_labels: got 4, and the labels have 3 names"
    ):
        seed_and_build_loss_module_on_cpu(wrong, LoadedData(wrong))


def test_names_of_numbers_are_in_the_models_config(saved: tuple[str, Any], tmp_path: Path) -> None:
    """Names of the data set's features are in the model's config, in their order."""
    import datasets

    label = datasets.ClassLabel(names=["yes", "no", "maybe"])
    rows = datasets.Dataset.from_list([{"text": "a text", "label": 1}]).cast_column("label", label)
    rows.to_parquet(str(tmp_path / "a.parquet"))
    source = {
        "train": {"format": "parquet", "path": [str(tmp_path / "a.parquet")]},
        "tokenizer": saved[0],
    }
    made = recipe("sequence-classification", {"config": BERT}, source)
    config: Any = seed_and_build_loss_module_on_cpu(made, LoadedData(made)).model.config
    assert (config.id2label, config.num_labels) == ({0: "yes", 1: "no", 2: "maybe"}, 3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a Llama without a padding token, whose embeddings have two spare rows."""
    folder = str(tmp_path_factory.mktemp("llama"))
    chosen = recipe("causal-lm", {"config": {**LLAMA, "tie_word_embeddings": False}})
    data = LoadedData(chosen)
    data.tokenizer._special_tokens_map["pad_token"] = None
    model: Any = seed_and_build_loss_module_on_cpu(chosen, data).model
    model.config.pad_token_id = None
    model.resize_token_embeddings(len(data.tokenizer) + 2)
    model.save_pretrained(folder)
    data.tokenizer.save_pretrained(folder)
    return folder


def with_tokens(llama: str, rows: int | None, lora: Any = None, **tokens: Any) -> LossModule:
    """Build the Llama with new tokens; rows: of its embeddings, None for its own."""
    # Other rows resize the embeddings.
    config = {} if rows is None else {"config": {"vocab_size": rows}}
    model = {"pretrained": llama, **config, "lora": lora}
    chosen = recipe("causal-lm", model, {"tokenizer": llama, **tokens})
    return seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))


def test_a_new_padding_token(llama: str) -> None:
    """A padding token beyond the pretrained rows is the model's after these have grown."""
    words = {"bos_token": "<b>", "unk_token": "<u>", "pad_token": "<new>"}
    model: Any = with_tokens(llama, 408, special_tokens=words).model
    # Behind 400 words and two other new ones, of which the folder has rows.
    assert (model.config.vocab_size, model.config.pad_token_id) == (408, 402)
    assert model.get_input_embeddings().weight.shape[0] == 408


ADAPTERS = {"r": 2, "alpha": 4, "target_modules": ["q_proj"]}
NEW = {"special_tokens": {"eos_token": "<|im_end|>"}, "added_tokens": ["<|im_start|>"]}


@pytest.mark.parametrize(
    ("rows", "tokens", "trained", "frozen"),
    [
        # In new rows, and in spare ones.
        (408, NEW, [], "embed_tokens, lm_head"),
        (None, NEW, [], "embed_tokens, lm_head"),
        (None, NEW, ["embed_tokens"], "lm_head"),
        (None, NEW, ["embed_tokens", "lm_head"], None),
        (None, {"special_tokens": {"pad_token": "<pad>"}}, [], None),
        # More rows without a new token, as for speed.
        (408, {}, [], None),
    ],
)
def test_new_tokens_that_adapters_leave_frozen(
    rows: int | None, tokens: Any, trained: list[str], frozen: str | None, llama: str
) -> None:
    """Adapters without the embeddings of new tokens are refused with the remedy; padding is none."""
    lora = {**ADAPTERS, "modules_to_save": trained}
    if frozen is None:
        assert with_tokens(llama, rows, lora, **tokens)
        return
    with pytest.raises(InputError) as raised:
        with_tokens(llama, rows, lora, **tokens)
    assert (
        f"<|im_end|>, <|im_start|> of data.tokenizer are new to model.pretrained, and {frozen} would"
        in str(raised.value)
    )
    assert str(raised.value).endswith("set model.lora.modules_to_save: [embed_tokens, lm_head]")


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("masked-lm", {"config": BERT}),
        ("masked-lm", {}),
        ("causal-lm", {"config": {**LLAMA, "dtype": "bfloat16"}}),
        ("causal-lm", {"config": LLAMA, "lora": {"r": 2, "target_modules": "all-linear"}}),
        ("causal-lm", {"config": LLAMA, "lora": {"r": 2, "modules_to_save": ["lm_head"]}}),
    ],
)
def test_a_model_without_weights_has_the_same_parameters(
    saved: tuple[str, Any], task: str, model: dict[str, Any]
) -> None:
    """Other ranks than the first build none, and get their parts of its weights."""
    folder, _ = saved
    # Another vocabulary than that of the folder.
    resized = {"pretrained": folder, "config": {"model_type": "bert", "vocab_size": 400}}
    chosen = recipe(task, model or resized, {"tokenizer": folder})
    whole, empty = (
        seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen), has_weights=has_weights)
        for has_weights in (True, False)
    )
    found = [
        [(name, p.shape, p.dtype, p.requires_grad) for name, p in built.named_parameters()]
        for built in (whole, empty)
    ]
    assert found[0] == found[1]
    assert {p.device.type for p in empty.parameters()} == {"meta"}


@pytest.mark.parametrize("words", [BPE, WORDPIECE], ids=lambda words: str(words["train"]))
def test_a_trained_tokenizer_gives_the_same_samples_from_its_folder(
    words: dict[str, Any], tmp_path: Path
) -> None:
    """An evaluation of a run reads its tokenizer from a folder, and must see the run's texts."""
    chosen = recipe("causal-lm", {"config": LLAMA}, {"tokenizer": words})
    trained = LoadedData(chosen)
    trained.tokenizer.save_pretrained(tmp_path)
    again = LoadedData(recipe("causal-lm", {"config": LLAMA}, {"tokenizer": str(tmp_path)}))
    assert len(trained.train) == len(again.train)
    for index in (0, len(trained.train) - 1):
        one, other = (data.train.sample(index, 0)["input_ids"] for data in (trained, again))
        assert one.tolist() == other.tolist()


def test_weights_that_are_read_when_they_are_divided(
    saved: tuple[str, Any], tmp_path: Path
) -> None:
    """Parameters take no memory until then, and buffers have their values."""
    folder, model = saved
    chosen = recipe("masked-lm", {"pretrained": folder}, {"tokenizer": folder})
    data = LoadedData(chosen)
    later = seed_and_build_loss_module_on_cpu(chosen, data, is_divided_later=True)
    assert later.weight_files is not None
    assert not any(later.loaded.values()) if later.loaded else False
    whole = dict(model.named_parameters())
    for name, parameter in later.model.named_parameters():
        assert parameter.is_meta
        assert parameter.shape == whole[name].shape
        assert torch.equal(later.weight_files.read_parameter(name), whole[name])
    for name, buffer in later.model.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name
    # Whole where nothing divides it, and where values are needed before.
    assert seed_and_build_loss_module_on_cpu(chosen, data).weight_files is None
    for fields in (
        {"lora": {"r": 2, "target_modules": ["query"]}},
        {"freeze": ["bert.embeddings.*"]},
    ):
        other = recipe("masked-lm", {"pretrained": folder, **fields}, {"tokenizer": folder})
        built = seed_and_build_loss_module_on_cpu(other, data, is_divided_later=True)
        assert built.weight_files is None
        assert not any(p.is_meta for p in built.parameters())


@pytest.mark.parametrize("change", ["lacks", "has", "shape"])
def test_files_that_do_not_have_exactly_the_model(
    change: str, saved: tuple[str, Any], tmp_path: Path
) -> None:
    """transformers loads these, with its errors and conversions."""
    folder, model = saved
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert weight_files_or_none(model, Path(folder)) is not None
    bias = "bert.encoder.layer.0.output.dense.bias"
    value = values.pop(bias)
    if change != "lacks":
        values[bias] = value[:1].clone() if change == "shape" else value
    if change == "has":
        values["bert.another"] = value.clone()
    save_file(values, tmp_path / "model.safetensors")
    assert weight_files_or_none(model, tmp_path) is None
