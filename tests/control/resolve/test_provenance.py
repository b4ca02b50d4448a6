"""Facts about the machine that a run's environment.json records."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from ortlaunch.resolve.provenance import package_and_machine_versions_record


def test_versions_are_those_of_every_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They equal importlib's; metadata that an interrupted pip left without a name is left out."""
    expected = {each.name: each.version for each in metadata.distributions()}
    (tmp_path / "~roken-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert package_and_machine_versions_record()["packages"] == expected
