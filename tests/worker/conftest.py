"""Fixtures for tests on a rank's side, some of which run on ONNX Runtime."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn

from tests.ortmodule.conftest import built, seeded, witness

__all__ = ["built", "seeded", "witness"]


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of one rank; DeepSpeed, which keeps what it saw of one, forgets it afterwards."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    if "deepspeed" in sys.modules:
        importlib.reload(sys.modules["deepspeed.utils.groups"])
        sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]


@pytest.fixture
def world(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What DeepSpeed asks for; and what its ZeRO 3 replaces in torch, for good, comes back for other tests."""
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
