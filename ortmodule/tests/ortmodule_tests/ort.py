"""ONNX Runtime Training and its torch extensions, for tests that need them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ortmodule._internal.native import extensions

INSTALLED = bool(extensions.installed_version_by_package_name(extensions.EXTRA_BY_PACKAGE))
needs_ort = pytest.mark.skipif(
    not INSTALLED, reason='needs onnxruntime-training: pip install "ortmodule[cpu]"'
)


def build() -> None:
    """Build the extensions, once for each stack of packages."""
    if extensions.missing_or_damaged_buildable_extension_names():
        subprocess.run([sys.executable, "-m", "ortmodule", "setup"], check=True, timeout=280)
