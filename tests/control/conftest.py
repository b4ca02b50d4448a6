"""Fixtures shared by the tests of the control side."""

from __future__ import annotations

import socket

import pytest

from ortlaunch.base import machine
from tests.control.typed import ortlaunch

__all__ = ["ortlaunch"]


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, with four cores, that is called box."""
    monkeypatch.setattr(machine, "visible_gpu_count", lambda environ: int(environ.get("GPUS", "0")))
    monkeypatch.setattr(machine, "usable_core_count", lambda: 4)
    monkeypatch.setattr(socket, "gethostname", lambda: "box.example.com")
