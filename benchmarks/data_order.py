"""The order of an epoch: computed place by place as ortlaunch does, beside NumPy's permutation that is held; CPU only.

python benchmarks/data_order.py [--samples 5e8] [--rounds 3]

Each is made and asked in a process of its own, in turns; medians. Memory is what the process has at most, above what it
had before. `first`: until the first micro batch is known, as at a resume in mid-epoch. Then micro batches of 1 to 1,024
samples from places all over the epoch, each with all that comes with it, in CPU microseconds. NumPy's permutation of
5e8 samples takes 4 GB and a minute.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from ortlaunch.worker.data.order import Order

SIZES, TIMES = (1, 8, 64, 1024), 200
Ask = Callable[[list[int]], object]


def held(samples: int) -> Ask:
    """As it was before: an index a sample."""
    order = np.random.Generator(np.random.Philox([7, 0])).permutation(samples)
    return lambda places: [(int(order[place]), 0) for place in places]


def computed(samples: int) -> Ask:
    """As it is."""
    return Order(samples, 7).at


def peak() -> int:
    """Bytes of this process at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(make: Callable[[int], Ask], samples: int) -> dict[str, float]:
    """Of one of the two, in this process."""
    before, begun = peak(), time.process_time()
    ask = make(samples)
    ask(list(range(samples // 2, samples // 2 + 8)))
    found = {"first": time.process_time() - begun}
    starts = np.random.default_rng(1).integers(0, samples - max(SIZES), TIMES).tolist()
    for size in SIZES:
        batches = [list(range(start, start + size)) for start in starts]
        begun = time.process_time()
        for places in batches:
            ask(places)
        found[f"us of {size}"] = (time.process_time() - begun) / TIMES * 1e6
    return {**found, "bytes": float(peak() - before)}


def in_a_process(name: str, samples: int) -> dict[str, float]:
    """The same in one that ends."""
    command = [sys.executable, __file__, "--samples", str(samples), "--only", name]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    """One row each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=float, default=5e8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["held", "computed"])
    given = parser.parse_args()
    samples, makes = int(given.samples), {"held": held, "computed": computed}
    if given.only:
        print(json.dumps(measure(makes[given.only], samples)))
        return
    rounds = [{name: in_a_process(name, samples) for name in makes} for _ in range(given.rounds)]
    print(f"{samples:,} samples, median of {given.rounds}")
    print(f"{'':10}{'memory':>12}{'first':>12}" + "".join(f"{f'batch of {size}':>16}" for size in SIZES))
    for name in makes:
        middle = {key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]}
        times = "".join(f"{middle[f'us of {size}']:13.0f} us" for size in SIZES)
        print(f"{name:10}{middle['bytes'] / 1e6:9.1f} MB{middle['first'] * 1e3:9.2f} ms{times}")


if __name__ == "__main__":
    main()
