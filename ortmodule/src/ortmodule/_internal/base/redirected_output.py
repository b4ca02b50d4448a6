"""Output of the user's program while ORT redirects stdout and stderr into a file, in an export."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ortmodule._internal.base.repair_registry import repair

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction

_REDIRECT = "_logger:_suppress_os_stream_output"


@repair(
    "flush_before_redirecting",
    "install",
    90,
    replaces=_REDIRECT,
    fault="Text that a loop printed before the first pass is lost where stdout is a file or a "
    "pipe, and a first pass under `contextlib.redirect_stdout` ends the export.",
    example="test_printed_output.py::test_text_before_an_export_is_kept",
    sources={_REDIRECT: "4ae7fde249f21bb1"},
)
def _flush_and_redirect_if_usable(
    original_redirect: AnyFunction, enable: bool = True, on_exit: object = None
) -> object:
    """Flush stdout and stderr before they are redirected; leave those without a descriptor alone."""
    are_usable = [
        _flush_stream_and_check_it_has_descriptor(stream) for stream in (sys.stdout, sys.stderr)
    ]
    return original_redirect(enable and all(are_usable), on_exit)


def _flush_stream_and_check_it_has_descriptor(output_stream: Any) -> bool:
    try:
        output_stream.flush()
        os.fstat(output_stream.fileno())
    # None, a stream in memory, a closed stream and a closed descriptor.
    except (AttributeError, OSError, ValueError):
        return False
    return True
