"""The plan: batch equation, ranks, forwarded variables, its text and its JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from ortlaunch.base.errors import PlanError
from ortlaunch.base.units import human_bytes
from ortlaunch.launch_plan import BatchPlan, Mesh, Node, Plan
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.planning.hosts import Host
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.rank import Rank
from ortlaunch.recipe.rules.rules import broken_rule_problems
from tests.makers import BERT, WORDS, bert, host, plan, recipe

# Hosts with different numbers of slots; the second one uses device 3.
UNEVEN = (host("a", 2), Host("b", 1, (3,)), host("c", 3))


def batch(global_size: int | None, micro: int | None, steps: int | None) -> dict[str, int | None]:
    """Return the recipe's section `batch`."""
    return {"global_size": global_size, "micro_size": micro, "accumulation_steps": steps}


@pytest.mark.parametrize(
    ("given", "ranks", "solved"),
    [
        (batch(None, 4, 2), 1, (8, 4, 2)),
        (batch(None, 4, 2), 6, (48, 4, 2)),
        (batch(None, 4, None), 3, (12, 4, 1)),
        (batch(64, 4, None), 1, (64, 4, 16)),
        (batch(64, 4, None), 8, (64, 4, 2)),
        (batch(64, None, 2), 8, (64, 4, 2)),
        (batch(64, None, None), 8, (64, 8, 1)),
        (batch(64, 4, 2), 8, (64, 4, 2)),
        (batch(65536, 64, None), 32, (65536, 64, 32)),
    ],
)
def test_batch_equation(given: dict[str, Any], ranks: int, solved: tuple[int, int, int]) -> None:
    """The value that the recipe leaves out follows from the others and the number of ranks."""
    total, micro, steps = solved
    made = plan(recipe(batch=given), [host("localhost", ranks)], "torchrun").batch
    assert made == BatchPlan(total, micro, steps, ranks, None)
    assert (
        made.global_samples
        == made.micro_samples * made.accumulation_steps * made.data_parallel_ranks
    )


@pytest.mark.parametrize("given", [batch(64, None, None), batch(None, 4, 2)])
def test_what_is_enough_for_the_equation(given: dict[str, Any]) -> None:
    """The global batch alone is enough, and so are the other two values together."""
    assert list(broken_rule_problems(recipe(batch=given))) == []


NOT_WHOLE = "batch: global_size (%s) is not a multiple of %s; %s would be valid"


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        (batch(64, 6, None), 2, NOT_WHOLE % (64, "micro_size (6) x 2 ranks = 12", "60 or 72")),
        (batch(4, 4, None), 2, NOT_WHOLE % (4, "micro_size (4) x 2 ranks = 8", "8")),
        (
            batch(64, None, 3),
            2,
            NOT_WHOLE % (64, "accumulation_steps (3) x 2 ranks = 6", "60 or 66"),
        ),
        (
            batch(64, 4, 4),
            3,
            "batch: global_size (64) != micro_size (4) x accumulation_steps (4) x 3 ranks = "
            "48; omit one of the three, or run on 4 ranks",
        ),
    ],
)
def test_batch_without_a_whole_solution(given: dict[str, Any], ranks: int, message: str) -> None:
    """The error shows the equation and valid values."""
    with pytest.raises(PlanError) as caught:
        plan(recipe(batch=given), [host("localhost", ranks)], "torchrun")
    assert str(caught.value) == message


def test_tokens_per_step() -> None:
    """A step's tokens are samples times sequence length; custom data has none."""
    assert plan(bert(batch=batch(64, 4, None))).batch.tokens_per_step == 64 * 128
    assert plan(recipe()).batch.tokens_per_step is None


def test_ranks_follow_the_hosts_in_order() -> None:
    """Every slot becomes a rank, host by host, and each rank has a number on its host."""
    made = plan(recipe(), UNEVEN, "mpi")
    assert made.nodes == (
        Node("a", 2, 0, (0, 1)),
        Node("b", 1, 2, (3,)),
        Node("c", 3, 3, (0, 1, 2)),
    )
    assert made.world_size == 6
    assert made.ranks == (
        Rank(0, 6, 0, 2), Rank(1, 6, 1, 2), Rank(2, 6, 0, 1), Rank(3, 6, 0, 3), Rank(4, 6, 1, 3), Rank(5, 6, 2, 3),
    )  # fmt: skip
    assert [made.node_of(rank).host for rank in range(6)] == ["a", "a", "b", "c", "c", "c"]


