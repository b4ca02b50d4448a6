"""A pass over the evaluation corpus: the loss by the run's engine, and how often the model is right.

Every sample counts once, counts are summed over the ranks, and dropout is off: a number is the same on any number of
ranks, whatever their last batches are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ortlaunch.worker.data import IGNORED, Samples
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.evaluation.measure import measures
from ortlaunch.worker.evaluation.own_metric import OwnMetric
from ortlaunch.worker.evaluation.word_scores import word_outputs
from ortlaunch.worker.model.chunked_head import LABELS
from ortlaunch.worker.model.own_numbers import Numbers, loss_in
from ortlaunch.worker.process_group.agreement import Agreement
from ortlaunch.worker.session import Session

Batch = dict[str, torch.Tensor]


def named(evaluated: dict[str, float]) -> dict[str, float]:
    """As metrics.jsonl has them, beside the numbers of training."""
    return {f"evaluation_{name}": value for name, value in evaluated.items()}


def turns(session: Session, samples: Samples) -> Iterator[tuple[Batch, range]]:
    """This rank's micro batches, and which samples are in each; ranks take turns, and all have as many.

    A rank without samples left still runs one: with ZeRO 3 a forward pass is a collective.
    """
    group = session.group
    micro = session.plan.batch.micro_samples
    for turn in range(0, len(samples), group.size * micro):
        first = turn + group.rank * micro
        counted = range(first, min(first + micro, len(samples)))
        yield (
            session.batches.stacked([samples.sample(i, epoch=0) for i in counted or range(1)]),
            counted,
        )


@torch.no_grad()
def evaluate(
    session: Session, samples: Samples, agreed: Agreement | None = None
) -> dict[str, float] | None:
    """The mean loss over the evaluation corpus, weighted as in training, and the task's metrics, by name (collective).

    None where the ranks agreed to stop meanwhile.
    """
    engine = session.engine
    group = session.group
    own_metric = OwnMetric(session.recipe.train.metric)
    total = 0.0
    seen = 0.0
    numbers = Numbers()
    model = session.recipe.model
    counters = measures(model.task, engine)
    with _evaluating(engine.eval_module, engine.plain), _outputs(session) as output_of:
        for batch, counted in turns(session, samples):
            if agreed is not None and agreed.now().stops:
                return None
            weight = engine.loss_weight.of(batch, counted) if counted else 0.0
            session.progress.pulse.tick()
            taken = engine.take(batch)
            given = _passed(session, taken)
            loss = numbers.take(given, weight) if engine.plain.has_numbers else loss_in(given)
            total = total + float(loss) * weight
            seen = seen + weight
            labels = {
                name: batch[name].to(engine.device) for name in LABELS if name in batch
            }  # without an added one
            output = output_of(given, taken)
            if model.traits.predicts:
                output = word_outputs(output, labels, engine.plain, engine.loss_weight.shifted)
            for counter in counters:
                counter.add(output, labels, bool(counted))
            own_metric.add(counted, output, batch)
    losses, weights = zip(
        *group.gather_numbers([total, seen])
    )  # not reduced, so that all ranks have the same bits
    if not sum(weights):
        raise DataError(
            f"data.evaluation: nothing counts in its {len(samples)} samples: train.loss_weight is 0 in all"
        )
    loss = sum(losses) / sum(weights)
    numbers.keep()
    found = {"loss": loss}
    for counter in counters:
        found |= counter.read(group, loss)
    found |= numbers.read(group) if engine.plain.has_numbers else {}
    return found | own_metric.read(group, found)


def _passed(session: Session, taken: Batch) -> Any:
    """What the engine's module returns. For engine ort a short last batch is filled with its last sample, unlabelled.

    ONNX Runtime's graph would be exported anew for its size, and again for the next evaluation's first batch, where the
    model asks sizes in Python.
    """
    module = session.engine.eval_module
    micro = session.plan.batch.micro_samples
    samples = {len(value) if value.dim() else 0 for value in taken.values()}
    graph = session.engine.record.engine.used == "ort" and not session.recipe.model.traits.is_own
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


@contextlib.contextmanager
def _evaluating(*modules: nn.Module) -> Iterator[None]:
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
    passes once more. Of a language model it gets what `word_outputs` makes of scores.
    """
    model = session.engine.plain.model
    traits = session.recipe.model.traits
    if session.recipe.train.metric is None or traits.predicts:
        yield lambda given, taken: given if isinstance(given, Mapping) else None
    elif session.engine.record.engine.used == "eager":
        kept: list[Any] = []
        handle = model.register_forward_hook(lambda _, __, output: kept.append(output))
        try:
            yield lambda given, taken: kept.pop()
        finally:
            handle.remove()
    else:
        yield lambda given, taken: model(
            **{name: each for name, each in taken.items() if traits.is_own or name not in LABELS}
        )
