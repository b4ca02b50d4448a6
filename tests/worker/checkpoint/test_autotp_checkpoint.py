"""Checkpoints of AutoTP's slices in other worlds: bit for bit, and the curve goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.worker.checkpoint.restore import CheckpointTensors
from ortlaunch.worker.model.named_state import ParameterRange
from tests.torchrun import torchrun

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.ci]

# Sections and ranks.
WORLDS: dict[str, tuple[dict[str, Any], int]] = {
    "one": ({}, 1),
    "zero 0": ({"parallel": {"tensor": 2}, "zero": {"stage": 0}}, 2),
    "zero 1": ({"parallel": {"tensor": 2}, "zero": {"stage": 1}}, 4),
    "zero 2": ({"parallel": {"tensor": 2}, "zero": {"stage": 2}}, 2),
    "tensor": ({"parallel": {"tensor": 2}}, 2),
    "shard": ({"parallel": {"shard": 2}}, 2),
    "zero 3": ({"zero": {"stage": 3}}, 2),
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every whole weight and moment of a checkpoint."""
    checkpoint = CheckpointTensors(folder)
    found = {}
    for kind, name in checkpoint.pieces:
        whole = torch.empty(math.prod(checkpoint.index["weights"][name]))
        part = ParameterRange(name, 0, whole.numel(), whole, 0, {})
        checkpoint.read_range_into_flat_tensor(kind, part, whole)
        found[f"{kind} {name}"] = whole
    return found


def start(world: str, source: Path | None, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the checkpoint that a world saves, and its next losses."""
    sections, ranks = WORLDS[world]
    file = folder / "losses.json"
    arguments = (json.dumps(sections), str(source or ""), str(folder / "saved"), str(file))
    folder.mkdir()
    torchrun(ranks, "-m", "tests.worker.autotp_ranks", *arguments, timeout=120)
    return tensors(folder / "saved"), json.loads(file.read_text())


@pytest.mark.parametrize(
    ("saved", "others"),
    [
        pytest.param("zero 0", ["one", "zero 1"], marks=pytest.mark.nightly),
        ("zero 1", ["one", "zero 0", "zero 1", "tensor", "shard", "zero 3"]),
        pytest.param("zero 2", ["zero 2", "zero 1"], marks=pytest.mark.nightly),
        pytest.param("tensor", ["zero 1"], marks=pytest.mark.nightly),
        pytest.param("shard", ["zero 2"], marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_of_slices_in_other_worlds(
    saved: str, others: list[str], tmp_path: Path
) -> None:
    """Weights and moments come back bit for bit; the next losses are those of the first run."""
    first, losses = start(saved, None, tmp_path / "first")
    # Weights and two moments of 13 parameters; the head has the weight of the embedding.
    assert len(first) == 3 * 13
    for other in others:
        restored, next_losses = start(other, tmp_path / "first/saved", tmp_path / other)
        assert next_losses == pytest.approx(losses, rel=1e-6), other
        assert restored.keys() == first.keys()
        for name, value in first.items():
            assert torch.equal(restored[name], value), (other, name)
