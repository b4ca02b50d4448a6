"""One check of a cell of tools/matrix.py: train a small model on ORT and in eager PyTorch, compare.

Runs in the cell's own environment, one process per check: `python tools/matrix_cell.py CHECK`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

STEPS = 4
Batch = dict[str, torch.Tensor]
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
}


def main(check: str) -> int:
    """Print, as JSON, the largest differences of losses and gradients, or ORT's error."""
    from ortmodule._internal.import_ortmodule import import_ortmodule_with_repairs_and_export_steps

    import_ortmodule_with_repairs_and_export_steps()  # before transformers, as the worker does
    model, batch = CHECKS[check]()
    try:
        print(json.dumps(compare(model, batch)))
    # A refusal is a result, so the exit status stays 0.
    except Exception as error:  # any error of ORT or the exporter is the cell's result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(json.dumps({"refused": f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]}))
    return 0


def compare(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Return the largest relative differences of AdamW steps' losses and first gradients."""
    from ortmodule import ORTModule, Settings

    ours = ORTModule(copy.deepcopy(model), Settings(threads=1))
    (losses, gradients), (ort_losses, ort_gradients) = trained(model, batch), trained(ours, batch)
    assert gradients.keys() == ort_gradients.keys(), gradients.keys() ^ ort_gradients.keys()
    largest = max(value.abs().max() for value in gradients.values())
    difference = max((ort_gradients[name] - value).abs().max() for name, value in gradients.items())
    return {
        "loss": max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(ort_losses, losses)),
        "gradient": (difference / largest).item(),
    }


def trained(module: Any, batch: Batch) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of every step and the gradients of the first."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = []
    gradients = {}
    for _ in range(STEPS):
        loss = module(**batch)
        loss.backward()
        gradients = gradients or {
            n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


# ------------------------------------------------------------ the models


def bert() -> tuple[nn.Module, Batch]:
    """Return a two-layer BERT for masked language modelling with eager attention."""
    import transformers

    config = transformers.BertConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return _loss_module(transformers.AutoModelForMaskedLM, config, "eager"), tokens()


def llama() -> tuple[nn.Module, Batch]:
    """Return a two-layer Llama with grouped keys and torch's fused attention."""
    import transformers

    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
    return _loss_module(transformers.AutoModelForCausalLM, config, "sdpa"), tokens()


def lora() -> tuple[nn.Module, Batch]:
    """Return the same Llama with adapters on queries and values, and all else frozen."""
    import peft

    module, batch = llama()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    module.model = peft.get_peft_model(module.model, config)
    generator = torch.Generator().manual_seed(2)
    for (
        name,
        parameter,
    ) in module.named_parameters():  # a B of zeros would leave A without a gradient
        if "lora_B" in name:
            parameter.data.normal_(std=0.02, generator=generator)
    return module, batch


class Doubled(torch.autograd.Function):
    """A function whose backward is twice the derivative, from tensors that the forward saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * 4 * x * ctx.scale, None


class Custom(nn.Module):
    """Two layers with that function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Doubled.apply(torch.tanh(self.first(x)), 0.5)).square().mean()


class Attention(nn.Module):
    """One of torch's own encoder layers, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x, src_key_padding_mask=padding)).square().mean()


def custom() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Custom(), {"x": torch.randn(4, 8)}


def attention() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    return Attention(), {"x": torch.randn(3, 5, 16), "padding": padding}


def tokens() -> Batch:
    """Two rows of tokens, one of them padded."""
    ids = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.where(mask == 1, ids, torch.full_like(ids, -100)),
    }


def _loss_module(kind: Any, config: Any, attention: str) -> nn.Module:
    from ortlaunch.worker.model.model import LossModule

    torch.manual_seed(0)
    return LossModule(kind.from_config(config, attn_implementation=attention))


CHECKS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "bert": bert,
    "llama": llama,
    "lora": lora,
    "custom": custom,
    "attention": attention,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