ZERO = {
    "stage": 2,
    "deepspeed": {"zero_optimization": {"reduce_bucket_size": 5e8}, "wall_clock_breakdown": True},
}
PLANS = {
    "custom": plan(recipe()),
    "uneven hosts": plan(recipe(), UNEVEN, "mpi"),
    "inside": plan(recipe(), [host("localhost", 2)], "inside"),
    "bert": plan(bert()),
    "deepspeed": plan(bert(zero=ZERO, precision="bf16"), [host("localhost", 4)], "torchrun"),
    # Two words, a letter beyond ASCII, and a variable that is forwarded.
    "environment": plan(
        recipe(launch={"env": {"B": "two words", "A": "é"}}), environ={"HF_TOKEN": "s3cret"}
    ),
}


@pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)
def test_json_comes_back(made: Plan) -> None:
    """A plan read from its JSON equals the plan, and is written as the same bytes."""
    text = made.to_json()
    again = Plan.from_plan_json_text(text)
    assert again == made
    assert again.to_json() == text
    assert again.ranks == made.ranks
    assert json.loads(text)["world_size"] == made.world_size


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Plan)])
def test_every_field_is_in_the_json(field: str) -> None:
    """Every field is in the JSON: another value changes the text, and is read back."""
    made = PLANS["deepspeed"]
    # Values of the field's type; other fields are texts.
    other: dict[str, Any] = {
        "nodes": (Node("elsewhere", 4, 0, (0, 1, 2, 3)),),
        "memory": None,
        "deepspeed": None,
        "task": "parity",
        "threads": 99,
        "mesh": Mesh(2, 4),
        "grace_seconds": 99,
    }
    other |= {
        "batch": made.batch._replace(micro_samples=99),
        "argv": ("x",),
        "env": (("K", "v"),),
        "forward": ("F",),
    }
    changed = dataclasses.replace(made, **{field: other.get(field, "another")})
    assert changed != made
    assert changed.to_json() != made.to_json()
    assert Plan.from_plan_json_text(changed.to_json()) == changed


def test_json_is_stable() -> None:
    """The JSON does not depend on the order of variables, so that plans can be compared by diff."""
    names = {"NCCL_DEBUG": "1", "PATH": "2", "HF_HOME": "3", "OMP_NUM_THREADS": "4"}
    texts = {
        plan(recipe(launch={"env": dict(ours)}), environ=dict(theirs)).to_json()
        for ours in itertools.permutations({"A": "1", "B": "2", "C": "3"}.items())
        for theirs in itertools.permutations(names.items())
    }
    assert len(texts) == 1


def test_json_of_another_format_is_refused() -> None:
    """A plan.json of another version of ortlaunch is refused."""
    text = PLANS["custom"].to_json().replace('"format": 1', '"format": 2')
    with pytest.raises(
        PlanError, match=r"^plan\.json was written by another version of ortlaunch$"
    ):
        Plan.from_plan_json_text(text)


