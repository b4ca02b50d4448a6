"""From the command to the end of the first training step, with an empty and a filled export cache, and on eager.

python benchmarks/restart.py [RECIPE] [KEY.PATH=VALUE]... [--rounds N]

Turns cold, warm, eager, cold, warm, eager ...; each is a whole `ortlaunch train` of one step. Only exported graphs are
thrown away between turns: built extensions, tokenizers and data stay.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ortlaunch.cache import cache_root

COMMAND = [sys.executable, "-m", "ortlaunch.cli", "train"]
ONE_STEP = ("train.max_steps=1", "log.every_steps=1")
TURNS = {
    "ort, empty cache": ("engine.name=ort", True),
    "ort, filled cache": ("engine.name=ort", False),
    "eager": ("engine.name=eager", False),
}


def main() -> int:
    """Run the turns and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/bert-large/tiny.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in TURNS}
    exports: dict[str, list[float]] = {name: [] for name in TURNS}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        cache = folder / "cache"
        cache.mkdir()
        for kept in cache_root().iterdir():
            if kept.name != "exports":
                (cache / kept.name).symlink_to(kept)
        for turn in range(options.rounds + 1):
            for name, (engine, empty) in TURNS.items():
                if empty:
                    shutil.rmtree(cache / "exports", ignore_errors=True)
                command = [*COMMAND, options.recipe, *options.overrides, *ONE_STEP, engine]
                seconds, export = first_step(command, folder / "run", cache)
                if turn:  # the first round reads from disk
                    found[name].append(seconds)
                    exports[name].append(export)
    what = " ".join([options.recipe, *options.overrides])
    print(f"| {what}: from the command to the first step's end | s, median (least - most) | of it export, s |")
    print("|---|---|---|")
    for name, times in found.items():
        median, export = statistics.median(times), statistics.median(exports[name])
        print(f"| {name} | {median:.2f} ({min(times):.2f} - {max(times):.2f}) | {export:.2f} |")
    return 0


def first_step(command: list[str], run: Path, cache: Path) -> tuple[float, float]:
    """Seconds to the first line of metrics.jsonl, and seconds that were spent in exports."""
    shutil.rmtree(run, ignore_errors=True)
    environ = {**os.environ, "ORTLAUNCH_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        ran = subprocess.Popen([*command, f"--run-dir={run}"], env=environ, stdout=log, stderr=log)
        metrics = run / "metrics.jsonl"
        while ran.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        if ran.wait(timeout=600):
            log.seek(0)
            raise SystemExit(log.read()[-3000:])
    ort = json.loads((run / "engine.json").read_text())["onnxruntime"]  # empty on eager
    return seconds, ort["export_seconds"] if ort else 0.0


if __name__ == "__main__":
    sys.exit(main())
