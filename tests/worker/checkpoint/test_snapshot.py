"""A checkpoint's content: named tensors, each rank's share, loaded into any world size."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ortlaunch.base.errors import CheckpointError
from ortlaunch.rank import Rank
from ortlaunch.worker.checkpoint import tensor_file
from ortlaunch.worker.checkpoint.restore import (
    CheckpointTensors,
    load_checkpoint_print_notes_and_return_loop_state,
)
from ortlaunch.worker.checkpoint.snapshot import rank_file_name, snapshot_of_this_rank
from ortlaunch.worker.engine.lamb import Lamb
from ortlaunch.worker.engine.stepping import TorchStepper
from ortlaunch.worker.model.named_state import NamedState, ParameterRange
from ortlaunch.worker.process_group.distributed import DistributedContext

ALONE: Any = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "fused": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "lamb": lambda weights: Lamb(weights, lr=0.1),
}


def net(frozen: bool = False, width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    model[0].requires_grad_(not frozen)
    return model


def stepper(model: nn.Module, optimizer: str = "adamw", precision: str = "fp32") -> TorchStepper:
    made = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    return TorchStepper(model, made, ALONE, precision, 1, None)


def train(trained: TorchStepper, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(step))
        trained.model(x).sum().backward()
        trained.clip_step_and_clear_gradients(0.1)


def save(
    named: NamedState, folder: Path, ranks: int = 1, state: dict[str, Any] | None = None
) -> None:
    """Save as this many ranks with the same state would."""
    for rank in range(ranks):
        snapshot_of_this_rank(
            named,
            state or {},
            DistributedContext(Rank(rank, ranks, rank, ranks), torch.device("cpu")),
        ).write_rank_file_and_index(folder)


def same(one: TorchStepper, other: TorchStepper) -> bool:
    """Return whether weights, buffers and optimizer state are equal bit for bit."""
    states = [[*s.model.state_dict().values(), *(v for kept in s.optimizer.state_dict()["state"].values()
              for _, v in sorted(kept.items()))] for s in (one, other)]  # fmt: skip
    return len(states[0]) == len(states[1]) and all(torch.equal(a, b) for a, b in zip(*states))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_goes_on(optimizer: str, ranks: int, tmp_path: Path) -> None:
    """A resumed training takes the same steps, for any optimizer and number of writing ranks."""
    first = stepper(net(), optimizer)
    second = stepper(net(), optimizer)
    train(first)
    save(first.named_state(), tmp_path, ranks, {"step": 3, "learning_rate": 0.1})
    assert load_checkpoint_print_notes_and_return_loop_state(
        tmp_path, second.named_state(), ALONE
    ) == {
        "step": 3,
        "learning_rate": 0.1,
    }
    assert same(first, second)
    for one in (first, second):
        train(one)
    assert same(first, second)


def test_a_copy_is_of_its_moment(tmp_path: Path) -> None:
    """A copied snapshot is unchanged by later training steps."""
    first = stepper(net())
    second = stepper(net())
    later = stepper(net())
    for one in (first, later):
        train(one)
    taken = snapshot_of_this_rank(later.named_state(), {}, ALONE).copy_to_host()
    train(later)
    taken.write_rank_file_and_index(tmp_path)
    load_checkpoint_print_notes_and_return_loop_state(tmp_path, second.named_state(), ALONE)
    assert same(first, second)


def test_ranks_share_the_writing(tmp_path: Path) -> None:
    """Replicated state is written once, in equal shares, and safetensors reads the files."""
    one = stepper(net(width=300))
    train(one)
    save(one.named_state(), tmp_path, ranks=4)
    parts = [load_file(tmp_path / rank_file_name(rank)) for rank in range(4)]
    counts = [
        sum(value.numel() for key, value in part.items() if "buffer" not in key) for part in parts
    ]
    # Weights, and two moments of AdamW.
    assert sum(counts) == 3 * sum(p.numel() for p in one.model.parameters())
    # A share of each of the three differs by one element at most.
    assert max(counts) - min(counts) <= 3
    pieces = sorted((int(key.split("@")[1]), value) for part in parts for key, value in part.items()
                    if key.startswith("weight:0.weight@"))  # fmt: skip
    assert torch.equal(
        torch.cat([value.flatten() for _, value in pieces]), one.model[0].weight.flatten()
    )  # type: ignore[index]
    whole = {key: value for part in parts for key, value in part.items()}["weight:2.bias@0"]
    assert torch.equal(whole, one.model[2].bias)  # type: ignore[index]


def test_frozen_weights_are_not_saved(tmp_path: Path) -> None:
    """A checkpoint has trained weights and buffers; frozen weights stay as the model was built."""
    first = stepper(net(frozen=True))
    second = stepper(net(frozen=True))
    train(first)
    save(first.named_state(), tmp_path)
    names = {key.split(":")[1].split("@")[0] for key in load_file(tmp_path / rank_file_name(0))}
    assert names == {
        "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked", "2.weight", "2.bias",
    }  # fmt: skip
    with torch.no_grad():
        second.model[0].weight.fill_(7.0)  # type: ignore[index]
    load_checkpoint_print_notes_and_return_loop_state(tmp_path, second.named_state(), ALONE)
    assert torch.equal(second.model[2].weight, first.model[2].weight)  # type: ignore[index]
    assert (second.model[0].weight == 7.0).all()  # type: ignore[index]


def test_weights_laid_out_otherwise(tmp_path: Path) -> None:
    """Channels last, a scalar, and weights of the user's own dtype are restored unchanged."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        convolution = nn.Conv2d(3, 4, 3)
        convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = nn.Sequential(convolution, nn.Linear(2, 2).double())
        model.scale = nn.Parameter(torch.tensor(2.0))
        return model

    first, second = stepper(built()), stepper(built())
    for parameter in first.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    first.clip_step_and_clear_gradients(0.1)
    save(first.named_state(), tmp_path, ranks=2)
    load_checkpoint_print_notes_and_return_loop_state(tmp_path, second.named_state(), ALONE)
    assert same(first, second)
    assert second.model[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    """The loss scale is restored with its count of good steps."""
    scale: list[Any] = [stepper(net(), precision="fp16") for _ in range(3)]
    scale[0].scaler.load_state_dict(
        {**scale[0].scaler.state_dict(), "scale": 32.0, "_growth_tracker": 5}
    )
    save(scale[0].named_state(), tmp_path)
    load_checkpoint_print_notes_and_return_loop_state(tmp_path, scale[1].named_state(), ALONE)
    assert scale[1].scaler.state_dict() == scale[0].scaler.state_dict()
    # DeepSpeed's scaler has other counters, so only its scale is used.
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(
        json.dumps({**index, "loss_scale": {"scale": 8.0, "cur_iter": 7}})
    )
    load_checkpoint_print_notes_and_return_loop_state(tmp_path, scale[2].named_state(), ALONE)
    assert scale[2].scaler.get_scale() == 8.0
    assert scale[2].scaler.state_dict()["_growth_tracker"] == 0


def test_another_optimizer_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With another optimizer, only the weights are loaded, and that is printed."""
    first = stepper(net())
    second = stepper(net(), "sgd")
    train(first)
    save(first.named_state(), tmp_path)
    load_checkpoint_print_notes_and_return_loop_state(tmp_path, second.named_state(), ALONE)
    assert (
        "the checkpoint has the state of AdamW; SGD starts with a new state"
        in capsys.readouterr().out
    )
    assert torch.equal(second.model[2].weight, first.model[2].weight)  # type: ignore[index]
    train(second)


# ------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (net(width=4), r"is of another model: 0.weight is \[3, 2\] there and \[4, 2\] here"),
        (
            nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
            r"it lacks \[\], and also has \['2.bias', '2.weight'\]",
        ),
        (
            nn.Sequential(*net(), nn.Linear(1, 1)),
            r"is of another model: it lacks \['3.bias', '3.weight'\]",
        ),
    ],
)
def test_a_checkpoint_of_another_model(other: nn.Module, message: str, tmp_path: Path) -> None:
    """Other shapes, and missing or unknown weights, are an error before anything is loaded."""
    save(stepper(net()).named_state(), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint_print_notes_and_return_loop_state(
            tmp_path, stepper(other).named_state(), ALONE
        )


class Planted:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "index.json"])
def test_a_planted_pickle_does_not_run(name: str, tmp_path: Path) -> None:
    """A pickle in place of any file of a checkpoint is reported, and not executed."""
    one = stepper(net())
    save(one.named_state(), tmp_path)
    for planted in (
        pickle.dumps(Planted(tmp_path / "ran")),
        # The start of a zip file, which torch.save writes.
        b"PK\x03\x04" + pickle.dumps(Planted(tmp_path / "ran")),
    ):
        (tmp_path / name).write_bytes(planted)
        with pytest.raises(CheckpointError, match=f"{name} "):
            load_checkpoint_print_notes_and_return_loop_state(tmp_path, one.named_state(), ALONE)
    torch.save({"model": Planted(tmp_path / "ran")}, tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} "):
        load_checkpoint_print_notes_and_return_loop_state(tmp_path, one.named_state(), ALONE)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_an_index(tmp_path: Path) -> None:
    """A folder without an index is an error that names it; other files are not read."""
    torch.save({}, tmp_path / "state.pt")
    with pytest.raises(
        CheckpointError, match=r"index\.json is not an index of a checkpoint.*No such file"
    ):
        load_checkpoint_print_notes_and_return_loop_state(
            tmp_path, stepper(net()).named_state(), ALONE
        )


def test_a_later_format(tmp_path: Path) -> None:
    """A later format is an error with both formats."""
    (tmp_path / "index.json").write_text('{"format": "ortlaunch 9"}')
    with pytest.raises(
        CheckpointError, match="of format 'ortlaunch 9', and this version reads 'ortlaunch 1'"
    ):
        load_checkpoint_print_notes_and_return_loop_state(
            tmp_path, stepper(net()).named_state(), ALONE
        )


def test_a_missing_part(tmp_path: Path) -> None:
    """Missing weights are named, with the first missing element."""
    one = stepper(net())
    save(one.named_state(), tmp_path, ranks=2)
    # Rank 1's file is lost: only that of rank 0 is left.
    os.replace(tmp_path / rank_file_name(0), tmp_path / rank_file_name(1))
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "ranks": 1}))
    os.replace(tmp_path / rank_file_name(1), tmp_path / rank_file_name(0))
    with pytest.raises(CheckpointError, match=r"lacks the weight of \S+ from element \d+ on"):
        load_checkpoint_print_notes_and_return_loop_state(tmp_path, one.named_state(), ALONE)


def test_a_part_that_begins_in_a_gap(tmp_path: Path) -> None:
    """It is named as missing, too, where the piece before it ends earlier."""
    one = stepper(net())
    save(one.named_state(), tmp_path, ranks=2)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "ranks": 1}))
    shards = CheckpointTensors(tmp_path)
    (kind, name), pieces = max(
        ((key, by_runs[None]) for key, by_runs in shards.pieces.items()),
        key=lambda item: item[1][0][0],
    )
    end = pieces[-1][0] + pieces[-1][1].elements
    part = ParameterRange(name, end + 3, 2, torch.zeros(2), 0, {})
    with pytest.raises(CheckpointError, match=f"lacks the {kind} of {name} from element"):
        shards.read_range_into_flat_tensor(kind, part, torch.zeros(2))


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_cut_file(size: int, tmp_path: Path) -> None:
    """A file that ends too early is named."""
    one = stepper(net())
    save(one.named_state(), tmp_path)
    os.truncate(tmp_path / rank_file_name(0), size)
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors is not a safetensors file"):
        load_checkpoint_print_notes_and_return_loop_state(tmp_path, one.named_state(), ALONE)


def test_what_has_no_place_is_refused(tmp_path: Path) -> None:
    """State that is no tensor, and a dtype that the format lacks, are errors of the save."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    with pytest.raises(
        CheckpointError,
        match="_extra_state in the model's state is dict; a checkpoint holds tensors only",
    ):
        save(stepper(Extra(2, 2)).named_state(), tmp_path)
    model = net()
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(
        CheckpointError,
        match=r"buffer:odd@0 is of torch.complex64, which a checkpoint cannot store",
    ):
        save(stepper(model).named_state(), tmp_path)


def test_a_large_file_goes_onto_the_disk_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file is flushed to the disk in parts."""
    # A single flush on a slow disk would show no progress for so long that it counts as a stall.
    flushed: list[int] = []
    monkeypatch.setattr(
        tensor_file.os, "fsync", lambda file: flushed.append(os.fstat(file).st_size)
    )
    monkeypatch.setattr(tensor_file, "_FLUSHED_BYTES", 400)
    tensors = [(str(number), (100,), torch.zeros(100)) for number in range(3)]
    size = tensor_file.write_safetensors_and_checksum(tmp_path / "file", tensors, {})["bytes"]
    assert flushed == [size - 800, size - 400, size, size]
