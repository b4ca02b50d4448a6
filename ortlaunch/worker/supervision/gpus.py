"""A rank's GPU: the GPUs that CUDA shows, why it shows none, and the time of forward passes.

CUDA reads CUDA_VISIBLE_DEVICES once. Therefore only `ForwardTimer` and `exporting` may initialize
CUDA in the process.
"""

from __future__ import annotations

import re
import socket
from collections import deque
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ortlaunch.base.cache import create_private_cache_folder_or_refuse
from ortlaunch.base.errors import LaunchError
from ortlaunch.rank import Rank

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/version")
# onnxruntime-training 1.19.2 has machine code for sm_60 - sm_86, and PTX of 8.6 (by cuobjdump).
_NEWEST_MACHINE_CODE = 8
# The oldest Linux driver for each CUDA major version (CUDA Toolkit release notes, "minor version
# compatibility").
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


def set_visible_gpus_and_return_own_index(
    planned_gpu_by_local_rank: Sequence[int], rank: Rank, environ: MutableMapping[str, str]
) -> int:
    """Set CUDA_VISIBLE_DEVICES to the GPUs that the plan gives the rank's host.

    DeepSpeed uses the GPU of index LOCAL_RANK, so the planned GPUs must be the first and only ones.

    Args:
        planned_gpu_by_local_rank: the planned GPU of each rank of this host, as an index into those that
            CUDA_VISIBLE_DEVICES shows now.
        rank: this process's rank.
        environ: the environment, which is changed.

    Returns:
        The index of the rank's GPU among those that CUDA then shows.

    Raises:
        LaunchError: CUDA_VISIBLE_DEVICES shows fewer GPUs than are planned.
    """
    visible_devices = environ.get(_VISIBLE)
    names = (
        [name.strip() for name in visible_devices.split(",")]
        if visible_devices
        else [str(i) for i in range(max(planned_gpu_by_local_rank) + 1)]
    )
    # A scheduler gave this task one GPU of its own (--gpus-per-task=1).
    if len(names) == 1 and len(set(planned_gpu_by_local_rank)) > 1:
        return 0
    if max(planned_gpu_by_local_rank) >= len(names):
        raise LaunchError(
            f"rank {rank.rank} needs GPUs {', '.join(map(str, planned_gpu_by_local_rank))} of "
            f"{socket.gethostname()}, and {_VISIBLE}={visible_devices} shows {len(names)} there"
        )
    gpu_name = names[planned_gpu_by_local_rank[rank.local_rank]]
    # CUDA shows at most one MIG instance to a process.
    if gpu_name.startswith("MIG-"):
        environ[_VISIBLE] = gpu_name
        return 0
    # Ranks may share a GPU, which is listed once.
    distinct = list(dict.fromkeys(planned_gpu_by_local_rank))
    environ[_VISIBLE] = ",".join(names[device] for device in distinct)
    return distinct.index(planned_gpu_by_local_rank[rank.local_rank])


def set_cuda_kernel_cache_and_loading_unless_set(environ: MutableMapping[str, str]) -> None:
    """Keep the kernels that the driver compiles for a newer GPU in our cache, so once per machine.

    The driver's default limit is a quarter of the space that onnxruntime-training 1.19.2 needs, and
    its default folder may be on a node's local disk, which is emptied. Variables that the user has
    set are kept.
    """
    # LAZY defers the load of each kernel to its first use.
    environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    # 4 GiB, in bytes.
    environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))
    if "CUDA_CACHE_PATH" not in environ:
        environ["CUDA_CACHE_PATH"] = str(create_private_cache_folder_or_refuse("cuda"))


class ForwardTimer:
    """GPU seconds of this rank's forward passes, which return before they are computed.

    A pair of CUDA events is recorded around each pass, and read once the GPU has reached the
    second. Nothing waits.
    """

    def __init__(self) -> None:
        self._begin_event: Any = None
        self._recorded_passes: deque[tuple[Any, Any]] = deque()

    def begin(self) -> None:
        """Record the begin of a forward pass."""
        self._begin_event = _record_cuda_event()

    def end(self) -> None:
        """Record the end of a forward pass, which is launched and may not be computed yet."""
        self._recorded_passes.append((self._begin_event, _record_cuda_event()))

    def read(self) -> float:
        """Return the seconds of the passes that the GPU has finished since the last call."""
        seconds = 0.0
        while self._recorded_passes and self._recorded_passes[0][1].query():
            begin_event, end_event = self._recorded_passes.popleft()
            # elapsed_time is in milliseconds.
            seconds += begin_event.elapsed_time(end_event) / 1000
        return seconds


def create_gpu_forward_timer_or_none(device: torch.device) -> ForwardTimer | None:
    """Return a timer for a GPU; None for a CPU, where a forward pass takes the host's time."""
    return ForwardTimer() if device.type == "cuda" else None


def _record_cuda_event() -> object:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def onnxruntime_export_phase_text(device: torch.device) -> str:
    """Return the phase name of building engine ort.

    For a GPU newer than ORT's machine code, the driver compiles every kernel.
    """
    phase = "exporting to ONNX Runtime"
    is_newer_gpu = (
        device.type == "cuda" and torch.cuda.get_device_capability(device)[0] > _NEWEST_MACHINE_CODE
    )
    return f"{phase}, compiling its kernels for this GPU (once)" if is_newer_gpu else phase


def reason_torch_sees_no_gpu_and_remedy() -> str:
    """Return why this torch sees no GPU, and the remedy."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is not a CUDA build; install one, or set launch.device: cpu"
        )
    build_text = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    driver = _nvidia_driver_version_or_none()
    oldest_driver = _OLDEST_DRIVER.get(int(torch.version.cuda.split(".")[0]))
    if driver and oldest_driver and int(driver.split(".")[0]) < oldest_driver:
        return (
            f"{build_text}, which needs NVIDIA driver {oldest_driver} or newer, and this host has {driver}; "
            "install such a driver, or a torch for an older CUDA"
        )
    driver_text = f"driver {driver}" if driver else "no NVIDIA driver"
    return (
        f"{build_text}, and this host has {driver_text}; see nvidia-smi, or set launch.device: cpu"
    )


def _nvidia_driver_version_or_none() -> str | None:
    """Return the version of the kernel's NVIDIA driver, such as 550.54.15, if there is one."""
    text = _DRIVER.read_text(errors="replace") if _DRIVER.is_file() else ""
    version_match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return version_match[1] if version_match else None
