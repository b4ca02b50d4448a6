"""What this machine is, and whether it is busy with something else; read from /proc and /sys."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ortlaunch.json_types import Json
from ortlaunch.process import all_processes

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
DEVICES = Path("/dev")
KERNEL_LOG = Path("/dev/kmsg")
THIS_MACHINE = "the memory of this machine"
FUSED_ATTENTION_SCORES = 256 * 256
"""Queries times keys of one head from which on engine ort leaves attention to torch's fused kernel."""
_WATCH_SECONDS = 0.5
_BUSY_SHARE = 0.1  # of one core
_RECENT_SECONDS = 300.0


def hardware() -> Json:
    """Processor, cores that this process may use, and the GPUs that the NVIDIA driver names."""
    return {"processor": _processor(), "cores": cores(), "gpus": _gpus()}


def cores() -> int:
    """Cores that this process may use: those that it is bound to, and no more than its control groups give time for."""
    return min([len(os.sched_getaffinity(0)), *_core_quotas()])


def share_of_cores(ranks: int) -> int:
    """Threads of each of so many ranks on this host."""
    return max(1, cores() // ranks)


def _core_quotas() -> Iterator[int]:
    """Cores' worth of time that a control group's processes get together, as `docker run --cpus` limits them."""
    for version, folder in _control_groups("cpu"):
        with contextlib.suppress(OSError):
            files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if version == 1 else ["cpu.max"]
            quota, period = " ".join((folder / name).read_text() for name in files).split()
            if quota not in ("max", "-1"):
                yield max(1, math.ceil(int(quota) / int(period)))


def _processor() -> str:
    with contextlib.suppress(OSError):
        named = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine()


def matrix_units() -> list[str]:
    """The units for bfloat16 products that this processor names: amx_bf16, avx512_bf16."""
    return sorted({"amx_bf16", "avx512_bf16"} & _flags())


def onednn_is_faster() -> bool:
    """Whether float32 products are faster by oneDNN than by MKL here: on AMD's processors with AVX-512.

    Seen with torch 2.13 on two cores of Zen 5, 1024 x 768 by 768 x 3072: 222 GFLOP/s by MKL, 428 by oneDNN.
    """
    return "AMD" in _processor() and "avx512f" in _flags()


def _flags() -> set[str]:
    """What this processor says it can do, in Linux's words."""
    with contextlib.suppress(OSError):
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return set(flags[1].split() if flags else ())
    return set()


def without_matrix_unit(precision: str) -> str | None:
    """Why this processor computes float32 products no faster at this precision; None where it has the unit.

    Seen with torch 2.13: oneDNN takes bfloat16 inside float32 products on AMX alone, and TensorFloat32 nowhere.
    """
    units = matrix_units()
    if precision == "medium" and "amx_bf16" in units:
        return None
    if precision == "high":
        return "torch has no TensorFloat32 products on a CPU"
    return (
        f"this processor has {', '.join(units) or 'no bf16 unit'}, and float32 products "
        "can use amx_bf16 alone"
    )


def matmul_effect(precision: str, device: str) -> str:
    """What `engine.matmul_precision` below highest brings on a host like this one, for a plan."""
    if device == "cuda":
        return (
            "products of float32 matrices in TensorFloat32, on a GPU that has it (Ampere and newer)"
        )
    nothing = without_matrix_unit(precision)
    return (
        f"gains nothing: {nothing}"
        if nothing
        else "products of float32 matrices in bfloat16, by amx_bf16"
    )


def visible_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that a process here would see, by CUDA_VISIBLE_DEVICES and the NVIDIA driver's files."""
    present = sum(1 for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    visible = 0
    for name in chosen.split(","):
        # CUDA stops at the first name that is no GPU, such as -1; names may also be GPU-UUIDs, or parts of one GPU.
        index = name.strip()
        if not index or index.startswith("-") or (index.isdigit() and int(index) >= present):
            break
        visible += 1
    return visible if present and "MIG-" in chosen else min(present, visible)


def _gpus() -> list[str]:
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        named = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        found.append(named[1].strip() if named else "unknown")
    return found


class MemoryLimit(NamedTuple):
    """A limit of what processes here can hold together, and what of it nobody holds now, in bytes."""

    name: str
    size: int
    free: int


def memory_limits() -> list[MemoryLimit]:
    """This machine's memory, then every control group with a limit that this process is in, its own before those above.

    The one place that asks: what a plan is held against, what `micro_size: auto` fills and what an export may copy
    are these numbers.
    """
    return [_machine_memory(), *_control_group_limits()]


def tightest_limit() -> MemoryLimit:
    """The smallest of `memory_limits`: what all processes of a run can hold here."""
    return min(memory_limits(), key=lambda limit: limit.size)


def tightest_free() -> MemoryLimit:
    """The limit of `memory_limits` that leaves the least now."""
    return min(memory_limits(), key=lambda limit: limit.free)


def _machine_memory() -> MemoryLimit:
    text = (PROC / "meminfo").read_text()
    found = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"^(Mem\w+):\s*(\d+) kB", text, re.MULTILINE)
    }
    return MemoryLimit(THIS_MACHINE, found["MemTotal"], found["MemAvailable"])


