"""model.onnx: logits equal PyTorch's, for batch sizes and lengths that were not compared."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import EngineError
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.export_records import OnnxCheck
from ortlaunch.worker.data import LoadedData, collate
from ortlaunch.worker.model.model import LossModule, seed_and_build_loss_module_on_cpu
from ortlaunch.worker.onnx import onnx_export
from ortlaunch.worker.onnx.onnx_export import write_and_check_onnx_folder
from ortlaunch.worker.onnx.onnx_model import OnnxModel
from ortlaunch.worker.onnx.onnx_model import loss_as_transformers_computes as loss_of
from tests import makers
from tests.ort import needs_ort

pytestmark = needs_ort
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
         "max_position_embeddings": 32, "vocab_size": 512}  # fmt: skip
BERT = {"model_type": "bert", **SMALL}
LLAMA = {"model_type": "llama", **SMALL}
WORDPIECE = {"train": "wordpiece", "vocab_size": 300}
PRETRAINING = makers.recipe(
    model={"task": "pretraining", "config": BERT},
    data={"train": "python-docs", "tokenizer": WORDPIECE, "sequence_length": 24},
)
LORA = makers.recipe(
    model={"task": "causal-lm", "config": LLAMA, "lora": {"r": 2, "target_modules": ["q_proj"]}},
    data={
        "train": "python-docs",
        "tokenizer": {"train": "bpe", "vocab_size": 300},
        "sequence_length": 24,
    },
)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for this file, so that its tokenizers are trained once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAUNCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def built(recipe: Recipe) -> tuple[LossModule, LoadedData]:
    """Return a model in training mode, as after a training, and its data."""
    data = LoadedData(recipe)
    model = seed_and_build_loss_module_on_cpu(recipe, data)
    for name, parameter in model.named_parameters():
        # New adapters are zero; trained ones are not.
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model, data


def by_onnxruntime(path: Path, **batch: torch.Tensor) -> list[Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return list(session.run(None, {name: value.numpy() for name, value in batch.items()}))


def test_bert_for_pretraining(tmp_path: Path) -> None:
    """Both heads of a BERT are exported, for any batch and length, with config and tokenizer."""
    from transformers import AutoTokenizer, BertForPreTraining

    model, data = built(PRETRAINING)
    found = write_and_check_onnx_folder(PRETRAINING, tmp_path, model, data)
    names = (
        ["input_ids", "attention_mask", "token_type_ids"],
        ["prediction_logits", "seq_relationship_logits"],
    )
    axes = {name: [0, 1] for name in (*names[0], "prediction_logits")} | {
        "seq_relationship_logits": [0]
    }
    assert found == OnnxCheck(
        17, *names, found.largest_difference, 1e-4, [[3, 24], [2, 13], [1, 24]], False, axes
    )
    assert {path.name for path in tmp_path.iterdir()} >= {
        "model.onnx",
        "config.json",
        "tokenizer.json",
    }

    # Five texts: neither this number nor this length was compared by the export.
    texts = AutoTokenizer.from_pretrained(tmp_path)(["a b", "some words more", "x", "y", "z"], padding=True,
                                                    return_tensors="pt")  # fmt: skip
    # The config is read from the exported folder, the weights are the model's.
    reference = BertForPreTraining(BertForPreTraining.config_class.from_pretrained(tmp_path)).eval()
    reference.load_state_dict(model.model.state_dict())
    with torch.no_grad():
        words, sentences = reference(**texts)[:2]
    given = {name: texts[name] for name in names[0]}
    torch.testing.assert_close([*map(torch.tensor, by_onnxruntime(tmp_path / "model.onnx", **given))],
                               [words, sentences], atol=1e-5, rtol=1e-5)  # fmt: skip
    assert_same_loss(tmp_path, PRETRAINING, model, data)


def assert_same_loss(folder: Path, recipe: Recipe, model: LossModule, data: LoadedData) -> None:
    """Check that the loss that `ortlaunch evaluate MODEL` computes of the graph is the model's."""
    batch = collate([data.train.sample(i, epoch=0) for i in range(4)])
    by_graph = OnnxModel(folder / "model.onnx", recipe.model.task)(**batch)["loss"]
    with torch.no_grad():
        assert float(by_graph) == pytest.approx(float(model.eval()(**batch)), abs=1e-5)


MEDIA = """
import torch

def images():
    random = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.rand(3, 16, 16, generator=random), "labels": torch.tensor(i % 3)} for i in range(8)]

def recordings():
    random = torch.Generator().manual_seed(0)
    words = torch.tensor([[4, 5, 6, 7, -100, -100]] * 8)
    return [{"input_features": torch.rand(8, 32, generator=random), "labels": row} for row in words]
"""
VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
       "intermediate_size": 32, "image_size": 16, "patch_size": 8, "num_labels": 3}  # fmt: skip
