"""Derive causes from error messages of libraries, drivers and the C library, by one table.

ortlaunch's own messages are not matched: its errors carry their cause (errors.py). Standard
library only.
"""

from __future__ import annotations

import re

from ortlaunch.base.cause import Cause

# The order matters: the first cause with a matching line wins.
_CAUSE_AND_PATTERN_PAIRS = (
    (
        Cause.OUT_OF_MEMORY,
        r"allocate memory|unable to allocate|failed to allocate|out of "
        r"memory|OutOfMemory|bad_alloc|MemoryError"
        r"|Errno 12\b",
    ),
    (Cause.DISK_FULL, r"[Nn]o space left on device|Errno 28\b|Errno 122\b|[Dd]isk quota exceeded"),
    (Cause.PORT_TAKEN, r"[Aa]ddress already in use|EADDRINUSE|Errno 98\b"),
    (Cause.NO_GPU, r"no NVIDIA driver|not compiled with CUDA|no CUDA-capable device"),
    (
        Cause.INDEX_OUT_OF_RANGE,
        (
            r"index out of range in self|Target \d+ is out of bounds|device-side assert|out of "
            r"bounds for"
        ),
    ),
    (Cause.MISSING_MODULE, r"ModuleNotFoundError|No module named|ImportError"),
    (Cause.MISSING_FILE, r"FileNotFoundError|No such file or directory|Errno 2\b"),
    (Cause.UNREADABLE_FILE, r"PermissionError|Permission denied|Errno 13\b"),
    (Cause.NO_LOCKS, r"No locks available|Errno 37\b"),
)
# Of Python's fault handler only the stack counts: its first line repeats the signal's name.
_NATIVE_CRASH_LINE = (
    r"terminate called|what\(\):|Assertion|assert|CHECK failed|Check failed"
    r"|Fatal Python error(?!: (Aborted|Segmentation|Floating|Bus|Illegal))"
)
# The innermost frames of the stack that Python's fault handler prints.
_STACK = re.compile(r'most recent call first\):\n  File "(.+)", line (\d+) in (.+)')
# A rank that loses its peers fails too; these messages mean that the cause is on another rank.
_PEER_IS_GONE = (
    r"Connection closed by peer|Connection reset by peer|remote process|NCCL error|Broken "
    r"pipe|Timed out waiting"
    r"|Socket closed|DistBackendError|DistNetworkError"
)
_MOST_CHARACTERS = 300  # characters of a line


def match_cause_in_text(text: str) -> tuple[Cause, str] | None:
    """Return the first cause of the table that matches a text, with the last line that matches."""
    cause_and_line = (
        (cause, last_matching_line(pattern, text)) for cause, pattern in _CAUSE_AND_PATTERN_PAIRS
    )
    return next(((cause, line) for cause, line in cause_and_line if line), None)


def native_crash_cause_and_detail(error_log_tail: str) -> tuple[Cause, str]:
    """Return the cause of a crash in native code, with what that printed and where Python was.

    Args:
        error_log_tail: the end of the rank's error log.
    """
    cause = Cause.CRASH
    python_location = ""
    for file, line, function in (match.groups() for match in _STACK.finditer(error_log_tail)):
        is_graph = file.endswith("_execution_agent.py")
        cause = Cause.GRAPH_CRASH if is_graph else Cause.CRASH
        python_location = (
            f"in its {function.removeprefix('run_')} pass"
            if is_graph
            else f"called by {function} at {file}:{line}"
        )
    return cause, "; ".join(
        filter(None, (last_matching_line(_NATIVE_CRASH_LINE, error_log_tail), python_location))
    )


def last_lines_and_whole_crash_stack_text(error_log_tail: str, line_count: int) -> str:
    """Return the last lines of a log; more of them where Python's fault handler has begun earlier."""
    lines = error_log_tail.splitlines()
    # The first frames of the stack are the cause.
    crash_starts = [n for n, line in enumerate(lines) if line.startswith("Fatal Python error")]
    return "\n".join(lines[max(0, min([len(lines) - line_count, *crash_starts[-1:]])) :])


def is_lost_peer_message(text: str) -> bool:
    """Return whether the text of an exception means that a peer rank has ended."""
    return re.search(_PEER_IS_GONE, text) is not None


def last_matching_line(pattern: str, text: str) -> str:
    """Return the last line that matches, cut to 300 characters; "" if none does."""
    # From the end: the last line of a traceback is the exception itself.
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if re.search(pattern, line)), "")[:_MOST_CHARACTERS]
