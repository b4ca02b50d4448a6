"""A pass over the evaluation corpus: the loss by the run's engine, and how often the model is right.

Every sample counts once, counts are summed over the ranks, and dropout is off: a number is the same on any number of
ranks, whatever their last batches are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ortlaunch.recipe.fields.families import LABELLED_TASKS, LANGUAGE_TASKS, SCORED_TASKS
from ortlaunch.worker.data import IGNORED, Samples
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.evaluation.own_metric import OwnMetric
from ortlaunch.worker.evaluation.scores import Scores
from ortlaunch.worker.evaluation.word_scores import word_scores
from ortlaunch.worker.model.chunked_head import LABELS
from ortlaunch.worker.model.own_numbers import Numbers, loss_in
from ortlaunch.worker.process_group.agreement import Agreement
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session

Batch = dict[str, torch.Tensor]
Counts = dict[str, torch.Tensor]
_PAIRS = "seq_relationship_logits"


def named(evaluated: dict[str, float]) -> dict[str, float]:
    """As metrics.jsonl has them, beside the numbers of training."""
    return {f"evaluation_{name}": value for name, value in evaluated.items()}


def turns(session: Session, samples: Samples) -> Iterator[tuple[Batch, range]]:
    """This rank's micro batches, and which samples are in each; ranks take turns, and all have as many.

    A rank without samples left still runs one: with ZeRO 3 a forward pass is a collective.
    """
    group, micro = session.group, session.plan.batch.micro_samples
    for turn in range(0, len(samples), group.size * micro):
        first = turn + group.rank * micro
        counted = range(first, min(first + micro, len(samples)))
        yield session.batches.stacked([samples.sample(i, epoch=0) for i in counted or range(1)]), counted


@torch.no_grad()
def evaluate(session: Session, samples: Samples, agreed: Agreement | None = None) -> dict[str, float] | None:
    """The mean loss over the evaluation corpus, weighted as in training, and the task's metrics, by name (collective).

    None where the ranks agreed to stop meanwhile.
    """
    engine, group, own_metric = session.engine, session.group, OwnMetric(session.recipe.train.metric)
    total, seen, counts, numbers, task = 0.0, 0.0, Counts(), Numbers(), session.recipe.model.task
    scores = Scores(_class_names(engine.plain.model))
    with _evaluating(engine.eval_module, engine.plain), _outputs(session) as output_of:
        for batch, counted in turns(session, samples):
            if agreed is not None and agreed.now().stops:
                return None
            weight = engine.loss_weight.of(batch, counted) if counted else 0.0
            session.progress.pulse.tick()
            taken = engine.take(batch)
            given = _passed(session, taken)
            loss = numbers.take(given, weight) if engine.plain.has_numbers else loss_in(given)
            total, seen = total + float(loss) * weight, seen + weight
            labels = {name: batch[name].to(engine.device) for name in LABELS if name in batch}  # without an added one
            output = output_of(given, taken)
            if task in LABELLED_TASKS:
                scores.add(_logits(output), labels.get("labels"), counts=bool(counted))
            elif task in LANGUAGE_TASKS:
                output = said_of(output, labels, engine.plain, engine.loss_weight.shifted)
                if task in SCORED_TASKS:
                    _add(counts, counts_of(output, labels), counts_them=bool(counted))
            own_metric.add(counted, output, batch)
    losses, weights = zip(*group.gather_numbers([total, seen]))  # not reduced, so that all ranks have the same bits
    if not sum(weights):
        raise DataError(f"data.evaluation: nothing counts in its {len(samples)} samples: train.loss_weight is 0 in all")
    loss = sum(losses) / sum(weights)
    numbers.keep()
    found = {"loss": loss, **_metrics(session, loss, _of_all_ranks(group, counts)), **scores.read(group)}
    found |= numbers.read(group) if engine.plain.has_numbers else {}
    return found | own_metric.read(group, found)


def _passed(session: Session, taken: Batch) -> Any:
    """What the engine's module returns. For engine ort a short last batch is filled with its last sample, unlabelled.

    ONNX Runtime's graph would be exported anew for its size, and again for the next evaluation's first batch, where the
    model asks sizes in Python.
    """
    module, micro = session.engine.eval_module, session.plan.batch.micro_samples
    samples = {len(value) if value.dim() else 0 for value in taken.values()}
    graph = session.engine.record.engine.used == "ort" and session.recipe.model.task != "custom"
    if not graph or len(samples) > 1 or micro in samples or _are_numbers(taken.get("labels")):
        return module(**taken)
    (count,) = samples
    given = module(**{name: _filled(name, value, micro) for name, value in taken.items()})
    if not isinstance(given, Mapping):
        return given
    return {name: value[:count] if value.dim() else value for name, value in given.items()}


def _filled(name: str, value: torch.Tensor, rows: int) -> torch.Tensor:
    added = value[-1:].expand(rows - len(value), *value.shape[1:])
    return torch.cat([value, torch.full_like(added, IGNORED) if name in LABELS else added])


def _are_numbers(labels: torch.Tensor | None) -> bool:
    """Whose error no label leaves out."""
    return labels is None or labels.is_floating_point()


def _class_names(model: Any) -> list[str]:
    """Of a model of transformers, in the order of their numbers."""
    names = getattr(getattr(model, "config", None), "id2label", None) or {}
    return [names[number] for number in sorted(names)]


@contextlib.contextmanager
def _evaluating(*modules: Any) -> Iterator[None]:
    """While open, dropout is off."""
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()


@contextlib.contextmanager
def _outputs(session: Session) -> Iterator[Callable[[Any, Batch], Any]]:
    """What the model returns for a batch beside its loss, of what the engine gave: scores, which metrics are made of.

    A metric of the user's may want all of it. Eager PyTorch's own pass has it; for the other engines plain PyTorch
    passes once more. Of a language model it gets what `said_of` makes of scores.
    """
    model = session.engine.plain.model
    own = session.recipe.model.task == "custom"
    if session.recipe.train.metric is None or session.recipe.model.task in LANGUAGE_TASKS:
        yield lambda given, taken: given if isinstance(given, Mapping) else None
    elif session.engine.record.engine.used == "eager":
        kept: list[Any] = []
        handle = model.register_forward_hook(lambda _, __, output: kept.append(output))
        try:
            yield lambda given, taken: kept.pop()
        finally:
            handle.remove()
    else:
        yield lambda given, taken: model(**{name: each for name, each in taken.items() if own or name not in LABELS})


def said_of(output: Any, labels: Batch, plain: Any = None, shifted: bool = False) -> Batch:
    """Of one batch of a language model, what metrics are made of: `WordScores` by name, and `seq_relationship_logits`.

    Args:
        output: of the model; where `plain`, its LossModule, makes head and loss in chunks, with what goes into the head
            in place of logits.
        labels: those of the batch.
        shifted: see `word_scores`.
    """
    words, states = labels.get("labels"), _logits(output)
    if words is None or states is None or words.dim() != 2 or states.dim() != 3:
        return {}
    pairs = {name: output[name] for name in (_PAIRS,) if name in output}
    return {**word_scores(states, words, plain, shifted)._asdict(), **pairs}


def _logits(output: Any) -> torch.Tensor | None:
    found: torch.Tensor | None = output and output.get("prediction_logits", output.get("logits"))
    return found


def counts_of(said: Batch, labels: Batch) -> Counts:
    """Of one batch of a language model: words and sentence pairs with how many are right, and the words' loss."""
    found = Counts()
    if "predictions" in said:
        counted = said["predictions"] != IGNORED
        right = said["predictions"].eq(labels["labels"]) & counted
        numbers = (right, counted, said["losses"].masked_fill(~counted, 0.0))
        found["words"] = torch.stack([each.sum(dtype=torch.float64) for each in numbers])
    if _PAIRS in said and "next_sentence_label" in labels:
        right = said[_PAIRS].argmax(-1) == labels["next_sentence_label"]
        found["pairs"] = torch.stack([right.sum(), torch.tensor(right.numel(), device=right.device)])
    return found


def _add(total: Counts, found: Counts, counts_them: bool) -> None:
    """One batch's to those before; a batch that only fills a rank's turn counts nothing."""
    for name, value in found.items():
        mine = value.double() if counts_them else torch.zeros_like(value, dtype=torch.float64)
        total[name] = total[name] + mine if name in total else mine


def _of_all_ranks(group: DistributedContext, counts: Counts) -> dict[str, list[float]]:
    ranks = {name: group.gather_numbers(value.tolist()) for name, value in counts.items()}
    return {name: [sum(values) for values in zip(*of_ranks)] for name, of_ranks in ranks.items()}


def _metrics(session: Session, loss: float, counts: dict[str, list[float]]) -> dict[str, float]:
    """Of all samples, by the names of `Evaluation`."""
    found = {}
    if session.recipe.model.task == "causal-lm" and session.engine.loss_weight.by == "labels":
        found["perplexity"] = _exp(loss)
    if "words" in counts:
        right, words, lost = counts["words"]
        found |= {"perplexity": _exp(lost / words), "masked_word_accuracy": right / words} if words else {}
    if "pairs" in counts:
        found["next_sentence_accuracy"] = counts["pairs"][0] / counts["pairs"][1]
    return found


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
