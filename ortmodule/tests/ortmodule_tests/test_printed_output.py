"""Text that a program prints around an export reaches the stream that the program chose."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule_tests.modules import wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]


def export() -> None:
    """Export a new module."""
    wrapped(nn.Linear(4, 1))(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("name", "stream"),
    [("stdout", io.StringIO), ("stderr", io.StringIO), ("stdout", lambda: None)],
    ids=["stdout", "stderr", "none"],
)
def test_a_stream_without_a_descriptor_does_not_end_an_export(
    name: str, stream: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export runs under `contextlib.redirect_stdout`, and where stdout is None."""
    monkeypatch.setattr(sys, name, stream())
    export()


def test_text_before_an_export_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is still in the buffer of stdout when an export begins is written."""
    path = tmp_path / "output"
    with path.open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        print("before")
        export()
        print("after")
    assert path.read_text() == "before\nafter\n"
