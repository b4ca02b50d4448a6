"""`plan --fit`: the smallest worlds of GPUs that hold a recipe, and the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ortlaunch
from ortlaunch.base.errors import InputError, PlanError
from ortlaunch.planning.fitting import FittingWorld
from tests.control.typed import Run
from tests.makers import CUSTOM

LLAMA = "llama2-7b/pretrain"


def worlds(source: Any, *assignments: str, gpu: str = "80GiB") -> dict[str, FittingWorld]:
    """Return the world of each sharding, on hosts of 8 GPUs."""
    found = ortlaunch.fitting_worlds(source, *assignments, gpu=gpu, gpus_per_host=8)
    return {world.sharding: world for world in found.worlds}


def test_worlds_of_llama() -> None:
    """16 bytes of state a parameter do not fit one GPU; divided, they fit two to sixteen."""
    found = worlds(LLAMA)
    assert {name: (world.gpus, world.hosts, world.engine) for name, world in found.items()} == {
        "DDP": (None, None, "ort"),
        "ZeRO 1": (2, 1, "ort"),
        "ZeRO 2": (4, 1, "ort"),
        "ZeRO 3": (2, 1, "eager"),
        "FSDP2": (2, 1, "eager"),
        "HSDP": (16, 2, "eager"),
        "FSDP2, tensor 2": (2, 1, "eager"),
        "FSDP2, tensor 4": (4, 1, "eager"),
        "FSDP2, tensor 8": (8, 1, "eager"),
        "ZeRO 1, tensor 2": (2, 1, "eager"),
        "ZeRO 1, tensor 4": (4, 1, "eager"),
        "ZeRO 1, tensor 8": (8, 1, "eager"),
    }
    assert found["DDP"].reason == "on 1 GPU: 112.4 GiB, optimizer 50.2 GiB"
    assert found["FSDP2"].reason == "on 1 GPU: 104.3 GiB, optimizer 50.2 GiB"


@pytest.mark.parametrize(
    ("sharding", "overrides"),
    [
        ("ZeRO 1", ("zero.stage=1",)),
        ("FSDP2", ("zero=null", "parallel.replicate=1")),
        ("FSDP2, tensor 4", ("zero=null", "parallel={replicate: 1, tensor: 4}")),
        ("ZeRO 1, tensor 4", ("zero.stage=1", "parallel={tensor: 4}")),
    ],
)
def test_bytes_are_those_of_the_plan(sharding: str, overrides: tuple[str, ...]) -> None:
    """The plan of the world that fits has the same bytes on a rank."""
    base = ("engine={name: eager}", "model.gradient_checkpointing=true", "launch.device=cuda")
    world = worlds(LLAMA, *base)[sharding]
    options = ortlaunch.LaunchOptions(processes_per_node=world.gpus)
    planned = ortlaunch.plan(LLAMA, *base, *overrides, options=options).memory
    assert planned is not None
    assert world.gpu_bytes == dict(planned.by_stage)[planned.chosen].total
    assert world.host_bytes == planned.host.peak


@pytest.mark.parametrize(
    ("source", "overrides", "sharding", "reason"),
    [
        ("bert-large/phase1", (), "ZeRO 1", "optimizer.name: got lamb with ZeRO 1"),
        ("bert-large/phase1", (), "FSDP2", "parallel: got optimizer lamb"),
        ("bert-large/phase1", ("optimizer={name: adamw, learning_rate: 1e-4}",), "FSDP2, tensor 2",
         "transformers has no plan of tensor parallelism for bert"),
        ("models/gemma3-1b", (), "FSDP2, tensor 2", "2 does not divide num_key_value_heads 1"),
        (LLAMA, ("batch.global_size=8",), "HSDP", "(1) x 16 ranks = 16; 16 would be valid"),
        # Weights stay whole, whatever the number of GPUs.
        (LLAMA, ("batch.global_size=4",), "ZeRO 1", "on 4 GPUs: 51.6 GiB, optimizer 18.8 GiB; batch: "),
    ],
)  # fmt: skip
def test_a_sharding_that_does_not_fit(
    source: str, overrides: tuple[str, ...], sharding: str, reason: str
) -> None:
    """The reason is a rule of the recipe, the batch, the layers, or the largest part."""
    world = worlds(source, *overrides, gpu="24GiB")[sharding]
    assert (world.gpus, world.hosts) == (None, None)
    assert reason in world.reason


def test_offload_leaves_gathered_weights_on_a_gpu() -> None:
    """The recipe's own `parallel.offload` holds for FSDP2: one small GPU, and the host's memory."""
    overrides = ("zero=null", "engine={name: eager}", "model.gradient_checkpointing=true")
    world = worlds(LLAMA, *overrides, "parallel.offload=true", gpu="16GiB")["FSDP2"]
    assert world.gpus == 1
    assert (world.host_bytes or 0) > 16 * 6_738_415_616


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fit", "this host shows no GPU; give the memory of a GPU with a unit, as --gpu 80GiB"),
        ("--fit --gpu 80", "got --gpu 80; give"),
        ("--gpu 80GiB", "--gpu has no effect without --fit"),
        ("--fit --gpu 80GiB --predict", "--predict has no effect with --fit"),
    ],
)
def test_wrong_options(
    words: str, message: str, ortlaunch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has a size with a unit, and other options of plan are refused."""
    monkeypatch.setenv("PATH", "")
    ended = ortlaunch("plan", "bert.yaml", *words.split())
    assert (ended.status, ended.out) == (2, "")
    assert message in ended.err


def test_the_smallest_gpu_of_this_host_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --gpu it is what nvidia-smi reports, in MiB."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81559\necho 40960\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert ortlaunch.fitting_worlds(LLAMA).gpu_bytes == 40 << 30


def test_a_model_that_cannot_be_counted(tmp_path: Path) -> None:
    """The error has the reason of the plan."""
    with pytest.raises(PlanError, match="plan --fit: your factory builds the model"):
        ortlaunch.fitting_worlds(CUSTOM, gpu="80GiB")
    with pytest.raises(InputError, match="got --gpu 8GB"):
        ortlaunch.fitting_worlds(LLAMA, gpu="8GB")


def test_the_guide_shows_what_is_printed() -> None:
    """The rows of docs/guides/sharding.md are those of the command that it names."""
    page = Path(__file__).parents[3] / "docs/guides/sharding.md"
    shown = page.read_text(encoding="utf-8").split("```")[1].strip().splitlines()
    printed = str(ortlaunch.fitting_worlds(LLAMA, gpu="24GiB", gpus_per_host=8)).splitlines()
    assert [line for line in shown if line not in printed] == []
    assert len(shown) == 9
