"""ONNX Runtime Training and its torch extensions, for tests that need them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ortlaunch.ortmodule.native import extensions

INSTALLED = bool(extensions.installed_version_by_package_name(extensions.EXTRA_BY_PACKAGE))
needs_ort = pytest.mark.skipif(
    not INSTALLED, reason='needs onnxruntime-training: pip install "ortlaunch[ort-cpu]"'
)


def build() -> None:
    """Build the extensions, once for each stack of packages."""
    # The same command as `ortlaunch setup` runs.
    if extensions.missing_or_damaged_buildable_extension_names():
        subprocess.run([sys.executable, "-m", extensions.__name__], check=True, timeout=280)


def share_extensions(cache: Path) -> None:
    """Link the built extensions into another cache folder."""
    cache.mkdir(exist_ok=True)
    (cache / "extensions").symlink_to(extensions.extension_cache_folder().parent.resolve())
