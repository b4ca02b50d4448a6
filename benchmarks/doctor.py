"""`ortlaunch doctor --hostfile` beside a bare `ssh HOST true` to the same hosts, all in parallel, in turns.

    python benchmarks/doctor.py [--rounds 5] [--hosts 10] [--names 10]

In a lab of its own (tests/cluster/lab.py: root, Debian's packages): hosts with so many names each, every name a target.
Status 1 where doctor's median is above 1.5 times that of ssh.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.lab import LOGIN, Lab, lacking

LIMIT = 1.5
ORTLAUNCH = str(Path(sys.executable).with_name("ortlaunch"))


def main() -> int:
    """Take turns and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--rounds", 5), ("--hosts", 10), ("--names", 10)):
        parser.add_argument(name, type=int, default=value)
    asked = parser.parse_args()
    lack = lacking()
    if lack:
        raise SystemExit(f"no lab: {lack}")
    with Lab(asked.hosts, aliases=asked.names) as lab, tempfile.TemporaryDirectory() as path:
        names = [alias for name in lab.names for alias in lab.aliases_of(name)]
        (Path(path) / "names").write_text("".join(f"{name}\n" for name in names))
        (Path(path) / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
        commands = {
            "ssh HOST true": ["xargs", "-a", "names", "-P", str(len(names)), "-I{}", "ssh", "{}", "true"],
            "ortlaunch doctor --hostfile": [ORTLAUNCH, "doctor", "--hostfile", "hosts"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(asked.rounds + 1):
            for name, command in commands.items():
                took = seconds(lab, command, Path(path))
                if turn:  # the first one reads from disk
                    times[name].append(took)
    return report(times, len(names))


def seconds(lab: Lab, command: list[str], folder: Path) -> float:
    """Of one whole command on the login node, which must end well."""
    began = time.monotonic()
    ended = lab.run(LOGIN, *command, cwd=folder)
    took = time.monotonic() - began
    if ended.returncode:
        raise SystemExit(
            f"{' '.join(command)}: status {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
        )
    return took


def report(times: dict[str, list[float]], targets: int) -> int:
    """The table and the verdict."""
    base = statistics.median(next(iter(times.values())))
    print(f"{targets} targets; load of this machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| command | s, median (least - most) | x ssh |\n|---|---|---|")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"| {name} | {median:.2f} ({min(found):.2f} - {max(found):.2f}) | {median / base:.2f} |")
    return int(median > LIMIT * base)


if __name__ == "__main__":
    sys.exit(main())
