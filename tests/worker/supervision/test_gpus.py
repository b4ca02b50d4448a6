"""The GPUs that CUDA shows a rank, and the reason where it shows none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ortlaunch.base.errors import LaunchError
from ortlaunch.rank import Rank
from ortlaunch.worker.supervision import gpus
from ortlaunch.worker.supervision.progress import Progress

CASES = [
    # planned devices, local rank, CUDA_VISIBLE_DEVICES before, after, the rank's index
    ((0, 1), 1, None, "0,1", 1),
    ((2, 3), 1, None, "2,3", 1),
    ((2, 3), 0, "4,5,6,7", "6,7", 0),
    ((0, 1), 1, "GPU-8932f937,GPU-1122aabb", "GPU-8932f937,GPU-1122aabb", 1),
    # srun --gpus-per-task=1: each task sees one GPU of its own.
    ((0, 1), 1, "3", "3", 0),
    # ORTLAUNCH_SHARE_GPUS: two ranks on one GPU.
    ((0, 0), 1, None, "0", 0),
    ((0, 1, 0, 1), 3, "4,5", "4,5", 1),
    # CUDA shows at most one MIG instance to a process.
    ((0, 1), 1, "MIG-1,MIG-2", "MIG-2", 0),
]


@pytest.mark.parametrize(("devices", "local", "before", "after", "index"), CASES)
def test_planned_gpus_are_shown(
    devices: tuple[int, ...], local: int, before: str | None, after: str, index: int
) -> None:
    """Our device, LOCAL_RANK and DeepSpeed's rule (GPU of index LOCAL_RANK) name the same GPU."""
    environ = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    rank = Rank(local, len(devices), local, len(devices))
    assert gpus.set_visible_gpus_and_return_own_index(devices, rank, environ) == index
    assert environ["CUDA_VISIBLE_DEVICES"] == after
    names = before.split(",") if before else [str(i) for i in range(8)]
    planned = names[0] if len(names) == 1 else names[devices[local]]
    assert after.split(",")[index] == planned


def test_fewer_visible_gpus_than_planned_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for fewer visible GPUs than slots shows the value of CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(gpus.socket, "gethostname", lambda: "box")
    with pytest.raises(
        LaunchError,
        match=r"^rank 0 needs GPUs 1, 2, 3 of box, and CUDA_VISIBLE_DEVICES=0,1 shows 2",
    ):
        gpus.set_visible_gpus_and_return_own_index(
            (1, 2, 3), Rank(0, 3, 0, 3), {"CUDA_VISIBLE_DEVICES": "0,1"}
        )


def test_compiled_kernels_are_kept_in_our_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver gets a large cache in our folder; variables that the user has set are kept."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    # The user's own value, which stays.
    environ = {"CUDA_CACHE_MAXSIZE": "5"}
    gpus.set_cuda_kernel_cache_and_loading_unless_set(environ)
    assert environ == {
        "CUDA_MODULE_LOADING": "LAZY",
        "CUDA_CACHE_MAXSIZE": "5",
        "CUDA_CACHE_PATH": str(tmp_path / "cache" / "cuda"),
    }
    assert (tmp_path / "cache" / "cuda").is_dir()


@pytest.mark.parametrize(
    ("capability", "compiles"), [((8, 0), False), ((8, 9), False), ((9, 0), True)]
)
def test_compiling_for_a_new_gpu_is_a_phase(
    capability: tuple[int, int], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress line names the compilation of ORT's kernels for a GPU newer than its wheel."""
    # ORT's wheel has machine code up to 8.6, which also runs on 8.9.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (
        "compiling its kernels" in gpus.onnxruntime_export_phase_text(torch.device("cuda", 0))
    ) == compiles
    assert gpus.onnxruntime_export_phase_text(torch.device("cpu")) == "exporting to ONNX Runtime"


@pytest.mark.parametrize(
    ("cuda", "version", "why"),
    [
        (None, None, "is not a CUDA build; install one, or set launch.device: cpu"),
        (
            "13.0",
            "550.54.15",
            "which needs NVIDIA driver 580 or newer, and this host has 550.54.15",
        ),
        (
            "12.4",
            "550.54.15",
            "is built for CUDA 12.4, and this host has driver 550.54.15; see nvidia-smi",
        ),
        ("12.4", None, "is built for CUDA 12.4, and this host has no NVIDIA driver"),
    ],
)
def test_why_torch_sees_no_gpu(
    cuda: str | None, version: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch without CUDA, a driver that is too old, and a missing driver are different causes."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "version")
    if version:
        text = (
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  "
            "Thu Feb 22 01:44:30 UTC 2024\n"
        )
        (tmp_path / "version").write_text(text)
    assert why in gpus.reason_torch_sees_no_gpu_and_remedy()


class FakeEvent:
    """A CUDA event of a GPU that takes 3 s a recorded pass and is one pass behind its host."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.number = FakeEvent.recorded
        FakeEvent.recorded += 1

    def query(self) -> bool:
        return self.number < FakeEvent.recorded - 2

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query(), "it would wait"
        # As in CUDA: milliseconds.
        return 3000.0 * (end.number - self.number)


def test_a_forward_pass_takes_what_the_gpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a forward pass is that between its CUDA events, read without waiting."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    progress = Progress(rank=0)
    module = torch.nn.Linear(1, 1)
    progress.register_forward_pass_hooks(
        module, gpus.create_gpu_forward_timer_or_none(torch.device("cuda"))
    )
    for _ in range(4):
        module(torch.ones(1))
    # Four passes, of which the GPU has finished two.
    assert progress.shared_progress.read_rank_progress().own_seconds == 2 * 3.0
    assert gpus.create_gpu_forward_timer_or_none(torch.device("cpu")) is None
