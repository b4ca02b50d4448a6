"""What a gloo group costs a rank: open descriptors, with gloo's full mesh and with connections on demand.

    python benchmarks/gloo_connections.py [--ranks 32 128 256]

Each rank is a fork of one process that has imported torch; they join as a run on CPUs does and make one side group
(worker/process_group/distributed.py), then all-reduce on both, gather texts and wait for each other. Counted are the
descriptors that this added, on the rank with the most and on the median rank, and the processor time of all ranks.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from datetime import timedelta

os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

LIMIT = timedelta(minutes=5)


def main() -> None:
    """Print one line for each number of ranks and each way to connect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 128, 256])
    for ranks in parser.parse_args().ranks:
        for lazy, name in (("0", "full mesh"), ("1", "on demand")):
            counts, seconds = measure(ranks, lazy)
            print(f"{ranks} ranks, {name}: {max(counts)} descriptors at most, median {statistics.median(counts):.0f}, "
                  f"{seconds:.1f} s of processor time", flush=True)  # fmt: skip


def measure(ranks: int, lazy: str) -> tuple[list[int], float]:
    """Descriptors of each rank, and the processor seconds of all."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    read_end, write_end = os.pipe()
    before = sum(os.times()[2:4])
    children = [pid for rank in range(ranks) if (pid := _fork(rank, ranks, listener, write_end))]
    listener.close()
    os.close(write_end)
    failed = [status for pid in children if (status := os.waitpid(pid, 0)[1])]
    with os.fdopen(read_end) as lines:
        counts = [int(line) for line in lines]
    if failed or len(counts) != ranks:
        raise SystemExit(f"{len(failed)} of {ranks} ranks failed, {len(counts)} counted")
    return counts, sum(os.times()[2:4]) - before


def _fork(rank: int, ranks: int, listener: socket.socket, counts: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.write(counts, f"{_live(rank, ranks, listener)}\n".encode())
    except BaseException as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def _live(rank: int, ranks: int, listener: socket.socket) -> int:
    """One rank's life; returns how many descriptors its groups hold."""
    where, held = listener.getsockname(), {"master_listen_fd": os.dup(listener.fileno())} if rank == 0 else {}
    store = dist.TCPStore(*where, ranks, is_master=rank == 0, timeout=LIMIT, **held)
    before = len(os.listdir("/proc/self/fd"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    side = dist.new_group(backend="gloo", timeout=LIMIT)
    number = torch.tensor([rank], dtype=torch.int32)
    dist.all_reduce(number, dist.ReduceOp.MAX, group=side)
    total = torch.tensor([1.0 * rank], dtype=torch.float64)
    dist.all_reduce(total)
    texts = [""] * ranks
    dist.all_gather_object(texts, str(rank))
    if int(number) != ranks - 1 or float(total) != ranks * (ranks - 1) / 2 or texts != list(map(str, range(ranks))):
        raise ValueError("the ranks computed something else")
    dist.barrier()
    held_now = len(os.listdir("/proc/self/fd"))
    dist.barrier()
    if rank == 0:
        time.sleep(1)  # it holds the store
    return held_now - before


if __name__ == "__main__":
    main()
