"""Federated averaging beside training in one place: four clients, five rounds, `ortlaunch device` alone.

    python benchmarks/federated.py [--folder FOLDER] [--batch 16] [--rates 2e-3,4e-3]

A small Llama learns from two elevenths of the language reference, which CPython carries, for 60 steps (more overfit);
the rest is split by topic among four clients, with a part held out. Each round every client trains the common
checkpoint on its own topics, and `average` takes the mean.
Beside it one device trains on the topics of all and sees as many samples as all clients
together: in as many steps as a client takes, of the batches of all, as data parallel ranks do, which is what the
average is held to; and in as many as all clients take, one after another, which only one place can. The schedule is
the same everywhere, and each has the best of the rates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLIENTS, ROUNDS = "abcd", 5
SAMPLES = 320  # of a client in a round: about half of what it has
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
train: {max_steps: 60}
"""


def main() -> int:
    """Train, average, measure, print; status 1 where the average is more than a tenth above one place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="to keep what is made")
    parser.add_argument("--batch", type=int, default=16, help="samples of a client's step")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a client in a round")
    parser.add_argument("--rates", default="2e-3,4e-3", help="learning rates to try, on both sides")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        prepare(folder)
        print(f"from the public texts {loss(folder, 'first'):.4f}", flush=True)
        steps, rates = options.samples // options.batch, options.rates.split(",")
        federated = min(averaged(folder, rate, options.batch, steps) for rate in rates)
        at_once = min(in_one_place(folder, rate, options.batch * len(CLIENTS), ROUNDS * steps) for rate in rates)
        in_turn = min(in_one_place(folder, rate, options.batch, ROUNDS * steps * len(CLIENTS)) for rate in rates)
    print(f"federated {federated:.4f}; one place {at_once:.4f}: {federated / at_once - 1:+.1%}; "
          f"in {len(CLIENTS)} x as many steps {in_turn:.4f}: {federated / in_turn - 1:+.1%}")  # fmt: skip
    return int(federated > 1.1 * at_once)


def prepare(folder: Path) -> None:
    """Texts, and the artifacts of a run on the public ones."""
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder)
    (folder / "recipe.yaml").write_text(RECIPE)
    ortlaunch(folder, "train", "recipe.yaml", "--run-dir=run")
    ortlaunch(folder, "export", "run", "--format=ondevice", "--to=artifacts")
    (folder / "first").write_bytes((folder / "artifacts/checkpoint").read_bytes())


def in_one_place(folder: Path, rate: str, batch: int, steps: int) -> float:
    """The loss after so many steps on the topics of all."""
    everybody = f"data.train.path=[{','.join(f'{name}.txt' for name in CLIENTS)}]"
    settings = (everybody, *length(rate, batch, steps), "--checkpoint=first", "--to=central")
    ortlaunch(folder, "device", "train", "artifacts", *settings)
    found = loss(folder, "central")
    print(f"one place, rate {rate}: {found:.4f} after {steps} steps of {batch}", flush=True)
    return found


def averaged(folder: Path, rate: str, batch: int, steps: int) -> float:
    """The loss after the last round."""
    (folder / "common").write_bytes((folder / "first").read_bytes())
    found = []
    for _ in range(ROUNDS):
        for name in CLIENTS:
            mine = (f"data.train.path=[{name}.txt]", *length(rate, batch, ROUNDS * steps), f"--steps={steps}")
            ortlaunch(folder, "device", "train", "artifacts", *mine, "--checkpoint=common", f"--to=client-{name}")
        clients = [f"client-{name}" for name in CLIENTS]
        ortlaunch(folder, "device", "average", "artifacts", *clients, "--to=common")
        found.append(loss(folder, "common"))
    rounds = ", ".join(f"{each:.4f}" for each in found)
    print(f"federated, rate {rate}: {rounds} after rounds of {steps} steps of {batch}", flush=True)
    return found[-1]


def length(rate: str, batch: int, steps: int) -> tuple[str, ...]:
    """Settings of a training: the rate falls to 0 at its last step, over all rounds."""
    return (f"optimizer.learning_rate={rate}", f"batch.micro_size={batch}", f"train.max_steps={steps}",
            "schedule.name=linear")  # fmt: skip


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
    sys.exit(main())
