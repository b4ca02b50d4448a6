"""What products in bfloat16 do to a training: loss curves at `engine.matmul_precision` highest and medium.

    python benchmarks/precision_curves.py [--shapes bert-tiny,llama-tiny,bert-768,llama-768]
                                          [--ways highest,medium,emulated] [--steps 200] [--picture F]

`emulated` is highest with both matrices of each aten product (mm, addmm, bmm, baddbmm; forward and backward) rounded to
bfloat16 first and the sums in float32, as a processor with AMX does it: what medium would do where this one has no such
unit. Engine eager, the tiny recipes' own data. The 768-wide shapes have 4 layers and steps of 8
sequences.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WAYS = ("highest", "medium", "emulated")
WIDE = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12}
WIDE_BATCH = {"batch.global_size": 8, "batch.micro_size": 8}
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SHAPES: dict[str, tuple[Path, dict[str, int]]] = {
    "bert-tiny": (RECIPES / "bert-large/tiny.yaml", {}),
    "llama-tiny": (RECIPES / "llama2-7b/tiny.yaml", {}),
    "bert-768": (RECIPES / "bert-large/tiny.yaml", {**WIDE, "intermediate_size": 3072}),
    "llama-768": (RECIPES / "llama2-7b/tiny.yaml", {**WIDE, "intermediate_size": 2048}),
}


def train_here(shape: str, how: str, steps: int, folder: Path) -> None:
    """One training in this process, its products rounded where they are emulated."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from ortlaunch.planning.world import LaunchOptions
    from ortlaunch.rank import Rank
    from ortlaunch.resolve.resolve import resolve
    from ortlaunch.run import control
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.worker.__main__ import live
    from ortlaunch.worker.supervision.watchdog import Watchdog

    aten = torch.ops.aten
    products = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}

    class Rounded(TorchDispatchMode):
        """The two matrices of a product have bfloat16's bits."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in products:
                first = products[func]
                args = (
                    *args[:first],
                    *(one.bfloat16().to(one.dtype) for one in args[first : first + 2]),
                    *args[first + 2 :],
                )
            return func(*args, **(kwargs or {}))

    path, config = SHAPES[shape]
    settings = {**{f"model.config.{name}": value for name, value in config.items()}, "train.max_steps": steps}
    settings |= {"engine.name": "eager", "log.every_steps": 1, "data.tokenizer.vocab_size": 3000}
    settings |= WIDE_BATCH if shape.endswith("768") else {}
    # Else `highest` would be oneDNN's products on AMD's processors, as medium's are.
    settings |= {"engine.matmul_precision": "medium"} if how == "medium" else {"engine.onednn": "false"}
    overrides = tuple(f"{name}={value}" for name, value in settings.items())
    resolved = resolve(path, overrides, LaunchOptions("local", 1, None, None, None), os.environ)
    run = RunDir(folder)
    control._prepare(resolved, run)
    rank = Rank.from_environ({})
    if how == "emulated":
        with Rounded():
            live(run, rank, Watchdog(rank, run))
    else:
        live(run, rank, Watchdog(rank, run))


def losses(shape: str, how: str, steps: int, folder: Path) -> list[float]:
    """Of each step, from a process of its own."""
    command = [sys.executable, __file__, "--one", shape, how, str(folder), "--steps", str(steps)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def draw(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """One plot a shape, a line each way."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 4), squeeze=False)
    for axis, (shape, found) in zip(axes[0], curves.items()):
        for how, curve in found.items():
            axis.plot(range(1, len(curve) + 1), curve, label=how, linewidth=1)
        axis.set(title=shape, xlabel="step", ylabel="loss")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    """Run all, print the differences, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ways", default=",".join(WAYS), help="highest, which all are compared with, first")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--picture", type=Path, help="a .png file")
    parser.add_argument("--one", nargs=3, metavar=("SHAPE", "HOW", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train_here(*options.one[:2], options.steps, Path(options.one[2]))
        return 0
    curves, ways = {}, options.ways.split(",")
    print(f"| shape | steps | last loss, highest | largest relative difference: {' | '.join(ways[1:])} |")
    print("|---" * (2 + len(ways)) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes.split(","):
            found = {how: losses(shape, how, options.steps, Path(folder) / f"{shape}-{how}") for how in ways}
            exact, curves[shape] = found["highest"], found
            worst = [max(abs(a - b) / abs(b) for a, b in zip(found[way], exact)) for way in ways[1:]]
            differences = " | ".join(f"{one:.1e}" for one in worst)
            print(f"| {shape} | {len(exact)} | {exact[-1]:.4f} | {differences} |", flush=True)
    if options.picture:
        draw(curves, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
