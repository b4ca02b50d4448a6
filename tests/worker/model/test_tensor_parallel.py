"""Slices of parameters in tensor parallelism, and checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ortlaunch.base.errors import CheckpointError, InputError
from ortlaunch.launch_plan import Mesh
from ortlaunch.rank import Rank
from ortlaunch.worker.checkpoint.restore import load_checkpoint_print_notes_and_return_loop_state
from ortlaunch.worker.checkpoint.snapshot import snapshot_of_this_rank
from ortlaunch.worker.model.named_state import NamedState, ParameterRange
from ortlaunch.worker.model.tensor_parallel import (
    _require_heads_divisible_by_rank_count,
    slice_layers_in_place,
    slice_of_tensor_rank,
)
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.process_group.tensor_groups import require_alike_in_tensor_groups

FUSED = _StridedShard(1, split_factor=2)
CASES = [
    ((6, 5), Shard(0), 2), ((6, 5), Shard(1), 2), ((7, 5), Shard(0), 3), ((6, 7), Shard(-1), 3),
    ((5, 4), Shard(1), 3), ((3, 4, 5), Shard(1), 2), ((3, 4, 6), Shard(2), 3), ((3, 8, 5), FUSED, 2),
    ((8, 5), _StridedShard(0, split_factor=2), 2), ((4, 3), Replicate(), 2),
]  # fmt: skip


def divided(shape: tuple[int, ...], placement: Any) -> Any:
    """A parameter as tensor parallelism leaves it, as far as its slices depend on it."""
    mesh = SimpleNamespace(mesh_dim_names=("shard", "tensor"))
    return SimpleNamespace(
        shape=shape, placements=(Shard(0), placement), device_mesh=mesh, dim=lambda: len(shape)
    )


def torch_slice(whole: torch.Tensor, placement: Any, index: int, count: int) -> torch.Tensor:
    """The slice by torch.chunk: of each fused layer by itself."""
    if isinstance(placement, Replicate):
        return whole
    layers = whole.chunk(getattr(placement, "split_factor", 1), placement.dim)
    chunks = [layer.chunk(count, placement.dim) for layer in layers]
    parts = [
        chunk[index] if index < len(chunk) else chunk[0].narrow(placement.dim, 0, 0)
        for chunk in chunks
    ]
    return torch.cat(parts, placement.dim)


@pytest.mark.parametrize(("shape", "placement", "count"), CASES, ids=str)
def test_a_slice_is_that_of_torch(shape: tuple[int, ...], placement: Any, count: int) -> None:
    """Its runs in the flattened parameter have the values of torch.chunk, in their order."""
    whole = torch.arange(torch.Size(shape).numel())
    for index in range(count):
        expected = torch_slice(whole.view(shape), placement, index, count)
        tensor_slice = slice_of_tensor_rank(divided(shape, placement), index, count)
        values = (
            whole[tensor_slice.first :][: expected.numel()]
            if tensor_slice.runs is None
            else tensor_slice.runs.view_of(whole).reshape(-1)
        )
        assert values.tolist() == expected.flatten().tolist()
        assert tuple(tensor_slice.shape) == tuple(expected.shape)


def state_of_rank(
    wholes: dict[str, torch.Tensor], world: tuple[int, int], rank: int, fills: bool
) -> tuple[NamedState, dict[str, torch.Tensor]]:
    """One rank's rows of its slices in a world of (parts, slices), with momenta of twice the weights."""
    part_count, slice_count = world
    part, index = divmod(rank, slice_count)
    masters, ranges = {}, []
    for name, (shape, placement, _) in zip(wholes, CASES):
        tensor_slice = slice_of_tensor_rank(divided(shape, placement), index, slice_count)
        values = torch_slice(wholes[name], placement, index, slice_count)
        row_count = -(-values.shape[0] // part_count)
        rows = values[part * row_count : (part + 1) * row_count].contiguous()
        if not rows.numel():
            continue
        masters[name] = nn.Parameter(rows if fills else torch.zeros_like(rows))
        start = tensor_slice.first + part * row_count * torch.Size(tensor_slice.shape[1:]).numel()
        ranges.append((name, start, rows.numel(), tensor_slice.runs, placement))
    optimizer = torch.optim.SGD(masters.values(), lr=0.0, momentum=0.9)
    group = optimizer.param_groups[0]
    if fills:
        for master in masters.values():
            optimizer.state[master]["momentum_buffer"] = 2 * master.detach()
    parts = [
        ParameterRange(name, start, count, masters[name], 0, group, runs,
                       is_saved=index == 0 or not isinstance(placement, Replicate))
        for name, start, count, runs, placement in ranges
    ]  # fmt: skip
    shapes = {name: tuple(whole.shape) for name, whole in wholes.items()}
    return NamedState(shapes, parts, optimizer, {}, (0, 1)), masters


def context(rank: int, ranks: int) -> DistributedContext:
    return DistributedContext(Rank(rank, ranks, rank, ranks), torch.device("cpu"))


@pytest.fixture
def wholes() -> dict[str, torch.Tensor]:
    """A tensor of each case."""
    torch.manual_seed(0)
    return {f"w{number}": torch.randn(shape) for number, (shape, *_) in enumerate(CASES)}


@pytest.mark.parametrize("saved", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("restored", [(1, 1), (3, 1), (1, 2), (2, 2), (3, 2)], ids=str)
def test_a_checkpoint_continues_in_another_world(
    saved: tuple[int, int], restored: tuple[int, int], wholes: dict[str, torch.Tensor], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Weights and momenta of every slice are equal bit for bit, whatever slices were saved."""
    rank_count = saved[0] * saved[1]
    for rank in range(rank_count):
        named, _ = state_of_rank(wholes, saved, rank, fills=True)
        snapshot_of_this_rank(named, {}, context(rank, rank_count)).write_rank_file_and_index(
            tmp_path
        )
    for rank in range(restored[0] * restored[1]):
        named, masters = state_of_rank(wholes, restored, rank, fills=False)
        _, expected = state_of_rank(wholes, restored, rank, fills=True)
        load_checkpoint_print_notes_and_return_loop_state(tmp_path, named, context(0, 1))
        for name, master in masters.items():
            assert torch.equal(master, expected[name]), name
            momentum = named.optimizer.state[master]["momentum_buffer"]
            assert torch.equal(momentum, 2 * expected[name].detach()), name


def test_a_checkpoint_without_a_slice_is_refused(
    wholes: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """The error has the tensor and the count of its missing elements."""
    # The first of two ranks alone.
    named, _ = state_of_rank(wholes, (1, 2), 0, fills=True)
    snapshot_of_this_rank(named, {}, context(0, 1)).write_rank_file_and_index(tmp_path)
    whole, _ = state_of_rank({"w1": wholes["w1"]}, (1, 1), 0, fills=False)
    whole.shapes.update(named.shapes)
    with pytest.raises(CheckpointError, match="lacks 12 elements of the weight of w1"):
        load_checkpoint_print_notes_and_return_loop_state(tmp_path, whole, context(0, 1))


QWEN = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4}  # fmt: skip


@pytest.fixture
def slice_and_list_styles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that slices a model for two ranks; transformers is replaced by a list of styles."""
    import transformers.distributed.tensor_parallel as of_transformers

    def slice_for_two(model: nn.Module, recipe_plan: dict[str, str]) -> dict[str, str]:
        styles: dict[str, str] = {}

        def apply(_: nn.Module, mesh: Any, style_by_name: dict[str, str]) -> None:
            if "norm" in style_by_name:
                raise ValueError("norm has no `out_features`")
            styles.update(style_by_name)

        monkeypatch.setattr(of_transformers, "apply_tensor_parallelism", apply)
        mesh: Any = SimpleNamespace(size=lambda: 2)
        slice_layers_in_place(SimpleNamespace(model=model), recipe_plan, mesh)  # type: ignore[arg-type]
        return styles

    return slice_for_two


def test_a_plan_of_transformers_for_layers_that_a_model_lacks(slice_and_list_styles: Any) -> None:
    """That of Qwen3-MoE has dense layers, too, which most of these models do not have."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN, **sizes))
    assert "model.layers.0.mlp.experts.down_proj" in slice_and_list_styles(model, {})


def test_a_plan_without_attention(slice_and_list_styles: Any) -> None:
    """Heads need not divide; and what transformers cannot slice is an error of the recipe."""
    model = nn.ModuleDict({"up": nn.Linear(2, 4), "down": nn.Linear(4, 2), "norm": nn.LayerNorm(2)})
    model.config = SimpleNamespace(num_attention_heads=3)  # type: ignore[assignment]
    plan = {"up": "colwise", "down": "rowwise"}
    styles = slice_and_list_styles(model, plan)
    assert {name: styles[name] for name in plan} == plan
    with pytest.raises(InputError, match="tensor_plan: norm has no `out_features`"):
        slice_and_list_styles(model, {"norm": "colwise"})
    model["attention"] = nn.Linear(2, 2)
    with pytest.raises(InputError, match="num_attention_heads 3"):
        slice_and_list_styles(model, {"attention": "colwise"})


@pytest.mark.parametrize("other", [1.0, 1.001, 1.5])
def test_a_gradient_that_differs_in_a_tensor_group(other: float) -> None:
    """A weight between slices that is whole itself gets a part of its gradient on each rank."""
    gathered: Any = SimpleNamespace(
        mesh=Mesh(1, 2, 2), gather_numbers=lambda norms: [norms, norms, [0.0, 0.0], [0.0, 0.0]]
    )
    gradients = {"norm": torch.ones(3), "scale": torch.ones(1)}
    require_alike_in_tensor_groups(gradients, gathered)
    gathered.gather_numbers = lambda norms: [norms, norms, norms, [norms[0], other]]
    if other < 1.01:
        require_alike_in_tensor_groups(gradients, gathered)
    else:
        with pytest.raises(InputError, match="tensor: scale gets another gradient on each rank"):
            require_alike_in_tensor_groups(gradients, gathered)


def test_heads_that_do_not_divide() -> None:
    """The error has the field and the largest number that divides."""
    model = nn.Module()
    model.config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)  # type: ignore[assignment]
    _require_heads_divisible_by_rank_count(model, 2)
    with pytest.raises(InputError, match="num_key_value_heads 2, which it must divide; give 2"):
        _require_heads_divisible_by_rank_count(model, 4)
