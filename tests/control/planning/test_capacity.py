"""Notes and refusals for ranks that exceed this host's cores or memory."""

from __future__ import annotations

import os

import pytest

from ortlaunch.base.errors import PlanError
from ortlaunch.base.machine import MemoryLimit, smallest_memory_limit
from ortlaunch.base.units import human_bytes
from ortlaunch.launch_plan import ProcessMemory
from ortlaunch.planning import capacity
from ortlaunch.planning.capacity import notes_or_refusal_for_crowding_of_this_host
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.planning.make_plan import make_plan
from ortlaunch.planning.workload import solve_batch_and_estimate_memory
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe
from tests.makers import bert, host, recipe, world_of

GiB = 1 << 30
PROCESS = ProcessMemory(200 << 20, 100 << 20)


# For every test here, so that results do not depend on the machine.
@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate two cores, and a control group of 16 GiB."""
    monkeypatch.setattr(capacity, "usable_core_count", lambda: 2)
    monkeypatch.setattr(
        capacity,
        "smallest_memory_limit",
        lambda: MemoryLimit("control group /job", 16 * GiB, 1 * GiB),
    )


def notes(
    made: Recipe, slots: int, name: str = "localhost", planned_only: bool = False
) -> list[str]:
    """Return the notes on that many ranks on one host."""
    world = world_of(made, [host(name, slots)], "torchrun")
    return list(
        notes_or_refusal_for_crowding_of_this_host(
            world, solve_batch_and_estimate_memory(made, world, PROCESS), planned_only
        )
    )


def large(layers: int) -> Recipe:
    """Return a recipe of a BERT with 12.6 million parameters a layer.

    With Adam, each parameter needs 16 bytes.
    """
    config = {"model_type": "bert", "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
              "vocab_size": 1000, "num_hidden_layers": layers}  # fmt: skip
    words = {"train": "python-docs", "tokenizer": "here", "sequence_length": 128}
    return bert(
        model={"task": "masked-lm", "config": config}, data=words, optimizer={"learning_rate": 1.0}
    )


def test_more_ranks_than_cores_are_noted() -> None:
    """More ranks than this host's cores get a note; other hosts' ranks do not."""
    assert notes(recipe(), 2) == []
    assert notes(recipe(), 3) == ["localhost: 3 ranks share 2 cores, which slows them"]
    assert notes(recipe(), 1000, "other") == []


@pytest.mark.parametrize("planned_only", [False, True])
def test_more_processes_than_memory_are_refused(planned_only: bool) -> None:
    """Ranks whose processes alone exceed the memory are refused, also in a plan."""
    # 81 processes of 200 MiB are 15.8 GiB; the one note is about cores.
    assert len(notes(recipe(), 81)) == 1
    with pytest.raises(PlanError) as caught:
        notes(recipe(), 82, planned_only=planned_only)
    assert str(caught.value) == (
        "localhost: 82 ranks x (200.0 MiB a process + 0 B of weights, gradients and optimizer "
        "state) = 16.0 GiB at least, and control group /job is 16.0 GiB; use fewer ranks, a "
        "smaller model or more hosts"
    )
    assert 81 * PROCESS.own < 16 * GiB < 82 * PROCESS.own


def test_a_model_beyond_memory_is_refused_and_can_be_planned() -> None:
    """A model beyond the memory is refused in a run, and noted in a plan."""
    # Counted are weights, gradients and Adam's state, which are exact.
    assert notes(large(24), 2) == []
    with pytest.raises(
        PlanError,
        match=r"2 ranks x \(200.0 MiB a process \+ 9.\d GiB of weights.* = 19.\d GiB at least",
    ):
        notes(large(50), 2)
    # The plan's table shows which stage would fit.
    assert notes(large(50), 2, planned_only=True)[0].startswith("localhost: 2 ranks x (200.0 MiB")


def test_an_estimate_beyond_memory_is_a_note() -> None:
    """Activations beyond the memory are a note, because they are estimated."""
    made = large(24).model_copy(
        update={"batch": large(24).batch.model_copy(update={"micro_size": 128})}
    )
    assert notes(made, 1)[0].startswith("localhost: its ranks need about ")


def test_the_hosts_memory_of_ranks_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on GPUs need host memory for the model's start, offloaded state, and a save's copy."""
    # Only this host's memory is checked.
    monkeypatch.setattr("ortlaunch.launch_plan.is_this_host", lambda name: True)
    zero = {"stage": 2, "offload": {"optimizer": "cpu"}}
    for made, cause in (
        # Without an offload, the largest part is the start.
        (large(40), "to build the model in float32"),
        (
            large(40).model_copy(update={"zero": bert(zero=zero).zero}),
            "of what is offloaded and a save beside training",
        ),
    ):
        world = World((host("gpus", 8),), "torchrun", "cuda", None, (), None)
        work = solve_batch_and_estimate_memory(made, world, PROCESS)
        planned = make_plan(made, world, work, modules_folder="", worker_argv=())
        assert planned.memory is not None
        with pytest.raises(
            PlanError, match=rf"gpus: 8 ranks x \(200\.0 MiB a process \+ .* {cause}"
        ):
            list(notes_or_refusal_for_crowding_of_this_host(world, work, is_planned_only=False))
        page = plan_description_text(planned, made)
        assert f"{human_bytes(planned.memory.host.built)} to build the model" in page
        # A page for terminals of 100 columns.
        assert max(map(len, page.splitlines())) <= 100


def test_a_divided_model_is_built_on_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 keeps it in files, as far as memory has no room; hosts need their parts alone."""
    monkeypatch.setattr("ortlaunch.launch_plan.is_this_host", lambda name: True)
    eager = {"engine": {"name": "eager"}, "optimizer": {"name": "adamw", "learning_rate": 1e-3}}
    divided = bert(parallel={}, zero=None, checkpoint={"async": False}, **eager)
    made = large(40).model_copy(
        update={name: getattr(divided, name) for name in (*eager, "parallel", "checkpoint")}
    )
    world = World((host("gpus", 8), host("more", 8)), "torchrun", "cuda", None, (), None)
    work = solve_batch_and_estimate_memory(made, world, PROCESS)
    assert work.memory is not None
    built = work.memory.host.built
    # A machine with memory for two models, and not for eight.
    monkeypatch.setattr(
        "ortlaunch.planning.capacity.smallest_memory_limit",
        lambda: ("memory", 2 * built + 8 * PROCESS.total, ""),
    )
    assert not list(notes_or_refusal_for_crowding_of_this_host(world, work, is_planned_only=False))
    monkeypatch.setattr(
        "ortlaunch.planning.capacity.smallest_memory_limit", lambda: ("memory", built, "")
    )
    # Rank 0 has the whole model in files then.
    assert not list(notes_or_refusal_for_crowding_of_this_host(world, work, is_planned_only=False))


def test_the_nearest_limit() -> None:
    """The tightest limit is this machine's memory, or that of a control group."""
    where, most, _ = smallest_memory_limit()
    assert where
    # No test machine has less.
    assert GiB // 4 < most <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
