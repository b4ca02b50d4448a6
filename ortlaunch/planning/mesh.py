"""The axes of the ranks of a run: copies of the model, and the ranks that share each copy. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ortlaunch.base.errors import PlanError
from ortlaunch.base.units import count_with_noun
from ortlaunch.launch_plan import Mesh, Node
from ortlaunch.recipe import Recipe


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
    rank_count = nodes[-1].first_rank + nodes[-1].slots
    if not trains:
        return Mesh(1, rank_count)
    given_shard, given_replicate = recipe.parallel.shard, recipe.parallel.replicate
    slot_counts = {node.slots for node in nodes}
    if given_shard != "auto":
        shard = given_shard
    elif given_replicate != "auto":
        shard = max(1, rank_count // given_replicate)
    else:
        # Between the hosts only gradients travel.
        shard = slot_counts.pop() if len(slot_counts) == 1 else rank_count
    replicate = max(1, rank_count // shard) if given_replicate == "auto" else given_replicate
    if shard * replicate != rank_count:
        raise PlanError(
            f"parallel: shard {shard} x replicate {replicate} needs "
            f"{count_with_noun(shard * replicate, 'rank')}, and the run has {rank_count}; give one "
            f"of them that divides {rank_count}, and auto for the other"
        )
    return Mesh(replicate, shard)


def mesh_groups_line(mesh: Mesh, nodes: Sequence[Node]) -> str:
    """Return the groups of ranks that share a copy of the model, as one line."""
    groups = [
        f"{first}-{first + mesh.shard - 1}" if mesh.shard > 1 else str(first)
        for first in range(0, mesh.replicate * mesh.shard, mesh.shard)
    ]
    shown = groups if len(groups) <= 4 else [*groups[:3], "...", groups[-1]]
    spans_hosts = any(node.slots % mesh.shard for node in nodes)
    return (
        f"mesh: {mesh.replicate} x the model, each shared by "
        f"{count_with_noun(mesh.shard, 'rank')} (FSDP2): {', '.join(shown)}"
        + ("; a copy spans hosts" if spans_hosts else "")
    )
