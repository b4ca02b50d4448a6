"""The plan as a page for a person."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.launch_plan import Memory, Plan
from ortlaunch.planning.memory import why_unknown
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import HeldOut
from ortlaunch.recipe.rules.parity import compared_steps
from ortlaunch.units import count_with_noun, human_bytes


def describe(plan: Plan, recipe: Recipe) -> str:
    """Return the plan for a person: the world and, for a training, batch, length and memory.

    Memory is listed by ZeRO stage.
    """
    lines = [*_world_lines(plan), *_start_lines(plan, recipe)]
    if plan.traits.evaluates:
        return "\n".join(lines)
    lines += [*_batch_lines(plan), _length_line(plan, recipe), *_interval_lines(recipe)]
    known = plan.memory
    # On one rank ZeRO has nothing to shard.
    choice = plan.world_size > 1 or recipe.zero is not None
    memory = (
        memory_lines(known, choice, plan.device)
        if known
        else [f"memory: unknown: {why_unknown(recipe)}"]
    )
    compared = compared_steps(recipe)
    if compared.steps and compared.why:
        lines.append(f"parity: step 1 is compared with plain PyTorch once ({compared.why})")
    if recipe.model.freeze and known:
        lines.append(
            "memory is an upper bound: model.freeze names parameters that a plan cannot see"
        )
    return "\n".join([*lines, *memory])


def _world_lines(plan: Plan) -> list[str]:
    # A long list is shown by its ends.
    shown = plan.nodes if len(plan.nodes) <= 8 else (*plan.nodes[:4], None, *plan.nodes[-2:])
    ranks = count_with_noun(plan.world_size, "rank")
    hosts = count_with_noun(len(plan.nodes), "host")
    lines = [f"{plan.name}: {ranks} on {hosts}, {plan.device}, launcher {plan.launcher}"]
    # One process on this host's CPU has nothing to list.
    if plan.world_size == 1 and plan.nodes[0].is_here and plan.device == "cpu":
        return lines
    for node in shown:
        if node is None:
            lines.append(f"  ... {len(plan.nodes) - 6} more hosts")
        else:
            last = node.first_rank + node.slots - 1
            kind = "GPU" if plan.device == "cuda" else "slot"
            devices = _short(node.devices)
            ranks = f"ranks {node.first_rank}-{last}" if node.slots > 1 else f"rank {last}"
            lines.append(f"  {node.host}: {ranks}, {kind}{'s' * (node.slots > 1)} {devices}")
    return lines


def _start_lines(plan: Plan, recipe: Recipe) -> list[str]:
    """Return how ranks meet and which variables they get.

    One process on this host needs neither line.
    """
    lines = [f"  ranks connect through: {plan.rendezvous}"] if plan.world_size > 1 else []
    if plan.forward and (len(plan.nodes) > 1 or recipe.launch.forward):
        lines.append(f"  environment variables sent to the hosts: {' '.join(plan.forward)}")
    if not plan.started_by.is_ours and recipe.launch.binding in ("core", "numa"):
        lines.append("  launch.binding has no effect here: this launcher is not ortlaunch's; see srun "
            "--cpu-bind, mpirun --bind-to")  # fmt: skip
    return [*lines, *_restart_lines(plan, recipe)]


def _restart_lines(plan: Plan, recipe: Recipe) -> list[str]:
    """Return how the run handles a fault, if the recipe sets restarts."""
    most = recipe.launch.max_restarts
    if not most:
        return []
    if not plan.started_by.is_ours:
        return ["  launch.max_restarts: the launcher is not ortlaunch's; a job of `ortlaunch "
                "submit` restarts the run; "
                "else start the same command again from the batch script"]  # fmt: skip
    times = count_with_noun(most, "time")
    nodes = recipe.launch.elastic
    lost = (
        [f"  a lost host is left out until the next restart; hosts: {nodes} (launch.nodes)"]
        if nodes
        else []
    )
    return [
        *lost,
        f"  after a failure: restarted from the last complete checkpoint, at most {times} "
        "without progress",
    ]


def _short(devices: tuple[int, ...]) -> str:
    """Return `0,1,2`, or `0-63` for more numbers than fit into a line."""
    if len(devices) > 8 and devices == tuple(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}-{devices[-1]}"
    shown = devices if len(devices) <= 32 else (*devices[:16], "...", devices[-1])
    return ",".join(map(str, shown))


def _batch_lines(plan: Plan) -> list[str]:
    b = plan.batch
    tokens = f", {b.tokens_per_step:,} tokens a step" if b.tokens_per_step else ""
    return [
        f"batch: {b.global_samples} samples = {b.micro_samples} micro x {b.accumulation_steps} "
        f"accumulation x {count_with_noun(b.data_parallel_ranks, 'rank')}{tokens}"
    ]


def _length_line(plan: Plan, recipe: Recipe) -> str:
    steps = recipe.train.max_steps
    if steps is None:
        return f"steps: those of {recipe.train.epochs:g} epochs, counted once the data is read"
    return f"steps: {steps:,}, {steps * plan.batch.global_samples:,} samples"


def _interval_lines(recipe: Recipe) -> Iterator[str]:
    """Yield how much of the data is held out, and the intervals that are given in epochs."""
    held = recipe.data.evaluation
    if isinstance(held, HeldOut):
        part = f"{held.share:.3g} of the" if held.share else f"{held.samples:,}"
        yield f"evaluation: {part} samples of data.train, chosen by seed {recipe.seed}"
    for name, every in recipe.epoch_intervals():
        epochs = recipe.train.epochs
        times = f", {count_with_noun(max(1, int(epochs / every)), 'time')}" if epochs else ""
        yield f"{name.replace('_', ' ')} {every:g} epochs{times}; in steps when the data are read"


_KINDS = ("weights", "gradients", "optimizer", "activations", "buckets", "overhead", "total")


def memory_lines(memory: Memory, choice: bool, device: str) -> list[str]:
    """Return the bytes of a rank by kind; a kind that is 0 in all stages is left out.

    choice: list every ZeRO stage, not only the chosen one.
    """
    stages = [row for row in memory.by_stage if choice or row[0] == memory.chosen]
    kinds = [kind for kind in _KINDS if any(getattr(parts, kind) for _, parts in stages)]
    marks = [
        f"{'->' if stage == memory.chosen else '':2}{stage:8}" if choice else ""
        for stage, _ in stages
    ]
    lines = [
        f"memory: {memory.parameters:,} parameters, {memory.trainable:,} trained; "
        f"a checkpoint takes {human_bytes(memory.checkpoint)}; on each rank:",
        f"  {'':{len(marks[0])}}{''.join(f'{kind:>{_width(kind)}}' for kind in kinds)}",
    ]
    for mark, (_, parts) in zip(marks, stages):
        lines.append(
            f"  {mark}"
            + "".join(f"{human_bytes(getattr(parts, kind)):>{_width(kind)}}" for kind in kinds)
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
    lines += [*_beside_lines(memory, device)]
    bound = "buckets are an upper bound; " if "buckets" in kinds else ""
    guessed = (
        "activations and overhead are estimates"
        if "overhead" in kinds
        else "activations are an estimate"
    )
    lines.append(f"  {guessed}, {bound}the rest is exact")
    if device == "cpu":
        source = "measured by a run here" if memory.process.is_measured else "a usual value"
        whole = memory.process.total + dict(memory.by_stage)[memory.chosen].total
        lines.append(
            f"  the process takes {human_bytes(memory.process.total)} beside its model ({source}), "
            f"{human_bytes(whole)} in all"
        )
    return lines


def _beside_lines(memory: Memory, device: str) -> Iterator[str]:
    """Yield the memory of a GPU at the start and of the host, for the chosen stage."""
    host = memory.host
    if device == "cuda":
        weights = dict(memory.by_stage)[memory.chosen].weights
        less = (
            f"; {human_bytes(weights)} where it lacks room"
            if memory.chosen in ("ZeRO 1", "ZeRO 2")
            else ""
        )
        yield f"  at the start a GPU holds {human_bytes(memory.start)}, before optimizer state{less}"
    parts = [f"{human_bytes(host.built)} to build the model"] if device == "cuda" else []
    parts += [f"{human_bytes(host.offloaded)} offloaded"] if host.offloaded else []
    parts += [f"{human_bytes(host.snapshot)} for async saves"] if host.snapshot else []
    if parts:
        yield (
            "  host memory a rank: "
            f"{', then '.join([parts[0], ' + '.join(parts[1:])][: len(parts)])}"
        )
    if host.nvme:
        yield f"  files below zero.offload.nvme_path: {human_bytes(host.nvme)} a rank"


def _width(kind: str) -> int:
    return 13 if kind == "activations" else 11
