"""Tests of starts that are refused at once with status 2, a clear reason and no run folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.tiny import RECIPE, ortlaunch, write_recipe

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
# For each case: arguments, variables, and words of the error.
CASES = {
    "no such host file": (["--hostfile", "/nope"], {}, ["/nope", "cannot be read"]),
    "more slots than exist": (["--hostfile", "many", "launch.device=cpu"], {}, ["localhost has", "4096 slots"]),
    "other number of nodes": (["--hostfile", "one", "launch.nodes=2"], {}, ["launch.nodes is 2", "1 hosts"]),
    "nodes without a host file": (["launch.nodes=4"], {}, ["launch.nodes is 4", "--hostfile"]),
    "stale RANK beside Open MPI": ([], {**OPEN_MPI, "RANK": "3"}, ["RANK=3", "OMPI_COMM_WORLD_SIZE=2"]),
    "a size without a rank": ([], {"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK"]),
    "ranks that are nodes": ([], {"RANK": "0", "WORLD_SIZE": "2"}, ["WORLD_SIZE", "LOCAL_RANK"]),
    "extensions not built": (["engine.name=ort"], {"ORT_EXTENSIONS_DIR": "empty"}, ["python -m ortmodule setup"]),
    "batch that does not fit": (
        ["--nproc-per-node", "3", "batch={global_size: 16, micro_size: 4}"], {}, ["global_size (16)", "3 ranks"],
    ),
    "a size to find inside a launcher": (
        ["batch={global_size: 16, micro_size: auto}", "--run-dir=given"], OPEN_MPI,
        ["micro_size: got auto", "set the number"],
    ),
    "no GPU": (["launch.device=cuda"], {"CUDA_VISIBLE_DEVICES": ""}, ["GPU"]),
}  # fmt: skip


@pytest.mark.timeout(30)
@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_anything_starts(case: str, tmp_path: Path):
    """The start is refused with the reason, without a traceback, and nothing is trained."""
    words, variables, said = CASES[case]
    if case == "extensions not built" and sys.version_info >= (3, 12):
        pytest.skip("onnxruntime-training has no wheel for this Python")
    write_recipe(tmp_path)
    (tmp_path / "many").write_text("localhost slots=4096\n")
    (tmp_path / "one").write_text("localhost slots=1\n")
    done = ortlaunch(tmp_path, "train", RECIPE, *words, timeout=25, **variables)
    assert done.returncode == 2, done.stderr
    assert [word for word in said if word not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
