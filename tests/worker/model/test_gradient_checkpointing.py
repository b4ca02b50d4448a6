"""`model.gradient_checkpointing`: its gradients, its memory, its plan, and the recipe's rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.recipe.fields.model import Lora
from ortlaunch.recipe.rules.rules import broken_rule_problems, precision_and_engine_device_rules
from ortlaunch.worker.model.adapters import add_lora_adapters
from ortlaunch.worker.model.model import (
    LossModule,
    _enable_gradient_checkpointing,
)
from tests.makers import bert, recipe

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64}
IDS = torch.arange(64).reshape(2, 32)


def model(family: str, lora: bool = False) -> nn.Module:
    """Return a model of four layers with dropout, in training mode."""
    import transformers

    torch.manual_seed(0)
    if family == "bert":
        config: Any = transformers.BertConfig(**SIZES, num_attention_heads=4)
        made = transformers.AutoModelForMaskedLM.from_config(config)
    else:
        config = transformers.LlamaConfig(
            **SIZES, num_attention_heads=4, attention_dropout=0.1, use_cache=False
        )
        made = transformers.AutoModelForCausalLM.from_config(config)
    return (add_lora_adapters(made, Lora(), "causal-lm") if lora else made).train()


def saved(run: Callable[[], torch.Tensor], weights: set[int]) -> tuple[torch.Tensor, int]:
    """Return the loss and the bytes kept for its backward pass, without weights."""
    # By address, because several tensors may share a storage.
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    return loss, sum(kept.values())


def passed(made: nn.Module) -> tuple[float, dict[str, torch.Tensor], int]:
    """Return loss, gradients and the bytes kept between the passes, with dropout of one seed."""
    # All models must draw the same dropout.
    torch.manual_seed(1)
    weights = {p.untyped_storage().data_ptr() for p in made.parameters()}
    loss, kept = saved(lambda: made(input_ids=IDS, labels=IDS).loss, weights)
    loss.backward()
    return (
        loss.item(),
        {name: p.grad for name, p in made.named_parameters() if p.grad is not None},
        kept,
    )


@pytest.mark.parametrize(("family", "lora"), [("bert", False), ("llama", False), ("llama", True)])
def test_gradients_are_the_same_from_less_memory(family: str, lora: bool) -> None:
    """Gradients are the same, bit for bit, and at most a third of the activations is kept."""
    plain = model(family, lora)
    checkpointed = model(family, lora)
    _enable_gradient_checkpointing(checkpointed)
    loss, gradients, kept = passed(plain)
    ours, our_gradients, our_kept = passed(checkpointed)
    assert ours == loss
    assert our_gradients.keys() == gradients.keys()
    assert all(torch.equal(our_gradients[name], gradients[name]) for name in gradients)
    assert our_kept < kept / 3


@pytest.mark.parametrize(("family", "checkpointed"), [("bert", False), ("llama", True)])
def test_activations_in_host_memory(family: str, checkpointed: bool) -> None:
    """Gradients are the same, bit for bit, and no activation is kept where it was computed."""
    plain = model(family)
    moved = model(family)
    if checkpointed:
        _enable_gradient_checkpointing(moved)
    _, gradients, _ = passed(plain)
    module = LossModule(moved)
    module.offloads = True
    torch.manual_seed(1)
    copies = []
    copy = torch.Tensor.copy_
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", lambda to, x: copies.append(x) or copy(to, x))
        module(input_ids=IDS, labels=IDS).backward()
    weights = {p.untyped_storage().data_ptr() for p in moved.parameters()}
    assert len(copies) >= SIZES["num_hidden_layers"]
    assert all(each.untyped_storage().data_ptr() not in weights for each in copies)
    for name, p in moved.named_parameters():
        assert p.grad is None or torch.equal(p.grad, gradients[name])


def test_a_custom_model_needs_the_method() -> None:
    """A model with gradient_checkpointing_enable is called; one without it is refused."""

    class Able(nn.Linear):
        on = False

        def gradient_checkpointing_enable(self) -> None:
            self.on = True

    able = Able(1, 1)
    _enable_gradient_checkpointing(able)
    assert able.on
    with pytest.raises(
        InputError,
        match=r"^model\.gradient_checkpointing: Linear has no method gradient_checkpoint",
    ):
        _enable_gradient_checkpointing(nn.Linear(1, 1))


def test_a_family_without_it_is_refused() -> None:
    """A family of transformers without gradient checkpointing is refused."""
    made = model("bert")
    made.supports_gradient_checkpointing = False  # type: ignore[assignment]
    with pytest.raises(
        InputError, match=r"model\.gradient_checkpointing: BertForMaskedLM does not support"
    ):
        _enable_gradient_checkpointing(made)


def test_the_plan_keeps_a_layers_input_alone() -> None:
    """The plan keeps only the inputs of layers, as with ONNX Runtime's recomputation."""
    # On engine ort the setting becomes ONNX Runtime's recomputation.
    sizes = {"model_type": "bert", **SIZES, "num_hidden_layers": 12, "vocab_size": 400}
    activations = []
    for checkpointing, level in ((False, 0), (True, 0), (False, 1)):
        made = bert(
            model={"task": "masked-lm", "config": sizes, "gradient_checkpointing": checkpointing},
            engine={"name": "ort", "memory_optimization": level},
        )
        planned = estimate_rank_memory_or_none(made, 8, 1)
        assert planned is not None
        activations.append(planned.by_stage[0][1].activations)
    assert activations[1] == activations[2] < activations[0] / 3


def test_what_would_do_nothing_is_refused() -> None:
    """Settings of ORT with which the option has no effect are refused."""

    # ORT can only recompute its own matmuls, and with named subgraphs it recomputes only those.

    def said(**engine: Any) -> str:
        custom = {"task": "custom", "factory": "mine:model", "gradient_checkpointing": True}
        made = recipe(model=custom, engine={"name": "ort", **engine})
        return "\n".join(
            text
            for _, text in [
                *broken_rule_problems(made),
                *precision_and_engine_device_rules(made, "cpu"),
            ]
        )

    assert said() == ""
    own = {"task": "custom", "factory": "mine:model", "offload_activations": True}
    offloads = recipe(model=own, engine={"name": "inductor"})
    assert "engine eager alone has it" in "\n".join(
        text for _, text in broken_rule_problems(offloads)
    )
    on_cpu = "\n".join(text for _, text in precision_and_engine_device_rules(offloads, "cpu"))
    assert "has no effect on a CPU" in on_cpu
    assert "has no effect with memory optimization" in said(torch_matmul=True)
    assert "has no effect beside memory_optimization_config" in said(
        memory_optimization_config=["Gelu+:1:-1"]
    )
    assert "has no effect with model.gradient_checkpointing, which becomes" in said(
        matmul_precision="medium"
    )
