"""What a run writes while it trains: metrics.jsonl, trackers, and a line for a person. Rank 0 only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from ortlaunch.recipe import Recipe
from ortlaunch.run.folder import RunDir, json_text, write_text
from ortlaunch.run.lines import json_lines
from ortlaunch.run.records import MetricsLine
from ortlaunch.units import duration
from ortlaunch.worker.trackers import Beside

# Of an evaluation, beside its loss.
EVALUATED = {
    "perplexity": "perplexity {:,.4g}", "masked_word_accuracy": "masked words {:.2%}",
    "next_sentence_accuracy": "sentence pairs {:.2%}", "classification_accuracy": "accuracy {:.2%}",
    "f1_macro": "F1 {:.4f}", "entity_precision": "precision {:.4f}", "entity_recall": "recall {:.4f}",
    "entity_f1": "entity F1 {:.4f}", "mse": "MSE {:.4g}", "pearson": "Pearson {:.4f}",
}  # fmt: skip


EVALUATION = "evaluation_"
KNOWN = {each.name for each in fields(MetricsLine)} | {f"{EVALUATION}{name}" for name in ("loss", *EVALUATED)}


class Metrics:
    """Writes one object a logged step: step, epoch, loss, learning_rate, tokens_per_second, elapsed_seconds, ..."""

    def __init__(self, recipe: Recipe, run: RunDir, first_step: int) -> None:
        self.max_steps, self.first_step = recipe.train.steps, first_step
        self.before = _cut_after(run, first_step)
        self.file = run.metrics.open("a", encoding="utf-8", buffering=1)
        self.trackers = [Beside(name, recipe, run, first_step) for name in recipe.log.trackers]
        self.started = time.perf_counter()

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record the values of a step (from 1) and show them."""
        elapsed = time.perf_counter() - self.started
        record = {"step": step, **values, "elapsed_seconds": round(self.before + elapsed, 3)}
        try:
            self.file.write(json_text(record) + "\n")
        except OSError as error:
            error.filename = self.file.name  # a full disk is met in a write, which has no name
            raise
        for tracker in self.trackers:
            tracker.log(step, values)
        self._show(step, values, elapsed)

    def _show(self, step: int, values: dict[str, Any], elapsed: float) -> None:
        left = elapsed / max(1, step - self.first_step) * (self.max_steps - step)
        line = f"step {step}/{self.max_steps}  " + "  ".join(_shown(values)) + f"  ETA {duration(left)}"
        print(line, flush=True)

    def close(self, failed: bool = False) -> None:
        """Flush and close."""
        self.file.close()
        for tracker in self.trackers:
            tracker.close(failed)


def _shown(values: dict[str, Any]) -> list[str]:
    forms = {
        "epoch": "epoch {:.2f}", "loss": "loss {:.4f}", "evaluation_loss": "evaluation loss {:.4f}",
        "learning_rate": "lr {:.3g}", "gradient_norm": "grad norm {:.3g}", "tokens_per_second": "{:,.0f} tokens/s",
        "samples_per_second": "{:,.1f} samples/s", "mfu": "MFU {:.1%}",
        **{f"evaluation_{name}": form for name, form in EVALUATED.items()},
    }  # fmt: skip
    if values.get("tokens_per_second") is not None:  # one speed is enough for a line
        del forms["samples_per_second"]
    own = (f"{name.replace(EVALUATION, 'evaluation ')} {values[name]:.4g}" for name in own_names(values))
    return [*(form.format(values[name]) for name, form in forms.items() if values.get(name) is not None), *own]


def own_names(values: Mapping[str, Any]) -> list[str]:
    """Of those numbers that the user's own model or metric gave."""
    return [name for name, value in values.items() if name not in KNOWN and value is not None]


def _cut_after(run: RunDir, step: int) -> float:
    """A resumed run takes up its own record where the checkpoint left it; returns the seconds that it took so far."""
    lines = json_lines(run.metrics, "step", "elapsed_seconds")
    if lines.left_out:
        print(*lines.left_out, sep="\n", flush=True)
    kept = [record for record in lines.found if record["step"] <= step]
    if run.metrics.exists():
        write_text(run.metrics, "".join(json_text(record) + "\n" for record in kept))
    return float(kept[-1]["elapsed_seconds"]) if kept else 0.0


def records(run: RunDir) -> list[dict[str, Any]]:
    """What can be read of metrics.jsonl."""
    return json_lines(run.metrics, "step").found


def flops_per_token(model: torch.nn.Module, sequence_length: int | None) -> float | None:
    """Floating point operations of forward and backward a token, after Chowdhery et al., "PaLM" (2022), appendix B.

    6 for each weight that multiplies (4 where it is frozen), and 12 x layers x hidden x length for attention. None
    for models without a transformers config.
    """
    config = getattr(model, "config", None)
    if config is None or sequence_length is None or not hasattr(config, "num_hidden_layers"):
        return None
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tied = {id(head.weight)} if head is not None else set()
    looked_up = {id(table) for table in tables} - tied
    weights = sum((6 if p.requires_grad else 4) * p.numel() for p in model.parameters() if id(p) not in looked_up)
    return float(weights + 12 * config.num_hidden_layers * config.hidden_size * sequence_length)


def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of a large matrix product here and now, operations a second: what MFU is measured against.

    On a CPU float32's where that is the higher: some have bfloat16 in software alone, a hundred times slower.
    """
    if device.type == "cuda":
        return _rate_of_products(device, dtype, 8192)
    best = _rate_of_products(device, torch.float32, 1024)
    if dtype == torch.float32 or _rate_of_products(device, dtype, 256) < best / 8:  # a large one would take seconds
        return best
    return max(best, _rate_of_products(device, dtype, 1024))


def _rate_of_products(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """The best of five."""
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(5):
        wait_for(device)
        start = time.perf_counter()
        a @ a
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
