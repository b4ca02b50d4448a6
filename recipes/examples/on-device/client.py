"""Train the artifacts on a text with onnxruntime alone, as page.html does, and write the weights.

python client.py ARTIFACTS mine.txt weights.f32
"""

import sys

import numpy as np
from onnxruntime.training.api import CheckpointState, Module, Optimizer
from tokenizers import Tokenizer

ROWS, LENGTH, STEPS = 4, 64, 20


def train(artifacts, text, steps=STEPS):
    """Return the losses, and the trained weights in one row."""
    state = CheckpointState.load_checkpoint(f"{artifacts}/checkpoint")
    module = Module(f"{artifacts}/training_model.onnx", state, f"{artifacts}/eval_model.onnx")
    optimizer = Optimizer(f"{artifacts}/optimizer_model.onnx", module)
    tokens = Tokenizer.from_file(f"{artifacts}/tokenizer.json").encode(text).ids
    rows = np.array(tokens[: len(tokens) // LENGTH * LENGTH], np.int64).reshape(-1, LENGTH)
    losses = []
    for step in range(steps):
        ids = rows[np.arange(step * ROWS, (step + 1) * ROWS) % len(rows)]
        module.train()
        loss, *_ = module(ids, np.ones_like(ids), ids)
        optimizer.step()
        module.lazy_reset_grad()
        losses.append(float(loss))
    return losses, module.get_contiguous_parameters(trainable_only=True).numpy()


if __name__ == "__main__":
    with open(sys.argv[2], encoding="utf-8") as file:
        found, weights = train(sys.argv[1], file.read())
    weights.astype("<f4").tofile(sys.argv[3])
    print(f"{STEPS} steps, {STEPS * ROWS} samples: loss {found[0]:.4f} to {found[-1]:.4f}")
