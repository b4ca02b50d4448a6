"""The mesh of ranks that `parallel` gives."""

from __future__ import annotations

from typing import Any

import pytest

from ortlaunch.base.errors import PlanError
from ortlaunch.launch_plan import Mesh
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.planning.mesh import mesh_groups_line, mesh_of_ranks_or_none
from tests.makers import bert, host, plan

EAGER = {
    "engine": {"name": "eager"},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
}


@pytest.mark.parametrize(
    ("parallel", "slots", "expected"),
    [
        ({}, (8,), Mesh(1, 8)),
        ({}, (1,), Mesh(1, 1)),
        # A copy within each host.
        ({}, (8, 8, 8), Mesh(3, 8)),
        # Hosts of other sizes: one copy over all.
        ({}, (4, 2), Mesh(1, 6)),
        ({"replicate": 1}, (8, 8), Mesh(1, 16)),
        ({"replicate": 4}, (8, 8), Mesh(4, 4)),
        ({"shard": 4}, (8, 8), Mesh(4, 4)),
        ({"shard": 2, "replicate": 4}, (8,), Mesh(4, 2)),
        (None, (8,), None),
        # Ranks of a tensor group are within a host.
        ({"tensor": 2}, (8, 8), Mesh(2, 4, 2)),
        ({"tensor": 8}, (8,), Mesh(1, 1, 8)),
        ({"tensor": 2, "replicate": 1}, (8, 8), Mesh(1, 8, 2)),
        ({"tensor": 2, "shard": 2}, (8,), Mesh(2, 2, 2)),
        ({"tensor": 16, "across_hosts": True}, (8, 8), Mesh(1, 1, 16)),
    ],
)
def test_the_axes(
    parallel: dict[str, Any] | None, slots: tuple[int, ...], expected: Mesh | None
) -> None:
    """`auto` keeps a copy within a host; two numbers must multiply to the ranks."""
    nodes = plan(
        bert(), [host(f"host{n}", count) for n, count in enumerate(slots)], "torchrun"
    ).nodes
    recipe = bert(parallel=parallel, zero=None, **EAGER)
    assert mesh_of_ranks_or_none(recipe, nodes, trains=True) == expected


@pytest.mark.parametrize(
    "parallel",
    [
        {"shard": 3},
        {"shard": 2, "replicate": 2},
        {"replicate": 16},
        {"shard": 3, "tensor": 2},
        {"replicate": 8, "tensor": 2},
    ],
)
def test_ranks_that_do_not_split(parallel: dict[str, Any]) -> None:
    """The error has the product, and the ranks."""
    nodes = plan(bert(), [host("one", 8)], "torchrun").nodes
    with pytest.raises(
        PlanError, match=r"parallel: shard \d+ x replicate \d+.* needs .*, and the run has 8"
    ):
        mesh_of_ranks_or_none(bert(parallel=parallel, zero=None, **EAGER), nodes, trains=True)


def test_a_tensor_group_that_spans_hosts_is_refused() -> None:
    """Its traffic is that of each layer."""
    nodes = plan(bert(), [host("one", 6), host("two", 6)], "torchrun").nodes
    with pytest.raises(PlanError, match=r"parallel.tensor is 4, and one has 6 ranks, .* of 6, or"):
        mesh_of_ranks_or_none(bert(parallel={"tensor": 4}, zero=None, **EAGER), nodes, trains=True)


@pytest.mark.parametrize("slots", [1, 3])
def test_too_few_ranks_for_a_tensor_group(slots: int) -> None:
    """On one host the error is of the ranks, and not of a second host."""
    nodes = plan(bert(), [host("one", slots)], "torchrun").nodes
    with pytest.raises(PlanError, match=rf"the run has {slots} ranks?, .* a multiple of 2 ranks"):
        mesh_of_ranks_or_none(bert(parallel={"tensor": 2}, zero=None, **EAGER), nodes, trains=True)


def test_ranks_of_a_tensor_group_read_the_same_samples() -> None:
    """The batch is divided by the groups."""
    parallel = {"parallel": {"tensor": 2}, "batch": {"micro_size": 2}}
    planned = plan(bert(zero=None, **EAGER, **parallel), [host("one", 8)], "torchrun")
    assert planned.batch.data_parallel_ranks == 4
    assert planned.batch.global_samples == 8


def test_an_evaluation_shares_one_copy() -> None:
    """It may have fewer ranks than the training."""
    nodes = plan(bert(), [host("one", 2)], "torchrun").nodes
    recipe = bert(parallel={"shard": 8}, zero=None, **EAGER)
    assert mesh_of_ranks_or_none(recipe, nodes, trains=False) == Mesh(1, 2)
    sliced = bert(parallel={"tensor": 4}, zero=None, **EAGER)
    assert mesh_of_ranks_or_none(sliced, nodes, trains=False) == Mesh(1, 1, 2)


def test_the_mesh_in_words() -> None:
    """Each group of ranks that shares a copy, and whether one spans hosts."""
    nodes = plan(bert(), [host("one", 8), host("two", 8)], "torchrun").nodes
    assert mesh_groups_line(Mesh(2, 8), nodes) == (
        "mesh: 2 x the model, each shared by 8 ranks (FSDP2): 0-7, 8-15"
    )
    assert mesh_groups_line(Mesh(1, 16), nodes).endswith("(FSDP2): 0-15; a copy spans hosts")
    assert mesh_groups_line(Mesh(2, 4, 2), nodes).endswith(
        "(FSDP2), of which 2 that follow each other compute a layer together: 0-7, 8-15"
    )
    assert mesh_groups_line(Mesh(8, 2), nodes).endswith(": 0-1, 2-3, 4-5, ..., 14-15")


@pytest.mark.parametrize(("rank_count", "tensor"), [(1, 1), (2, 2), (3, 1), (6, 2)])
def test_the_memory_of_an_evaluation_on_fewer_ranks(rank_count: int, tensor: int) -> None:
    """It is that of the mesh that these ranks give."""
    weights = []
    for tensor_count in (4, tensor):
        recipe = bert(parallel={"tensor": tensor_count}, zero=None, **EAGER)
        memory = estimate_rank_memory_or_none(recipe, 1, rank_count)
        assert memory is not None
        weights.append(dict(memory.by_stage)["FSDP2"].weights)
    assert weights[0] == weights[1] > 0
