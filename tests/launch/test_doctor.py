"""Tests of `ortlaunch doctor --hostfile` where the hosts are this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ortlaunch.api.json_outputs import output_json_schema
from tests.launch.tiny import ortlaunch


def findings(folder: Path, hosts: str, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status of doctor, and its findings by check."""
    (folder / "hosts").write_text(hosts)
    ended = ortlaunch(folder, "doctor", *words, "--hostfile", "hosts", "--json")
    assert ended.stdout.startswith("["), ended.stderr
    rows = json.loads(ended.stdout)
    jsonschema.validate(rows, output_json_schema("doctor"))
    assert ended.returncode == any(row["verdict"] == "failed" for row in rows)
    return ended.returncode, {row["check"]: row for row in rows}


def test_ranks_measure_the_hosts(tmp_path: Path) -> None:
    """Ranks measure matrix products and the all-reduce, and leave nothing behind."""
    _, found = findings(tmp_path, "localhost slots=2\n", "--launcher", "torchrun")
    assert "reached" in found
    assert list(found)[-2:] == ["matrix rate", "all-reduce"]
    assert found["matrix rate"]["figures"]["gflops_least"] > 0
    assert found["all-reduce"]["what"].startswith("2 ranks: ")
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


@pytest.mark.slow
def test_ranks_that_fail_are_a_finding(tmp_path: Path) -> None:
    """Ranks that fail are a failed check, which names the file of their output."""
    words = ("bert-large/tiny", "engine.name=eager", "launch.env={GLOO_SOCKET_IFNAME: nope0}")
    status, found = findings(tmp_path, "localhost slots=2\n", *words)
    assert (status, found["ranks"]["verdict"]) == (1, "failed")
    (folder,) = tmp_path.glob("ortlaunch-doctor-*")
    assert found["ranks"]["mend"] == f"see {folder / 'output.txt'}"


def test_no_rank_is_started_where_a_check_failed(tmp_path: Path) -> None:
    """No rank is started after a failed check, and a finding names the check."""
    status, found = findings(tmp_path, "localhost slots=1\n", "--port", "1", "--interface", "eth9")
    assert status == 1
    assert found["ranks"]["verdict"] == "warning"
    assert found["ranks"]["what"] == "not started, because of interface of localhost"
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]
