"""It learns: a tiny recipe, minutes on the built-in corpus with engine ort, beside counting words and pairs of words.

    python benchmarks/learns.py bert-large/tiny  --steps 2000 --picture bert.png
    python benchmarks/learns.py llama2-7b/tiny   --steps 500 --picture llama.png

Every tenth page of the language reference is held out, but for paragraphs that other pages have, too. Everything is in
nats for each word that is guessed there: the model's, that of the words' frequencies, and that of the word before
(Kneser and Ney's smoothing, with the discount that is best on the held-out text itself). Both count what the model is
trained on, in its own tokens. BERT guesses masked words, and sees the words around. The word before is the true one
for the baseline, be it masked for BERT or not; `where it is not masked` is the baseline that knows no more than BERT.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

Pairs = np.ndarray[Any, Any]  # (guesses, 3): the word before, the word, whether the model sees the word before
DISCOUNTS = [number / 20 for number in range(1, 20)]


def write_corpus(folder: Path) -> None:
    """train.txt and held-out.txt, a blank line between paragraphs; none of the training's is held out, too."""
    from pydoc_data.topics import topics

    pages = [topics[name].split("\n\n") for name in sorted(topics)]
    train = [paragraph for number, page in enumerate(pages) if number % 10 for paragraph in page]
    known = set(train)
    held_out = [paragraph for page in pages[::10] for paragraph in page if paragraph not in known]
    for name, part in (("train", train), ("held-out", held_out)):
        (folder / f"{name}.txt").write_text("\n\n".join(part), encoding="utf-8")


def overrides(folder: Path, steps: int) -> list[str]:
    """What differs from the shipped recipe."""
    files = {name: f"{{format: text, path: [{folder / name}.txt]}}" for name in ("train", "held-out")}
    return [
        f"data.train={files['train']}", f"data.evaluation={files['held-out']}", f"train.max_steps={steps}",
        f"train.evaluate_every_steps={max(1, steps // 5)}", "engine.name=ort",
    ]  # fmt: skip


def train(recipe: str, settings: list[str], run: Path) -> list[dict[str, Any]]:
    """The records of a run in a process of its own."""
    command = [str(Path(sys.executable).with_name("ortlaunch")), "train", recipe, f"--run-dir={run}", *settings]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# --------------------------------------------------------------------------------------------------- baselines


def guessed(sample: dict[str, Any], masked: bool) -> Pairs:
    """What a sample asks for, each with the true word before it."""
    ids, labels = sample["input_ids"].numpy(), sample["labels"].numpy()
    truth = np.where(labels == -100, ids, labels) if masked else ids
    places = np.flatnonzero(labels != -100) if masked else np.arange(1, len(ids))
    seen = labels[places - 1] == -100 if masked else np.ones_like(places)
    return np.stack([truth[places - 1], truth[places], seen], 1)


def unigram(tokens: np.ndarray[Any, Any], asked: Pairs, words: int) -> float:
    """Nats a guess by frequency alone, one added to each."""
    counts = np.bincount(tokens, minlength=words) + 1.0
    return float(-np.log(counts[asked[:, 1]] / counts.sum()).mean())


def bigram(tokens: np.ndarray[Any, Any], asked: Pairs, words: int) -> float:
    """Nats a guess by the word before, at the discount that is best for just these guesses."""
    counts = np.zeros((words, words), dtype=np.float32)
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1.0)
    kinds = counts > 0
    after = (kinds.sum(0) + 1.0) / (kinds.sum() + words)  # in how many contexts a word stands
    before, word = asked.T[:2]
    whole, seen = counts.sum(1)[before], kinds.sum(1)[before]

    def nats(discount: float) -> float:
        left = np.where(whole > 0, discount * seen / np.maximum(whole, 1), 1.0)
        own = np.maximum(counts[before, word] - discount, 0) / np.maximum(whole, 1)
        return float(-np.log(own + left * after[word]).mean())

    return min(map(nats, DISCOUNTS))


def baselines(recipe: str, settings: list[str]) -> dict[str, float]:
    """Of the recipe's own tokens and held-out samples."""
    from ortlaunch.recipe import load
    from ortlaunch.resolve.shipped import locate
    from ortlaunch.worker.data import Data

    made = load(locate(Path(recipe)), settings).recipe
    data = Data(made)
    held_out: Any = data.evaluation
    masked, words = made.model.task != "causal-lm", len(data.tokenizer)
    asked = np.concatenate([guessed(held_out.sample(i, 0), masked) for i in range(len(held_out))])
    training: Any = data.train
    tokens = np.asarray(training.tokens).astype(np.int64)
    seen, unseen = asked[asked[:, 2] == 1], asked[asked[:, 2] == 0]
    found = {
        "every word alike": math.log(words),
        "by frequency": unigram(tokens, asked, words),
        "by the word before": bigram(tokens, asked, words),
    }
    if len(unseen):
        nats = len(seen) * bigram(tokens, seen, words) + len(unseen) * unigram(tokens, unseen, words)
        found["where it is not masked"] = nats / len(asked)
    return found


def curves(records: list[dict[str, Any]]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(step, value): the loss of training, and the nats of a held-out guess; BERT's loss has its pairs beside."""
    training = [(one["step"], one["loss"]) for one in records if "loss" in one]
    held_out = [
        (one["step"], math.log(one["evaluation_perplexity"])) for one in records if "evaluation_perplexity" in one
    ]
    return training, held_out


def draw(recipe: str, found: dict[str, float], records: list[dict[str, Any]], path: Path) -> None:
    """Held-out and training loss over the steps, the baselines as lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    training, held_out = curves(records)
    axes.plot(*zip(*training), color="#b9c4d0", label="training loss")
    axes.plot(*zip(*held_out), color="#2f6fb3", marker="o", label=f"held out: {held_out[-1][1]:.3f} at the end")
    for (name, value), style in zip(found.items(), (":", "--", "-", "-.")):
        axes.axhline(value, color="#555555", linestyle=style, linewidth=1, label=f"{name}: {value:.3f}")
    axes.set(title=f"{recipe}, engine ort", xlabel="step", ylabel="nats a guess")
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> int:
    """Train, count, print, draw; status 1 where counting pairs of words is as good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--set", nargs="*", default=(), help="overrides of the recipe, key=value")
    parser.add_argument("--picture", type=Path, help="a .png file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        settings = [*overrides(folder, options.steps), *options.set]
        records = train(options.recipe, settings, folder / "run")
        found = baselines(options.recipe, settings)
        summary = json.loads((folder / "run" / "summary.json").read_text())
    model = curves(records)[1][-1][1]
    for what, nats in {**found, "the model": model}.items():
        print(f"{what:22} {nats:.3f} nats, perplexity {math.exp(nats):.1f}")
    seconds = sum(summary["seconds"].values())
    print(
        f"{options.recipe}: {options.steps} steps, {summary['seconds']['training']:.0f} s of training, {seconds:.0f} s"
    )
    if options.picture:
        draw(options.recipe, found, records, options.picture)
    return int(model >= min(found.values()))


if __name__ == "__main__":
    sys.exit(main())
