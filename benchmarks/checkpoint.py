"""Compare checkpoints of two ranks under ZeRO 1 with DeepSpeed's and torch.save; async with sync.

    python benchmarks/checkpoint.py [--parameters 300e6] [--rounds 3] [--steps 4] [--folder .]

All ways run in turns in the same two processes, on the disk of --folder. DeepSpeed and torch.save
leave their bytes in the disk's cache; they are timed without and with the flush that ours always
has. Loads are from that cache. Then steps of training are timed alone, with one save that they wait
for, and with one that is written beside them. The disk's rate is that of `dd` with fsync, the
memory's that of a copy of the same size. Needs about 60 bytes of memory and 20 of disk for each
parameter.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RANKS = 2
WIDTH = 2048


class Turn:
    """Times in seconds of actions that all ranks begin and end together, by name."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, act: Callable[[], Any]) -> None:
        # Between two barriers the time is that of the slowest rank.
        self.group.barrier()
        started = time.perf_counter()
        act()
        self.group.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)


def build(parameters: int, group: Any) -> Any:
    """Return a stack of square layers on DeepSpeed's ZeRO 1 with AdamW."""
    import torch
    from torch import nn

    from ortlaunch.worker.engine.stepping import DeepSpeedStepper

    torch.manual_seed(0)
    # At least four layers, as far as the width allows, of width * width weights and width biases.
    width = min(WIDTH, max(8, int((parameters / 4) ** 0.5)))
    count = max(1, round(parameters / (width * width + width)))

    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = super().forward(x).square().mean()
            return loss

    net = Net(*(nn.Linear(width, width) for _ in range(count)))
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    return DeepSpeedStepper(net, torch.optim.AdamW(net.parameters(), lr=1e-4), group, config), width


def step(stepper: Any, width: int) -> None:
    import torch

    loss = stepper.engine(torch.full((8, width), 0.1))
    stepper.engine.backward(loss)
    stepper.clip_step_and_clear_gradients(1e-4)


