"""Train a case of the zoo on ONNX Runtime and in eager PyTorch, three steps each.

Every function runs in the child process of a case.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

STEPS = 3
# Of the norm of the difference divided by the norm of eager's values.
LIMIT = 1e-5


class Net(nn.Module):
    """A layer between weights, so that gradients reach its inputs and its own weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        # Scale the first floating-point input only: labels and lengths must stay as they are.
        given = [
            v * self.scale if not i and v.is_floating_point() else v for i, v in enumerate(inputs)
        ]
        losses = [(v.sin() + v.square()).mean() for v in floating(self.layer(*given))]
        return torch.stack(losses).sum() * self.scale


class Given(Net):
    """A net whose layer also takes the batch itself, as does a copy in evaluation mode."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.teacher = copy.deepcopy(layer)

    def train(self, mode: bool = True) -> Given:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            targets = floating(self.teacher(*inputs))
        found = floating(self.layer(*inputs))
        losses = [(v * (t - 0.1).cos()).mean() for v, t in zip(found, targets)]
        return super().forward(*inputs) + self.scale * torch.stack(losses).sum()


def floating(values: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors among the results of a layer."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [value for value in tensors if value.is_floating_point()]


def layer_net(
    make: Callable[[], Any], frozen: int = 0, kind: type[Net] = Net
) -> tuple[nn.Module, list[Any]]:
    """Return a net of a layer and its inputs, with running statistics reset.

    Args:
        make: returns the layer and its inputs.
        frozen: 1 freezes all parameters of the layer, 2 every other one.
        kind: the net.
    """
    layer, inputs = make()
    with torch.no_grad():
        # Lazy layers create their weights in the first pass.
        layer(*inputs)
    for module in layer.modules():
        if hasattr(module, "reset_running_stats"):
            module.reset_running_stats()
    for parameter in [*layer.parameters()][::frozen] if frozen else ():
        parameter.requires_grad_(False)
    return kind(layer), inputs


def tried(make: Callable[[], Any], long: bool = False) -> dict[str, Any]:
    """Return the result of one case.

    Its `state` is trains, differs, refused, or no case (eager PyTorch does not run it).

    Args:
        make: returns the model and its inputs.
        long: whether attention stays torch's fused kernel, as in models of long sequences.
    """
    from ortmodule._internal.base import torch_calls
    from ortmodule._internal.torch_in_graph import attention_choice, torch_kernels

    # The cases are small: torch computes their matmuls, as it does at the widths of real models.
    torch_kernels.LEAST_MATRIX_WIDTH = 1
    if long:
        attention_choice.FUSED_ATTENTION_SCORES = 1
    torch.manual_seed(0)
    try:
        model, inputs = make()
        # Training changes the weights: each side needs its own copy.
        eager = copy.deepcopy(model)
        theirs = steps(eager, eager, inputs)
    except Exception as error:
        return {"state": "no case", "why": brief(error)}
    torch_calls.reset_call_and_pass_counts()
    try:
        ours, named = advised(model, inputs)
    except Exception as error:
        return {"state": "refused", "why": brief(error), "trace": traceback.format_exc()[-3000:]}
    worst = max(difference(a, b) for a, b in zip(ours, theirs))
    # Rounding may separate two correct results: float64 then decides which of them is off.
    exact = bound(model, inputs, ours, theirs) if worst > LIMIT else []
    operators = {
        name: found.forward for name, found in torch_calls.call_counts_by_called_name().items()
    }
    near = exact and all(mine <= max(LIMIT, 4 * eager) for mine, eager in exact)
    state = "trains" if worst <= LIMIT or near else "differs"
    # Only the written nets record whether they would train without torch operators.
    before = (
        plain_export(model, inputs) if operators and type(model).__module__.endswith("nets") else ""
    )
    calls = [f"{name.removeprefix('aten.')} {count}" for name, count in operators.items()]
    advised_layers = [f"as the error says, torch_modules: {', '.join(named)}"] if named else []
    shown = [*advised_layers, *calls[:6], *([f"{len(calls) - 6} more"] if len(calls) > 6 else [])]
    first = [max(column) for column in zip(*exact[:2])]
    return {
        "state": state,
        "why": f"differs by {worst:.0e}" if state == "differs" else "",
        "difference": worst,
        "step 1 from float64, eager's": f"{first[0]:.0e}, {first[1]:.0e}" if first else None,
        "torch in the graph": ", ".join(shown),
        "before": before,
    }


def plain_export(model: nn.Module, inputs: Any) -> str:
    """Return the error of a run with torch_operators off; an empty text if it trains."""
    from ortmodule import ORTModule, Settings

    tried = copy.deepcopy(model)
    try:
        steps(tried, ORTModule(tried, Settings(torch_operators="off")), inputs)
    except Exception as error:
        return brief(error)
    return ""


def advised(model: nn.Module, inputs: Any) -> tuple[list[torch.Tensor], list[str]]:
    """Return the values of a run, and the layers that it runs as torch modules.

    A failed export suggests layers for `torch_modules`; the next attempt uses them.
    """
    from ortmodule import ORTModule, Settings

    named: list[str] = []
    # Each error names only the layers of one failed export.
    for _ in range(12):
        try:
            tried = copy.deepcopy(model)
            return steps(tried, ORTModule(tried, Settings(torch_modules=named)), inputs), named
        except Exception as error:
            found = re.search(r"torch_modules=\[(.*?)\]", str(error))
            more = re.findall(r"'([^']+)'", found[1]) if found else []
            if not more or set(more) <= set(named):
                raise
            named = sorted({*named, *more})
    raise AssertionError("every export names another layer")


def steps(model: nn.Module, module: Any, inputs: Any) -> list[torch.Tensor]:
    """Return the loss and gradients of each step of SGD, and the buffers at the end."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    found: list[torch.Tensor] = []
    for step in range(STEPS):
        # Both sides begin each step with the same random state.
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
        loss.backward()
        found.append(loss.detach().reshape(1))
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        found.append(torch.cat([g.detach().reshape(-1).clone() for g in grads]))
        optimizer.step()
    found += [b.detach().float().reshape(-1).clone() for b in model.buffers()]
    return found


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the relative difference by norm; an absolute one for values near zero."""
    # Infinite values must be at the same positions; then only finite ones are compared.
    if not torch.equal(ours.isfinite(), theirs.isfinite()):
        return float("inf")
    ours = ours.nan_to_num(0.0, 0.0, 0.0)
    theirs = theirs.nan_to_num(0.0, 0.0, 0.0)
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-3))


def bound(
    model: nn.Module, inputs: Any, ours: Sequence[Any], theirs: Sequence[Any]
) -> list[tuple[float, float]]:
    """Return the distances of our values and eager's from float64's; empty if float64 fails."""
    # torch has no grouped matmul in float64.
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    wide = tree_map(
        lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, inputs
    )
    try:
        exact = steps(model.double(), model, wide)
    except Exception:
        return []
    return [(difference(a, c), difference(b, c)) for a, b, c in zip(ours, theirs, exact)]


def brief(error: Exception) -> str:
    # The last line carries the cause; torch appends C++ frames below it.
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if line.strip() and not line.startswith("frame #")
    ]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else ''}"
