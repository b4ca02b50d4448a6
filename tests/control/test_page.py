"""tests/page.py writes each result of long tests at once, resumes, and makes a page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import page

ROOT = Path(__file__).resolve().parents[2]
# A test module with every kind of result: passed, failed, skipped and expected to fail.
MIXED = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_good(number, record_property):
    record_property("part", "curves")
    record_property("case", f"case {number}")
    record_property("row", {"difference": number / 1000})
    record_property("note", "a remark")

def test_bad():
    assert False, "planted | here"

def test_absent():
    pytest.skip("no such thing here")

@pytest.mark.xfail
def test_known():
    raise ValueError("as ever")
"""


def command(folder: Path, *words: str) -> list[str]:
    """Return the pytest command for test_long.py of a folder, with only the page plugin."""
    plugins = ["-p", "no:cacheprovider", "-p", "tests.page"]
    return [sys.executable, "-m", "pytest", *plugins, "--page", str(folder / "out"), "--device=cpu", "-q",
            "--rootdir", str(folder), str(folder / "test_long.py"), *words]  # fmt: skip


def run(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Write test_long.py, run it and return the finished process."""
    (folder / "test_long.py").write_text(text)
    return subprocess.run(
        command(folder, *words), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def cases(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out/results.json").read_text())["cases"]
    return {case.rpartition("::")[2]: value for case, value in found.items()}


def test_results_are_kept_and_resumed(tmp_path: Path) -> None:
    """A failure gives status 1 and its reason on the page; a second call runs no test again."""
    first = run(tmp_path, MIXED)
    text = (tmp_path / "out/page.md").read_text()
    assert first.returncode == 1
    assert "| curves | 2 | 0 | 0 | 0 |" in text
    assert "| case 1 | passed | 1.0e-03 |" in text
    assert "- case 2: passed: a remark" in text
    assert "test_bad: failed: AssertionError: planted \\| here" in text
    assert "test_absent: skipped: no such thing here" in text
    assert {name: case["status"] for name, case in cases(tmp_path).items() if "good" not in name} == {
        "test_bad": "failed", "test_absent": "skipped", "test_known": "known to fail",
    }  # fmt: skip
    # The stored result is used, so the changed message must not appear.
    again = run(tmp_path, MIXED.replace("planted", "changed"))
    assert again.returncode == 1
    assert "changed" not in (tmp_path / "out/page.md").read_text()


def test_tests_without_time_are_left_for_another_call(tmp_path: Path) -> None:
    """A call without enough time ends with status LEFT; the next call runs the other tests."""
    text = "import time\n\n" + "".join(
        f"def test_{name}():\n    time.sleep(0.4)\n\n" for name in "abc"
    )
    assert run(tmp_path, text, "--minutes=0.01").returncode == page.LEFT
    first = cases(tmp_path)
    assert next(iter(first)) == "test_a"
    assert len(first) < 3
    assert run(tmp_path, text).returncode == 0
    assert list(cases(tmp_path)) == ["test_a", "test_b", "test_c"]
    assert cases(tmp_path)["test_a"] == first["test_a"]


def test_a_stopped_call_keeps_its_results(tmp_path: Path) -> None:
    """After SIGINT during a test the results of the earlier tests are kept."""
    (tmp_path / "test_long.py").write_text(
        "import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\n"
    )
    # A shell ignores SIGINT for background jobs, and children inherit that: restore the default.
    process = subprocess.Popen(
        command(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "out/page.md").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert list(cases(tmp_path)) == ["test_a"]


def test_results_of_another_machine_are_not_mixed(tmp_path: Path) -> None:
    """Results of another torch version are refused, and the message names that version."""
    assert run(tmp_path, "def test_a(): pass\n").returncode == 0
    file = tmp_path / "out/results.json"
    results = json.loads(file.read_text())
    results["machine"]["packages"]["torch"] = "0.1"
    file.write_text(json.dumps(results))
    ended = run(tmp_path, "def test_a(): pass\n")
    assert ended.returncode == 2
    assert "'torch': '0.1'" in ended.stdout + ended.stderr
    assert "give another --page" in ended.stdout + ended.stderr


def test_a_test_that_runs_out_of_time() -> None:
    """Only the first test of a call fails when time runs out, because it had all of the time.

    A later test is left for the next call.
    """
    # Without __init__, which needs a pytest session.
    results = object.__new__(page.Results)
    results.deadline = time.monotonic() + 1
    results.is_first = False
    with pytest.raises(pytest.skip.Exception, match="left for another call"):
        results.out_of_time("was not done in 1 s")
    results.is_first = True
    with pytest.raises(pytest.fail.Exception, match="was not done"):
        results.out_of_time("was not done in 1 s")
