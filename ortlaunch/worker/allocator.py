"""Memory settings of a CPU process: freed blocks stay with the process for the next step.

By default glibc returns every large tensor to the kernel and allocates it again, zeroed page by
page. This costs about a tenth of the processor time of a training step. With these settings the
process keeps freed blocks of up to 32 MiB; with FSDP2, of up to 1 MiB, because gathered weights are
to be freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from array import array
from collections.abc import MutableMapping
from pathlib import Path

# Parameter numbers of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
# The largest threshold that glibc accepts. Larger blocks go back to the kernel anyway: kept ones
# would leave holes that nothing else fills (2.6 times the memory, measured).
_LARGEST = 32 << 20
# With FSDP2: kept blocks of gathered weights leave holes, too (2.2 times the memory, measured).
_LARGEST_WITH_FSDP2 = 1 << 20
# torch reads this variable when it allocates its first tensor.
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# glibc reads it as an unsigned integer, which is more than any process can hold.
_NEVER_TRIM = -1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The kernel maps so many pages of a file at once.
_PAGES_MAPPED_TOGETHER = 16
# From <linux/mman.h>, since Linux 5.14; older kernels refuse it.
_MADV_POPULATE_READ = 22
# Addresses of pages of library files that were in memory before this process was forked; empty in a
# process that was executed.
_file_page_addresses = list[int]()
_REPORTING = Path("/sys/module/page_reporting/parameters/page_reporting_order")
# The kernel's value is 2^32 - 1 until a balloon driver enables the reports.
_LARGEST_ORDER = 64
KEPT_MEMORY_TEXT = "kept by the process from step to step, in blocks of up to"


def make_malloc_keep_memory_and_describe(
    environ: MutableMapping[str, str], divides_weights: bool = False
) -> str:
    """Make glibc's malloc keep freed memory; return a description of the result for engine.json.

    Nothing changes without glibc, or where the environment already configures malloc (MALLOC_*,
    GLIBC_TUNABLES, LD_PRELOAD).

    Args:
        environ: the environment variables of the process.
        divides_weights: whether FSDP2 gathers and frees weights in each pass.
    """
    user_variables = [name for name in sorted(environ) if name.startswith("MALLOC_")]
    user_variables += (
        ["GLIBC_TUNABLES"] if "glibc.malloc" in environ.get("GLIBC_TUNABLES", "") else []
    )
    user_variables += ["LD_PRELOAD"] if "malloc" in environ.get("LD_PRELOAD", "") else []
    if user_variables:
        return f"from the environment: {', '.join(f'{name}={environ[name]}' for name in user_variables)}"
    if platform.libc_ver()[0] != "glibc":
        return "released by malloc, which is not glibc's"
    pages = _set_huge_pages_variable_and_describe(environ)
    libc = ctypes.CDLL(None)
    largest_bytes = _LARGEST_WITH_FSDP2 if divides_weights else _LARGEST
    was_accepted = libc.mallopt(_MMAP_THRESHOLD, largest_bytes) and libc.mallopt(
        _TRIM_THRESHOLD, _NEVER_TRIM
    )
    return (
        f"{KEPT_MEMORY_TEXT} {largest_bytes >> 20} MiB; larger ones {pages}"
        if was_accepted
        else "released by glibc, which refused other settings"
    )


def _set_huge_pages_variable_and_describe(environ: MutableMapping[str, str]) -> str:
    """Enable torch's huge pages where they are faster; return a description of the pages in use."""
    if _HUGE_PAGES in environ:
        return f"as {_HUGE_PAGES}={environ[_HUGE_PAGES]} says"
    if host_reclaims_free_guest_pages():
        # The host often has to find a huge page first: 128 MiB then take 15 ms, or 110 to 400 ms.
        # In pages of 4 KiB they always take 55 ms.
        return (
            "in ordinary pages: the host of this virtual machine reclaims free memory, huge "
            "pages first"
        )
    environ[_HUGE_PAGES] = "1"
    return "in huge pages"


def host_reclaims_free_guest_pages() -> bool:
    """Return whether this guest reports free pages to its host (virtio-balloon, Hyper-V).

    Linux 5.14 and newer publish this; older kernels give False.
    """
    try:
        return int(_REPORTING.read_text()) % 2**32 < _LARGEST_ORDER
    except (OSError, ValueError):
        return False


def trim_heap() -> None:
    """Return freed memory to the system: after an export or a comparison, or between parts of a step."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def remember_mapped_pages_of_files() -> None:
    """Keep the addresses of the pages of files in memory, for `map_pages_of_files_as_before_fork`."""
    # Some kernels have no such file. A fork then counts less memory than it uses.
    with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb") as page_map:
        for line in Path("/proc/self/maps").read_text().splitlines():
            address_range, _, _, _, inode, *_ = line.split()
            start, end = (int(address, 16) // _PAGE_BYTES for address in address_range.split("-"))
            page_map.seek(start * 8)
            entries = array("Q", page_map.read((end - start) * 8 if inode != "0" else 0))
            # The highest bit of an entry: the page is in memory.
            _file_page_addresses.extend(
                (start + page) * _PAGE_BYTES
                for page in range(0, len(entries), _PAGES_MAPPED_TOGETHER)
                if entries[page] >> 63
            )


def map_pages_of_files_as_before_fork() -> None:
    """Map the pages of library files again, which count in plans and records of memory.

    A fork has its parent's memory, but pages of files only once it uses them.
    """
    for address in _file_page_addresses:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), _PAGE_BYTES, _MADV_POPULATE_READ)
