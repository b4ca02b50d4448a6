"""Fingerprints of the DeepSpeed functions that gradient_norm.py replaces or relies on.

Every release from 0.17.6 to 0.19.8 has been read and compared. To add a new release, read its
differences first; a higher version number alone proves nothing.
`python -m ortmodule._internal.deepspeed.known_sources` prints the fingerprints of the installed release.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

from ortmodule._internal.base import source_guard

# The functions of ZeRO 1 and 2 that each release changed; the first release has all of them.
# Releases between these changed none. Values are the first 16 hex digits of the source's sha256.
_CHANGES = {
    "0.17.6": {
        "has_overflow_partitioned_grads_serial": "b54b01f27a954af8",
        "get_grad_norm_direct": "cad2fa322292007f",
        "step": "44750b4ab49af6bb",
        "check_overflow": "21e688469410dcb9",
        "_check_overflow": "10eab3fe40cd7899",
        "has_overflow": "0a194c8f91aaec8b",
        "_has_inf_or_nan": "d3252aef4efb2f28",
        "scaled_global_norm": "b8065427c8f0c587",
    },
    "0.18.0": {"has_overflow": "7bb9d1f516f05fc4"},
    "0.19.2": {"step": "62d2f3516fdddcdc"},
    "0.19.5": {"step": "758f2ba1b6953f7d"},
    "0.19.6": {
        "get_grad_norm_direct": "c9e4c5dbc9773ab8",
        "_has_inf_or_nan": "d0f2050f1480e742",
        "has_inf_or_nan": "df13dbbb19af2b66",
    },
    "0.19.7": {"get_grad_norm_direct": "3b3896f9c8f3c35c", "step": "383a3c95313e5269"},
    "0.19.8": {
        "step": "5a522828a63eded2",
        "scaled_global_norm": "9b8484b91f2b73df",
        "has_inf_or_nan": "1d63f8be1223ed84",
    },
}


def known_hash_by_function_name_by_release() -> dict[str, dict[str, str]]:
    """Return release -> function -> fingerprint, with all functions for each release."""
    hashes_by_release: dict[str, dict[str, str]] = {}
    release_hashes: dict[str, str] = {}
    for release, changes in _CHANGES.items():
        release_hashes = hashes_by_release[release] = {**release_hashes, **changes}
    return hashes_by_release


def reason_deepspeed_source_is_unknown_or_empty(optimizer_class: type) -> str:
    """Return why the source of a ZeRO 1 or 2 optimizer class is not a known one, or ""."""
    hashes_by_release = known_hash_by_function_name_by_release()
    installed_hashes = installed_hash_by_function_name(
        optimizer_class, set().union(*hashes_by_release.values())
    )
    changed_by_release = {
        release: [
            name
            for name, known_hash in release_hashes.items()
            if installed_hashes.get(name) != known_hash
        ]
        for release, release_hashes in hashes_by_release.items()
    }
    # Of equally near releases the latest one is reported.
    nearest_release = min(
        reversed(list(changed_by_release)), key=lambda release: len(changed_by_release[release])
    )
    if not changed_by_release[nearest_release]:
        return ""
    return (
        f"{', '.join(changed_by_release[nearest_release])} differs from all known releases (0.17.6 to "
        f"{list(hashes_by_release)[-1]})"
    )


def installed_hash_by_function_name(
    optimizer_class: type, function_names: set[str]
) -> dict[str, str]:
    """Return the fingerprints of the named methods of the optimizer, or functions of its module."""
    module = sys.modules[optimizer_class.__module__]
    functions = {
        name: getattr(optimizer_class, name, None) or getattr(module, name, None)
        for name in function_names
    }
    return {
        name: function_source_hash_or_empty(function)
        for name, function in functions.items()
        if function is not None
    }


def function_source_hash_or_empty(function: Any) -> str:
    """Return the first 16 hex digits of the sha256 of a function's source, or "" without one."""
    try:
        source = textwrap.dedent(inspect.getsource(function)).strip()
    except (OSError, TypeError):
        return ""
    return source_guard.short_source_hash(source)


if __name__ == "__main__":
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for name, value in sorted(
        installed_hash_by_function_name(
            DeepSpeedZeroOptimizer, set().union(*known_hash_by_function_name_by_release().values())
        ).items()
    ):
        print(name, value)
