"""Small modules, ways to wrap them, and a fresh process, for the tests on ONNX Runtime."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from ortmodule import ORTModule, Settings, load
from ortmodule._internal.base.graph import GraphNodeCounts
from ortmodule._internal.pass_counters import PassAndGraphCounters

# Four sequences of eight words, out of a vocabulary of 30.
IDS = torch.arange(32).reshape(4, 8) % 30


def wrapped(module: nn.Module, threads: int = 1, **settings: Any) -> Any:
    """Return an ORTModule with these settings."""
    return ORTModule(module, Settings(threads=threads, **settings))


def manager_of(module: Any, training: bool = True) -> Any:
    """Return ORT's manager of an ORTModule for one mode; it has the graph and the session."""
    return module._torch_module._execution_manager(training)


def training_graph(module: Any) -> Any:
    """Return the graph of forward and backward pass, as ORT built it."""
    return manager_of(module)._onnx_models.optimized_model.graph


def python(
    code: str, *arguments: str, timeout: float = 120, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def same(ours: nn.Module, eager: nn.Module, atol: float = 1e-6) -> None:
    """Check that gradients and buffers equal eager's."""
    theirs = dict(eager.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[name].grad, rtol=1e-4, atol=atol, msg=name
        )
    others = dict(eager.named_buffers())
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, others[name], rtol=1e-5, atol=1e-6, msg=name)


class Layers(nn.Module):
    """Two layers with a scalar output."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


class Checkpointed(Layers):
    """Layers with a checkpoint of the first; the exporter cannot trace a reentrant one."""

    def __init__(self, reentrant: bool, width: int = 8) -> None:
        super().__init__(width)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(
            lambda y: torch.relu(self.first(y)), x, use_reentrant=self.reentrant
        )
        return self.second(hidden).square().mean()


class Reverse(torch.autograd.Function):
    """Gradient reversal: its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Words(nn.Module):
    """Embedding, LayerNorm, GELU and a loss on the first word only.

    ORT's compute optimizer moves the selection of the first word up.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(30, 16)
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.second(nn.functional.gelu(self.norm(self.first(self.words(ids)))))
        return self.last(hidden)[:, 0].square().mean()


def cast_parameters_in_place(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters in place, and no buffer, as DeepSpeed does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


class LossModel(nn.Module):
    """A model of transformers whose output is the loss; token ids alone are their own labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch).loss


def language_model(family: str, attention: str, dropout: float = 0.0) -> LossModel:
    """Return a two-layer BERT or Llama with random weights, as a launcher wraps it.

    Its input is a batch, its output the loss.
    """
    transformers = pytest.importorskip("transformers")

    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes.update(num_attention_heads=4, max_position_embeddings=32)
    if family == "bert":
        drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = transformers.BertConfig(**sizes, **drops)
        kind = transformers.AutoModelForMaskedLM
    else:
        config = transformers.LlamaConfig(
            **sizes, num_key_value_heads=2, attention_dropout=dropout, use_cache=False
        )
        kind = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    return LossModel(kind.from_config(config, attn_implementation=attention))


def stepped(module: nn.Module, **settings: Any) -> Any:
    """Return the module under engine ort after one forward and backward pass on IDS."""
    load(Settings(**settings))
    ours = wrapped(module, **settings)
    ours(IDS).backward()
    return ours


def executed(witness: PassAndGraphCounters, module: nn.Module, **settings: Any) -> GraphNodeCounts:
    """Return the training graph of such a pass, after a check that its gradients equal eager's."""
    # A copy made before, because ORT's pass leaves gradients in the module.
    eager = copy.deepcopy(module)
    eager(IDS).backward()
    stepped(module, **settings)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad, msg=name)
    return witness.graphs[-1]
