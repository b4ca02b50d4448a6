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


@pytest.mark.parametrize("saved", ["zero 0", "zero 1", "zero 2"])
def test_a_checkpoint_of_autotp_in_every_world(saved: str, tmp_path: Path) -> None:
    """Weights and moments come back bit for bit, there and back; losses are those of the run."""
    first, losses = start(saved, None, tmp_path / "first")
    # Weights and two moments of 12 parameters, of which one is tied.
    assert len(first) == 3 * 13
    for world in WORLDS:
        restored, next_losses = start(world, tmp_path / "first/saved", tmp_path / f"to {world}")
        assert next_losses == pytest.approx(losses, rel=1e-6), world
        back, _ = start(saved, tmp_path / f"to {world}/saved", tmp_path / f"back {world}")
        for name, value in first.items():
            assert torch.equal(restored[name], value), (world, name)
            assert torch.equal(back[name], value), (world, name)
