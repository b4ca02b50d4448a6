"""The fields of `model.lora` are peft's: the same adapters, scales and outputs; published adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import InputError
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.recipe.fields.model import Lora
from ortlaunch.worker.data import LoadedData, collate
from ortlaunch.worker.model.adapters import (
    add_lora_adapters,
    merge_adapters,
    set_adapters_from_layer_inputs,
)
from ortlaunch.worker.model.model import seed_and_build_loss_module_on_cpu
from ortlaunch.worker.weight_memory import WeightMemory
from tests.worker.models import LLAMA, built, labels, recipe

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("own_cache")
TARGETS = ["q_proj", "v_proj"]
IDS = torch.arange(24).reshape(2, 12)
# Our fields, and peft's.
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rslora": ({"rslora": True}, {"use_rslora": True}),
    "dora": ({"dora": True}, {"use_dora": True}),
    "patterns": (
        {"rank_pattern": {"layers.0.*q_proj": 2}, "alpha_pattern": {"v_proj": 5.0}},
        {"rank_pattern": {"layers.0.*q_proj": 2}, "alpha_pattern": {"v_proj": 5.0}},
    ),
    "expression": (
        {"target_modules": r".*layers.\d.self_attn.(k|o)_proj"},
        {"target_modules": r".*layers.\d.self_attn.(k|o)_proj"},
    ),
    **{
        name: ({"init": name}, {"init_lora_weights": name})
        for name in ("gaussian", "orthogonal", "olora", "pissa", "pissa_niter_4")
    },
}


@pytest.fixture(scope="module")
def base() -> Any:
    return built("causal-lm", {**LLAMA, "hidden_size": 32})


def output(model: Any) -> torch.Tensor:
    """Return the logits, with the zeros of the adapters raised."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.01)
        logits: torch.Tensor = model.eval()(input_ids=IDS).logits
    return logits


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_pefts(base: Any, name: str, tmp_path: Path) -> None:
    """Each field gives peft's parameters and logits, and its merged weights give the same ones."""
    import peft

    ours, theirs = FIELDS[name]
    torch.manual_seed(7)
    lora = Lora(**{"r": 4, "alpha": 8, "target_modules": TARGETS, **ours})
    adapted: Any = add_lora_adapters(copy.deepcopy(base), lora, "causal-lm")
    torch.manual_seed(7)
    settings = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **theirs})
    other = peft.get_peft_model(copy.deepcopy(base), settings)
    expected = dict(other.named_parameters())
    assert {n: p.shape for n, p in adapted.named_parameters()} == {
        n: p.shape for n, p in expected.items()
    }
    logits = output(adapted)
    torch.testing.assert_close(logits, output(other))
    with torch.no_grad():
        merged = merge_adapters(adapted, WeightMemory(tmp_path))(input_ids=IDS).logits
    torch.testing.assert_close(merged, logits, rtol=1e-4, atol=1e-5)


def test_a_pattern_without_a_layer_is_refused(base: Any) -> None:
    """peft would ignore it."""
    lora = Lora(rank_pattern={"layers.9.*": 2})
    with pytest.raises(InputError, match=r"model.lora.rank_pattern: layers.9.\* matches no layer"):
        add_lora_adapters(copy.deepcopy(base), lora, "causal-lm")


def test_dora_is_planned() -> None:
    """The plan counts the lengths that DoRA trains."""
    lora = {"r": 2, "dora": True, "target_modules": "all-linear"}
    chosen = recipe("causal-lm", {"config": {**LLAMA, "vocab_size": 400}, "lora": lora}, zero=None)
    memory = estimate_rank_memory_or_none(chosen, 1, 1)
    assert memory is not None
    model = seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))
    assert memory.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.fixture(scope="module")
def published(base: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A folder of adapters that peft saved, and the logits of their model."""
    import peft

    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["k_proj"], use_rslora=True)
    model = peft.get_peft_model(copy.deepcopy(base), settings)
    logits = output(model)
    folder = tmp_path_factory.mktemp("published")
    model.save_pretrained(folder)
    return folder, logits


def test_published_adapters_continue(base: Any, published: tuple[Path, torch.Tensor]) -> None:
    """They are trained further, with the fields that they were saved with, and saved as peft reads them."""
    folder, logits = published
    lora = Lora(pretrained=str(folder))
    adapted: Any = add_lora_adapters(copy.deepcopy(base), lora, "causal-lm")
    with torch.no_grad():
        torch.testing.assert_close(adapted.eval()(input_ids=IDS).logits, logits)
    trained = {name: p.shape[0] for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == {
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.default.weight": 3,
        "base_model.model.model.layers.0.self_attn.k_proj.lora_B.default.weight": 32,
    }


def test_adapters_that_do_not_fit_are_refused(
    base: Any, published: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    """A folder without adapters, those of another model, and those without the task's head."""
    from safetensors.torch import load_file, save_file

    start = "model.lora.pretrained: got "
    with pytest.raises(InputError, match=f"{start}{tmp_path}: Can't find 'adapter_config.json'"):
        add_lora_adapters(copy.deepcopy(base), Lora(pretrained=str(tmp_path)), "causal-lm")
    narrow = built("causal-lm", LLAMA)
    with pytest.raises(InputError, match=f"{start}.*size mismatch"):
        add_lora_adapters(narrow, Lora(pretrained=str(published[0])), "causal-lm")
    weights = load_file(published[0] / "adapter_model.safetensors")
    weights.popitem()
    save_file(weights, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        (published[0] / "adapter_config.json").read_text()
    )
    with pytest.raises(InputError, match=f"{start}.*Found missing adapter keys"):
        add_lora_adapters(copy.deepcopy(base), Lora(pretrained=str(tmp_path)), "causal-lm")
    rows = {"train": labels(tmp_path, 2)}
    model = {"config": {**LLAMA, "hidden_size": 32}, "lora": {"pretrained": str(published[0])}}
    chosen = recipe("sequence-classification", model, rows)
    with pytest.raises(InputError, match="they have no head for the task"):
        seed_and_build_loss_module_on_cpu(chosen, LoadedData(chosen))


def test_eva_has_pefts_first_values(base: Any) -> None:
    """`init: eva` gives peft's singular vectors of the layers' inputs; the update is zero."""
    import peft

    samples = Samples([{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row}
                       for row in torch.randint(0, 48, (12, 12))])  # fmt: skip
    ours = add_lora_adapters(copy.deepcopy(base), Lora(init="eva", r=4), "causal-lm")
    set_adapters_from_layer_inputs(ours, samples, 4)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=TARGETS, init_lora_weights="eva",
                             task_type="CAUSAL_LM", eva_config=peft.EvaConfig(rho=1.0))  # fmt: skip
    theirs = peft.get_peft_model(copy.deepcopy(base), config)
    batches = [collate(samples.rows[:8]), collate(samples.rows[8:])]
    peft.initialize_lora_eva_weights(theirs, batches, show_progress_bar=False)
    for (name, value), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(value, other), name
        assert "lora_B" not in name or not value.any()
        if "lora_A" in name:
            assert torch.allclose(value @ value.T, torch.eye(4), atol=1e-4)
    with pytest.raises(InputError, match="8 of the first samples have 96 learned tokens, fewer"):
        set_adapters_from_layer_inputs(ours, samples, 97)


class Samples:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, epoch: int) -> Any:
        return self.rows[index]
