"""Compare every engine x launch x ZeRO stage with plain PyTorch: largest relative loss difference.

python benchmarks/parity.py [--engines eager,inductor,ort] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.parity import RECIPES, cases, largest_difference, reference, train


def main() -> int:
    """Print the table; status 1 where a case fails or differs by more than 1e-3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="eager,inductor,ort")
    parser.add_argument("--keep", type=Path, help="folder for the run folders")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp())
    expected = {recipe: reference(recipe) for recipe in RECIPES}
    worst = 0.0
    print("| recipe, engine, launch, sharding | largest relative difference | s |\n|---|---|---|")
    for number, case in enumerate(cases(tuple(options.engines.split(",")))):
        started = time.perf_counter()
        try:
            difference = largest_difference(
                train(case, folder / f"{number:03}"), expected[case.recipe]
            )
        except AssertionError as error:
            print(error, file=sys.stderr)
            difference = float("inf")
        worst = max(worst, difference)
        print(f"| {case} | {difference:.1e} | {time.perf_counter() - started:.0f} |", flush=True)
    print(f"\nworst: {worst:.1e}")
    return int(worst > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
