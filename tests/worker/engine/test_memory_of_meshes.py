"""Planned bytes of `parallel` compared with torch's `fully_shard`, on rank 0 of up to 1,024 ranks.

torch's fake process group sends nothing, and tensors of the meta device have no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ortlaunch.launch_plan import Memory
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.model.tensor_parallel import slice_layers_in_place
from tests.makers import bert
from tests.worker.engine.test_memory import BERT_LARGE, LLAMA_7B, transformers_model

QWEN3 = {
    **LLAMA_7B,
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
}
LORA = {"r": 16, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture
def world() -> Iterator[Any]:
    """Yield a function that makes this process rank 0 of some ranks."""

    def join(ranks: int) -> None:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())

    yield join
    dist.destroy_process_group()


def divided(config: dict[str, Any], task: str, shard: int, tensor: int, lora: Any) -> Any:
    """Return the model as torch divides it over a mesh, by transformers' plan for its layers."""
    model: Any = transformers_model(config, task)
    mesh = init_device_mesh("cpu", (shard, tensor), mesh_dim_names=("shard", "tensor"))
    base = getattr(model, model.base_model_prefix)
    layers = base.encoder.layer if "bert" in config["model_type"] else base.layers
    if tensor > 1:
        slice_layers_in_place(LossModule(model), {}, mesh["tensor"])
    if lora:
        import peft

        with torch.device("meta"):
            peft.inject_adapter_in_model(peft.LoraConfig(**lora), model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "lora_" in name
    for layer in layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def planned(config: dict[str, Any], task: str, shard: int, tensor: int, lora: Any) -> Memory:
    """Return the planned memory of a rank."""
    recipe = bert(
        model={"task": task, "config": config, "lora": lora},
        parallel={"shard": shard, "tensor": tensor},
        engine={"name": "eager"},
        optimizer={"name": "adamw", "learning_rate": 1e-4},
    )
    memory = estimate_rank_memory_or_none(recipe, 1, 1024, "cuda", copy_rank_count=shard * tensor)
    assert memory is not None
    return memory


@pytest.mark.parametrize(
    ("config", "task", "shard", "tensor", "lora"),
    [
        (LLAMA_7B, "causal-lm", 8, 1, None),
        (LLAMA_7B, "causal-lm", 64, 1, None),
        (LLAMA_7B, "causal-lm", 1024, 1, None),
        (LLAMA_7B, "causal-lm", 128, 8, None),
        (QWEN3, "causal-lm", 2, 4, None),
        ({**QWEN3, "tie_word_embeddings": True}, "causal-lm", 2, 2, None),
        (LLAMA_7B, "causal-lm", 64, 1, LORA),
        (BERT_LARGE, "masked-lm", 8, 1, None),
        (BERT_LARGE, "masked-lm", 64, 1, None),
    ],
)
def test_plan_is_what_fully_shard_leaves_on_rank_0(
    world: Any, config: dict[str, Any], task: str, shard: int, tensor: int, lora: Any
) -> None:
    """Planned bytes of weights, gradients and state are those of torch's parts, to the byte."""
    world(shard * tensor)
    parts = [
        (parameter.to_local().numel(), parameter.requires_grad)
        for parameter in divided(config, task, shard, tensor, lora).parameters()
    ]
    found = dict(planned(config, task, shard, tensor, lora).by_stage)["FSDP2"]
    trained = sum(size for size, is_trained in parts if is_trained)
    held = sum(size for size, _ in parts)
    assert (found.weights, found.gradients, found.optimizer) == (4 * held, 4 * trained, 8 * trained)


def test_offload_moves_the_parts_to_the_host() -> None:
    """With parallel.offload a GPU has gathered weights and activations alone."""
    recipe = bert(
        model={"task": "causal-lm", "config": LLAMA_7B},
        parallel={"offload": True},
        engine={"name": "eager"},
    )
    memory = estimate_rank_memory_or_none(recipe, 1, 8, "cuda")
    assert memory is not None
    found = dict(memory.by_stage)["FSDP2"]
    assert (found.model, found.buckets > 0) == (0, True)
    # Weights and gradients; sgd has no state.
    assert memory.host.offloaded == 8 * 6_738_415_616 // 8
    assert memory.start == 4 * 32000 * 4096
