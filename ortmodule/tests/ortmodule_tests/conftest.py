"""Fixtures of the tests on ONNX Runtime."""

from __future__ import annotations

import pytest
import torch

from ortmodule._internal.base import repair_registry
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.forks import fresh, fresh_ort, servers
from ortmodule_tests.ort import build
from ortmodule_tests.session import (
    end_no_slow_test_at_a_warning,
    libraries_are_no_garbage,
    no_gpu,
)

__all__ = ["fresh", "fresh_ort", "libraries_are_no_garbage", "no_gpu", "servers"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let warnings be no errors in tests that `make test` leaves out."""
    end_no_slow_test_at_a_warning(items)


@pytest.fixture(scope="session")
def built() -> None:
    """ORT's torch extensions, built for the installed versions."""
    # A later session finds them in the cache.
    build()


@pytest.fixture(autouse=True)
def _every_repair_is_in_force() -> None:
    """Fail in a process in which a repair is not applied, with the reason.

    Without one, tests fail or end the process, and do not say why. A process that leaves one out on
    purpose records the reason "left out".
    """
    reasons = repair_registry.reason_by_unapplied_repair()
    assert {name: text for name, text in reasons.items() if text != "left out"} == {}


@pytest.fixture
def witness(built: None) -> PassAndGraphCounters:
    """An installed witness, which counts the passes that ORT runs in this test."""
    witness = PassAndGraphCounters()
    witness.start_counting_in_this_process()
    return witness


@pytest.fixture
def seeded() -> None:
    """The same initial weights in every run."""
    torch.manual_seed(0)
