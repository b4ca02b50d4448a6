"""A pass over the evaluation corpus: the loss by the run's engine, and how often the model is right.

Every sample counts once, and dropout is off, so that numbers are the same on any number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from ortlaunch.worker.agreement import Agreement
from ortlaunch.worker.data import IGNORED, Samples, collate
from ortlaunch.worker.data.corpus import DataError
from ortlaunch.worker.model import whole_logits
from ortlaunch.worker.session import Session

Batch = dict[str, torch.Tensor]
Counts = dict[str, torch.Tensor]


def turns(session: Session, samples: Samples) -> Iterator[tuple[Batch, range]]:
    """This rank's micro batches, and which samples are in each; ranks take turns, and all have as many.

    A rank without samples left still runs one: with ZeRO 3 a forward pass is a collective.
    """
    group, micro = session.group, session.plan.batch.micro_samples
    for turn in range(0, len(samples), group.size * micro):
        first = turn + group.rank * micro
        counted = range(first, min(first + micro, len(samples)))
        yield collate([samples.sample(i, epoch=0) for i in counted or range(1)]), counted


@torch.no_grad()
def evaluate(session: Session, samples: Samples, agreed: Agreement | None = None) -> float | None:
    """Mean loss over the evaluation corpus, weighted as in training.

    None where the ranks agreed to stop meanwhile.
    """
    engine, group = session.engine, session.group
    module, total, seen = engine.eval_module, 0.0, 0.0
    module.eval()
    for batch, counted in turns(session, samples):
        if agreed is not None and agreed.now().stops:
            module.train()
            return None
        weight = engine.loss_weight.of(batch, counted) if counted else 0.0
        session.progress.pulse.tick()
        total, seen = total + float(module(**engine.take(batch))) * weight, seen + weight
    module.train()
    if not (of_all := group.sum(seen)):
        raise DataError(f"data.evaluation: nothing counts in its {len(samples)} samples: train.loss_weight is 0 in all")
    return group.sum(total) / of_all


@torch.no_grad()
def count(session: Session, samples: Samples) -> dict[str, list[float]]:
    """What `counts_of` finds, summed over all samples (collective): by plain PyTorch, for engines give no logits."""
    engine, total = session.engine, dict[str, torch.Tensor]()
    with _logits(engine.plain, engine.record.engine.used == "inductor") as kept:
        for batch, counted in turns(session, samples):
            session.progress.pulse.tick()
            taken = engine.take(batch)
            engine.plain(**taken)
            for name, value in counts_of(kept.pop(), taken).items():
                mine = value.double() if counted else torch.zeros_like(value, dtype=torch.float64)
                total[name] = total[name] + mine if name in total else mine
    ranks = {name: session.group.gather_numbers(value.tolist()) for name, value in total.items()}
    return {name: [sum(values) for values in zip(*of_ranks)] for name, of_ranks in ranks.items()}


@contextlib.contextmanager
def _logits(plain: Any, compiled: bool) -> Iterator[list[Any]]:
    """While open, each pass of a LossModule leaves there what its model returned; without dropout, not compiled."""
    kept: list[Any] = []
    with contextlib.ExitStack() as ending:
        ending.callback(plain.train)
        plain.eval()
        ending.enter_context(whole_logits(plain))
        if compiled:
            ending.enter_context(torch.compiler.set_stance("force_eager"))
        ending.callback(plain.model.register_forward_hook(lambda _, __, output: kept.append(output)).remove)
        yield kept


def counts_of(output: Any, batch: Batch) -> Counts:
    """Of one batch: words and sentence pairs with how many are right, or samples by class; each (numbers,)."""
    found: Counts = {}
    labels, logits = batch.get("labels"), output.get("prediction_logits", output.get("logits"))
    if labels is None or logits is None or labels.is_floating_point():
        return found
    if labels.dim() == 2 and logits.dim() == 3:
        found |= _words(logits, labels)
    elif labels.dim() == 1 and logits.dim() == 2 and logits.size(1) > 1:
        found |= _classes(logits, labels)
    if "next_sentence_label" in batch and "seq_relationship_logits" in output:
        right = output["seq_relationship_logits"].argmax(-1) == batch["next_sentence_label"]
        found["pairs"] = torch.stack([right.sum(), torch.tensor(right.numel(), device=right.device)])
    return found


def _words(logits: torch.Tensor, labels: torch.Tensor) -> Counts:
    """Right ones, all, and the sum of their negative log likelihoods."""
    places = labels != IGNORED
    found, wanted = logits[places].float(), labels[places]
    lost = functional.cross_entropy(found, wanted, reduction="sum")
    return {"words": torch.stack([(found.argmax(-1) == wanted).sum().float(), places.sum().float(), lost])}


def _classes(logits: torch.Tensor, labels: torch.Tensor) -> Counts:
    """How often each class was given rightly, given, and meant."""
    classes, given, meant = logits.size(1), logits.argmax(-1), labels
    right = given[given == meant]
    return {
        name: torch.bincount(each, minlength=classes)
        for name, each in (("right", right), ("given", given), ("meant", meant))
    }


def f1_macro(right: list[float], given: list[float], meant: list[float]) -> float:
    """Mean over the classes that were given or meant of 2 x right / (given + meant), as scikit-learn's."""
    each = [2 * r / (g + m) for r, g, m in zip(right, given, meant) if g + m]
    return sum(each) / len(each)
