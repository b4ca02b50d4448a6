"""tools/coverage_table.py, with which `make coverage` prints figures by folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools" / "coverage_table.py"


def _file(statements: int, run: int, branches: int, taken: int) -> dict:
    return {
        "summary": {
            "num_statements": statements,
            "covered_lines": run,
            "num_branches": branches,
            "covered_branches": taken,
        }
    }


def test_a_folder_has_the_sum_of_its_files_and_sub_folders(tmp_path: Path) -> None:
    """Rates are of statements and branches, not means of files; without a branch there is none."""
    file = tmp_path / "coverage.json"
    # Statements, of these run, branches, of these taken.
    files = {
        "ortlaunch/rank.py": _file(10, 5, 0, 0),
        "ortlaunch/worker/session.py": _file(30, 30, 4, 1),
        "ortlaunch/worker/data/text.py": _file(60, 45, 6, 4),
    }
    file.write_text(json.dumps({"files": files}))
    printed = subprocess.check_output([sys.executable, str(TOOL), str(file)], text=True)
    assert [line.split() for line in printed.splitlines()[1:]] == [
        ["ortlaunch", "100", "80.0", "10", "50.0"],
        ["ortlaunch/worker", "90", "83.3", "10", "50.0"],
        ["ortlaunch/worker/data", "60", "75.0", "6", "66.7"],
    ]
