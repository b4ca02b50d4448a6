"""Federated averaging beside training in one place: four clients, five rounds, `ortlaunch device` alone.

    python benchmarks/federated.py [FOLDER]

A small Llama learns from two elevenths of the language reference, which CPython carries; the rest is split by topic
among four clients, with a part held out. Each round every client trains the common checkpoint on its own topics, and
`average` takes the mean. Beside it one device trains on the topics of all: as many steps as a client, and as all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLIENTS, ROUNDS, STEPS = "abcd", 5, 20
RECIPE = """\
name: federated
model:
  task: causal-lm
  config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 128,
           max_position_embeddings: 64}
data:
  train: {format: text, path: [public.txt]}
  evaluation: {format: text, path: [held-out.txt]}
  tokenizer: {train: bpe, vocab_size: 1000}
  sequence_length: 64
batch: {micro_size: 16, accumulation_steps: 1}
optimizer: {name: adamw, learning_rate: 3e-3}
schedule: {name: constant}
engine: {name: eager}
train: {max_steps: 20}
"""


def main() -> None:
    """Train, average, measure, print."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write_texts(folder)
        (folder / "recipe.yaml").write_text(RECIPE)
        ortlaunch(folder, "train", "recipe.yaml", "--run-dir=run")
        ortlaunch(folder, "export", "run", "--format=ondevice", "--to=artifacts")
        print(f"from the public texts   {loss(folder, 'artifacts/checkpoint'):.4f}", flush=True)
        everybody = f"data.train.path=[{','.join(f'{name}.txt' for name in CLIENTS)}]"
        for name, steps in (
            ("a client's steps", ROUNDS * STEPS),
            ("all clients' steps", len(CLIENTS) * ROUNDS * STEPS),
        ):
            ortlaunch(folder, "device", "train", "artifacts", everybody, f"train.max_steps={steps}", "--to=central")
            print(f"one place, {name:18} {loss(folder, 'central'):.4f} after {steps} steps", flush=True)
        for turn in range(ROUNDS):
            for name in CLIENTS:
                mine = (f"data.train.path=[{name}.txt]", f"train.max_steps={ROUNDS * STEPS}", f"--steps={STEPS}")
                ortlaunch(folder, "device", "train", "artifacts", *mine, f"--to=client-{name}")
            ortlaunch(folder, "device", "average", "artifacts", *(f"client-{name}" for name in CLIENTS))
            print(f"average of round {turn + 1}      {loss(folder, 'artifacts/checkpoint'):.4f}", flush=True)


def write_texts(folder: Path) -> None:
    """Topics in turn: of eleven two are public, one is held out, eight go to the clients."""
    from pydoc_data.topics import topics

    files: dict[str, list[str]] = {}
    names = ["public", "a", "b", "c", "held-out", "d", "public", "a", "b", "c", "d"]
    for number, name in enumerate(sorted(topics)):
        files.setdefault(names[number % len(names)], []).append(topics[name])
    for name, texts in files.items():
        (folder / f"{name}.txt").write_text("\n\n".join(texts), encoding="utf-8")


def ortlaunch(folder: Path, *words: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "ortlaunch.cli", *words]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "2"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def loss(folder: Path, checkpoint: str) -> float:
    """On the held-out topics."""
    ortlaunch(folder, "device", "evaluate", "artifacts", f"--checkpoint={checkpoint}")
    found: dict[str, Any] = json.loads((folder / "artifacts/evaluation.json").read_text())
    return float(found["loss"])


if __name__ == "__main__":
    main()
