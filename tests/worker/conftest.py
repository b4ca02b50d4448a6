"""Fixtures for tests of a rank's side, some of which run on ONNX Runtime."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn

from ortmodule_tests.conftest import built, seeded, witness

__all__ = ["built", "seeded", "witness"]


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of one rank, which DeepSpeed forgets afterwards."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    # DeepSpeed keeps groups and communication in global variables, which would outlive the group.
    if "deepspeed" in sys.modules:
        importlib.reload(sys.modules["deepspeed.utils.groups"])
        sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]


@pytest.fixture
def world(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that DeepSpeed needs, with torch's functions restored afterwards."""
    # DeepSpeed's ZeRO 3 replaces this function for good.
    monkeypatch.setattr(nn.functional, "linear", nn.functional.linear)
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for name, value in {**ranks, "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for a file of tests, so that its tokenizers are trained once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAUNCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
