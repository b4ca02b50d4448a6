"""Loss curves of ortlaunch against plain PyTorch: the reference loop, the cases, the comparison.

The reference shares only the batches with ortlaunch. Model, optimizer, schedule, clipping and the
loop are written here by hand, in one process, with transformers and torch alone.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RECIPES = ("bert-large/tiny", "llama2-7b/tiny")
STEPS = 20
LAUNCHES = {
    "one process": (),
    "torchrun": ("--launcher=torchrun", "--nproc-per-node=2"),
    "mpirun": ("--launcher=mpi", "--nproc-per-node=2"),
}
NO_DROPOUT = (
    "model.config.hidden_dropout_prob=0.0",
    "model.config.attention_probs_dropout_prob=0.0",
)


class Case(NamedTuple):
    """A recipe, and the engine, launch and sharding that train it."""

    recipe: str
    engine: str
    launch: str
    zero: int | None

    def __str__(self) -> str:
        zero = "no DeepSpeed" if self.zero is None else f"ZeRO {self.zero}"
        return f"{self.recipe.split('/')[0]}, {self.engine}, {self.launch}, {zero}"


def cases(engines: tuple[str, ...] = ("eager", "inductor", "ort")) -> Iterator[Case]:
    """Yield every case that must give the plain curve; ZeRO 3 only on eager."""
    for recipe, engine, launch in itertools.product(RECIPES, engines, LAUNCHES):
        for zero in (None, 1, 2, *((3,) if engine == "eager" else ())):
            yield Case(recipe, engine, launch, zero)


def overrides(recipe: str) -> list[str]:
    """Return the settings of all runs of a recipe: short, every step logged, no dropout."""
    # 16 and 4 divide over one and two ranks, with accumulation in both.
    short = [
        f"train.max_steps={STEPS}",
        "log.every_steps=1",
        "batch.global_size=16",
        "batch.micro_size=4",
    ]
    # Llama has no dropout.
    return [*short, *(NO_DROPOUT if recipe.startswith("bert") else ())]


def train(case: Case, run_dir: Path, *more: str, timeout: float = 400) -> list[float]:
    """Return the losses of `ortlaunch train` by step; the run folder is kept."""
    zero = "null" if case.zero is None else f"{{stage: {case.zero}}}"
    settings = [*overrides(case.recipe), f"engine={{name: {case.engine}}}", f"zero={zero}", *more]
    recipe = str(ROOT / "recipes" / f"{case.recipe}.yaml")
    options = (*LAUNCHES[case.launch], f"--run-dir={run_dir}")
    command = [sys.executable, "-m", "ortlaunch.cli", "train", recipe, *settings, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert result.returncode == 0, f"{case}:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def reference(recipe_name: str, device: str = "cpu") -> list[float]:
    """Return the losses of the plain PyTorch loop by step, in this process, in float32."""
    # Imported here, so that a test's collection does not load torch and transformers.
    import torch
    import transformers

    from ortlaunch.launch_plan import BatchPlan
    from ortlaunch.recipe import load_recipe
    from ortlaunch.worker.data import Batches, LoadedData

    recipe = load_recipe(ROOT / "recipes" / f"{recipe_name}.yaml", overrides(recipe_name)).recipe
    data = LoadedData(recipe)
    total = recipe.batch.global_size
    micro = recipe.batch.micro_size
    batches = Batches(data.train, BatchPlan(total, micro, total // micro, 1, None), recipe.seed)

    fields = dict(recipe.model.config)
    # ortlaunch rounds the vocabulary up to a multiple of 8.
    vocabulary = -(-len(data.tokenizer) // 8) * 8
    config = transformers.AutoConfig.for_model(
        fields.pop("model_type"), **{"vocab_size": vocabulary, **fields}
    )
    config.pad_token_id = data.tokenizer.pad_token_id
    # The same seed at the same point as in ortlaunch gives the same initial weights.
    torch.manual_seed(recipe.seed)
    auto = {
        "pretraining": transformers.AutoModelForPreTraining,
        "causal-lm": transformers.AutoModelForCausalLM,
    }
    model = (
        auto[recipe.model.task].from_config(config, attn_implementation="eager").train().to(device)
    )

    o = recipe.optimizer
    # Biases and norms have no decay, as the recipe's list of names states.
    decayed = [p for n, p in model.named_parameters() if not any(word in n for word in o.no_decay)]
    spared = [p for n, p in model.named_parameters() if any(word in n for word in o.no_decay)]
    groups = [
        {"params": decayed, "weight_decay": o.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=o.learning_rate, betas=o.betas, eps=o.epsilon)

    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = o.learning_rate * _factor(recipe, step)
        passes = []
        taken = [
            batches.read_micro_batch_and_count_tokens(step, i, 0) for i in range(total // micro)
        ]
        # The mean is over the step's labels, and a short document has fewer masked words.
        counts = [int((batch["labels"] != -100).sum()) for batch in taken]
        for batch, count in zip(taken, counts):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss * (
                count / sum(counts)
            )
            loss.backward()
            passes.append(loss.item())
        if recipe.train.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(passes))
    return losses


def _factor(recipe, step: int) -> float:
    """Return the factor of the learning rate at a step, for the tiny recipes' schedules."""
    schedule = recipe.schedule
    warmup = (
        schedule.warmup_steps
        if schedule.warmup_steps is not None
        else round((schedule.warmup_ratio or 0) * STEPS)
    )
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (STEPS - warmup)
    return {
        "linear": 1 - progress,
        "constant": 1.0,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "polynomial": (1 - step / STEPS) ** schedule.power,
    }[schedule.name]


def largest_difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two curves of the same length."""
    assert len(losses) == len(expected), f"{len(losses)} steps, not {len(expected)}"
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
