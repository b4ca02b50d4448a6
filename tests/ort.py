"""Whether ONNX Runtime Training is here, and its torch extensions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ortlaunch.ortmodule.build import extensions

INSTALLED = bool(extensions.versions(extensions.EXTRA_OF))
needs_ort = pytest.mark.skipif(
    not INSTALLED, reason='needs onnxruntime-training: pip install "ortlaunch[ort-cpu]"'
)


def build() -> None:
    """The extensions, built once per stack by the command that `ortlaunch setup` runs."""
    if extensions.missing():
        subprocess.run([sys.executable, "-m", extensions.__name__], check=True, timeout=280)


def share_extensions(cache: Path) -> None:
    """Give another cache folder the built extensions."""
    cache.mkdir(exist_ok=True)
    (cache / "extensions").symlink_to(extensions.cache_dir().parent.resolve())
