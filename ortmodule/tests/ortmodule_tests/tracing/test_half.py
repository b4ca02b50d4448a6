"""Models in float16 on ORT: matmuls behind attention masks are float16, positions float32."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from ortmodule_tests.modules import cast_parameters_in_place, manager_of, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort
FLOAT = onnx.TensorProto.FLOAT
HALF = onnx.TensorProto.FLOAT16
# A position at which float16 frequencies would be clearly wrong.
LONG = 4096
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "attn_implementation": "sdpa",
}


class Bert(nn.Module):
    """The pretraining loss of a small BERT over padded sequences."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")

        torch.manual_seed(0)
        config = transformers.BertConfig(
            **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        self.model = transformers.BertForPreTraining(config)

    def forward(self, ids: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(ids).masked_fill(torch.arange(ids.shape[1]) > 5, 0)
        return self.model(
            ids, attention_mask=mask, labels=ids, next_sentence_label=ids[:, 0] % 2
        ).loss


class Llama(nn.Module):
    """The loss of a small Llama at positions from `first` on."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            **SIZES, num_key_value_heads=2, max_position_embeddings=2 * LONG, use_cache=False
        )
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, ids: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        positions = first + torch.arange(ids.shape[1])
        # A step of more than 1 would start another document; these are one, far from the beginning.
        return self.model(
            ids, position_ids=positions[None].expand_as(ids), labels=ids, attention_mask=None
        ).loss


def _types(model: onnx.ModelProto, *operators: str) -> dict[str, set[int]]:
    """Return the element types of the inputs of these operators, by operator."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {
        value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)
    }
    types.update({tensor.name: tensor.data_type for tensor in graph.initializer})
    found: dict[str, set[int]] = {}
    for node in graph.node:
        if node.op_type in operators:
            found.setdefault(node.op_type, set()).update(
                types[name] for name in node.input if name in types
            )
    return found


def _exported(module: Any) -> onnx.ModelProto:
    exported: onnx.ModelProto = manager_of(
        module
    )._graph_transition_manager._exported_model_info.exported_model
    return exported


@pytest.mark.parametrize("kind", [Bert, Llama])
def test_float16_equals_float32_and_has_no_float32_product(
    kind: type[nn.Module], built: None
) -> None:
    """Losses and gradients of float16 parameters equal float32's, and every matmul is float16."""
    model = kind()
    ids = torch.arange(24).reshape(3, 8) * 5 % 64
    first = torch.tensor(LONG - 8)
    half = copy.deepcopy(model)
    cast_parameters_in_place(half, torch.float16)
    ours = wrapped(half)
    loss = ours(ids, first)
    expected = model(ids, first)
    loss.float().backward()
    expected.backward()
    torch.testing.assert_close(loss.float(), expected, rtol=2e-3, atol=0)
    halves, floats = (
        torch.cat([p.grad.float().flatten() for p in each.parameters() if p.grad is not None])
        for each in (half, model)
    )
    # float16 has 11 significant bits; rounding adds up over the layers.
    assert float((halves - floats).norm() / floats.norm()) < 2e-2
    assert (
        # >=, because a graph may have Gemm nodes or not.
        _types(_exported(ours), "MatMul", "Gemm", "Softmax").items()
        >= {"MatMul": {HALF}, "Softmax": {HALF}}.items()
    )


@pytest.mark.parametrize("kind", [Bert, Llama])
def test_autocast_exports_float16_products(kind: type[nn.Module], built: None) -> None:
    """Under float16 autocast attention's matmuls behind a mask are float16 too."""
    ours = wrapped(kind())
    ids = torch.arange(24).reshape(3, 8) * 5 % 64
    first = torch.tensor(0)
    # BERT's graph under CPU autocast has a LayerNormalization of two types. ORT refuses that, but
    # only after the export.
    with contextlib.suppress(RuntimeError), torch.autocast("cpu", torch.float16):
        ours(ids, first)
    assert _types(_exported(ours), "MatMul", "Gemm")["MatMul"] == {HALF}


def test_casting_parameters_keeps_buffers() -> None:
    """Rotary frequencies stay float32; in float16 they are 0.99 rad off at position 4,096."""
    model = Llama()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    cast_parameters_in_place(model, torch.float16)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    # The loop below would pass without any buffers.
    assert before
    for name, buffer in model.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer, before[name])
