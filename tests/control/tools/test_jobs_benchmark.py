"""Tests of benchmarks/jobs.py: measures of a process tree, commands, tables and the picture."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# Each part of it is a fact of the test below: a child with 60 MB, and one that outlives its parent.
COMMAND = """
import subprocess, sys, time
child = "import time; held = b'x' * 60_000_000; print('held', flush=True); time.sleep(0.5)"
left = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
subprocess.run([sys.executable, "-c", left])
subprocess.run([sys.executable, "-c", child])
time.sleep(float(sys.argv[1]))
"""
# In a process of its own, because it adopts orphans.
MEASURE = """
import json, os, sys
from pathlib import Path
from whole_jobs import job_run
job_run.adopt_orphans()
stop = job_run.Stop("held")
with job_run.busy_neighbour() as neighbour:
    measures = [
        job_run.run_and_measure([sys.executable, "-c", sys.argv[1], seconds], Path("log"), Path("."),
                                os.environ, limit, stop_or_none, neighbour)
        for seconds, limit, stop_or_none in (("0", 60, None), ("60", 0.3, None), ("60", 60, stop))
    ]
    os.kill(neighbour, 0)
print(json.dumps([each._asdict() for each in measures]))
"""


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the benchmark, as a script imports it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import jobs

    return jobs


def record_of(jobs: ModuleType, seconds: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    """Return a record of runs with these seconds, by job and tool."""
    runs = []
    for (job, tool), turns in seconds.items():
        for number, wall in enumerate(turns):
            measured = {"wall_seconds": wall, "user_seconds": 3.0, "system_seconds": 1.0}
            memory = {"peak_resident_bytes": 2**20, "peak_proportional_bytes": 2**19}
            run = {"job": job, "tool": tool, "loss": 1.5, "other_cpu_seconds": number, **memory}
            parts = {} if jobs.is_peer(tool) else {"parts": {"training": wall - 1}}
            runs.append({**run, **measured, **parts, "commands": [measured]})
    return {"machine": "a machine", "runs": runs, "failed": []}


def test_a_tree_is_measured_and_ended(tmp_path: Path) -> None:
    """Time, memory, orphans and a stop are of all the command's processes, not the neighbour's."""
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, COMMAND], cwd=tmp_path, env={"PYTHONPATH": str(BENCHMARKS)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    whole, killed, stopped = json.loads(ended.stdout)
    assert (whole["exit_status"], killed["exit_status"], stopped["exit_status"]) == (0, -9, -15)
    assert 0.3 < killed["wall_seconds"] < 10
    assert whole["wall_seconds"] > 0.5
    assert whole["orphans"] == 1
    # The whole command, its child with 60 MB, and the orphan.
    assert whole["processes"] == 3
    assert 60_000_000 < whole["peak_resident_bytes"] < 200_000_000
    # A page that two processes share counts once.
    assert 0 < whole["peak_proportional_bytes"] < whole["peak_resident_bytes"]
    assert 0.02 < whole["user_seconds"] + whole["system_seconds"] < 0.5
    assert whole["seconds_after_signal"] is None
    assert 0 <= stopped["seconds_after_signal"] < 1


def test_each_job_has_a_recipe_and_commands(jobs: ModuleType, tmp_path: Path) -> None:
    """Every command of ours names a recipe of the folder, and every peer's a script of it."""
    for job in jobs.JOBS:
        tools = [
            jobs.Tool("before-ort", "ort", tmp_path),
            jobs.Tool("ours-default", "default", tmp_path),
        ]
        tools += [jobs.Tool(peer, peer, tmp_path) for peer in jobs.JOBS[job].peers]
        for tool in tools:
            parts = jobs.parts_of_job(job, tool, tmp_path / "out")
            assert len(parts) == (
                2 if job == "f" else 8 if (job, tool.kind) == ("h", "trainer") else 1
            )
            for part in parts:
                (file,) = (Path(word) for word in part.command if word.startswith(str(jobs.HERE)))
                assert file.exists()
                assert ("engine.name=ort" in part.command) == (tool.kind == "ort")
        if jobs.JOBS[job].alike is None:
            recipe = yaml.safe_load((jobs.HERE / f"{job}.yaml").read_text())
            assert recipe["name"] == f"job-{job}"
    first, second = jobs.parts_of_job("f", tools[0], tmp_path / "out")
    assert first.exit_statuses == (85,)
    assert first.command == second.command


def test_tables_and_picture_compare_with_the_fastest_peer(jobs: ModuleType) -> None:
    """The ratio is of medians to the fastest peer's, and a noisy run is marked."""
    record = record_of(jobs, {
        ("c", "ours-ort"): [10.0, 30.0, 12.0], ("c", "trl"): [40.0], ("c", "llama-factory"): [6.0],
        ("e", "ours-ort"): [5.0], ("e", "trainer"): [10.0],
    })  # fmt: skip
    table = jobs.results_table(record)
    assert "| ours-ort | 12.0 | 10.0 30.0 12.0* | 2.00 | 4 (1) | 1 | 0 | 1.5000 |  |" in table
    assert "| trl | 40.0 | 40.0 | 6.67 |" in table
    runs = [{"engine": "ort"}, {"engine": "eager"}]
    assert jobs.tool_with_engines("ours-auto", runs) == "ours-auto (ort, eager)"
    assert jobs.tool_with_engines("ours-ort", runs[:1]) == "ours-ort"
    assert jobs.means_lines(record) == (
        "ours-ort: 1.00 times as fast as the fastest peer (geometric mean of 2 jobs; 0.50 to 2.00)"
    )
    assert jobs.parts_table(record).splitlines()[2:4] == [
        "| command, supervisor, exit | 1.00 | 1.00 |", "| training | 11.00 | 4.00 |",
    ]  # fmt: skip
    dots = [
        each.text for each in xml.fromstring(jobs.picture(record)).iter() if "title" in each.tag
    ]
    assert "c, ours-ort: 0.50 x" in dots
    assert "e, trainer: 1.00 x" in dots
    # Without a peer there is nothing to compare with.
    assert "x" not in jobs.means_lines(record_of(jobs, {("c", "ours-ort"): [1.0]}))


def test_the_page_has_the_recorded_figures(jobs: ModuleType) -> None:
    """docs/evidence/speed.md and its picture are those of jobs.json."""
    docs = Path(jobs.__file__).parents[1] / "docs" / "evidence"
    record = json.loads((docs / "jobs.json").read_text())
    page = (docs / "speed.md").read_text()
    assert jobs.results_table(record) in page
    assert all(line in page for line in jobs.means_lines(record).splitlines())
    assert jobs.picture(record) == (docs / "jobs.svg").read_text()
