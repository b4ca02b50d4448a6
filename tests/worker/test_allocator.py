"""A process keeps freed memory, unless the environment configures malloc."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ortlaunch.worker.allocator import KEPT_MEMORY_TEXT, make_malloc_keep_memory_and_describe

FAULTS = """
import ctypes, resource, sys
from ortlaunch.worker.allocator import trim_heap, make_malloc_keep_memory_and_describe
if sys.argv[1] != "plain":
    make_malloc_keep_memory_and_describe({})
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer = bytearray(int(sys.argv[2]) << 20)  # written once
    del buffer
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
step()
if sys.argv[1] == "given back":
    trim_heap()
print(step())
"""
# Pages of 16 MiB.
PAGES = (16 << 20) // 4096
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def faults(how: str, mebibytes: int = 16) -> int:
    """Return the page faults of the second allocation of a size, in a fresh process."""
    command = [sys.executable, "-c", FAULTS, how, str(mebibytes)]
    return int(
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    )


@glibc
def test_what_is_freed_is_used_again() -> None:
    """Freed blocks are used again without page faults, except blocks of more than 32 MiB."""
    assert faults("kept") < PAGES / 10
    assert faults("given back") > PAGES / 2
    # 64 MiB are above the largest block that is kept.
    assert faults("kept", 64) > 4 * PAGES / 2


@glibc
@pytest.mark.parametrize(
    ("order", "given", "found", "said"),
    [
        # Kernels before 5.14 have no such file.
        (None, {}, "1", "in huge pages"),
        # The kernel's value without a balloon driver, as unsigned and as signed integer.
        ("4294967295", {}, "1", "in huge pages"),
        ("-1", {}, "1", "in huge pages"),
        # A host that takes free pages back.
        (
            "9",
            {},
            None,
            "in ordinary pages: the host of this virtual machine reclaims free memory",
        ),
        ("9", {"THP_MEM_ALLOC_ENABLE": "1"}, "1", "as THP_MEM_ALLOC_ENABLE=1 says"),
        (None, {"THP_MEM_ALLOC_ENABLE": "0"}, "0", "as THP_MEM_ALLOC_ENABLE=0 says"),
    ],
)
def test_large_blocks_come_in_large_pages(
    tmp_path: Path, order: str | None, given: dict[str, str], found: str | None, said: str
) -> None:
    """torch uses huge pages, unless the host takes free pages back or the environment decides."""
    told = tmp_path / "page_reporting_order"
    if order is not None:
        told.write_text(f"{order}\n")
    code = f"""
from pathlib import Path
from ortlaunch.worker import allocator
allocator._REPORTING, environ = Path({str(told)!r}), {given}
print(allocator.make_malloc_keep_memory_and_describe(environ))
print(environ.get("THP_MEM_ALLOC_ENABLE"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    words, asked = done.stdout.splitlines()
    assert words.startswith(f"{KEPT_MEMORY_TEXT} 32 MiB; larger ones {said}")
    assert asked == str(found)


@pytest.mark.parametrize(
    "environ",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=10"},
        {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"},
    ],
)
def test_what_the_user_chose_stays(environ: dict[str, str]) -> None:
    """Settings of malloc in the environment stay unchanged and are reported."""
    assert all(
        text in make_malloc_keep_memory_and_describe({**environ, "PATH": "/bin"})
        for text in environ.values()
    )


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another libc than glibc is left unchanged."""
    # Musl has no such settings.
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert "not glibc" in make_malloc_keep_memory_and_describe({})
