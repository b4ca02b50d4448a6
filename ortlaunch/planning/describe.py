"""The plan as a page for a person."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.base.units import count_with_noun, human_bytes
from ortlaunch.launch_plan import Memory, Plan
from ortlaunch.planning.memory import (
    assumed_model_sizes_text_or_empty,
    reason_rank_memory_cannot_be_estimated,
)
from ortlaunch.planning.mesh import mesh_groups_line
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import HeldOut
from ortlaunch.recipe.rules.parity import parity_step_count_and_reason


def plan_description_text(plan: Plan, recipe: Recipe) -> str:
    """Return the plan for a person: the world and, for a training, batch, length and memory.

    Memory is listed by ZeRO stage.
    """
    lines = [*_ranks_and_hosts_lines(plan), *_connection_and_restart_lines(plan, recipe)]
    if plan.mesh:
        lines.append(mesh_groups_line(plan.mesh, plan.nodes, plan.has_fsdp2))
    if plan.traits.evaluates:
        return "\n".join(lines)
    lines += [
        *_batch_equation_lines(plan),
        _length_line(plan, recipe),
        *_held_out_and_epoch_interval_lines(recipe),
    ]
    planned_memory = plan.memory
    # On one rank ZeRO has nothing to shard.
    has_stage_choice = plan.world_size > 1 or recipe.zero is not None
    memory_text_lines = (
        memory_table_and_note_lines(
            planned_memory, has_stage_choice, plan.device, assumed_model_sizes_text_or_empty(recipe)
        )
        if planned_memory
        else [f"memory: unknown: {reason_rank_memory_cannot_be_estimated(recipe)}"]
    )
    parity_steps = parity_step_count_and_reason(recipe)
    if parity_steps.steps and parity_steps.reason:
        # A resumed run has no whole model of its first step.
        start_text = "where the run begins with it" if recipe.parallel else "once"
        lines.append(
            f"parity: step 1 is compared with plain PyTorch {start_text} ({parity_steps.reason})"
        )
    if recipe.model.freeze and planned_memory:
        lines.append(
            "memory is an upper bound: model.freeze names parameters that a plan cannot see"
        )
    return "\n".join([*lines, *memory_text_lines])


def _ranks_and_hosts_lines(plan: Plan) -> list[str]:
    # A long list is shown by its ends.
    shown_nodes = plan.nodes if len(plan.nodes) <= 8 else (*plan.nodes[:4], None, *plan.nodes[-2:])
    ranks_text = count_with_noun(plan.world_size, "rank")
    hosts_text = count_with_noun(len(plan.nodes), "host")
    lines = [f"{plan.name}: {ranks_text} on {hosts_text}, {plan.device}, launcher {plan.launcher}"]
    # One process on this host's CPU has nothing to list.
    if plan.world_size == 1 and plan.nodes[0].is_here and plan.device == "cpu":
        return lines
    for node in shown_nodes:
        if node is None:
            lines.append(f"  ... {len(plan.nodes) - 6} more hosts")
        else:
            last_rank = node.first_rank + node.slots - 1
            device_noun = "GPU" if plan.device == "cuda" else "slot"
            devices_text = _device_indices_text(node.devices)
            ranks_text = (
                f"ranks {node.first_rank}-{last_rank}" if node.slots > 1 else f"rank {last_rank}"
            )
            lines.append(
                f"  {node.host}: {ranks_text}, {device_noun}{'s' * (node.slots > 1)} {devices_text}"
            )
    return lines


def _connection_and_restart_lines(plan: Plan, recipe: Recipe) -> list[str]:
    """Return how ranks meet and which variables they get.

    One process on this host needs neither line.
    """
    lines = [f"  ranks connect through: {plan.rendezvous}"] if plan.world_size > 1 else []
    if plan.forward and (len(plan.nodes) > 1 or recipe.launch.forward):
        lines.append(f"  environment variables sent to the hosts: {' '.join(plan.forward)}")
    if not plan.started_by.is_ours and recipe.launch.binding in ("core", "numa"):
        lines.append("  launch.binding has no effect here: this launcher is not ortlaunch's; see srun "
            "--cpu-bind, mpirun --bind-to")  # fmt: skip
    return [*lines, *_fault_handling_lines(plan, recipe)]


def _fault_handling_lines(plan: Plan, recipe: Recipe) -> list[str]:
    """Return how the run handles a fault, if the recipe sets restarts."""
    max_restarts = recipe.launch.max_restarts
    if not max_restarts:
        return []
    if not plan.started_by.is_ours:
        return ["  launch.max_restarts: the launcher is not ortlaunch's; a job of `ortlaunch "
                "submit` restarts the run; "
                "else start the same command again from the batch script"]  # fmt: skip
    times_text = count_with_noun(max_restarts, "time")
    node_range = recipe.launch.elastic
    lost_host_lines = (
        [f"  a lost host is left out until the next restart; hosts: {node_range} (launch.nodes)"]
        if node_range
        else []
    )
    return [
        *lost_host_lines,
        f"  after a failure: restarted from the last complete checkpoint, at most {times_text} "
        "without progress",
    ]


def _device_indices_text(device_indices: tuple[int, ...]) -> str:
    """Return `0,1,2`, or `0-63` for more numbers than fit into a line."""
    if len(device_indices) > 8 and device_indices == tuple(
        range(device_indices[0], device_indices[-1] + 1)
    ):
        return f"{device_indices[0]}-{device_indices[-1]}"
    shown_devices = (
        device_indices
        if len(device_indices) <= 32
        else (*device_indices[:16], "...", device_indices[-1])
    )
    return ",".join(map(str, shown_devices))


def _batch_equation_lines(plan: Plan) -> list[str]:
    batch = plan.batch
    tokens_text = f", {batch.tokens_per_step:,} tokens a step" if batch.tokens_per_step else ""
    return [
        f"batch: {batch.global_samples} samples = {batch.micro_samples} micro x {batch.accumulation_steps} "
        f"accumulation x {count_with_noun(batch.data_parallel_ranks, 'rank')}{tokens_text}"
    ]


def _length_line(plan: Plan, recipe: Recipe) -> str:
    max_steps = recipe.train.max_steps
    if max_steps is None:
        return f"steps: those of {recipe.train.epochs:g} epochs, counted once the data is read"
    return f"steps: {max_steps:,}, {max_steps * plan.batch.global_samples:,} samples"


def _held_out_and_epoch_interval_lines(recipe: Recipe) -> Iterator[str]:
    """Yield how much of the data is held out, and the intervals that are given in epochs."""
    evaluation_source = recipe.data.evaluation
    if isinstance(evaluation_source, HeldOut):
        amount_text = (
            f"{evaluation_source.share:.3g} of the"
            if evaluation_source.share
            else f"{evaluation_source.samples:,}"
        )
        yield f"evaluation: {amount_text} samples of data.train, chosen by seed {recipe.seed}"
    for name, interval_epochs in recipe.name_and_epochs_of_intervals():
        epochs = recipe.train.epochs
        times_text = (
            f", {count_with_noun(max(1, int(epochs / interval_epochs)), 'time')}" if epochs else ""
        )
        yield f"{name.replace('_', ' ')} {interval_epochs:g} epochs{times_text}; in steps when the data are read"


_MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "buckets", "overhead", "total")


def memory_table_and_note_lines(
    memory: Memory, shows_all_stages: bool, device: str, assumed_sizes_text: str = ""
) -> list[str]:
    """Return the bytes of a rank by kind; a kind that is 0 in all stages is left out.

    Args:
        memory: the memory of a rank.
        shows_all_stages: list every ZeRO stage, not only the chosen one.
        device: cpu or cuda.
        assumed_sizes_text: the sizes that the plan assumes, as `assumed_model_sizes_text_or_empty` returns them.
    """
    stage_rows = [row for row in memory.by_stage if shows_all_stages or row[0] == memory.chosen]
    part_names = [
        part_name
        for part_name in _MEMORY_PARTS
        if any(getattr(stage_bytes, part_name) for _, stage_bytes in stage_rows)
    ]
    row_labels = [
        f"{'->' if stage == memory.chosen else '':2}{stage:8}" if shows_all_stages else ""
        for stage, _ in stage_rows
    ]
    lines = [
        f"memory: {memory.parameters:,} parameters, {memory.trainable:,} trained; "
        f"a checkpoint takes {human_bytes(memory.checkpoint)}; on each rank:",
        f"  {'':{len(row_labels[0])}}{''.join(f'{part_name:>{_column_width(part_name)}}' for part_name in part_names)}",
    ]
    for row_label, (_, stage_bytes) in zip(row_labels, stage_rows):
        lines.append(
            f"  {row_label}"
            + "".join(
                f"{human_bytes(getattr(stage_bytes, part_name)):>{_column_width(part_name)}}"
                for part_name in part_names
            )
        )
    if memory.compared:
        lines.append(
            f"  overhead: {human_bytes(memory.compared)} are for a comparison with plain PyTorch "
            "(engine.parity_steps)"
        )
    if memory.chunk:
        lines.append(
            f"  output layer and loss in chunks of {memory.chunk} rows (engine.chunked_loss)"
        )
    lines += [*_gpu_start_and_host_memory_lines(memory, device)]
    bound_text = "buckets are an upper bound; " if "buckets" in part_names else ""
    estimate_text = (
        "activations and overhead are estimates"
        if "overhead" in part_names
        else "activations are an estimate"
    )
    rest = (
        f"the rest, and the parameters, are for {assumed_sizes_text}"
        if assumed_sizes_text
        else "the rest is exact"
    )
    lines.append(f"  {estimate_text}, {bound_text}{rest}")
    if device == "cpu":
        source_text = "measured by a run here" if memory.process.is_measured else "a usual value"
        total_bytes = memory.process.total + dict(memory.by_stage)[memory.chosen].total
        lines.append(
            f"  the process takes {human_bytes(memory.process.total)} beside its model ({source_text}), "
            f"{human_bytes(total_bytes)} in all"
        )
    return lines


def _gpu_start_and_host_memory_lines(memory: Memory, device: str) -> Iterator[str]:
    """Yield the memory of a GPU at the start and of the host, for the chosen stage."""
    host_memory = memory.host
    if device == "cuda":
        weights = dict(memory.by_stage)[memory.chosen].weights
        other_text = (
            f"; {human_bytes(weights)} where it lacks room"
            if memory.chosen in ("ZeRO 1", "ZeRO 2")
            else ""
        )
        yield f"  at the start a GPU holds {human_bytes(memory.start)}, before optimizer state{other_text}"
    rank_0_text = " on rank 0, or on its disk" if host_memory.is_built_on_rank_0_only else ""
    part_texts = (
        [f"{human_bytes(host_memory.built)} to build the model{rank_0_text}"]
        if device == "cuda" or rank_0_text
        else []
    )
    part_texts += (
        [f"{human_bytes(host_memory.offloaded)} offloaded"] if host_memory.offloaded else []
    )
    part_texts += (
        [f"{human_bytes(host_memory.snapshot)} for async saves"] if host_memory.snapshot else []
    )
    if part_texts:
        yield (
            "  host memory a rank: "
            f"{', then '.join([part_texts[0], ' + '.join(part_texts[1:])][: len(part_texts)])}"
        )
    if host_memory.nvme:
        yield f"  files below zero.offload.nvme_path: {human_bytes(host_memory.nvme)} a rank"


def _column_width(part_name: str) -> int:
    return 13 if part_name == "activations" else 11
