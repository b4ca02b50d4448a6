"""Trains cases of the zoo on ONNX Runtime and in eager, three steps each; a line of JSON for each (zoo.py)."""

from __future__ import annotations

import copy
import json
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

STEPS = 3
LIMIT = 1e-5


class Net(nn.Module):
    """A layer between weights, so that gradients go through it to what it is given and to what it has."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.tensor(1.1))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        # Sizes as they are: what is a label stays what it is, and only the first number gets a gradient.
        given = [v * self.scale if not i and v.is_floating_point() else v for i, v in enumerate(inputs)]
        found = [v for v in tree_leaves(self.layer(*given)) if isinstance(v, torch.Tensor) and v.is_floating_point()]
        losses = [(v.sin() + v.square()).mean() for v in found]
        return torch.stack(losses).sum() * self.scale


def main() -> int:
    """The names are arguments: `layers` or a task of transformers, then cases; without cases their names are told."""
    kind, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made = _cases(kind)
    if not names:
        for name in made:
            print(json.dumps({"case": name}))
        return 0
    for name in names:
        print(json.dumps({"started": name}), flush=True)
        print(json.dumps({"name": name, **tried(made[name])}), flush=True)
    return 0


def _cases(kind: str) -> dict[str, Callable[[], Any]]:
    if kind == "layers":
        import zoo_layers

        return {name: lambda make=make: _net(make) for name, make in zoo_layers.cases().items()}
    import zoo_transformers

    return zoo_transformers.cases(kind)


def _net(make: Callable[[], Any]) -> tuple[nn.Module, list[Any]]:
    layer, inputs = make()
    with torch.no_grad():
        layer(*inputs)  # for lazy ones
    for module in layer.modules():
        if hasattr(module, "reset_running_stats"):
            module.reset_running_stats()
    return Net(layer), inputs


def tried(make: Callable[[], Any]) -> dict[str, Any]:
    """What became of one case: trains, differs, refused, or is no case at all (eager does not run it)."""
    from ortlaunch.ortmodule import torch_calls

    torch.manual_seed(0)
    began = time.perf_counter()
    try:
        model, inputs = make()
        eager = copy.deepcopy(model)
        theirs = steps(eager, eager, inputs)
    except Exception as error:
        return {"state": "no case", "why": brief(error)}
    torch_calls.restart()
    try:
        ours, named = advised(model, inputs)
    except Exception as error:
        return {"state": "refused", "why": brief(error), "trace": traceback.format_exc()[-3000:]}
    worst = max(difference(a, b) for a, b in zip(ours, theirs))
    took = time.perf_counter() - began
    operators = {name: found.forward for name, found in torch_calls.made().items()}
    state = "trains" if worst <= LIMIT else "differs"
    return {"state": state, "named": named, "difference": worst, "torch": operators, "seconds": round(took, 1)}


def advised(model: nn.Module, inputs: Any) -> tuple[list[torch.Tensor], list[str]]:
    """What a run gives, as it is or with the layers that its error says can run as torch; and these layers."""
    from ortlaunch.ortmodule import ORTModule, Settings

    named: list[str] = []
    for _ in range(4):
        try:
            tried = copy.deepcopy(model)
            return steps(tried, ORTModule(tried, Settings(torch_modules=named)), inputs), named
        except Exception as error:
            found = re.search(r"Settings\.torch_modules=\[(.*?)\]", str(error))
            more = re.findall(r"'([^']+)'", found[1]) if found else []
            if not more or set(more) <= set(named):
                raise
            named = sorted({*named, *more})
    raise AssertionError("every export names another layer")


def steps(model: nn.Module, module: Any, inputs: Any) -> list[torch.Tensor]:
    """The losses, and the gradients and buffers at the end, of so many steps of SGD."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    found: list[torch.Tensor] = []
    for step in range(STEPS):
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
    """Relative, by norm; of what is almost nothing, absolute."""
    if not torch.equal(ours.isfinite(), theirs.isfinite()):
        return float("inf")
    ours, theirs = ours.nan_to_num(0.0, 0.0, 0.0), theirs.nan_to_num(0.0, 0.0, 0.0)
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-3))


def brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else ''}"


if __name__ == "__main__":
    sys.exit(main())
