"""Frozen weights, which no checkpoint has: other ones than in the training are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import CheckpointError, InputError
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.run_folder.resume_record import FROM_THE_BEGINNING
from ortlaunch.worker import checkpoint
from ortlaunch.worker.data import UserSamples
from ortlaunch.worker.export.export_checkpoint import require_unchanged_frozen_weights
from ortlaunch.worker.model.identity import (
    data_and_frozen_weights_identity,
    frozen_weights_fingerprint_or_none,
)
from tests.makers import plan, recipe
from tests.training import train_here
from tests.worker.checkpoint.test_checkpoint import GROUP

ROWS = [
    {"x": row, "y": row.sum()}
    for row in torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
]


class Adapted(nn.Module):
    """A model of a frozen base with weights from the seed, and a trained weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 300).requires_grad_(False)
        self.weight = nn.Parameter(torch.ones(300))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.base(x) @ self.weight - y) ** 2).mean()


def test_a_fingerprint() -> None:
    """The fingerprint depends on the seed of frozen weights, and not on trained weights."""
    one = Adapted(1)
    other = Adapted(1)
    trained = Adapted(2)
    with torch.no_grad():
        other.weight.mul_(2)
    assert (
        frozen_weights_fingerprint_or_none(one)
        == frozen_weights_fingerprint_or_none(other)
        != frozen_weights_fingerprint_or_none(trained)
    )
    assert frozen_weights_fingerprint_or_none(trained.requires_grad_(True)) is None


@pytest.mark.parametrize("allow", [[], ["model"]])
def test_another_base_needs_a_word(
    allow: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another frozen base is refused by a resume without `--allow model`, and by every export."""
    # Another seed or other packages give another base.
    run = RunDir(tmp_path)
    sections = {"train": {"max_steps": 1}}
    write_text_atomically(run.plan, plan(recipe(**sections)).to_json())
    train_here(run.path, Adapted(1), ROWS, **sections)
    replace(
        FROM_THE_BEGINNING, allow=tuple(allow), step=1, checkpoint=str(run.checkpoint_folder(1))
    ).write(run)
    found = checkpoint.set_aside_damaged_and_choose_own_or_source_checkpoint(run, GROUP)
    assert found is not None
    checkpoint.print_training_changes_and_refuse_unallowed(
        run,
        recipe(**sections),
        found,
        data_and_frozen_weights_identity(UserSamples(ROWS), Adapted(1)),
        GROUP,
    )
    require_unchanged_frozen_weights(found.folder, frozen_weights_fingerprint_or_none(Adapted(1)))
    capsys.readouterr()
    now = data_and_frozen_weights_identity(UserSamples(ROWS), Adapted(2))
    if allow:
        checkpoint.print_training_changes_and_refuse_unallowed(
            run, recipe(**sections), found, now, GROUP
        )
        assert "applied, with --allow model" in capsys.readouterr().out
    else:
        with pytest.raises(
            InputError, match=r"weights.frozen: '\w+' -> '\w+': refused without --allow model"
        ):
            checkpoint.print_training_changes_and_refuse_unallowed(
                run, recipe(**sections), found, now, GROUP
            )
    with pytest.raises(CheckpointError, match="differ from those of its training"):
        require_unchanged_frozen_weights(
            found.folder, frozen_weights_fingerprint_or_none(Adapted(2))
        )
