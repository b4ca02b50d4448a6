"""Settings of torch's flight recorder for NCCL, which writes the last collectives at a timeout.

Each rank writes a file. `ortlaunch diagnose` names the files; torch's `torchfrtrace` reads them.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from ortlaunch.run_folder.folder import RunDir

# Each entry has a few hundred bytes, on every rank.
_ENTRIES = "2000"


def set_flight_recorder_variables_unless_set(
    environ: MutableMapping[str, str], run: RunDir
) -> None:
    """Set the variables of the flight recorder; keep values of the user."""
    # torch 2.4 to 2.8 and torch 2.13 read different names: set both.
    prefix = str(run.flight_recorder.absolute())
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", _ENTRIES),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", _ENTRIES),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_FR_DUMP_TEMP_FILE", prefix),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", prefix),
    ):
        environ.setdefault(name, value)
