"""Compare sweeps of a finetuning: a whole grid, and TPE with ASHA, which stops bad trials early.

python benchmarks/sweep.py FOLDER
    24 trials each: the grid, TPE + ASHA between the grid's ends, and on the grid's own points
    with early and with late evaluations
python -m tests.cluster.lab 2 python benchmarks/sweep.py FOLDER --sweeps grid,tpe-asha-slurm
    TPE + ASHA with trials that are jobs of Slurm, in the tests' cluster; a finished grid is kept

The model and the docstrings are those of `finetune.py`, with fewer and shorter samples. A trial is
54 steps, evaluated every 6. The table has the lowest held-out loss of a complete trial, the steps
that all trials of a sweep took, and the steps of the trials up to the first that is as good as the
grid's best one. The claim is that TPE + ASHA between the ends is no worse than the grid, with
at most 40 % of its steps; status 1 if one of these sweeps is not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import finetune

from ortlaunch import Sweep, sweep

# Shorter than finetune.py's: the table is about trials, and not about the best model.
LENGTH = 32
STEPS = 54
EVERY = 6
# Of the grid's steps.
SHARE = 0.4
# A first grid as people write it: a rate below and above finetune.py's, and two values of the rest.
GRID: dict[str, dict[str, Any]] = {
    "optimizer.learning_rate": {"choice": [1e-4, 3e-4, 1e-3]},
    "schedule.warmup_ratio": {"choice": [0.0, 0.2]},
    "optimizer.weight_decay": {"choice": [0.0, 0.1]},
    "batch.global_size": {"choice": [8, 16]},
}
# The same ends; batches have no values between.
BETWEEN: dict[str, dict[str, Any]] = {
    "optimizer.learning_rate": {"log_uniform": [1e-4, 1e-3]},
    "schedule.warmup_ratio": {"uniform": [0.0, 0.2]},
    "optimizer.weight_decay": {"uniform": [0.0, 0.1]},
    "batch.global_size": {"choice": [8, 16]},
}
ASHA = {"sampler": "tpe", "pruner": "asha"}
SWEEPS: dict[str, dict[str, Any]] = {
    "grid": {"space": GRID, "sampler": "grid"},
    "tpe-asha": {"space": BETWEEN, **ASHA},
    "tpe-asha-points": {"space": GRID, **ASHA},
    # ASHA's rungs are evaluations: here after a third of a trial, and at its end.
    "tpe-asha-points-late": {"space": GRID, **ASHA, "every": 18},
    "tpe-asha-slurm": {"space": BETWEEN, **ASHA, "submit": True},
}


def recipe(folder: Path, seed: int, search: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of a sweep."""
    made = finetune.recipe(folder, STEPS)
    made["seed"] = seed
    made["data"]["sequence_length"] = LENGTH
    made["engine"] = {"name": "eager"}
    made["train"]["evaluate_every_steps"] = search.get("every", EVERY)
    # The rest of the processor is another trial's.
    made["launch"] = {"processes_per_node": 1}
    made["sweep"] = {"metrics": [{"metric": "loss"}], "trials": 24, "parallel": 2, **search}
    made["sweep"].pop("every", None)
    return made


def run(folder: Path, name: str, seed: int) -> tuple[Sweep, float]:
    """Run a sweep, or continue it, and return it with its seconds."""
    began = time.monotonic()
    place = folder / f"sweep-{name}-{seed}"
    found = sweep(recipe(folder, seed, SWEEPS[name]), run_dir=place, progress=True)
    seconds = time.monotonic() - began
    # 0.3 GB each, which nothing continues.
    for checkpoint in place.glob("trials/*/checkpoints/*"):
        shutil.rmtree(checkpoint)
    return found, seconds


def row(name: str, found: Sweep, seconds: float, target: float) -> list[str]:
    """Return the cells of a sweep; `target` is the grid's lowest loss."""
    trials = found.trials()
    total = sum(one.steps for one in trials)
    best = found.best()[0]
    reached = [one.number for one in trials
               if one.state == "complete" and one.values["loss"] <= target]  # fmt: skip
    until = str(sum(one.steps for one in trials[: reached[0] + 1])) if reached else "not reached"
    pruned = sum(one.state == "pruned" for one in trials)
    return [name, f"{best.values['loss']:.5f}", f"{total}", until, f"{pruned}", f"{seconds:.0f}",
            json.dumps(best.fields)]  # fmt: skip


def main() -> int:
    """Run the sweeps, print the table; status 1 if TPE + ASHA misses its claim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=finetune.SEED, help="of trials and draws")
    parser.add_argument(
        "--sweeps",
        default="grid,tpe-asha,tpe-asha-points,tpe-asha-points-late",
        help=f"of {', '.join(SWEEPS)}",
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(finetune.SETTINGS)
    finetune.fetch_model(folder)
    finetune.write_data(folder, training=480, evaluation=96)
    names = dict.fromkeys(["grid", *options.sweeps.split(",")])
    found = {name: run(folder, name, options.seed) for name in names}
    grid = found["grid"][0]
    target = grid.best()[0].values["loss"]
    most = SHARE * sum(one.steps for one in grid.trials())
    head = ["sweep", "lowest loss", "steps", "steps to the grid's", "pruned", "seconds", "best"]
    rows = [head, ["---"] * len(head),
            *(row(name, *pair, target) for name, pair in found.items())]  # fmt: skip
    print("\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    missed = 0
    for name in {"tpe-asha", "tpe-asha-slurm"} & set(found):
        steps = sum(one.steps for one in found[name][0].trials())
        lowest = found[name][0].best()[0].values["loss"]
        missed += lowest > target or steps > most
        print(f"{name}: loss {lowest:.5f} for {target:.5f}, {steps} steps of at most {most:.0f}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
