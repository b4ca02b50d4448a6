"""The axes of the ranks of a run: copies of the model, and the ranks that share each copy. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortlaunch.base.errors import PlanError
from ortlaunch.base.units import count_with_noun
from ortlaunch.launch_plan import Mesh, Node
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.parallel import Parallel


def mesh_of_ranks_or_none(recipe: Recipe, nodes: Sequence[Node], trains: bool) -> Mesh | None:
    """Return the mesh of `parallel`; None without that section.

    Args:
        recipe: the run's.
        nodes: its hosts.
        trains: whether the task trains. Another task, such as an evaluation, may have fewer ranks:
            all of them share one copy.

    Raises:
        PlanError: the ranks do not split.
    """
    if recipe.parallel is None:
        return None
    settings = recipe.parallel
    rank_count = nodes[-1].first_rank + nodes[-1].slots
    if not trains:
        tensor = math.gcd(settings.tensor, *(node.slots for node in nodes))
        shard = rank_count // tensor if recipe.has_fsdp2 else 1
        return Mesh(rank_count // tensor // shard, shard, tensor)
    _require_tensor_groups_within_hosts(settings, nodes)
    if not recipe.has_fsdp2:
        if rank_count % settings.tensor:
            raise PlanError(
                f"parallel.tensor is {settings.tensor}, and the run has {count_with_noun(rank_count, 'rank')}, "
                f"which do not divide into groups of {settings.tensor}"
            )
        return Mesh(rank_count // settings.tensor, 1, settings.tensor)
    ranks_of_copy = rank_count
    if settings.replicate != "auto":
        ranks_of_copy = rank_count // settings.replicate
    # Between the hosts only gradients travel.
    elif len({node.slots for node in nodes}) == 1:
        ranks_of_copy = nodes[0].slots
    shard = max(1, ranks_of_copy // settings.tensor) if settings.shard == "auto" else settings.shard
    replicate = (
        max(1, rank_count // (shard * settings.tensor))
        if settings.replicate == "auto"
        else settings.replicate
    )
    needed_rank_count = replicate * shard * settings.tensor
    if needed_rank_count != rank_count:
        tensor_text = f" x tensor {settings.tensor}" if settings.tensor > 1 else ""
        raise PlanError(
            f"parallel: shard {shard} x replicate {replicate}{tensor_text} needs "
            f"{count_with_noun(needed_rank_count, 'rank')}, and the run has {rank_count}; give one "
            f"of them that divides {rank_count}, and auto for the other"
        )
    return Mesh(replicate, shard, settings.tensor)


def _require_tensor_groups_within_hosts(settings: Parallel, nodes: Sequence[Node]) -> None:
    if settings.across_hosts:
        return
    if len(nodes) == 1 and nodes[0].slots % settings.tensor:
        raise PlanError(
            f"parallel.tensor is {settings.tensor}, and the run has "
            f"{count_with_noun(nodes[0].slots, 'rank')}, which do not divide into groups of "
            f"{settings.tensor}; start a multiple of {settings.tensor} ranks"
        )
    for node in nodes:
        if node.slots % settings.tensor:
            raise PlanError(
                f"parallel.tensor is {settings.tensor}, and {node.host} has "
                f"{count_with_noun(node.slots, 'rank')}, so that ranks of two hosts would compute a "
                f"layer together; give a divisor of {node.slots}, or parallel.across_hosts: true "
                "where hosts are linked like the GPUs of one"
            )


def data_parallel_rank_count(recipe: Recipe, nodes: Sequence[Node], trains: bool = True) -> int:
    """Return the number of groups of ranks that read samples of their own.

    Raises:
        PlanError: as `mesh_of_ranks_or_none`.
    """
    mesh = mesh_of_ranks_or_none(recipe, nodes, trains)
    return (nodes[-1].first_rank + nodes[-1].slots) // (mesh.tensor if mesh else 1)


def mesh_groups_line(mesh: Mesh, nodes: Sequence[Node], has_fsdp2: bool = True) -> str:
    """Return the groups of ranks that share a copy of the model, as one line."""
    size = mesh.ranks_of_copy
    groups = [
        f"{first}-{first + size - 1}" if size > 1 else str(first)
        for first in range(0, mesh.replicate * size, size)
    ]
    shown = groups if len(groups) <= 4 else [*groups[:3], "...", groups[-1]]
    spans_hosts = any(node.slots % size for node in nodes)
    tensor_text = (
        f", of which {mesh.tensor} that follow each other compute a layer together"
        if mesh.tensor > 1
        else ""
    )
    sharding_text = (
        f"(FSDP2){tensor_text}"
        if has_fsdp2
        else "that compute each layer together (DeepSpeed's AutoTP)"
    )
    return (
        f"mesh: {mesh.replicate} x the model, each shared by "
        f"{count_with_noun(size, 'rank')} {sharding_text}: {', '.join(shown)}"
        + ("; a copy spans hosts" if spans_hosts else "")
    )
