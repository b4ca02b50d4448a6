"""Bytes of Llama-2-7b in DeepSpeed while it is built and sharded, on the first of 8 ranks.

No memory is allocated: tensors are fake, and so are the messages to other ranks. The device is the
CPU, so that an offload is counted, too. `python -m tests.worker.memory_7b '{"name": {recipe's
sections}}'` prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ortlaunch.planning.hosts import Host
from ortlaunch.rank import Rank
from ortlaunch.recipe import Recipe
from ortlaunch.worker.engine import engine
from ortlaunch.worker.model import matmul_precision
from ortlaunch.worker.model.model import seed_and_build_loss_module_on_cpu
from ortlaunch.worker.process_group.distributed import DistributedContext
from tests.makers import bert, plan
from tests.worker.memory_ranks import NoData

RANKS = 8
OTHERS = {"optimizer": {"name": "adamw", "learning_rate": 1.0}, "train": {"max_steps": 1, "loss_weight": "samples"},
          "engine": {"name": "eager", "chunked_loss": "off"}}  # fmt: skip


MOVE = engine._move_model_or_buffers_if_weights_are_divided


class FirstRank(DistributedContext):
    """A group whose other ranks send the same as this one."""

    def gather(self, value: object) -> list[Any]:
        """Return this rank's value for each rank."""
        return [value] * self.size


class Bytes(TorchDispatchMode):
    """A counter of the bytes of living storages, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.start = 0
        self.restart()

    def restart(self) -> None:
        """Count only storages that are made from here on."""
        self.now = self.peak = 0
        self.start += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            # Tensors on the meta device take no memory.
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: Any) -> None:
        if storage not in self.seen:
            self.seen.add(storage)
            self._change(storage.nbytes(), self.start)
            weakref.finalize(storage, self._change, -storage.nbytes(), self.start)

    def _change(self, size: int, start: int) -> None:
        # Storages of an earlier start are no longer counted.
        self.now += size if start == self.start else 0
        self.peak = max(self.peak, self.now)


def count(sections: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of the built model, and from its move to the device on, peak and rest."""
    group = FirstRank(Rank(0, RANKS, 0, RANKS), torch.device("cpu"))
    data = {"train": "python-docs", "tokenizer": "here", "sequence_length": 8}
    model = {"task": "causal-lm", "config": {"model_type": "llama"}}
    recipe = bert(**{"model": model, "data": data, **OTHERS, **sections})
    settled = plan(recipe, [Host("localhost", RANKS, tuple(range(RANKS)))], "torchrun")
    sample = {name: torch.zeros(1, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    counted = Bytes()

    def move(model: torch.nn.Module, group: DistributedContext, recipe: Recipe) -> None:
        """Move as the engine does, to a device whose bytes are not the host's."""
        counted.restart()
        MOVE(model, group, recipe)
        for parameter in () if recipe.zero and recipe.zero.stage == 3 else model.parameters():
            # A clone counts as a copy on the device. With ZeRO 3, DeepSpeed itself moves the
            # weights.
            parameter.data = parameter.data.clone()

    engine._move_model_or_buffers_if_weights_are_divided = move
    with FakeTensorMode(allow_non_fake_inputs=True), counted:
        built = seed_and_build_loss_module_on_cpu(recipe, NoData())  # type: ignore[arg-type]
        size = counted.now
        made = engine.build_engine(recipe, settled, built, group, sample)
    found = {"built": size, "start": counted.peak, "left": counted.now}
    del made, built
    return found


def main(cases: dict[str, Any]) -> None:
    """Count each case, and print the results."""
    os.environ.update(RANK="0", WORLD_SIZE=str(RANKS), LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    from deepspeed.accelerator import get_accelerator

    # Stand-ins: a device with space for a flat copy, no values, no addresses, and moves to where a
    # tensor already is.
    matmul_precision.measure_matmul_mantissa_bits = lambda *_: 23
    get_accelerator().available_memory = lambda *_: 2**60
    get_accelerator().is_fp16_supported = lambda: True
    FakeTensor.data_ptr = lambda self: 0  # type: ignore[method-assign]
    torch.nn.Module.to = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    print(json.dumps({name: count(sections) for name, sections in cases.items()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
