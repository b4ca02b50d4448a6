"""Two real ranks with the loss in chunks, on every engine and ZeRO stage, compared with float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ort import needs_ort
from tests.torchrun import torchrun

pytest.importorskip("deepspeed")
pytestmark = [needs_ort, pytest.mark.usefixtures("built")]
ALL = [
    *(
        f"{engine},{zero},llama"
        for engine in ("eager", "inductor", "ort")
        for zero in ("none", "0", "1", "2")
    ),
    *("eager,none,llama-tied", "inductor,2,llama-tied", "ort,2,llama-tied"),
    *("eager,none,bert", "inductor,1,bert", "ort,none,bert"),
]


def apart(cases: list[str], file: Path, timeout: float) -> dict[str, Any]:
    """Run these cases on two ranks, and return the differences."""
    torchrun(2, "-m", "tests.worker.chunked_ranks", str(file), *cases, timeout=timeout)
    read: dict[str, Any] = json.loads(file.read_text())
    return read


def hold(found: dict[str, Any]) -> None:
    """Check that all cases ran in chunks and as requested, within 1e-6.

    `pytest -rP` prints the differences.
    """
    worst = {case: max(each["loss"], *each["gradients"].values()) for case, each in found.items()}
    print(*(f"{case}: {difference:.1e}" for case, difference in worst.items()), sep="\n")
    for case, each in found.items():
        assert (each["used"], each["rows"]) == (case.partition(",")[0], 8)
        assert each["used"] != "ort" or each["aten"]["ortmodule::head_loss"] == 1
    assert {case: difference for case, difference in worst.items() if difference > 1e-6} == {}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(200)
def test_two_ranks_on_two_engines(tmp_path: Path) -> None:
    """Tied weights in ORT's graph with ZeRO 1, and BERT's two losses with ZeRO 2, are correct."""
    hold(apart(["ort,1,llama-tied", "eager,2,bert"], tmp_path / "found.json", 180))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_engine_and_stage(tmp_path: Path) -> None:
    """All cases are correct."""
    hold(apart(ALL, tmp_path / "found.json", 880))
