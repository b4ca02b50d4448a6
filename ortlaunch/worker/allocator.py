"""On a CPU: memory that a step frees stays with the process, because the next step asks for the same again.

glibc gives every large tensor back to the kernel and takes it anew, zeroed page by page: about a tenth of the processor
time of a training step. The price is memory in between, some 15 % more at the peak.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's malloc.h
_NEVER = -1  # as an unsigned number: more than there is
KEPT = "kept by the process from step to step"


def keep_freed_memory(environ: Mapping[str, str]) -> str:
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
    libc = ctypes.CDLL(None)
    done = libc.mallopt(_MMAP_MAX, 0) and libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    return KEPT if done else "given back as glibc sees fit: it refused another way"


def give_back_freed_memory() -> None:
    """Give back what is free now, once: an export's copies of the model are not needed again."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
