"""Head and loss over a large vocabulary, forward and backward: whole logits, chunks of rows, and the products alone.

    python benchmarks/chunked_loss.py [--turns 7] [--precision highest|high|medium] [--rows 160]

1,024 rows x 768 x 32,000 in torch, each in a process of its own for its peak memory, then in turns for its time; and
the head of a masked-lm of MiniLM's size (32 x 96 tokens, 384, 30,522, 15 % labelled) in eager and inside ONNX Runtime's
graph. Status 1 where chunks take more than 1.1 x the products' time, save less than twice the logits' memory, or are
slower on ort than the whole in eager.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
ROWS, WIDTH, VOCABULARY = 1024, 768, 32_000
MINILM = {"hidden_size": 384, "vocab_size": 30_522, "num_hidden_layers": 1, "num_attention_heads": 12}
FACTOR, LOGITS = 1.1, 4 * ROWS * VOCABULARY


def ways(rows: int) -> dict[str, Callable[[], Any]]:
    """Forward and backward of one head."""
    import torch
    from torch.nn import functional

    from ortlaunch.worker.model.chunked_loss import chunked_loss

    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.02).requires_grad_()
    labels = torch.randint(VOCABULARY, (ROWS,))

    def products() -> None:
        with torch.no_grad():
            logits = hidden @ weight.t()
            _ = logits @ weight, logits.t() @ hidden

    def trained(loss: Any) -> None:
        hidden.grad = weight.grad = None
        loss.backward()

    return {
        "products": products,
        "whole": lambda: trained(functional.cross_entropy(functional.linear(hidden, weight), labels)),
        "chunks": lambda: trained(chunked_loss(hidden, weight, None, labels, rows, True)),
    }


def minilm(rows: int) -> dict[str, Callable[[], Any]]:
    """Forward and backward of MiniLM's head behind hidden states, by engine and form."""
    import torch
    import transformers

    from ortlaunch.ortmodule import ORTModule, Settings
    from ortlaunch.worker.model.chunked_head import ChunkedHead
    from ortlaunch.worker.model.model import LossModule

    class Head(torch.nn.Module):
        """What BertForMaskedLM does with its last hidden states."""

        def __init__(self) -> None:
            super().__init__()
            self.cls = transformers.models.bert.modeling_bert.BertOnlyMLMHead(transformers.BertConfig(**MINILM))

        def forward(self, hidden: Any, labels: Any = None) -> Any:
            logits = self.cls(hidden)
            loss = None if labels is None else torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)

    torch.manual_seed(0)
    batch = {"hidden": torch.randn(32, 96, 384, requires_grad=True), "labels": torch.randint(30_522, (32, 96))}
    batch["labels"][torch.rand(32, 96) > 0.15] = -100
    whole, chunked = (LossModule(Head().train()) for _ in range(2))
    chunked.chunk(ChunkedHead("cls.predictions.decoder", rows, False))
    modules = {"eager, whole": whole, "eager, chunks": chunked}
    threads = torch.get_num_threads()
    modules |= {
        name.replace("eager", "ort"): ORTModule(each, Settings(threads=threads)) for name, each in modules.items()
    }

    def step(module: Any) -> None:
        batch["hidden"].grad = None
        module.zero_grad(set_to_none=True)
        module(**batch).backward()

    return {name: lambda module=module: step(module) for name, module in modules.items()}  # type: ignore[misc]


def medians(contestants: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Seconds of each, in turns, after two to warm up."""
    took: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns + 2):
        for name, act in contestants.items():
            started = time.perf_counter()
            act()
            took[name].append(time.perf_counter() - started)
    for name, each in took.items():
        middle, least = statistics.median(each[2:]), min(each[2:])
        print(f"  {name:<14} {middle:.3f} s (least {least:.3f})", flush=True)
    return {name: statistics.median(each[2:]) for name, each in took.items()}


def own_peak(name: str, rows: int) -> int:
    """Bytes that a process of its own had resident at most, over what it had before its first pass."""
    command = [sys.executable, __file__, "--rows", str(rows), "--peak-of", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(name: str, rows: int) -> None:
    act = ways(rows)[name]
    before = resident("VmRSS")
    act()
    print(resident("VmHWM") - before)


def resident(word: str) -> int:
    """Bytes of this process now (VmRSS), or at most since it began (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(word))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        print_peak(options.peak_of, options.rows)
        return 0
    import torch

    torch.set_float32_matmul_precision(options.precision)
    print(f"{ROWS:,} x {WIDTH} x {VOCABULARY:,}, chunks of {options.rows} rows, {options.precision}:")
    head = medians(ways(options.rows), options.turns)
    saved = own_peak("whole", options.rows) - own_peak("chunks", options.rows)
    ratio = head["chunks"] / head["products"]
    print(
        f"  chunks / products {ratio:.2f}; peak memory less by {saved / LOGITS:.1f} x the logits ({LOGITS >> 20} MiB)"
    )
    print("MiniLM's masked-lm head, 32 x 96 x 384 x 30,522:")
    small = medians(minilm(options.rows), options.turns)
    slower = small["ort, chunks"] > small["eager, whole"]
    return int(ratio > FACTOR or saved < 2 * LOGITS or slower)


if __name__ == "__main__":
    sys.exit(main())