def _control_group_limits() -> Iterator[MemoryLimit]:
    for version, folder in _control_groups("memory"):
        most, used, cache = _MEMORY_FILES[version]
        with contextlib.suppress(OSError):  # a group without the controller, such as the root's
            limit = (folder / most).read_text().strip()
            usage = int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit != "max" and int(limit) < 1 << 60:  # version 1 writes nearly 2^63 for none
                # Page cache that the kernel can drop does not count as used.
                left = int(limit) - usage + int(stat.get(cache, 0))
                yield MemoryLimit(f"control group {folder}", int(limit), max(0, left))


_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def _control_groups(controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's control group and of those above it, which limit it too.

    In a container the path in /proc may be the host's, which is not there: the mount's own root is its group then.
    """
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            tops = [(2, CONTROL_GROUPS), (2, CONTROL_GROUPS / "unified")]
        elif controller in kinds.split(","):
            tops = [(1, CONTROL_GROUPS / controller)]
        else:
            continue
        for version, top in tops:
            own = top / path.lstrip("/")
            yield from (
                (version, folder) for folder in (own, *own.parents) if folder.is_relative_to(top)
            )


def oom_kills() -> int | None:
    """Processes of this one's control group that the kernel has ended for memory; None where it does not say."""
    for version, folder in _control_groups("memory"):
        with contextlib.suppress(OSError):
            text = (folder / {1: "memory.oom_control", 2: "memory.events"}[version]).read_text()
            found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
            if found:
                return int(found[1])
    return None


def memory_kill_in_log(pid: int) -> str | None:
    """What the kernel's log says of a process that its out-of-memory killer ended just now; None: nothing we may read.

    The log counts processes as the machine does, which in a container with numbers of its own finds nothing.
    """
    killed = re.compile(rf"Killed process {pid} \(")
    for line in _kernel_log():
        head, _, said = line.partition(";")
        if (
            killed.search(said)
            and time.monotonic() - int(head.split(",")[2]) / 1e6 < _RECENT_SECONDS
        ):
            return said.partition("\n")[0]
    return None


def _kernel_log() -> Iterator[str]:
    with contextlib.suppress(OSError):
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                with contextlib.suppress(BrokenPipeError):  # overwritten meanwhile
                    line = os.read(log, 1 << 13)
                    if not line:
                        return
                    yield line.decode(errors="replace")
        finally:
            os.close(log)


def others_at_work() -> list[str]:
    """`name (pid): share of a core` of every process that works now, this one apart; the busiest first."""
    before = _ticks()
    begun = time.perf_counter()
    time.sleep(_WATCH_SECONDS)
    passed = (time.perf_counter() - begun) * os.sysconf("SC_CLK_TCK")
    shares = [((used - before.get(who, used)) / passed, who) for who, used in _ticks().items()]
    busy = sorted(((share, who) for share, who in shares if share >= _BUSY_SHARE), reverse=True)
    return [f"{name} ({pid}): {share:.0%} of a core" for share, (pid, name) in busy]


def _ticks() -> dict[tuple[int, str], int]:
    """(pid, name) -> processor time in ticks, of every process but this one."""
    return {(one.pid, one.name): one.ticks for one in all_processes() if one.pid != os.getpid()}
