"""Base weights in 4 and 8 bits: what is quantized, identified, refused, and stored so already."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.model.identity import frozen_weights_fingerprint_or_none
from ortlaunch.worker.model.model import seed_and_build_loss_module_on_cpu
from ortlaunch.worker.model.quantized_weights import quantized_layers, scale_tensors
from tests.worker.models import BERT, GPT2, LLAMA, labels, recipe

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.usefixtures("own_cache")]
# Blocks of nf4 have 64 values.
WIDE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a saved Llama, BERT and GPT-2, each with its tokenizer."""
    pytest.importorskip("bitsandbytes")
    saved = {}
    for task, fields in (
        ("causal-lm", {**LLAMA, **WIDE}),
        ("masked-lm", {**BERT, **WIDE}),
        ("causal-lm", GPT2),
    ):
        chosen = recipe(task, {"config": fields})
        data = LoadedData(chosen)
        model: Any = seed_and_build_loss_module_on_cpu(chosen, data).model
        folder = tmp_path_factory.mktemp(str(fields["model_type"]))
        model.save_pretrained(folder)
        data.tokenizer.save_pretrained(folder)
        saved[str(fields["model_type"])] = str(folder)
    return saved


def built(
    folder: str, quantize: dict[str, Any] | None, task: str = "causal-lm", **more: Any
) -> Any:
    """Return a model with adapters beside the weights of a folder."""
    lora = {"r": 2, "target_modules": "all-linear"}
    fields = {"pretrained": folder, "lora": lora, "quantize": quantize, **more}
    chosen = recipe(task, fields, {"tokenizer": folder, **more.pop("data", {})})
    return seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))


@pytest.mark.parametrize(
    "quantize", [{"type": "nf4"}, {"type": "nf4", "double": False}, {"type": "int8"}]
)
def test_planned_bytes_are_those_of_the_tensors(
    folders: dict[str, str], quantize: dict[str, Any]
) -> None:
    """The plan has the bytes of packed weights, scales and adapters, exactly."""
    folder = folders["llama"]
    model = built(folder, quantize)
    tensors = [
        *model.parameters(),
        *itertools.chain(*(scale_tensors(layer) for _, layer in quantized_layers(model))),
    ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    lora = {"r": 2, "target_modules": "all-linear"}
    chosen = recipe(
        "causal-lm", {"pretrained": folder, "lora": lora, "quantize": quantize}, zero=None
    )
    memory = estimate_rank_memory_or_none(chosen, 1, 1)
    assert memory is not None
    # On a CPU all layers share one table of 256 scales.
    assert dict(memory.by_stage)["DDP"].weights == pytest.approx(sum(storages.values()), rel=0.1)
    assert memory.parameters == sum(p.numel() for p in built(folder, None).parameters())


def test_a_head_for_labels_is_whole_and_trained(folders: dict[str, str], tmp_path: Path) -> None:
    """The linear layers of the blocks are quantized; pooler and classifier are not."""
    folder = folders["bert"]
    lora = {"target_modules": ["query"]}
    fields = {"pretrained": folder, "lora": lora, "quantize": {"type": "nf4"}}
    data = {"tokenizer": folder, "train": labels(tmp_path, 3)}
    chosen = recipe("sequence-classification", fields, data)
    model = seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))
    names = [name for name, _ in quantized_layers(model)]
    assert len(names) == 2 * 6
    assert all(".layer." in name for name in names)
    whole = {name for name, layer in model.named_modules() if type(layer) is nn.Linear}
    assert any(name.endswith("pooler.dense") for name in whole)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {
        f"model.base_model.model.classifier.modules_to_save.default.{part}"
        for part in ("weight", "bias")
    }


def test_scales_are_part_of_the_identity(folders: dict[str, str], tmp_path: Path) -> None:
    """A base of twice the weights has the same codes, and is another one."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer, LlamaConfig

    folder = folders["llama"]
    weights = load_file(f"{folder}/model.safetensors")
    doubled = {name: 2 * value if "_proj" in name else value for name, value in weights.items()}
    save_file(doubled, tmp_path / "model.safetensors", {"format": "pt"})
    LlamaConfig.from_pretrained(folder).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    models = [built(path, {"type": "nf4"}) for path in (folder, folder, str(tmp_path))]
    packed = [next(iter(quantized_layers(model)))[1].weight.data for model in models]
    assert torch.equal(packed[0], packed[2])
    first, again, other = map(frozen_weights_fingerprint_or_none, models)
    assert first == again != other


def test_weights_that_are_stored_quantized(folders: dict[str, str], tmp_path: Path) -> None:
    """They load with the same `quantize` and the same values, and with no other."""
    model = built(folders["llama"], {"type": "nf4"})
    model.model.unload().save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    stored = str(tmp_path)
    again = built(stored, {"type": "nf4"})
    for (name, layer), (_, other) in zip(quantized_layers(model), quantized_layers(again)):
        assert torch.equal(layer.weight.data, other.weight.data), name
        for scale, other_scale in zip(scale_tensors(layer), scale_tensors(other)):
            assert torch.equal(scale, other_scale), name
    remedy = r"set model.quantize: \{type: nf4\} beside model.lora"
    for quantize in (None, {"type": "int8"}, {"type": "nf4", "double": False}):
        with pytest.raises(InputError, match=f"its weights are stored in nf4; {remedy}"):
            built(stored, quantize)


def test_layers_that_lie_across_are_refused(folders: dict[str, str]) -> None:
    """GPT-2's layers would be exported as another model."""
    with pytest.raises(InputError, match="the layers of GPT2LMHeadModel are Conv1D"):
        built(folders["gpt2"], {"type": "nf4"})
