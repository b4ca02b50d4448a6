"""Compare ortlaunch with its peers on the same model, batches and optimizer, in one run.

python benchmarks/peers.py full       our engines, Hugging Face Trainer (eager, torch.compile), bare loops
python benchmarks/peers.py lora       the same Llama with adapters: eager, stock ORTModule, ours
python benchmarks/peers.py deepspeed  ZeRO 1: accelerate with DeepSpeed, ours on eager and ort
python benchmarks/peers.py shard      FSDP2 on two ranks of one thread: a bare loop, accelerate, ours
python benchmarks/peers.py tensor     tensor parallelism on two ranks: a bare loop with transformers', ours

In full and lora our engines run twice, at `engine.matmul_precision: highest` and `medium`
(--precisions); the rates of two matmuls at each are printed first. Every contestant is a process of
its own and runs in turns: A B C A B C ..., medians. Needs only the extra `lora` (peft and
accelerate).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contest import race, table

SETTINGS = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
LOOPS = Path(__file__).with_name("loops.py")
FULL: dict[str, dict[str, Any]] = {
    "Trainer, eager": {"loop": "trainer", "compile": False},
    "Trainer, torch.compile": {"loop": "trainer", "compile": True},
    "bare PyTorch loop": {"loop": "bare-eager"},
    "bare ORTModule loop": {"loop": "bare-ort"},
    "bare loop, our ORTModule": {"loop": "bare-ours", "engine": "ort"},
    "ortlaunch, eager": {"loop": "ours", "engine": "eager"},
    "ortlaunch, inductor": {"loop": "ours", "engine": "inductor"},
    "ortlaunch, ort": {"loop": "ours", "engine": "ort"},
}
LORA = {
    "bare PyTorch loop": {"loop": "bare-eager"},
    "stock ORTModule": {"loop": "bare-ort"},
    "ortlaunch, eager": {"loop": "ours", "engine": "eager"},
    "ortlaunch, ort": {"loop": "ours", "engine": "ort"},
}
DEEPSPEED = {
    "accelerate, ZeRO 1": {"loop": "accelerate", "zero": 1},
    "ortlaunch, eager, ZeRO 1": {"loop": "ours", "engine": "eager", "zero": 1},
    "ortlaunch, ort, ZeRO 1": {"loop": "ours", "engine": "ort", "zero": 1},
}
SHARD: dict[str, dict[str, Any]] = {
    name: {"loop": loop, "engine": "eager", "parallel": {"shard": 2}}
    for name, loop in (
        ("bare fully_shard loop", "bare-fsdp2"),
        ("accelerate, FSDP2", "accelerate-fsdp2"),
        ("ortlaunch, parallel.shard: 2", "ours"),
    )
}
TENSOR: dict[str, dict[str, Any]] = {
    name: {"loop": loop, "engine": "eager", "parallel": {"tensor": 2}}
    for name, loop in (
        ("bare loop, transformers' tp_size=2", "transformers-tensor"),
        ("ortlaunch, parallel.tensor: 2", "ours"),
    )
}
RACES = {  # contestants, whom they are measured against, shapes, LoRA
    "full": (FULL, "Trainer, eager", ("bert", "llama"), False),
    "lora": (LORA, "stock ORTModule", ("llama",), True),
    "deepspeed": (DEEPSPEED, "accelerate, ZeRO 1", ("bert", "llama"), False),
    "shard": (SHARD, "bare fully_shard loop", ("llama",), False),
    "tensor": (TENSOR, "bare loop, transformers' tp_size=2", ("llama",), False),
}


def at_precisions(
    contestants: dict[str, dict[str, Any]], words: list[str]
) -> dict[str, dict[str, Any]]:
    """Return our loop at each precision; the others use PyTorch's default, highest."""
    found = {}
    for name, options in contestants.items():
        for word in words if options["loop"] == "ours" else ["highest"]:
            found[name if word == "highest" else f"{name}, {word}"] = {**options, "precision": word}
    return found


def rates(words: list[str], vocabulary: int) -> str:
    """Return GFLOP/s of matmuls of MLP and head at each precision, and ineffective precisions."""
    import torch

    from ortlaunch.base.machine import reason_cpu_matmul_precision_gains_nothing_or_none

    lines = []
    for columns in (3072, vocabulary):
        left = torch.randn(1024, 768)
        right = torch.randn(768, columns)
        for word in words:
            torch.set_float32_matmul_precision(word)
            # The least of 9, because other processes only add time.
            seconds = min(_timed(lambda a=left, b=right: a @ b) for _ in range(9))
            # A matmul of n x k by k x m has 2 n k m operations.
            rate = 2e-9 * left.numel() * columns / seconds
            lines.append(f"1024 x 768 x {columns:,} at {word}: {rate:.0f} GFLOP/s")
    # PyTorch's default, for all that follows in this process.
    torch.set_float32_matmul_precision("highest")
    missing = [
        f"{word} gains nothing: {why}"
        for word in words
        if word != "highest" and (why := reason_cpu_matmul_precision_gains_nothing_or_none(word))
    ]
    return "\n".join(lines + missing)


def _timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def main() -> int:
    """Run a race and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("race", choices=RACES)
    parser.add_argument("--shapes", help="bert, llama or both, with a comma")
    parser.add_argument("--only", help="names of contestants, with a semicolon")
    parser.add_argument(
        "--precisions", default="highest,medium", help="of our engines in full and lora"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="training steps of a turn")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument(
        "--small", action="store_true", help="a tiny model: to try the script, not to measure"
    )
    options = parser.parse_args()
    contestants, against, shapes, lora = RACES[options.race]
    words = ["highest"] if options.race not in ("full", "lora") else options.precisions.split(",")
    contestants = at_precisions(contestants, words)
    print(rates(words, options.vocabulary), flush=True)
    names = options.only.split(";") if options.only else list(contestants)
    # --only may leave out the contestant that the others are compared with.
    against = against if against in names else names[0]
    for shape in options.shapes.split(",") if options.shapes else shapes:
        base = {
            "shape": shape,
            "lora": lora,
            "zero": None,
            "batch": options.batch,
            "small": options.small,
        }
        base["vocabulary"] = options.vocabulary
        commands = {
            name: [
                sys.executable,
                str(LOOPS),
                json.dumps({**base, "steps": options.steps, **contestants[name]}),
            ]
            for name in names
        }
        # Run folders and logs of the contestants are removed after each race.
        with tempfile.TemporaryDirectory() as folder:
            times = race(
                commands, options.rounds, {**os.environ, **SETTINGS, "CONTEST_FOLDER": folder}
            )
        what = (
            f"vocabulary {options.vocabulary:,}, "
            f"{'LoRA, r 8 on q and v' if lora else 'all weights'}"
        )
        print(f"\n{shape}-shaped, hidden 768, 4 layers, batch {options.batch} x 128, {what}, fp32, "
              f"{options.rounds} turns of {options.steps} "
              f"steps:\n\n{table(times, against)}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
