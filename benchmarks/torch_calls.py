"""What calls of torch inside ONNX Runtime's graph cost: seconds of CPU a step, in turns, medians.

BERT and Llama (no operator in torch) with `torch_operators` auto and off; a convolution net and a bidirectional LSTM,
and nn.GRU, beside eager PyTorch, with the share that torch takes.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Images(nn.Module):
    """Convolutions with GroupNorm, Mish and an uneven pool."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 32, 64, 64)
        blocks = [
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.Mish())
            for i, o in zip(sizes, sizes[1:])
        ]
        self.body = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(5), nn.Flatten(), nn.Linear(64 * 25, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class Sequences(nn.Module):
    """A recurrent layer and a linear one."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.recurrent = kind(64, 128, batch_first=True, **settings)
        self.last = nn.LazyLinear(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.recurrent(x)[0]).square().mean()


class Loss(nn.Module):
    """A language model's loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        return loss


def transformer(family: str) -> nn.Module:
    """Two layers of 256."""
    import transformers

    sizes = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(family, **sizes, intermediate_size=1024, use_cache=False)
    kind = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    return Loss(kind.from_config(config))


def main() -> int:
    """Print a line for each model and way to run it."""
    from ortlaunch.ortmodule import ORTModule, Settings
    from ortlaunch.ortmodule.base import torch_calls
    from ortlaunch.ortmodule.base.counters import tally
    from ortlaunch.ortmodule.witness import Witness

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    Witness().install()

    def ort(asked: str) -> Callable[[nn.Module], Any]:
        return lambda model: ORTModule(model, Settings(torch_operators=asked))  # type: ignore[arg-type]

    def eager(model: nn.Module) -> Any:
        return model

    words, images, sequence = torch.randint(1000, (8, 64)), torch.randn(8, 3, 32, 32), torch.randn(8, 32, 64)
    cases: list[tuple[str, nn.Module, torch.Tensor, dict[str, Callable[[nn.Module], Any]]]] = [
        ("BERT", transformer("bert"), words, {"auto": ort("auto"), "off": ort("off")}),
        ("Llama", transformer("llama"), words, {"auto": ort("auto"), "off": ort("off")}),
        ("convolutions", Images(), images, {"auto": ort("auto"), "eager": eager}),
        ("LSTM, two ways", Sequences(nn.LSTM, bidirectional=True), sequence, {"auto": ort("auto"), "eager": eager}),
        ("GRU", Sequences(nn.GRU), sequence, {"auto": ort("auto"), "eager": eager}),
    ]
    for name, model, batch, ways in cases:
        with torch.no_grad():
            model(batch)  # for the lazy layer
        made = {way: wrap(copy.deepcopy(model)) for way, wrap in ways.items()}
        before = tally.exports
        for module in made.values():
            module(batch).backward()
        torch_calls.restart()
        seconds: dict[str, list[float]] = {way: [] for way in made}
        for _ in range(options.rounds):
            for way, module in made.items():
                began = time.process_time()
                for _ in range(options.steps):
                    module(batch).backward()
                seconds[way].append((time.process_time() - began) / options.steps)
        told = ", ".join(f"{way} {statistics.median(found) * 1000:.1f} ms" for way, found in seconds.items())
        exports = tally.exports - before
        print(f"{name}: {told}; torch in the graph {torch_calls.share():.0%}; {exports} exports", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
