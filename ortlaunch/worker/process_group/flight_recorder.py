"""NCCL's flight recorder of torch, switched on: the last collectives of each rank, written where one times out.

`ortlaunch diagnose` names the files; torch's `torchfrtrace` reads them.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from ortlaunch.run_folder.folder import RunDir

_ENTRIES = "2000"  # of a few hundred bytes each, on every rank


def record_collectives(environ: MutableMapping[str, str], run: RunDir) -> None:
    """Set what torch 2.13 reads, and 2.4 to 2.8 under their names; what the user has set stays."""
    prefix = str(run.flight_recorder.absolute())
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", _ENTRIES),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", _ENTRIES),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_FR_DUMP_TEMP_FILE", prefix),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", prefix),
    ):
        environ.setdefault(name, value)
