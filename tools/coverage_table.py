"""Print the coverage of ortlaunch/ by folder, from the file that `coverage json` writes.

usage: python tools/coverage_table.py build/coverage/coverage.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path


def table(files: dict[str, dict[str, dict[str, int]]]) -> str:
    """Return a line for each folder, with its sub-folders, and one for the package.

    Args:
        files: by path, the `summary` of each file: its statements and branches, and how many of
            them ran.
    """
    sums = defaultdict[str, Counter[str]](Counter)
    # A folder's rates are from its sums: the mean of its files' rates would weigh small files too much.
    for path, file in files.items():
        for folder in Path(path).parents:
            sums[folder.as_posix()].update(file["summary"])
    # Coverage's own rate has statements and branches in one number.
    lines = [f"{'folder':<40} {'statements':>10} {'run, %':>7} {'branches':>9} {'taken, %':>8}"]
    for name, counts in sorted(sums.items()):
        if name != ".":
            lines.append(
                f"{name:<40} {counts['num_statements']:>10}"
                f" {_percent(counts['covered_lines'], counts['num_statements']):>7}"
                f" {counts['num_branches']:>9}"
                f" {_percent(counts['covered_branches'], counts['num_branches']):>8}"
            )
    return "\n".join(lines)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["files"]))
