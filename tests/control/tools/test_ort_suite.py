"""Test tools/ort_suite.py: its message without ONNX Runtime's files, and its adapted copies."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "ort_suite.py"


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    """The functions of the script, by name."""
    return runpy.run_path(str(TOOL))


def test_missing_files_are_named_with_their_place(tmp_path: Path) -> None:
    """Without the files the script ends with status 2 and names the files and their source."""
    # The script downloads nothing.
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"{tmp_path} has no orttraining_test_" in done.stderr
    assert (
        "orttraining/orttraining/test/python of github.com/microsoft/onnxruntime at tag v1.19.2"
        in " ".join(done.stderr.split())
    )


@pytest.mark.parametrize(
    ("source", "adapted"),
    [
        (
            '@pytest.mark.parametrize("device", ["cuda", "cpu", None])',
            '@pytest.mark.parametrize("device", ["cpu", None])',
        ),
        ('    device = "cuda"', '    device = "cpu"'),
        ("    model = model.cuda()\n    x = 1", "    x = 1"),
        (
            "from transformers import AdamW, AutoConfig",
            "from torch.optim import AdamW\nfrom transformers import AutoConfig",
        ),
        # A test about two devices has no meaning on one, so it stays as it is.
        ('(["cuda", "cpu"], ["cpu", "cuda"])', '(["cuda", "cpu"], ["cpu", "cuda"])'),
    ],
)
def test_a_test_of_cuda_becomes_one_of_a_cpu(
    source: str, adapted: str, tool: dict[str, Any], tmp_path: Path
) -> None:
    """A test on CUDA is rewritten for a CPU, except a test about two devices."""
    (tmp_path / "test_it.py").write_text(source)
    tool["adapt"](tmp_path, tmp_path / "cpu")
    assert (tmp_path / "cpu" / "test_it.py").read_text() == adapted


def test_a_failure_without_a_reason_is_told_apart(tool: dict[str, Any]) -> None:
    """A failure has its known reason, or "?", with which the script ends with status 1."""
    assert (
        tool["reason"]("test_a: AssertionError: Torch not compiled with CUDA enabled")
        == "needs CUDA"
    )
    assert tool["reason"]("test_a: AssertionError: Tensor-likes are not close") == "?"