WHISPER = {"model_type": "whisper", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
           "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
           "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "vocab_size": 32,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "config", "factory", "inputs", "outputs"),
    [
        ("image-classification", VIT, "images", {"pixel_values": (5, 3, 16, 16)}, (5, 3)),
        ("speech-seq2seq", WHISPER, "recordings",
         {"input_features": (2, 8, 32), "decoder_input_ids": (2, 6)}, (2, 6, 32)),
    ],
)  # fmt: skip
def test_images_and_recordings(
    task: str,
    config: dict[str, Any],
    factory: str,
    inputs: dict[str, Any],
    outputs: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model of images or speech exports with its own inputs; a decoder has the words before."""
    (tmp_path / "media_of_a_test.py").write_text(MEDIA)
    monkeypatch.syspath_prepend(tmp_path)
    # Not left for later tests, which list the user's modules of this process.
    monkeypatch.setitem(sys.modules, "media_of_a_test", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "media_of_a_test")
    source = {"format": "custom", "factory": f"media_of_a_test:{factory}"}
    recipe = makers.recipe(model={"task": task, "config": config}, data={"train": source})
    model, data = built(recipe)
    found = write_and_check_onnx_folder(recipe, tmp_path, model.eval(), data)
    assert found.inputs == [*inputs]
    assert found.outputs == ["logits"]
    # Another number of samples than the compared ones.
    given = {
        name: torch.randint(4, 30, shape) if name.endswith("ids") else torch.rand(shape)
        for name, shape in inputs.items()
    }
    (logits,) = by_onnxruntime(tmp_path / "model.onnx", **given)
    with torch.no_grad():
        expected = model.model(**given).logits
    assert logits.shape == outputs
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=1e-5)


def test_adapters_are_merged_and_large_weights_lie_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are merged, and large weights are in a second file, with PyTorch's logits."""
    # A small limit in place of 2 GiB.
    monkeypatch.setattr(onnx_export, "_MOST_IN_ONE_FILE", 1000)
    model, data = built(LORA)
    ids = torch.arange(3, 13).reshape(2, 5)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = model.model.eval()(input_ids=ids, attention_mask=mask).logits
    found = write_and_check_onnx_folder(LORA, tmp_path, model, data)
    assert (found.outputs, found.external_data) == (["logits"], True)
    assert {path.name for path in tmp_path.iterdir()} >= {"model.onnx", "model.onnx_data"}
    (logits,) = by_onnxruntime(tmp_path / "model.onnx", input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-5, rtol=1e-5)
    assert_same_loss(tmp_path, LORA, model, data)


def test_another_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that differ from PyTorch's, or are nan, are an error."""
    model, data = built(PRETRAINING)
    for wrong in (2e-4, float("nan")):
        monkeypatch.setattr(
            onnx_export,
            "largest_output_difference_of_graph_from_pytorch",
            lambda *_, wrong=wrong: wrong,
        )
        with pytest.raises(EngineError, match=r"differ from PyTorch's by .*; the limit is 0\.0001"):
            write_and_check_onnx_folder(PRETRAINING, tmp_path, model, data)


def test_no_number_after_a_number_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nan in any output or batch is an error."""
    # Python's max ignores a nan that is not the first value.
    model, data = built(PRETRAINING)
    # For each of three batches a good output, then a bad one.
    answers = iter([0.0, float("nan")] * 3)
    monkeypatch.setattr(onnx_export, "_largest_tensor_difference", lambda *_: next(answers))
    with pytest.raises(EngineError, match=r"differ from PyTorch's by nan"):
        write_and_check_onnx_folder(PRETRAINING, tmp_path, model, data)


@pytest.mark.parametrize(
    ("labels", "outputs"),
    [(torch.tensor([0, 2, 1]), 3), (torch.tensor([0.5, -1.0, 2.0]), 1), (torch.eye(3), 3)],
    ids=["classes", "a number", "several truths"],
)  # fmt: skip
def test_the_loss_of_samples(labels: torch.Tensor, outputs: int) -> None:
    """The loss of a head over whole texts equals transformers', for each type of label."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {name: value for name, value in BERT.items() if name != "model_type"}
    model = BertForSequenceClassification(BertConfig(**sizes, num_labels=outputs)).eval()  # type: ignore[call-arg]
    with torch.no_grad():
        output = model(torch.arange(3, 18).reshape(3, 5), labels=labels)
    assert float(loss_of("sequence-classification", output, {"labels": labels})) == pytest.approx(
        float(output.loss)
    )