@pytest.mark.parametrize(
    ("environ", "launch", "forward"),
    [
        ({}, {}, ()),
        # Prefixes are compared from the beginning of a name.
        ({"HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x", "LANG": "C", "XNCCL_DEBUG": "1"}, {}, ()),
        (
            {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "PYTHONPATH": "."},
            {},
            ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH"),
        ),
        (
            {"NCCL_DEBUG": "1", "HF_TOKEN": "x", "OMP_NUM_THREADS": "1"},
            {},
            ("HF_TOKEN", "NCCL_DEBUG", "OMP_NUM_THREADS"),
        ),
        (
            {
                "http_proxy": "x",
                "HTTP_PROXY": "x",
                "no_proxy": "y",
                "SSL_CERT_FILE": "/c",
                "proxy": "z",
            },
            {},
            ("HTTP_PROXY", "SSL_CERT_FILE", "http_proxy", "no_proxy"),
        ),
        ({"WANDB_API_KEY": "x", "HOME": "y"}, {"forward": ["WANDB_API_KEY"]}, ("WANDB_API_KEY",)),
        # The recipe's value replaces the shell's.
        ({"NCCL_DEBUG": "INFO"}, {"env": {"NCCL_DEBUG": "WARN"}}, ()),
        ({"KEY": "x"}, {"env": {"KEY": "y"}, "forward": ["KEY"]}, ()),
    ],
)
def test_forwarded_names(
    environ: dict[str, str], launch: dict[str, Any], forward: tuple[str, ...]
) -> None:
    """Known and requested names are forwarded, sorted, once, except for the recipe's own variables."""
    made = plan(recipe(launch=launch), environ=environ)
    assert made.forward == forward
    assert made.env == tuple(sorted(launch.get("env", {}).items()))


def test_forwarding_what_is_not_set() -> None:
    """A name to forward that this shell does not set is an error with the name."""
    with pytest.raises(PlanError) as caught:
        plan(recipe(launch={"forward": ["API_KEY", "HOME", "TOKEN"]}), environ={"HOME": "/root"})
    assert (
        str(caught.value)
        == "launch.forward: API_KEY, TOKEN is not set in this shell; export it, or take it out"
    )


def test_a_forwarded_value_is_nowhere_in_the_plan() -> None:
    """Of a secret, only the name is written."""
    asked = recipe(launch={"forward": ["API_KEY"]})
    made = plan(asked, environ={"API_KEY": "s3cret", "HF_TOKEN": "s3cret"})
    assert made.forward == ("API_KEY", "HF_TOKEN")
    # All texts that may be written or printed.
    for text in (made.to_json(), plan_description_text(made, asked), repr(made)):
        assert "s3cret" not in text
        assert "API_KEY" in text


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        ((0, 1, 2), "0,1,2"),
        (tuple(range(9_999)), "0-9998"),
        # With gaps, a range would be wrong.
        (tuple(range(0, 200, 2)), "0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30,...,198"),
    ],
)
def test_the_slots_of_a_host_are_one_short_line(devices: tuple[int, ...], shown: str) -> None:
    """The slots of a host fit into one short line."""
    lines = plan_description_text(
        plan(recipe(), [Host("a", len(devices), devices)], "mpi"), recipe()
    ).splitlines()
    assert lines[1].endswith(f", slots {shown}")


def test_describe_names_every_part() -> None:
    """The page shows hosts with ranks, rendezvous, batch, and memory by stage."""
    asked = bert(zero={"stage": 1}, batch=batch(64, 4, None))
    made = plan(asked, [host("a", 2), Host("b", 2, (0, 3))], "mpi", environ={"NCCL_DEBUG": "WARN"})
    lines = plan_description_text(made, asked).splitlines()
    assert lines[:4] == [
        "made: 4 ranks on 2 hosts, cpu, launcher mpi",
        "  a: ranks 0-1, slots 0,1",
        "  b: ranks 2-3, slots 0,3",
        "  ranks connect through: a TCP port of rank 0's host, sent by MPI",
    ]
    assert lines[4] == "  environment variables sent to the hosts: NCCL_DEBUG"
    assert lines[5] == "batch: 64 samples = 4 micro x 4 accumulation x 4 ranks, 8,192 tokens a step"
    assert lines[6] == "steps: 3, 192 samples"
    assert [line[:12] for line in lines[9:14]] == [
        "    DDP     ",
        # An arrow marks the chosen stage.
        *(f"  {'->' if n == 1 else '  '}ZeRO {n}  " for n in range(4)),
    ]
    assert max(map(len, lines)) <= 100


