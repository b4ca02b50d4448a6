"""Hardware, memory limits and load of this machine, read from /proc and /sys."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import resource
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.json_types import Json
from ortlaunch.base.process import all_processes

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
DEVICES = Path("/dev")
KERNEL_LOG = Path("/dev/kmsg")
THIS_MACHINE = "the memory of this machine"
FUSED_ATTENTION_SCORES = 256 * 256
"""From this product of queries and keys of one head, engine ort uses torch's fused attention."""
_WATCH_SECONDS = 0.5  # over which the load of other processes is measured
_BUSY_SHARE = 0.1  # of one core
# Age of a kernel message that is still attributed to a process of this run.
_RECENT_SECONDS = 300.0


def hardware_record() -> Json:
    """Return the processor, the cores that this process may use, and the GPUs' models."""
    return {"processor": _processor_name(), "cores": usable_core_count(), "gpus": _gpu_models()}


def usable_core_count() -> int:
    """Return the number of cores that this process may use, by its affinity and control groups."""
    return min([len(os.sched_getaffinity(0)), *_cpu_core_limit_of_each_control_group()])


def threads_per_rank(ranks_on_host: int) -> int:
    """Return the number of threads of each rank, for this many ranks on this host."""
    return max(1, usable_core_count() // ranks_on_host)


def _cpu_core_limit_of_each_control_group() -> Iterator[int]:
    """Yield the CPU limit of each control group in cores, as `docker run --cpus` sets it."""
    for version, folder in _own_and_parent_control_group_folders("cpu"):
        with contextlib.suppress(OSError):
            files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if version == 1 else ["cpu.max"]
            quota, period = " ".join((folder / name).read_text() for name in files).split()
            # Versions 2 and 1 of control groups write these for no limit.
            if quota not in ("max", "-1"):
                yield max(1, math.ceil(int(quota) / int(period)))


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        named = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine()


def bfloat16_matmul_units() -> list[str]:
    """Return the processor's units for bfloat16 matmuls: amx_bf16, avx512_bf16."""
    return sorted({"amx_bf16", "avx512_bf16"} & _processor_flags())


def is_onednn_faster() -> bool:
    """Return whether oneDNN computes float32 matmuls faster than MKL here: AMD with AVX-512."""
    # Measured with torch 2.13 on two cores of Zen 5, 1024 x 768 by 768 x 3072: 222 GFLOP/s by MKL,
    # 428 by oneDNN.
    return "AMD" in _processor_name() and "avx512f" in _processor_flags()


def _processor_flags() -> set[str]:
    """Return the processor's feature flags, as Linux names them."""
    with contextlib.suppress(OSError):
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return set(flags[1].split() if flags else ())
    return set()


def reason_cpu_matmul_precision_gains_nothing_or_none(matmul_precision: str) -> str | None:
    """Return why this processor computes float32 matmuls no faster at a lower precision.

    None if it has the unit. Measured with torch 2.13: oneDNN uses bfloat16 inside float32 matmuls
    only with AMX, and TensorFloat32 never.
    """
    units = bfloat16_matmul_units()
    if matmul_precision == "medium" and "amx_bf16" in units:
        return None
    if matmul_precision == "high":
        return "torch has no TensorFloat32 matmul on CPU"
    return (
        f"this processor has {', '.join(units) or 'no bf16 unit'}, and a float32 matmul can "
        "only use amx_bf16"
    )


def lower_matmul_precision_effect_text(matmul_precision: str, device: str) -> str:
    """Return the effect of `engine.matmul_precision` below highest on this host, as text."""
    if device == "cuda":
        return "float32 matmul runs in TensorFloat32, on GPUs with it (Ampere and newer)"
    no_effect_reason = reason_cpu_matmul_precision_gains_nothing_or_none(matmul_precision)
    return (
        f"no effect: {no_effect_reason}"
        if no_effect_reason
        else "float32 matmul runs in bfloat16 (amx_bf16)"
    )


def visible_gpu_count(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs visible to a process here, by CUDA_VISIBLE_DEVICES and /dev."""
    present_count = sum(
        1 for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)
    )
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is None:
        return present_count
    names: list[str] = []
    for name in map(str.strip, visible_devices.split(",")):
        # CUDA stops at the first name that is no GPU, such as -1 or Slurm's NoDevFiles, and shows
        # none if one is named twice. Names may also be UUIDs of GPUs, or parts of one GPU.
        if not (
            name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < present_count)
        ):
            break
        names.append(name)
    visible_count = len(names) if len({*names}) == len(names) else 0
    # One GPU may have several MIG parts, so their number is not limited by `present`.
    return (
        visible_count
        if present_count and "MIG-" in visible_devices
        else min(present_count, visible_count)
    )


def _gpu_models() -> list[str]:
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        named = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        models.append(named[1].strip() if named else "unknown")
    return models


def gpu_memory_bytes_or_none() -> int | None:
    """Return the memory of this host's smallest GPU; None without one, or without nvidia-smi."""
    import subprocess

    argv = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout
        return min(int(line) for line in lines.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


class MemoryLimit(NamedTuple):
    """A limit of the memory of processes here: its whole size, and its free part, in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


def machine_and_control_group_memory_limits() -> list[MemoryLimit]:
    """Return the machine's memory, then the limits of this process's control groups, innermost
    first.

    The only source of these numbers: for plans, for `micro_size: auto` and for copies in an export.
    """
    return [_machine_memory_limit(), *_memory_limits_of_control_groups()]


def smallest_memory_limit() -> MemoryLimit:
    """Return the smallest memory limit: the most that all processes of a run can use here."""
    return min(machine_and_control_group_memory_limits(), key=lambda limit: limit.total_bytes)


def memory_limit_with_least_free() -> MemoryLimit:
    """Return the memory limit with the least free bytes now."""
    return min(machine_and_control_group_memory_limits(), key=lambda limit: limit.free_bytes)


def _machine_memory_limit() -> MemoryLimit:
    text = (PROC / "meminfo").read_text()
    bytes_by_name = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"^(Mem\w+):\s*(\d+) kB", text, re.MULTILINE)
    }
    return MemoryLimit(THIS_MACHINE, bytes_by_name["MemTotal"], bytes_by_name["MemAvailable"])


def _memory_limits_of_control_groups() -> Iterator[MemoryLimit]:
    for version, folder in _own_and_parent_control_group_folders("memory"):
        most, used, cache = _MEMORY_FILES[version]
        # A group may lack the controller, such as the root group.
        with contextlib.suppress(OSError):
            limit = (folder / most).read_text().strip()
            usage = int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # Version 2 writes "max" for no limit, version 1 a number near 2^63.
            if limit != "max" and int(limit) < 1 << 60:
                # Page cache that the kernel can drop does not count as used.
                free_bytes = int(limit) - usage + int(stat.get(cache, 0))
                yield MemoryLimit(f"control group {folder}", int(limit), max(0, free_bytes))


_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def _own_and_parent_control_group_folders(controller_name: str) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) of this process's control group and its parents, which limit it, too.

    In a container the path in /proc may be the host's and not exist; its parents then include the
    root of the mount, which is the container's group.
    """
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            tops = [(2, CONTROL_GROUPS), (2, CONTROL_GROUPS / "unified")]
        elif controller_name in kinds.split(","):
            tops = [(1, CONTROL_GROUPS / controller_name)]
        else:
            continue
        for version, top in tops:
            own_folder = top / path.lstrip("/")
            yield from (
                (version, folder)
                for folder in (own_folder, *own_folder.parents)
                if folder.is_relative_to(top)
            )


def memory_kill_count_of_control_group() -> int | None:
    """Return how many processes of this control group the kernel ended for memory; None if unknown."""
    for version, folder in _own_and_parent_control_group_folders("memory"):
        with contextlib.suppress(OSError):
            text = (folder / {1: "memory.oom_control", 2: "memory.events"}[version]).read_text()
            if match := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
                return int(match[1])
    return None


def kernel_memory_kill_message_or_none(pid: int) -> str | None:
    """Return the kernel's message about a process that its out-of-memory killer ended recently.

    None if there is none, or this user may not read the log. The log has process ids of the machine,
    so nothing is found in a container with its own process ids.
    """
    kill_pattern = re.compile(rf"Killed process {pid} \(")
    for line in _kernel_log_lines():
        head, _, message = line.partition(";")
        if (
            kill_pattern.search(message)
            and time.monotonic() - int(head.split(",")[2]) / 1e6 < _RECENT_SECONDS
        ):
            return message.partition("\n")[0]
    return None


def _kernel_log_lines() -> Iterator[str]:
    with contextlib.suppress(OSError):
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                # EPIPE: the kernel has overwritten the next message; reading continues after it.
                with contextlib.suppress(BrokenPipeError):
                    line = os.read(log, 1 << 13)
                    if not line:
                        return
                    yield line.decode(errors="replace")
        finally:
            os.close(log)


def watch_and_describe_other_busy_processes() -> list[str]:
    """Return `name (pid): share of a core` of every other busy process, the busiest first."""
    ticks_before = _processor_ticks_by_process()
    start_seconds = time.perf_counter()
    time.sleep(_WATCH_SECONDS)
    passed = (time.perf_counter() - start_seconds) * os.sysconf("SC_CLK_TCK")
    shares = [
        ((used - ticks_before.get(who, used)) / passed, who)
        for who, used in _processor_ticks_by_process().items()
    ]
    busy = sorted(((share, who) for share, who in shares if share >= _BUSY_SHARE), reverse=True)
    return [f"{name} ({pid}): {share:.0%} of a core" for share, (pid, name) in busy]


def _processor_ticks_by_process() -> dict[tuple[int, str], int]:
    """Return (pid, name) -> processor time in ticks, for every process except this one."""
    return {
        (process.pid, process.name): process.ticks
        for process in all_processes()
        if process.pid != os.getpid()
    }


def own_address_on_route_or_none(other_host: str) -> str | None:
    """Return this host's address on its route to another; None if only loopback leads there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends no packet: the kernel only picks the route. 9 is "discard".
        probe.connect((other_host, 9))
        address: str = probe.getsockname()[0]
        return None if address.startswith("127.") else address
    return None


def raise_open_file_limit_to_hard_limit() -> None:
    """Raise this process's limit of open files to the host's maximum."""
    # Rank 0 has a connection to every rank, and `over_ssh` a pipe to every host; many shells set a
    # limit of 1,024.
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
