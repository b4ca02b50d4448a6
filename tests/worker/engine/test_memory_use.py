"""The tensors that a rank counts as live memory.

tests/worker/engine/test_memory_use_ranks.py compares the counts with the plan.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ortlaunch.run_folder.records import MeasuredMemory, MemoryReport
from ortlaunch.worker.engine.memory_use import (
    _bytes_of_new_storages_and_add_them,
    memory_summary_text,
)


class StandIn(torch.Tensor):
    """A tensor without memory or device, as torch 2.6 with DeepSpeed 0.17 creates some."""

    @property
    def device(self) -> torch.device:
        """Raise as torch's C++ code does."""
        raise RuntimeError("tensor does not have a device")


def test_what_has_no_device_has_no_memory() -> None:
    """A tensor without a device is not counted, and does not end the run."""
    ones = torch.ones(4)
    # Four float32 elements count; the view shares their storage.
    assert (
        _bytes_of_new_storages_and_add_them(
            [torch.ones(8).as_subclass(StandIn), ones, ones[1:]], {}
        )
        == 16
    )


def test_what_torch_compile_traces_with_has_no_memory(recwarn: pytest.WarningsRecorder) -> None:
    """Fake tensors are not counted, and torch prints no warning."""
    with FakeTensorMode():
        traced = torch.ones(8)
    assert _bytes_of_new_storages_and_add_them([traced], {}) == 0
    assert not recwarn.list


def test_the_line_names_what_its_peak_counts() -> None:
    """Beside the run's own bytes stand those of the whole process; on a GPU there are no others."""
    measured = MeasuredMemory(1, 1, 1, 0, 0, 3 * 2**20, 700 * 2**20)
    report = MemoryReport(None, measured, "resident", 500 * 2**20, [700 * 2**20])
    first = memory_summary_text(report).splitlines()[0]
    assert first == (
        "memory a rank: 700.0 MiB at peak, not planned, without Python and libraries; "
        "1.2 GiB resident with them"
    )
    report.baseline = 0
    assert memory_summary_text(report).startswith("memory a rank: 700.0 MiB at peak, not planned\n")