def flushed(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def ours(turn: Turn, stepper: Any, folder: Path) -> int:
    """Time ortlaunch's save, its check against the manifest, and its load; return the bytes."""
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.worker import checkpoint
    from ortlaunch.worker.checkpoint.verify import gather_checkpoint_damage_or_empty

    run = RunDir(folder / "ours")
    state = {"step": 1, "samples": 1}
    turn.time(
        "ours: save, flushed",
        lambda: checkpoint.write_checkpoint_of_step(run, {}, turn.group, stepper, 1, state),
    )
    found = size_of(run.checkpoint_folder(1))
    turn.time(
        "ours: check of sums",
        lambda: gather_checkpoint_damage_or_empty(run.checkpoint_folder(1), turn.group),
    )
    turn.time(
        "ours: load",
        lambda: checkpoint.load_checkpoint_print_notes_and_return_loop_state(
            run.checkpoint_folder(1), stepper.named_state(), turn.group
        ),
    )
    return found


def deepspeeds(turn: Turn, stepper: Any, folder: Path) -> int:
    place = folder / "deepspeed"
    turn.time(
        "deepspeed: save",
        lambda: stepper.engine.save_checkpoint(str(place), tag="one", save_latest=False),
    )
    turn.time("deepspeed: flush", lambda: flushed(place) if turn.group.rank == 0 else None)
    found = size_of(place)
    turn.time("deepspeed: load", lambda: stepper.engine.load_checkpoint(str(place), tag="one"))
    return found


def torchs(turn: Turn, stepper: Any, folder: Path) -> int:
    """Save all weights and moments by torch.save on rank 0, as without ZeRO; the other waits."""
    import torch

    file = folder / "torch" / "state.pt"
    first = turn.group.rank == 0
    whole: dict[str, Any] = {}
    if first:
        file.parent.mkdir(parents=True)
        weights = {name: p.detach() for name, p in stepper.model.named_parameters()}
        whole = {
            kind: {name: p.clone() for name, p in weights.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        whole["weight"] = weights
    turn.time("torch.save: save", lambda: torch.save(whole, file) if first else None)
    turn.time("torch.save: flush", lambda: flushed(file.parent) if first else None)
    found = size_of(file.parent)
    whole.clear()
    turn.time("torch.save: load", lambda: torch.load(file, weights_only=True) if first else None)
    return found


def trained(
    turn: Turn, stepper: Any, width: int, steps: int, way: str, folder: Path, apart: Any
) -> None:
    """Time steps with a synchronous save after the first, an asynchronous one, or none."""
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.worker import checkpoint
    from ortlaunch.worker.checkpoint.background import BackgroundTask
    from ortlaunch.worker.checkpoint.transaction import (
        take_snapshot_on_all_ranks,
        write_snapshot_as_checkpoint,
    )

    run = RunDir(folder / way)
    state = {"step": 1, "samples": 1}
    written = None

    def whole(taken: Any) -> None:
        began = time.perf_counter()
        write_snapshot_as_checkpoint(run, {}, apart, taken, 1, 1)
        turn.seconds.setdefault("async: written within", []).append(time.perf_counter() - began)

    def act() -> None:
        nonlocal written
        for i in range(steps):
            step(stepper, width)
            if i == 0 and way == "sync":
                checkpoint.write_checkpoint_of_step(run, {}, turn.group, stepper, 1, state)
            if i == 0 and way == "async":
                began = time.perf_counter()
                taken = take_snapshot_on_all_ranks(
                    run, turn.group, stepper, 1, state, copies_to_host=True
                )
                turn.seconds.setdefault("async: copy in memory", []).append(
                    time.perf_counter() - began
                )
                written = BackgroundTask(functools.partial(whole, taken))

    # A save that is still being written at the end would be missing in the time of the steps.
    forget_peak()
    turn.time(f"steps, {way}", act)
    if written is not None:
        turn.time("async: wait at the end", written.wait_and_raise_its_error)
    turn.seconds.setdefault(f"peak, {way}", []).append(peak())


def forget_peak() -> None:
    # Linux: 5 resets VmHWM to the present size.
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> float:
    """Return the peak memory of this process since then, in GB."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1e6 if found else 0.0  # from kB


def rates(turn: Turn, folder: Path, size: int) -> None:
    """Measure the best speed of disk and memory for as many bytes, on rank 0 only."""
    import torch

    file = folder / "zeros"
    command = [
        "dd",
        "if=/dev/zero",
        f"of={file}",
        "bs=16M",
        f"count={max(size >> 24, 1)}",
        "conv=fsync",
    ]
    first = turn.group.rank == 0
    turn.time(
        "dd", lambda: subprocess.run(command, check=True, capture_output=True) if first else None
    )
    source, target = (torch.zeros(size // 4) if first else None for _ in range(2))
    turn.time("copy", lambda: target.copy_(source) if first else None)  # type: ignore[union-attr,arg-type]


def rank(arguments: argparse.Namespace) -> None:
    import deepspeed
    import torch

    from ortlaunch.rank import Rank
    from ortlaunch.worker.process_group.distributed import DistributedContext

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    torch.distributed.init_process_group("gloo")
    me = torch.distributed.get_rank()
    group = DistributedContext(Rank(me, RANKS, me, RANKS), torch.device("cpu"))
    stepper, width = build(int(arguments.parameters), group)
    step(stepper, width)
    turn = Turn(group)
    sizes = {}
    apart = group.duplicate_on_new_cpu_group()
    folder = Path(arguments.write).parent
    for _ in range(arguments.rounds):
        for name, way in (("ours", ours), ("deepspeed", deepspeeds), ("torch.save", torchs)):
            sizes[name] = way(turn, stepper, folder)
            _clear(turn, folder)
        rates(turn, folder, sizes["ours"])
        for name in ("alone", "sync", "async"):
            trained(turn, stepper, width, arguments.steps, name, folder, apart)
            _clear(turn, folder)
    # Peaks and times of writing differ between ranks.
    every = group.gather(turn.seconds)
    if me == 0:
        parameters = sum(p.numel() for p in stepper.model.parameters())
        found = {"parameters": parameters, "bytes": sizes, "ranks": every}
        Path(arguments.write).write_text(json.dumps(found), encoding="utf-8")
    group.barrier()
    torch.distributed.destroy_process_group()


def _clear(turn: Turn, folder: Path) -> None:
    turn.group.barrier()
    if turn.group.rank == 0:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    turn.group.barrier()


def launched(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write = str(Path(folder) / "found.json")
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
        ]
        options = [
            f"--{name}={getattr(arguments, name)}" for name in ("parameters", "rounds", "steps")
        ]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": path,
        }
        command = [*launcher, __file__, *options, f"--write={write}"]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise SystemExit(result.stdout[-2000:] + result.stderr[-4000:])
        found: dict[str, Any] = json.loads(Path(write).read_text(encoding="utf-8"))
        return found


def told(found: dict[str, Any]) -> list[str]:
    """Return the lines of the table, and of the cost of asynchronous saves."""
    median = {name: statistics.median(values) for name, values in found["ranks"][0].items()}
    size = found["bytes"]["ours"]
    lines = [f"{found['parameters']:,} parameters, ZeRO 1, {RANKS} ranks; seconds, medians"]
    for name in ("ours", "deepspeed", "torch.save"):
        parts = {
            key.partition(": ")[2]: value
            for key, value in median.items()
            if key.startswith(f"{name}:")
        }
        lines.append(f"  {name:10}  {found['bytes'][name] / 1e9:6.3f} GB  "
                     + ", ".join(f"{part} {value:.3f}" for part, value in parts.items()))  # fmt: skip
    alone = median["steps, alone"]
    both = {
        way: median[f"steps, {way}"] - alone + median.get(f"{way}: wait at the end", 0)
        for way in ("sync", "async")
    }
    written = max(statistics.median(rank["async: written within"]) for rank in found["ranks"])
    disk = size / median["dd"]
    memory = size / median["copy"]
    reached = size / (written + median["async: copy in memory"])
    lines += [
        f"  steps alone {alone:.3f}; a save adds {both['sync']:.3f} (sync), "
        f"{both['async']:.3f} (async: "
        f"copy {median['async: copy in memory']:.3f}, wait at the end "
        f"{median['async: wait at the end']:.3f})",
        f"  written at {reached / 1e9:.3f} GB/s (async), "
        f"{size / median['ours: save, flushed'] / 1e9:.3f} (sync); "
        f"dd with fsync {disk / 1e9:.3f}, a copy in memory {memory / 1e9:.3f}: "
        f"{reached / min(disk, memory):.0%} of the slower",
    ]
    peaks = {
        way: sum(max(rank[f"peak, {way}"]) for rank in found["ranks"])
        for way in ("alone", "sync", "async")
    }
    return [
        *lines,
        "  memory of both ranks at peak: "
        + ", ".join(f"{way} {gb:.3f} GB" for way, gb in peaks.items()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=300e6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of training around a save")
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        rank(arguments)
    else:
        print(*told(launched(arguments)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
