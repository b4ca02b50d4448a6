"""Fixtures that several files of unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch import doctor
from tests.makers import OWN_MODULE


@pytest.fixture
def workbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a cache and a shell of the test's own, where any engine may be asked for."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN_MODULE)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(doctor, "require", lambda *_: None)  # whatever is installed here
