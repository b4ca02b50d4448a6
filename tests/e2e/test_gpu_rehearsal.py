"""The whole of tests/gpu in its form for a CPU: every part, the page, and a wrong curve."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT
from tests.ort import INSTALLED, needs_ort

PARTS = ("smoke", "functions", "eager", "inductor", "ort", "deepspeed", "bert", "lora", "llama", "precision",
         "chunked_loss", "recompute", "memory")  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def proof(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run tests/gpu on the CPU, with its results in `out`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-m",
        "gpu",
        "--device=cpu",
        "--page",
        str(out),
        *words,
    ]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False
    )


@pytest.mark.parametrize(
    ("words", "case"),
    [
        pytest.param(
            "eager and fp32 and deepspeed", "eager, fp32, no DeepSpeed", marks=pytest.mark.ci
        ),
        ("ort and fp32 and zero", "ort, fp32, ZeRO 2"),
        ("two and not (ddp or 1 or 3)", "two ranks on one device, ZeRO 2"),
    ],
)
@needs_ort
def test_the_smoke_part(words: str, case: str, tmp_path: Path) -> None:
    """The smoke part passes for eager, for ort with ZeRO, and for two ranks on one device."""
    ended = proof(tmp_path, "-k", f"smoke: and {words}")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    found = cases_of(tmp_path).values()
    assert case in {one["case"] for one in found}
    assert {one["status"] for one in found} == {"passed"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of all parts."""
    out = tmp_path_factory.mktemp("proof")
    ended = proof(out, "--minutes=55")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    return out


def cases_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())["cases"]
    return found


def test_every_part_passes(done: Path) -> None:
    """Every part has a passed case; ort only where it is installed."""
    passed: dict[str, int] = dict.fromkeys(PARTS, 0)
    for case in cases_of(done).values():
        passed[case["part"]] += case["status"] == "passed"
    assert {part for part, count in passed.items() if not count} <= {
        *(() if INSTALLED else ("ort",))
    }


def test_the_page(done: Path) -> None:
    """The page has a section for each part, and each benchmark's figures and parity."""
    page = (done / "page.md").read_text()
    assert all(f"## {part}\n" in page for part in PARTS)
    row = next(
        line
        for line in page.splitlines()
        if line.startswith("| bert-large/tiny, fp32 | passed | eager |")
    )
    assert "| reference |" in row


def test_a_curve_that_is_wrong_fails_the_proof(done: Path, tmp_path: Path) -> None:
    """A training against a reference moved by 2 % fails, and finished cases are not run again."""
    out = tmp_path / "proof"
    shutil.copytree(done, out)
    results = json.loads((out / "results.json").read_text())
    (again,) = (key for key in results["cases"] if "eager: llama2-7b/tiny, ZeRO 1, bf16" in key)
    file = out / "reference-llama2-7b-tiny.json"
    file.write_text(json.dumps([1.02 * loss for loss in json.loads(file.read_text())]))
    # Only a case without a result is run again.
    before = results["cases"].pop(again)
    (out / "results.json").write_text(json.dumps(results))
    ended = proof(out, "-k", "eager:")
    assert ended.returncode == 1, ended.stdout
    assert cases_of(out)[again]["why"][0].startswith("Failed: a loss differs by ")
    assert {key: case for key, case in cases_of(out).items() if key != again} == results["cases"]
    assert before["status"] == "passed"
