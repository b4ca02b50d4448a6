"""The pytest plugin of tools/ort_suite.py: apply ortlaunch's settings to ORTModule in ORT's tests.

Variables and DebugOptions that a test sets stay as the test sets them; the rest is `Settings`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from ortmodule import Settings
from ortmodule._internal import module, options
from ortmodule._internal.base.patching import set_environment_variables_temporarily
from ortmodule._internal.module import store_settings_in_both_managers
from ortmodule._internal.state.buffers import restore_layer_modes_after_block

_SETTINGS = Settings(
    threads=2, allow_fallback=True, allow_traced_values="ORT_SUITE_TRACED_VALUES" in os.environ
)
_TESTS_OWN = ("ORTMODULE_LOG_LEVEL", "ORTMODULE_SAVE_ONNX_PATH")
_LARGEST = 160_000  # numbers in a transposed tensor: others have up to 1 GB, for ORT's CUDA kernels


def pytest_configure() -> None:
    """Patch ORTModule before the tests' files import it."""
    options.load(_SETTINGS)
    ortmodule: Any = module.import_ortmodule_with_all_repairs()
    ortmodule.ORTModule.__init__ = _as_wrapped(ortmodule.ORTModule.__init__)
    _without_hub()


def _as_wrapped(init: Any) -> Any:
    @functools.wraps(init)
    def made(self: Any, model: Any, debug_options: Any = None) -> None:
        if not isinstance(model, torch.nn.Module):  # which ORT refuses
            init(self, model, debug_options)
            return
        ours = options.write_config_file_and_get_constructor_variables(
            _SETTINGS, copies_model_before_export=True
        ).items()
        ours = {name: value for name, value in ours if name not in (*_TESTS_OWN, *os.environ)}
        with set_environment_variables_temporarily(**ours), restore_layer_modes_after_block(model):
            init(self, model, debug_options)
        if hasattr(vars(self).get("_torch_module"), "_execution_manager"):
            store_settings_in_both_managers(self, _SETTINGS)

    return made


def _without_hub() -> None:
    """Replace bert-base-uncased by its architecture with random weights."""
    asked = transformers.AutoConfig.from_pretrained

    def config(name: str, *args: Any, cache_dir: Any = None, **kwargs: Any) -> Any:
        return (
            transformers.BertConfig(**kwargs)
            if name == "bert-base-uncased"
            else asked(name, *args, **kwargs)
        )

    transformers.AutoConfig.from_pretrained = staticmethod(config)
    for kind in (transformers.BertForSequenceClassification, transformers.BertModel):
        kind.from_pretrained = classmethod(
            lambda cls, name, config=None, **_: cls(config or transformers.BertConfig())
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Leave out transposes of large tensors."""
    large = [
        item
        for item in items
        if "correctness_transpose" in item.name and math.prod(_shape(item)) > _LARGEST
    ]
    config.hook.pytest_deselected(items=large)
    items[:] = [item for item in items if item not in large]


def _shape(item: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = item.callspec.params["shape"]
    return shape


@pytest.fixture(autouse=True)
def _variables_as_before() -> Iterator[None]:
    """Restore variables after a test, so that a failed one does not affect the next ones.

    Random numbers have a seed, too: some tests draw large ones without it, and compare their sums.
    These fail now and then by rounding, float32 in PyTorch against float64 as often.
    """
    torch.manual_seed(0)
    before = {name: value for name, value in os.environ.items() if name.startswith("ORTMODULE")}
    yield
    for name in [name for name in os.environ if name.startswith("ORTMODULE")]:
        del os.environ[name]
    os.environ.update(before)
