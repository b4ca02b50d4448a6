"""Settings of every session of tests: compiled modules, passive threads, cheap garbage collections."""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path

import pytest

# Processes that tests start import the tests' helpers, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# Without bytecode files, each process that a test starts would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Threads that wait for others of their process would spin and take the cores from the tests beside
# them: training took up to six times the processor time. libgomp reads it when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def end_no_slow_test_at_a_warning(items: list[pytest.Item]) -> None:
    """Let warnings be warnings in tests that run for hours, or with other packages."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("slow", "nightly", "zoo", "gpu")):
            item.add_marker(pytest.mark.filterwarnings("default"))


@functools.cache
def _leave_out_of_collections(modules: int) -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def libraries_are_no_garbage() -> None:
    """Keep loaded libraries out of garbage collections."""
    # Every export of ONNX Runtime starts a collection, which would visit all objects of torch. The
    # cache repeats the freeze for each 50 newly loaded modules.
    _leave_out_of_collections(len(sys.modules) // 50)


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide GPUs except from tests marked gpu, in this process and its children."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
