"""The verdict on a run and its four renderings, compared with a golden file.

`UPDATE_GOLDEN=1 pytest ...` writes the file anew; read its diff before you commit it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ortlaunch.report.records import read_run_records_or_refuse
from ortlaunch.report.sections import report_page_values
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.started_runs.diagnosis import diagnose_run
from ortlaunch.started_runs.status import read_status

# What differs between two runs of one case, and its replacement.
_VARYING = (
    (r"/[\w./-]*/lib/python[\d.]+/", "PYTHON/"),
    (r"0x[0-9a-f]{6,}", "ADDRESS"),
    (r"(process|pid:?|\bpid) \d+", r"\1 PID"),
    (r"[0-9.]+ [KMGT]iB\b|\d+kB", "SIZE"),
    (r"\bstep \d+|step is \d+, loss [\d.]+", "step N"),
    (r"rank [\d, ]+ ended later", "rank N ended later"),
    (r"\d+ frames", "N frames"),
    (r"line \d+", "line N"),
    (r"\.py:\d+", ".py:N"),
    (r"\b\d{4}-\d\d-\d\d[ T][\d:.+]+", "TIME"),
    (r"\b\d+:\d\d\b", "DURATION"),
    (r"for \d+(\.\d+)? s", "for SECONDS s"),
    (r"\b\d\.\d\d times", "N times"),
)


def renderings(run: RunDir) -> dict[str, Any]:
    """Return the verdict of job.json, and what each command prints of it; of a traceback the last line."""
    status = read_status(run)
    (record,) = read_run_records_or_refuse([run.path])
    failures = report_page_values([record])["failures"]
    assert status.job.verdict is not None
    verdict = replace(
        status.job.verdict, traceback=status.job.verdict.traceback.rpartition("\n")[2]
    )
    texts = {
        "verdict": asdict(verdict),
        "train": str(verdict).splitlines(),
        "status": status.end_text(has_details=False).splitlines(),
        # Frames and logs have paths of this machine.
        "diagnose": [
            line for line in str(diagnose_run(run)).splitlines() if not line.startswith("    |")
        ],
        "report": [[text, *advice] for _, text, advice in failures],
    }
    return json.loads(_text_without_varying_parts(json.dumps(texts), run.path))  # type: ignore[no-any-return]


def _text_without_varying_parts(text: str, folder: Path) -> str:
    for path in (folder.absolute(), folder):
        text = text.replace(str(path.parent.absolute()) + os.sep, "").replace(f"{path}", "run")
    text = re.sub(rf"(?<![\w-]){re.escape(socket.gethostname())}\b", "HOST", text)
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    return text


def compare_with_golden_file(
    golden_path: Path, case_name: str, run: RunDir, is_any_rank_first: bool = False
) -> None:
    """Assert that verdict and renderings of a case are those of the golden file.

    Args:
        is_any_rank_first: whether several ranks end at once, so that any of them is the first.
    """
    ends = json.loads(golden_path.read_text()) if golden_path.exists() else {}
    found = renderings(run)
    if is_any_rank_first:
        found = json.loads(re.sub(r"rank(_|\"?:? )\d+", r"rank\g<1>9", json.dumps(found)))
    if os.environ.get("UPDATE_GOLDEN"):
        ends[case_name] = found
        golden_path.write_text(json.dumps(ends, indent=1, sort_keys=True) + "\n")
    texts = [
        json.dumps(end, indent=1, sort_keys=True).splitlines()
        for end in (ends.get(case_name), found)
    ]
    assert found == ends.get(case_name), "\n".join(difflib.unified_diff(*texts, lineterm="", n=0))
