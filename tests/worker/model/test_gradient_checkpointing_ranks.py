"""`model.gradient_checkpointing` on engines ort and inductor: recomputation and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.recipe.fields.model import Lora
from ortlaunch.worker.model.adapters import add_lora_adapters
from ortlaunch.worker.model.model import (
    LossModule,
    _enable_gradient_checkpointing,
)
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.modules import language_model, same, wrapped
from tests.ort import needs_ort
from tests.worker.model.test_gradient_checkpointing import saved

IDS = torch.arange(32).reshape(2, 16)


def models(lora: bool) -> tuple[LossModule, LossModule, LossModule]:
    """Return three equal Llamas: plain, with checkpoints, and a plain one with eager's gradients."""
    plain = language_model("llama", "sdpa")
    if lora:
        plain = LossModule(add_lora_adapters(plain.model, Lora(), "causal-lm"))
    checkpointed = copy.deepcopy(plain)
    reference = copy.deepcopy(plain)
    _enable_gradient_checkpointing(checkpointed.model)
    reference(input_ids=IDS, labels=IDS).backward()
    return plain, checkpointed, reference


def equal(ours: nn.Module, eager: nn.Module) -> None:
    """Check that trained parameters have the same gradients, and that no others have one."""
    frozen = {name for name, p in eager.named_parameters() if p.grad is None}
    assert {name for name, p in ours.named_parameters() if p.grad is None} == frozen
    for module in (ours, eager):
        for parameter in module.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    same(ours, eager)


@needs_ort
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_onnx_runtime_recomputes(lora: bool, witness: PassAndGraphCounters) -> None:
    """ONNX Runtime's backward graph has the layers' nodes once more, also with LoRA."""
    # With LoRA the embeddings are frozen.
    plain, checkpointed, reference = models(lora)
    graphs: list[Any] = []
    for module in (plain, checkpointed):
        wrapped(module)(input_ids=IDS, labels=IDS).backward()
        graphs.append(witness.graphs[-1])
    # The nodes that are computed again make the backward graph larger.
    assert graphs[1].backward.total() > 1.2 * graphs[0].backward.total()
    equal(checkpointed, reference)


# Slow, because it compiles twice.
@pytest.mark.slow
def test_torch_compile_recomputes() -> None:
    """torch.compile has no graph break, and keeps less than half of the bytes."""
    from torch._dynamo.utils import counters

    plain, checkpointed, reference = models(lora=False)
    kept = []
    for module in (plain, checkpointed):
        counters.clear()
        module.compile(dynamic=False)
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        loss, size = saved(lambda module=module: module(input_ids=IDS, labels=IDS), weights)  # type: ignore[misc]
        loss.backward()
        kept.append(size)
        assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    assert kept[1] < kept[0] / 2
    equal(checkpointed, reference)
