"""ORTTrainer on two ranks, beside transformers' Trainer on the same two."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortmodule_tests.ort import needs_ort
from ortmodule_tests.torchrun import torchrun

pytest.importorskip("transformers")
from ortmodule_tests.trainer.tiny import assert_same_search  # an extra

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["none", pytest.param("2", marks=pytest.mark.ci)])
def test_losses_on_two_ranks_are_trainers(stage: str, tmp_path: Path) -> None:
    """With DistributedDataParallel and ZeRO 2: losses, resume, report and saved model."""
    if stage != "none":
        pytest.importorskip("deepspeed")
    torchrun(2, "-m", "ortmodule_tests.trainer.ranks", str(tmp_path), stage, timeout=280)


@pytest.mark.slow
def test_zero_3_is_refused(tmp_path: Path) -> None:
    """ORTModule cannot train weights that ZeRO 3 has sharded: an error before the first step."""
    pytest.importorskip("deepspeed")
    torchrun(1, "-m", "ortmodule_tests.trainer.ranks", str(tmp_path), "3", timeout=200)


@pytest.mark.slow
def test_a_search_is_trainers(tmp_path: Path) -> None:
    """hyperparameter_search on one process and on two has the result of transformers' Trainer."""
    pytest.importorskip("optuna")
    assert_same_search(tmp_path / "one")
    torchrun(2, "-m", "ortmodule_tests.trainer.ranks", str(tmp_path / "two"), "search", timeout=280)
