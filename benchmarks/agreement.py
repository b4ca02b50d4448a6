"""What the ranks' agreement costs a step: by itself on 2 ranks, and beside the tiny recipe, with and without it.

python benchmarks/agreement.py [--steps 10000] [--turns 6] [--turn-steps 20]

The first number is of begin and end alone, nothing between them: the wait for the slower rank is in it. In the second
part two ranks train recipes/bert-large/tiny.yaml in turns with and without it; medians. Exit status 1 where the first
is 0.5 % of the tiny recipe's step or more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 0.005


def processor_seconds() -> float:
    """Of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def alone(steps: int) -> dict[str, float]:
    """Microseconds of one agreement, by the clock and of the processor, without anything else."""
    import torch
    import torch.distributed as dist

    from ortlaunch.rank import Rank
    from ortlaunch.worker.process_group.agreement import agreement
    from ortlaunch.worker.process_group.distributed import DistributedContext

    rank = int(os.environ["RANK"])
    context = DistributedContext(Rank(rank, 2, rank, 2), torch.device("cpu"))
    took = []
    with agreement(context) as agreed:
        for _ in range(200):
            agreed.now()
        dist.barrier()
        begun, used = time.perf_counter(), processor_seconds()
        for _ in range(steps):
            before = time.perf_counter()
            agreed.begin()
            agreed.end()
            took.append(time.perf_counter() - before)
    mean, cpu = (time.perf_counter() - begun) / steps, (processor_seconds() - used) / steps
    return {"mean": 1e6 * mean, "median": 1e6 * statistics.median(took), "processor": 1e6 * cpu}


def beside(folder: Path, turns: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every step of the tiny recipe, in turns with and without."""
    import torch

    from ortlaunch.plan import Plan
    from ortlaunch.rank import Rank
    from ortlaunch.recipe import parse_resolved
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.worker.process_group.agreement import agreement
    from ortlaunch.worker.process_group.distributed import DistributedContext
    from ortlaunch.worker.session import build_session
    from ortlaunch.worker.supervision.progress import Progress
    from ortlaunch.worker.tasks.train import TrainState, train_step

    rank, run = int(os.environ["RANK"]), RunDir(folder)
    recipe, plan = parse_resolved(run.recipe.read_text()), Plan.read(run.plan)
    context = DistributedContext(Rank(rank, 2, rank, 2), torch.device("cpu"))
    torch.set_num_threads(1)
    session = build_session(recipe, plan, run, context, Progress(1), None)
    state, took = TrainState(), {"without": [], "with": []}
    with agreement(context) as agreed:
        for turn in range(2 * turns + 2):
            name = ("without", "with")[(turn + turn // 2) % 2]  # without, with, with, without, ...
            for _ in range(steps):
                before = time.perf_counter()
                train_step(session, state, agreed if name == "with" else None)
                if name == "with":
                    agreed.end()
                took[name].append(time.perf_counter() - before)
                state.step = (state.step + 1) % recipe.train.steps
            if turn == 1:
                took = {"without": [], "with": []}  # warm
    return took


def be_a_rank(folder: Path, arguments: argparse.Namespace) -> None:
    """Measure both parts; rank 0 prints them."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meet"), 2), rank=rank, world_size=2)
    found = {"alone": alone(arguments.steps), **beside(folder, arguments.turns, arguments.turn_steps)}
    dist.barrier()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Plan the tiny recipe for 2 ranks, start them, print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn-steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        be_a_rank(arguments.folder, arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        words = [sys.executable, __file__, *sys.argv[1:], "--folder", name]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [subprocess.Popen(words, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
        if any(rank.wait() for rank in ranks):
            sys.exit("a rank failed")
        sys.exit(show(json.loads((folder / "found.json").read_text()), arguments.steps))


def prepare(folder: Path) -> None:
    """The run folder of the tiny recipe on engine eager, as `train` writes it."""
    from ortlaunch.planning.hosts import Host
    from ortlaunch.planning.make_plan import make_plan
    from ortlaunch.planning.world import World
    from ortlaunch.recipe import load, to_yaml
    from ortlaunch.run_folder.folder import RunDir

    recipe = load(ROOT / "recipes/bert-large/tiny.yaml", ["engine.name=eager"]).recipe
    world = World((Host("localhost", 2, (0, 1)),), "torchrun", "cpu", None, (), threads=1)
    run = RunDir(folder)
    run.recipe.write_text(to_yaml(recipe))
    run.plan.write_text(make_plan(recipe, world, modules=".", worker=["-"], environ={}).to_json())


def show(found: dict, steps: int) -> int:
    """The table; 1 where the agreement costs too much."""
    alone_, medians = found["alone"], {name: 1e3 * statistics.median(found[name]) for name in ("without", "with")}
    share = alone_["mean"] / (1e3 * medians["without"])
    each = ", ".join(f"{name} {alone_[name]:.0f} us" for name in ("mean", "median", "processor"))
    print(f"the agreement alone, {steps:,} steps on 2 ranks: {each}")
    shown = ", ".join(f"{name} {medians[name]:.2f} ms" for name in medians)
    change = medians["with"] / medians["without"] - 1
    print(f"a step of bert-large/tiny on 2 ranks, medians of {len(found['with'])}: {shown} ({change:+.2%})")
    spread = [statistics.quantiles(found[name], n=4) for name in ("without", "with")]
    print("quartiles:", *(f"{1e3 * low:.2f} - {1e3 * high:.2f} ms" for low, _, high in spread))
    print(f"alone, in percent of the step without: {share:.3%} (most: {MOST:.1%})")
    return int(share >= MOST)


if __name__ == "__main__":
    main()