def test_the_plain_case_is_told_briefly() -> None:
    """The page of one process without ZeRO has no rendezvous, forwarded names or table of stages."""
    asked = bert(train={"epochs": 3})
    lines = plan_description_text(
        plan(asked, environ={"PATH": "/bin", "HF_HOME": "/x"}), asked
    ).splitlines()
    assert [line.split(":")[0].strip() for line in lines[:4]] == [
        "made",
        "batch",
        "steps",
        "memory",
    ]
    assert lines[2] == "steps: those of 3 epochs, counted once the data is read"
    assert [line for line in lines if "ZeRO" in line] == []
    # No column for the optimizer: SGD has no state.
    assert lines[4].split() == [
        "weights",
        "gradients",
        "activations",
        "overhead",
        "total",
    ]
    # A number and a unit for each column.
    assert len(lines[5].split()) == 2 * len(lines[4].split())


def test_describe_many_hosts_briefly() -> None:
    """The page of ten thousand hosts is short."""
    made = plan(recipe(), [host(f"n{i}", 8) for i in range(10_000)], "mpi")
    lines = plan_description_text(made, recipe()).splitlines()
    assert lines[0] == "made: 80,000 ranks on 10,000 hosts, cpu, launcher mpi"
    assert lines[5] == "  ... 9994 more hosts"
    assert lines[7].startswith("  n9999: ranks 79992-79999,")
    assert len(lines) < 15


def test_describe_a_model_that_is_not_known() -> None:
    """The page of an unknown model has the reason in place of a table of memory."""
    for kind, reason in (
        ("xlnet", "models of type xlnet have no estimate"),
        (
            "gpt2",
            "a plan needs n_embd, n_head, n_layer, n_positions, vocab_size of a gpt2 in model.config, as its "
            "config.json has them",
        ),
    ):
        unknown = bert(model={"task": "causal-lm", "config": {"model_type": kind}})
        assert plan(unknown).memory is None
        page = " ".join(plan_description_text(plan(unknown), unknown).split())
        assert f"memory: unknown: {reason}" in page
    # Of adapters the field that has no estimate is named.
    for lora, field in (
        ({"target_modules": ["all-linear"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["lm_head"]}, "target_modules"),
    ):
        config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
                  "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}  # fmt: skip
        unknown = bert(model={"task": "causal-lm", "config": config, "lora": lora})
        page = " ".join(plan_description_text(plan(unknown), unknown).split())
        assert f"unknown: adapters with these model.lora.{field} have no estimate" in page
    # Sizes that follow from the data are assumed, and not exact.
    source = {"format": "text", "path": "a.txt"}
    learned = {"train": source, "tokenizer": {"train": "bpe", "vocab_size": 400}}
    config = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 1}
    for num_labels, expected in (
        ({}, "the parameters, are for at most 400 tokens of data.tokenizer and 2 classes (mo"),
        ({"num_labels": 3}, "the parameters, are for at most 400 tokens of data.tokenizer"),
        ({"num_labels": 3, "vocab_size": 512}, "the rest is exact"),
    ):
        model = {"task": "sequence-classification", "config": {**config, **num_labels}}
        made = bert(model=model, data=learned)
        assert expected in " ".join(plan_description_text(plan(made), made).split())
    # A known model has the table.
    assert "memory: 1" in plan_description_text(plan(bert()), bert())


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (5 * 2**30, "5.0 GiB"),
     (2**40, "1.0 TiB"), (2**50, "1024.0 TiB")],
)  # fmt: skip
def test_bytes_for_a_person(size: int, text: str) -> None:
    """Bytes are shown in the unit that fits."""
    assert human_bytes(size) == text


@pytest.mark.parametrize(("mini_batch", "rows"), [(None, 512), (64, 64)])
def test_scores_of_all_texts_are_planned(mini_batch: int | None, rows: int) -> None:
    """A loss over the batch has a score of each sample with each document of the step."""
    settings = {"loss": "multiple-negatives-ranking", "mini_batch": mini_batch}
    planned = []
    for loss in (settings, {**settings, "loss": "cosine-mse"}):
        made = bert(
            model={"task": "embedding", "config": BERT, "embedding": loss},
            data={
                **WORDS,
                "train": {"format": "jsonl", "path": "x", "text_columns": ["q", "d", "n"]},
            },
            batch={"global_size": 512},
        )
        memory = estimate_rank_memory_or_none(made, 512, 1)
        assert memory is not None
        planned.append(dict(memory.by_stage)["DDP"].activations)
    assert planned[0] - planned[1] == 16 * rows * 512 * 2
