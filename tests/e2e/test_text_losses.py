"""Whole runs of embedding and reranker: ranks, engines, resumes, and what sentence-transformers loads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.recipe import read_resolved_recipe_of_run
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.data.corpus import read_corpus_rows_up_to_limit
from tests.e2e.runs import (
    COMMAND,
    EAGER,
    SMALL,
    TWO_RANKS,
    Run,
    Train,
    ended_well,
    environment,
    merged,
)

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PAIRS: dict[str, Any] = {
    "name": "pairs",
    "model": {
        "task": "embedding",
        "config": {"model_type": "bert", **SMALL, "max_position_embeddings": 32, **STILL},
        "embedding": {"query_prompt": "find: "},
    },
    "data": {
        "train": "python-pairs",
        "evaluation": {"samples": 50},
        "tokenizer": {"train": "wordpiece", "vocab_size": 600},
        "sequence_length": 32,
    },
    "batch": {"global_size": 12},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
    "schedule": {"name": "constant"},
    **EAGER,
    "train": {"max_steps": 8, "evaluate_every_steps": 4},
    "log": {"every_steps": 1},
}
RANKED: dict[str, Any] = merged(PAIRS, {"model": {"task": "reranker", "embedding": None}})
METRICS = ("loss", "ndcg_at_10", "mrr_at_10")


@pytest.fixture(scope="module")
def whole(train: Train) -> Run:
    """Embeddings in one process."""
    return ended_well(train("whole", PAIRS))


@pytest.fixture(scope="module")
def ranked(train: Train) -> Run:
    """A reranker in one process."""
    return ended_well(train("ranked", RANKED))


def require_same_run(run: Run, whole: Run) -> None:
    assert run.losses() == pytest.approx(whole.losses(), rel=2e-6)
    for name in METRICS:
        expected = [value for _, value in whole.values(f"evaluation_{name}")]
        assert [value for _, value in run.values(f"evaluation_{name}")] == pytest.approx(
            expected, rel=2e-5
        )


def test_two_ranks_compare_the_texts_of_both(train: Train, whole: Run) -> None:
    """Negatives of the other rank count with their gradients: the run is that of one process."""
    require_same_run(ended_well(train("two", PAIRS, *TWO_RANKS)), whole)


def test_a_run_goes_on_in_another_world(train: Train, whole: Run) -> None:
    """Two ranks to step 4 and one to step 8 are the run of one process; parts of 5 texts, too."""
    parts = merged(PAIRS, {"model": {"embedding": {"mini_batch": 5}}})
    half = merged(parts, {"train": {"max_steps": 4}})
    ended_well(train("half", half, *TWO_RANKS))
    require_same_run(ended_well(train("half", parts)), whole)


def test_what_sentence_transformers_loads(whole: Run) -> None:
    """SentenceTransformer loads the export, and its own evaluator gives the run's metrics."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    run = RunDir(whole.folder)
    samples: Any = LoadedData(read_resolved_recipe_of_run(run.recipe)).evaluation
    every = [row.values for row in read_corpus_rows_up_to_limit("python-pairs")]
    rows = [every[samples._index_of(index)] for index in range(len(samples))]
    documents = dict.fromkeys(row[name] for row in rows for name in ("positive", "negative"))
    number = {text: str(index) for index, text in enumerate(documents)}
    model = SentenceTransformer(str(run.export), device="cpu")
    evaluator = InformationRetrievalEvaluator(
        {row["query"]: row["query"] for row in rows},
        {number[text]: text for text in documents},
        {row["query"]: {number[row["positive"]]} for row in rows},
        query_prompt_name="query",
    )
    found = evaluator(model)
    last = whole.records()[-1]
    for name in ("ndcg", "mrr", "recall"):
        assert last[f"evaluation_{name}_at_10"] == pytest.approx(found[f"cosine_{name}@10"])
    assert 0 < last["evaluation_triplet_accuracy"] < 1


def test_what_a_cross_encoder_loads(ranked: Run) -> None:
    """CrossEncoder loads the export, and its own evaluator gives the run's metrics."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    run = RunDir(ranked.folder)
    samples: Any = LoadedData(read_resolved_recipe_of_run(run.recipe)).evaluation
    every = [row.values for row in read_corpus_rows_up_to_limit("python-pairs")]
    rows = [every[samples._index_of(index)] for index in range(len(samples))]
    model = CrossEncoder(str(run.export), device="cpu", max_length=32)
    evaluator = CrossEncoderRerankingEvaluator(
        [
            {"query": row["query"], "positive": [row["positive"]], "negative": [row["negative"]]}
            for row in rows
        ]
    )
    found = evaluator(model)
    last = ranked.records()[-1]
    for ours, theirs in (("map", "map"), ("mrr_at_10", "mrr@10"), ("ndcg_at_10", "ndcg@10")):
        assert last[f"evaluation_{ours}"] == pytest.approx(found[theirs], abs=1e-6)


@pytest.mark.slow
@pytest.mark.ci
def test_an_evaluation_afterwards(whole: Run, home: Path) -> None:
    """`ortlaunch evaluate` on two ranks gives the metrics of the run, its loss too."""
    command = [str(COMMAND), "evaluate", whole.folder.name, *TWO_RANKS]
    subprocess.run(command, cwd=home, env=environment(home), timeout=120, check=True)
    (path,) = (whole.folder / "evaluations").glob("*/evaluation.json")
    found = json.loads(path.read_text())
    for name, value in whole.records()[-1].items():
        if name.startswith("evaluation_"):
            assert found[name.removeprefix("evaluation_")] == pytest.approx(value, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.ci
def test_adapters_alone_keep_their_pooling(train: Train, whole: Run) -> None:
    """SentenceTransformer loads adapters of a base with the pooling that they were trained with."""
    from sentence_transformers import SentenceTransformer

    lora = {"r": 2, "target_modules": ["query"], "merge": False}
    embedding = {"pooling": "cls", "query_prompt": None}
    model = {"pretrained": str(whole.folder / "export"), "lora": lora, "embedding": embedding}
    data = {"tokenizer": str(whole.folder / "export")}
    run = ended_well(
        train("adapters", merged(PAIRS, {"model": {**model, "config": None}, "data": data}))
    )
    modules = [*SentenceTransformer(str(run.folder / "export"), device="cpu")]
    assert modules[1].pooling_mode == "cls"
    assert len(modules) == 3


_WORLDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "inductor": ({"engine": {"name": "inductor"}}, TWO_RANKS),
    "ort": ({"engine": {"name": "ort", "parity_steps": 2}}, TWO_RANKS),
    "zero": ({"zero": {"stage": 3}}, TWO_RANKS),
    "shards": ({"parallel": {"shard": 2}}, TWO_RANKS),
}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    "world",
    [
        "inductor",
        "ort",
        pytest.param("zero", marks=pytest.mark.nightly),
        pytest.param("shards", marks=pytest.mark.nightly),
    ],
)
def test_engines_and_divided_models(train: Train, whole: Run, ranked: Run, world: str) -> None:
    """Each engine and division trains as one process; ort is compared with plain PyTorch, too."""
    changes, ranks = _WORLDS[world]
    both = ((PAIRS, whole), (RANKED, ranked))
    # Its compilation takes long.
    for recipe, expected in both[:1] if world == "inductor" else both:
        name = f"{world}-{recipe['model']['task']}"
        # The graphs of training and evaluation are compiled on each rank.
        run = train(name, merged(recipe, changes), *ranks, timeout=400)
        require_same_run(ended_well(run), expected)
