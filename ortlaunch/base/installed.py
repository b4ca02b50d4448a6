"""Versions of installed packages, from their metadata alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib import metadata


def installed_version_by_package_name(package_names: Iterable[str]) -> dict[str, str]:
    """Return those of the packages that are installed, with their versions."""
    versions = {}
    for package_name in package_names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package_name] = metadata.version(package_name)
    return versions
