"""On a CPU: memory that a step frees stays with the process, because the next step asks for the same again.

glibc gives every large tensor back to the kernel and takes it anew, zeroed page by page: about a tenth of the processor
time of a training step. Here blocks of up to 32 MiB are kept. Larger ones go back, for kept ones leave holes that
nothing else fills (2.6 times the memory, measured); torch takes them in pages of 2 MiB, where the kernel has such.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import MutableMapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST = 32 << 20  # the most that glibc takes
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch at its first tensor
_NEVER = -1  # as an unsigned number: more than there is
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
    environ.setdefault(_HUGE_PAGES, "1")
    libc = ctypes.CDLL(None)
    done = libc.mallopt(_MMAP_THRESHOLD, _LARGEST) and libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    return KEPT if done else "given back as glibc sees fit: it refused another way"


def give_back_freed_memory() -> None:
    """Give back what is free now, once: an export's copies of the model are not needed again."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
