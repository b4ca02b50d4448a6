"""The import of ORTModule's package with every repair and with this package's export."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ortmodule._internal.base import repair_registry
from ortmodule._internal.base.patching import hide_package_unless_loaded
from ortmodule._internal.base.source_guard import PACKAGE
from ortmodule._internal.errors import MissingDependency
from ortmodule._internal.native import extensions

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction

_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"


@functools.cache
def import_ortmodule_with_repairs_and_export_steps() -> ModuleType:
    """Return the module `onnxruntime.training.ortmodule`, repaired; the first call imports it.

    With torch 2.6 and older, call it before transformers is imported. ORT replaces
    `torch.utils.checkpoint.checkpoint` at its import, and transformers keeps the function that it
    imported; its gradient checkpointing would then fail in the export.

    Raises:
        MissingDependency: a package or extension is missing; has the command to type.
    """
    _require_built_extensions()
    # Its modules declare the repairs, and need the packages of which the last line names a missing one.
    from ortmodule._internal import pipeline

    ortmodule = import_ortmodule_with_repairs_before_it()
    repair_registry.apply_repairs("after import")
    pipeline.install_export_steps_in_ort()
    return ortmodule


def import_ortmodule_with_repairs_before_it() -> ModuleType:
    """Return ORT's module with the declared repairs that come before its import, and no others."""
    repair_registry.apply_repairs("before import")
    try:
        # ORT replaces DeepSpeed's `checkpoint` too, and for that would import DeepSpeed.
        with hide_package_unless_loaded("deepspeed"):
            ortmodule = importlib.import_module(PACKAGE)
    except ImportError as error:
        pip_extra = extensions.EXTRA_BY_PACKAGE[extensions.installed_ort_package_name_or_refuse()]
        raise MissingDependency(
            f"ONNX Runtime Training does not import: {error}",
            f'pip install "ortmodule[{pip_extra}]"',
        ) from error
    if _CHECKPOINTING not in sys.modules:
        sys.meta_path.insert(
            0, _DeepSpeedCheckpointReplacer(ortmodule._override_gradient_checkpoint)
        )
    return ortmodule


class _DeepSpeedCheckpointReplacer(importlib.abc.MetaPathFinder):
    """Replaces DeepSpeed's `checkpoint` once DeepSpeed is imported, as ORT does at its own import."""

    def __init__(self, replace_checkpoint: AnyFunction) -> None:
        self.override = replace_checkpoint

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the spec of DeepSpeed's module, whose loader also replaces; else None."""
        if name != _CHECKPOINTING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        original_exec = loader.exec_module

        def load_and_replace(module: Any) -> None:
            original_exec(module)
            module.checkpoint = self.override(module.checkpoint)

        loader.exec_module = load_and_replace
        return spec


def _require_built_extensions() -> None:
    if missing := extensions.missing_or_damaged_buildable_extension_names():
        missing_reason = "; ".join(
            [
                f"{', '.join(missing)} not in {extensions.extension_cache_folder()}",
                *extensions.descriptions_of_extensions_changed_since_build(),
            ]
        )
        raise MissingDependency(
            f"ORT's torch extensions are not built for this stack ({missing_reason})",
            extensions.SETUP_COMMAND,
        )
