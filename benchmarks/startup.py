"""Time short commands: medians of whole commands, interleaved, beside `torchrun --help`.

    python benchmarks/startup.py [--runs 7]

Status 1 if a verb takes more than 0.20 s, `submit --dry-run` of 1,024 nodes x 8 more than 1 s,
10,000 hosts more than 1.5 s, or if their plan changes when it is read from its JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORTLAUNCH = str(Path(sys.executable).with_name("ortlaunch"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
# Seconds; above them the exit status is 1.
LIMIT = 0.20
SUBMIT_LIMIT = 1.0
MANY_HOSTS_LIMIT = 1.5
HOSTS = 10_000
SLOTS = 8

RECIPE = f"""\
name: startup
model:
  task: masked-lm
  config: {{model_type: bert, hidden_size: 1024, num_hidden_layers: 24, num_attention_heads: 16}}
data: {{train: python-docs, tokenizer: {{train: wordpiece}}, sequence_length: 128}}
batch: {{micro_size: 4, accumulation_steps: 2}}
optimizer: {{name: fused_adam, learning_rate: 1.0e-4}}
zero: {{stage: 1}}
train: {{max_steps: 100}}
launch: {{processes_per_node: {SLOTS}, device: cpu}}
"""


# Bytecode is cached as in an installed package, even if this shell turns that off.
ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds(command: list[str], folder: Path) -> float:
    """Return the wall-clock time of one whole command."""
    started = time.perf_counter()
    result = subprocess.run(
        command, cwd=folder, env=ENVIRON, capture_output=True, text=True, check=False
    )
    took = time.perf_counter() - started
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr}")
    return took


def medians(commands: dict[str, list[str]], folder: Path, runs: int) -> dict[str, float]:
    """Return median seconds of commands, in turns, so that a busy moment affects all of them."""
    took: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(runs + 1):
        for name, command in commands.items():
            once = seconds(command, folder)
            # The first turn fills the file cache.
            if number:
                took[name].append(once)
    return {name: statistics.median(times) for name, times in took.items()}


def comes_back(folder: Path, command: list[str]) -> bool:
    """Return whether a plan from `--json` can be read and written again without a change."""
    from ortlaunch.launch_plan import Plan

    text = subprocess.run(
        [*command, "--json"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    plan = Plan.from_plan_json_text(text)
    return plan.world_size == HOSTS * SLOTS and plan.to_json() + "\n" == text


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        # Host names that do not exist: a plan never connects to its hosts.
        folder = Path(name)
        (folder / "recipe.yaml").write_text(RECIPE)
        (folder / "hosts").write_text("".join(f"node{i:05} slots={SLOTS}\n" for i in range(HOSTS)))
        many = [ORTLAUNCH, "plan", "recipe.yaml", "--hostfile", "hosts"]
        few = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "ortlaunch --help": [ORTLAUNCH, "--help"],
            "ortlaunch validate": [ORTLAUNCH, "validate", "recipe.yaml"],
            "ortlaunch plan": [ORTLAUNCH, "plan", "recipe.yaml"],
        }
        table = medians({**few, "torchrun --help": [TORCHRUN, "--help"]}, folder, runs)
        words = [
            ORTLAUNCH,
            "submit",
            "recipe.yaml",
            "launch.nodes=1024",
            "--scheduler",
            "slurm",
            "--dry-run",
        ]
        submits = medians({"submit --dry-run, 1,024 nodes x 8": words}, folder, runs)
        hosts = medians(
            {"plan, 10,000 hosts": many, "plan --json, 10,000 hosts": [*many, "--json"]},
            folder,
            runs,
        )
        whole = comes_back(folder, many)
    print(f"medians of {runs} interleaved runs, in seconds")
    for command, took in {**table, **submits, **hosts}.items():
        print(f"{took:7.3f}  {command}")
    print(f"the plan of {HOSTS:,} hosts comes back out of its JSON: {'yes' if whole else 'NO'}")
    slow = [command for command in few if table[command] > LIMIT]
    slow += [command for command, took in hosts.items() if took > MANY_HOSTS_LIMIT]
    slow += [command for command, took in submits.items() if took > SUBMIT_LIMIT]
    print(*(f"above its limit: {command}" for command in slow), sep="\n", end="\n" if slow else "")
    return int(bool(slow) or not whole)


if __name__ == "__main__":
    sys.exit(main())
