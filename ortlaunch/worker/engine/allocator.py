"""On a CPU: memory that a step frees stays with the process, because the next step asks for the same again.

glibc gives every large tensor back to the kernel and takes it anew, zeroed page by page: about a tenth of the processor
time of a training step. Here blocks of up to 32 MiB are kept. Larger ones go back, for kept ones leave holes that
nothing else fills (2.6 times the memory, measured); torch takes them in pages of 2 MiB, but for guests whose host takes
free memory back: there a huge page is often one that the host has to find anew (128 MiB: 15 ms, or 110 to 400 ms; in
pages of 4 KiB always 55 ms).
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import MutableMapping
from pathlib import Path

# glibc's malloc.h
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST = 32 << 20  # the most that glibc takes
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch at its first tensor
_NEVER = -1  # as an unsigned number: more than there is
_REPORTING = Path("/sys/module/page_reporting/parameters/page_reporting_order")
_LARGEST_ORDER = 64  # the kernel's value is 2^32 - 1 until a balloon driver asks for reports
KEPT = "kept by the process from step to step, in blocks of up to 32 MiB"


def keep_freed_memory(environ: MutableMapping[str, str]) -> str:
    """Let glibc's malloc keep what is freed; what it does, in words, is returned for engine.json.

    Left alone where the environment says how malloc is to be (MALLOC_*, GLIBC_TUNABLES, LD_PRELOAD), and without glibc.
    """
    chosen = [name for name in sorted(environ) if name.startswith("MALLOC_")]
    chosen += ["GLIBC_TUNABLES"] if "glibc.malloc" in environ.get("GLIBC_TUNABLES", "") else []
    chosen += ["LD_PRELOAD"] if "malloc" in environ.get("LD_PRELOAD", "") else []
    if chosen:
        return f"as the environment says: {', '.join(f'{name}={environ[name]}' for name in chosen)}"
    if platform.libc_ver()[0] != "glibc":
        return "given back as malloc sees fit: it is not glibc's"
    pages = _choose_pages(environ)
    libc = ctypes.CDLL(None)
    done = libc.mallopt(_MMAP_THRESHOLD, _LARGEST) and libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    return (
        f"{KEPT}; larger ones {pages}"
        if done
        else "given back as glibc sees fit: it refused another way"
    )


def _choose_pages(environ: MutableMapping[str, str]) -> str:
    """Ask torch for huge pages where they gain; which pages it is, in words."""
    if _HUGE_PAGES in environ:
        return f"as {_HUGE_PAGES}={environ[_HUGE_PAGES]} says"
    if host_takes_free_memory():
        return "in ordinary pages: the host of this virtual machine takes back what is free, huge pages first"
    environ[_HUGE_PAGES] = "1"
    return "in huge pages"


def host_takes_free_memory() -> bool:
    """Whether this guest reports free pages to its host (virtio-balloon, Hyper-V), as Linux 5.14 and newer tell."""
    try:
        return int(_REPORTING.read_text()) % 2**32 < _LARGEST_ORDER
    except (OSError, ValueError):
        return False


def give_back_freed_memory() -> None:
    """Give back what is free now, once: an export's copies of the model are not needed again."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
