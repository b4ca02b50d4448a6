"""Results of long tests: `pytest --page FOLDER` writes results.json and a page of Markdown.

Each result is written as soon as its test ends. A test gives figures by `record_property(name,
value)`: `part` and `case` are its location on the page, `note` is a remark, `row` is a mapping (one
for each row of a case with several rows), and every other name is a column.

Tests that have a result in the folder are not run again, unless `--again` is set. To resume a call
that was stopped, or whose `--minutes` are over (exit status 3), repeat it. A folder holds the
results of one machine.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.units import human_bytes
from ortlaunch.resolve import provenance

# Exit status while tests are left: repeat the call.
LEFT = 3
# The limit of one test, also if the call has more time left.
CASE_SECONDS = 600.0
PASSED, FAILED, SKIPPED, KNOWN = STATUSES = ("passed", "failed", "skipped", "known to fail")
_LOCATION = ("part", "case", "note", "row")
_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "peft",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "numpy",
)
# Runs in a child process, so that pytest's own process does not initialize CUDA.
_ASK_TORCH = """
import json, torch
device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps(device and {"name": device.name, "memory": device.total_memory, "cuda": torch.version.cuda,
    "capability": float(f"{device.major}.{device.minor}")}))
"""
# Of a column: its title and the format of its values. Other columns are shown by str().
FORMATS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "difference": ("largest difference", "{:.1e}".format),
    "tolerance": ("allowed", "{:g}".format),
    "last_loss": ("last loss", "{:.4f}".format),
    "nodes": ("nodes of ONNX Runtime's graph", str),
    "seconds": ("s/step", "{:.4g}".format),
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "mfu": ("MFU of the measured rate", "{:.1%}".format),
    "mfu_of_vendor_peak": ("of the vendor's peak", "{:.1%}".format),
    "peak_flops": ("matrix rate, TFLOP/s", lambda rate: f"{rate / 1e12:.3g}"),
    "gradient_norm": ("gradient norm by", str),
    "recomputed_by": ("recomputed by", str),
    "chunk_rows": ("rows a chunk", str),
    "planned_model": ("weights, gradients, optimizer: planned", human_bytes),
    "model": ("measured", human_bytes),
    "ratio": ("ratio", "{:.2f}".format),
    "planned": ("peak planned", human_bytes),
    "memory": ("peak measured", human_bytes),
    "first_step": ("first step after, s", "{:.0f}".format),
    "verdict": ("parity", str),
    "largest": ("largest difference", "{:.0e}".format),
    "loss_from_highest": ("loss moved by", "{:.0e}".format),
}


# --------------------------------------------------------------------------------------- the plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of long tests."""
    group = parser.getgroup("long tests (marks nightly, zoo, gpu)")
    group.addoption(
        "--page", metavar="FOLDER", help="write results.json and page.md there, and resume"
    )
    group.addoption("--again", action="store_true", help="run what has a result in the folder, too")
    group.addoption(
        "--minutes",
        type=float,
        default=1e6,
        help="of this call; what is left needs another (status 3)",
    )
    group.addoption(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="of tests/gpu; cpu: a rehearsal, tiny",
    )
    group.addoption(
        "--ranks", type=int, choices=(1, 2, 4), default=1, help="of a run of tests/gpu, one a GPU"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that keeps results, if --page gives a folder."""
    if config.getoption("--page") is not None:
        results = Results(config, Path(config.getoption("--page")).absolute())
        results.read()
        config.pluginmanager.register(results, "results of long tests")


class Results:
    """The results so far, by node id, and the time limit of this call."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self.folder = folder
        self.again = config.getoption("--again")
        # True in a worker of pytest-xdist: only the main process writes files.
        self.is_worker = hasattr(config, "workerinput")
        self.deadline = time.monotonic() + 60 * config.getoption("--minutes")
        self.machine = machine(config.getoption("--device"))
        # Seconds of the longest test of this call, as an estimate for the next one.
        self.longest = 0.0
        self.cases: dict[str, dict[str, Any]] = {}
        self.pending: dict[str, None] = {}
        self.is_first = True

    def read(self) -> None:
        """Load the results of earlier calls; end pytest if they are from another machine."""
        if not (self.folder / "results.json").exists():
            return
        results = json.loads((self.folder / "results.json").read_text())
        before = results["machine"]
        now = self.machine
        different = [name for name in ("name", "python", "packages") if before[name] != now[name]]
        if different:
            what = "; ".join(f"{name}: {before[name]}, here {now[name]}" for name in different)
            pytest.exit(
                f"{self.folder} has results of another machine ({what}); give another --page",
                returncode=2,
            )
        self.cases = results["cases"]

    @property
    def remaining(self) -> float:
        """Seconds that the next test may take."""
        return min(self.deadline - time.monotonic(), CASE_SECONDS)

    def out_of_time(self, why: str) -> None:
        """End a test that ran out of time: leave it for another call, or fail it."""
        self.deadline = min(self.deadline, time.monotonic())
        # The first test had all the time of its call: another such call would not help.
        if self.is_first:
            pytest.fail(why, pytrace=False)
        pytest.skip("left for another call")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect tests that have a result."""
        done = [item for item in items if item.nodeid in self.cases and not self.again]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]
        self.pending = dict.fromkeys(item.nodeid for item in items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Record the tests that the workers of pytest-xdist run."""
        self.pending = dict.fromkeys(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Do not start a test that would probably not finish in the time left."""
        # The first test always starts, so that every call makes progress.
        if self.is_first:
            return None
        return True if self.remaining < min(self.longest, CASE_SECONDS) else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a result as soon as it is known."""
        if report.when == "setup" and report.passed:
            return
        if report.when == "teardown":
            self.is_first = False
            self.longest = max(self.longest, report.duration)
            if report.passed:
                return
        self.longest = max(self.longest, report.duration)
        result = result_of(report)
        if self.is_worker or "left for another call" in result["why"]:
            return
        self.cases[report.nodeid] = result
        self.pending.pop(report.nodeid, None)
        self.folder.mkdir(parents=True, exist_ok=True)
        results = {"format": 2, "machine": self.machine, "cases": self.cases}
        for name, text in (
            ("results.json", json.dumps(results, indent=1)),
            ("page.md", page(results)),
        ):
            # Renamed when complete: a stopped call leaves no half-written file.
            arriving = self.folder / f"{name}.new"
            arriving.write_text(text)
            arriving.replace(self.folder / name)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Set the exit status: 1 if any call's test failed or none passed, 3 if tests are left."""
        if (
            not self.is_worker
            and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
            and self.cases
        ):
            statuses = {case["status"] for case in self.cases.values()}
            is_wrong = FAILED in statuses or not (PASSED in statuses or self.pending)
            session.exitstatus = 1 if is_wrong else LEFT if self.pending else 0

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the counts of all calls."""
        counts = Counter(case["status"] for case in self.cases.values())
        terminalreporter.line(
            f"{', '.join(f'{count} {name}' for name, count in counts.items())}: "
            f"{self.folder}/page.md"
        )
        if self.pending:
            terminalreporter.line(
                f"{len(self.pending)} left for another call, from {next(iter(self.pending))} on"
            )


def result_of(report: pytest.TestReport) -> dict[str, Any]:
    """Return the entry of results.json for a test's report."""
    given = list(report.user_properties)
    location = {name: value for name, value in given if name in ("part", "case")}
    columns: dict[str, Any] = {name: value for name, value in given if name not in _LOCATION}
    rows = [
        {**columns, **value} for name, value in given if name == "row" and isinstance(value, dict)
    ]
    status = {"passed": PASSED, "failed": FAILED, "skipped": SKIPPED}[report.outcome]
    why = [str(value) for name, value in given if name == "note"]
    if report.skipped and hasattr(report, "wasxfail"):
        status = KNOWN
    if isinstance(report.longrepr, tuple):
        why.append(report.longrepr[2].removeprefix("Skipped: "))
    elif report.longrepr is not None:
        crash = getattr(report.longrepr, "reprcrash", None)
        why.append(" ".join((crash.message if crash else str(report.longrepr)).split())[-700:])
    file, _, name = report.nodeid.rpartition("::")
    part = location.get("part", Path(file).stem.removeprefix("test_"))
    case = location.get("case", name)
    return {"part": part, "case": case, "status": status, "seconds": round(report.duration, 1),
            "why": why, "rows": rows or [columns]}  # fmt: skip


@functools.cache
def machine(device: str) -> dict[str, Any]:
    """Return the machine, packages and commit of the results; `memory` is None without a GPU."""
    gpu = None
    if device == "cuda":
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=False
        )
        gpu = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    environment = provenance.package_and_machine_versions_record()
    commit = provenance.git_commit_and_dirty_or_none(_ROOT)
    name = f"{gpu['name']}, {human_bytes(gpu['memory'])}, CUDA {gpu['cuda']}" if gpu else "CPU"
    return {
        "name": name,
        "memory": gpu and gpu["memory"],
        "capability": gpu and gpu["capability"],
        "python": environment["python"],
        "packages": {
            name: environment["packages"][name]
            for name in _PACKAGES
            if name in environment["packages"]
        },
        "commit": commit["commit"][:12] + (" with changes" if commit["dirty"] else "")
        if commit
        else None,
        "date": time.strftime("%Y-%m-%d"),
    }


# ----------------------------------------------------------------------------------------- the page


def page(results: dict[str, Any]) -> str:
    """Return results.json as Markdown: a summary and a section for each part."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for case in results["cases"].values():
        parts.setdefault(case["part"], []).append(case)
    return "\n".join([*_head(results["machine"]), *_summary(parts), *_sections(parts), ""])


def _head(machine: dict[str, Any]) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    commit = f", commit {machine['commit']}" if machine["commit"] else ""
    made = (
        f"Written by `pytest --page` on {machine['date']}{commit}; "
        f"Python {machine['python']}, {packages}."
    )
    return [f"# {machine['name']}: results", "", made, ""]


def _summary(parts: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = [f"| part | {' | '.join(STATUSES)} | s |", "|---" * (2 + len(STATUSES)) + "|"]
    for part, cases in parts.items():
        counts = Counter(case["status"] for case in cases)
        numbers = " | ".join(str(counts[status]) for status in STATUSES)
        lines.append(f"| {part} | {numbers} | {sum(case['seconds'] for case in cases):.0f} |")
    return lines


def _sections(parts: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for part, cases in parts.items():
        rows = [
            (f"{case['case']} | {case['status']}", row) for case in cases for row in case["rows"]
        ]
        # Rows of a bench have other columns than rows of a loss curve: a table of their own.
        measured = [pair for pair in rows if "variant" in pair[1]]
        tables = [*_table([pair for pair in rows if pair not in measured]), *_table(measured)]
        reasons = [
            f"- {case['case']}: {case['status']}: {_cell(why)}"
            for case in cases
            for why in case["why"]
        ]
        if tables or reasons:
            yield from ["", f"## {part}", *tables, *(["", *reasons] if reasons else [])]


def _table(rows: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return a table with a line for each row; columns without a value are left out."""
    given = dict.fromkeys(
        name for _, row in rows for name, value in row.items() if value not in (None, "", [])
    )
    shown = [name for name in given if not name.startswith("_")]
    if not shown:
        return []
    titles = [FORMATS.get(name, (name.replace("_", " "), str))[0] for name in shown]
    lines = ["", f"| case | result | {' | '.join(titles)} |", "|---" * (2 + len(shown)) + "|"]
    for start, row in rows:
        cells = (
            "" if row.get(name) is None else FORMATS.get(name, ("", str))[1](row[name])
            for name in shown
        )
        lines.append(f"| {start} | {' | '.join(map(_cell, cells))} |")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
