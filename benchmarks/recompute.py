"""`model.gradient_checkpointing`: the peak of activations before and after, beside the plan, and what it costs in time.

    python benchmarks/recompute.py [--engines eager,inductor,ort] [--micro 8] [--steps 4] [--rounds 1]

A Llama of 12 layers of 256 on 256 tokens, whole commands in turns. Activations are the peak of a run with a full micro
batch less that of a run with one sample, as much larger as the batch: what a process holds anyway is in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

LENGTH = 256
SIZES = {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 704,
         "max_position_embeddings": LENGTH}  # fmt: skip
TINY = Path(__file__).parents[1] / "recipes/llama2-7b/tiny.yaml"


class Run(NamedTuple):
    """Bytes planned for activations, bytes at peak, and seconds of each step but the first."""

    planned: int
    peak: int
    seconds: list[float]


def train(engine: str, again: bool, micro: int, steps: int, folder: Path) -> Run:
    """One command, as anyone would type it."""
    overrides = {
        **{f"model.config.{name}": value for name, value in SIZES.items()}, "data.sequence_length": LENGTH,
        "data.tokenizer.vocab_size": 1000, "batch.global_size": micro, "batch.micro_size": micro,
        "engine.name": engine, "engine.chunked_loss": "off", "model.gradient_checkpointing": str(again).lower(),
        "train.max_steps": steps, "log.every_steps": 1,
    }  # fmt: skip
    command = [sys.executable, "-m", "ortlaunch.cli", "train", str(TINY), "--run-dir", str(folder)]
    command += [f"{name}={value}" for name, value in overrides.items()]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    memory = json.loads((folder / "memory.json").read_text())
    ends = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    marks = [one["elapsed_seconds"] for one in ends if "loss" in one]
    return Run(memory["planned"]["activations"], memory["measured"]["peak"], [b - a for a, b in zip(marks, marks[1:])])


def measured(engine: str, again: bool, options: Any, folder: Path) -> tuple[int, int, list[float]]:
    """Activations planned, activations measured, and seconds of steps."""
    name = f"{engine}-{again}"
    full = train(engine, again, options.micro, options.steps, folder / name)
    one = train(engine, again, 1, 2, folder / f"{name}-one")
    return full.planned, (full.peak - one.peak) * options.micro // (options.micro - 1), full.seconds


def main() -> int:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="eager,inductor,ort")
    parser.add_argument("--micro", type=int, default=8, help="samples of a micro batch, two or more")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="turns of all; times are medians, bytes the last turn's")
    options = parser.parse_args()
    seconds: dict[tuple[str, bool], list[float]] = {}
    found: dict[tuple[str, bool], tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            for key in ((engine, again) for engine in options.engines.split(",") for again in (False, True)):
                *found[key], times = measured(*key, options, Path(folder) / str(turn))
                seconds.setdefault(key, []).extend(times)
    print(table(found, {key: statistics.median(times) for key, times in seconds.items()}))
    return 0


def table(found: dict[tuple[str, bool], Any], seconds: dict[tuple[str, bool], float]) -> str:
    """MiB of activations by engine, and how much longer a step takes."""
    lines = [
        "| engine | planned, MiB | measured | recomputed: planned | measured | step time x |",
        "|---|---|---|---|---|---|",
    ]
    for engine in dict.fromkeys(engine for engine, _ in found):
        sizes = " | ".join(f"{size / 2**20:.0f}" for again in (False, True) for size in found[engine, again])
        lines.append(f"| {engine} | {sizes} | {seconds[engine, True] / seconds[engine, False]:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
