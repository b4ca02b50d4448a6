"""Training on streamed text in this process: to the end, and stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_stream import RECIPE, write_shards
from tests.makers import recipe
from tests.training import run_here


@pytest.mark.slow
@pytest.mark.ci
def test_a_resumed_training_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Stopped after 4 steps, it goes on with the samples that follow; its tokens are deleted."""
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path)

    def losses(folder: str, steps: int) -> list[Any]:
        sections = {**RECIPE, "train": {"max_steps": steps}, "engine": {"name": "eager"}}
        run = run_here(tmp_path / folder, recipe(**sections))
        assert not run.stream.exists()
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        return [(line["step"], line["loss"], line["epoch"]) for line in lines if "loss" in line]

    whole = losses("whole", 10)
    losses("parts", 4)
    assert losses("parts", 10) == whole
    assert whole[-1][2] > whole[0][2]
    out = capfd.readouterr().out
    assert "data: streamed; 10 steps of 12 are 120 samples" in out
    assert "resumed after step 4" in out
