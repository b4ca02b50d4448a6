"""Reading a corpus ten times as large as the memory that a process may have: anonymous memory stays flat, nothing dies.

    python benchmarks/data_memory.py [--limit 300] [--steps 3000]

As root, where a memory control group can be made; shards of token ids of ten times the limit are mapped, and a process
in a group of that limit reads micro batches all over them, as `train` does. Its memory is told in parts: `own`
(anonymous) is what it needs, `mapped` are pages of the files, which the kernel takes back. Both count for a group: a
process that kept what it has read would be killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

_GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.peak"),
)


def memory() -> dict[str, float]:
    """MiB of this process."""
    status = Path("/proc/self/status").read_text()
    return {
        name: int(re.search(rf"{field}:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
        for name, field in (("own", "RssAnon"), ("mapped", "RssFile"))
    }


def read(path: str, steps: int) -> None:
    """Micro batches of 32 samples of 512 tokens by the thread, and what memory that takes."""
    from ortlaunch.plan import BatchPlan
    from ortlaunch.worker.data import Batches, Blocks
    from ortlaunch.worker.data.ahead import Reader
    from ortlaunch.worker.data.shards import joined

    tokens = joined(Path(path))
    batches = Batches(Blocks(tokens, 512, with_mask=True), BatchPlan(32, 32, 1, 1, None), 7)
    began, total = time.perf_counter(), 0
    with batches.read_ahead(0, Reader(0)):
        for step in range(steps):
            total += batches.micro_batch(step, 0, 0)["input_ids"].numel()
            if step in (steps // 10, steps // 2, steps - 1):
                found = ", ".join(f"{name} {value:.0f} MiB" for name, value in memory().items())
                rate = total / (time.perf_counter() - began)
                done = f"after {total * 4 >> 20:6,} MiB of {len(tokens) * 4 >> 20:,}"
                print(f"  {done}: {found}, {rate:,.0f} tokens/s", flush=True)


def group_of(limit: int) -> tuple[Path, str]:
    """A control group of this limit, and the file that tells what it used at most."""
    for root, limit_file, peak_file in _GROUPS:
        folder = root / f"ortlaunch-data-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / limit_file).write_text(str(limit))
        except OSError:
            continue
        return folder, peak_file
    raise SystemExit("no memory control group can be made here: root, and /sys/fs/cgroup/memory (v1) or v2")


def main(limit: int, steps: int) -> None:
    """The shards, the group, the process in it."""
    from ortlaunch.worker.data.shards import ShardWriter, shard_paths

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens")
        random = np.random.default_rng(0)
        with contextlib.closing(ShardWriter(path, 0)) as shards:
            for _ in range(10 * limit):  # MiB by MiB
                shards.write(random.integers(0, 30_000, (1 << 20) // 4, dtype=np.uint32))
        sizes = [each.stat().st_size >> 20 for each in shard_paths(path)]
        group, peak = group_of(limit << 20)
        try:
            command = [sys.executable, __file__, "--read", str(path), str(steps)]
            enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
            done = subprocess.run(["sh", "-c", enter, "sh", *command], check=False)
            most = int((group / peak).read_text()) >> 20
            corpus = f"limit {limit} MiB, corpus {sum(sizes):,} MiB in {len(sizes)} shards"
            print(f"{corpus}: status {done.returncode}, the group's peak {most} MiB")
        finally:
            group.rmdir()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2], int(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--limit", type=int, default=300, help="MiB that the process may have")
        parser.add_argument("--steps", type=int, default=3000)
        asked = parser.parse_args()
        main(asked.limit, asked.steps)
