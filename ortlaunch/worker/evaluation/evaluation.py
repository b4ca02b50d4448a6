"""A pass over the evaluation corpus: the loss by the run's engine, and the task's metrics.

Every sample counts once, counts are summed over the ranks, and dropout is off. Therefore the result
does not depend on the number of ranks or on the size of their last batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.run_folder.records import as_json
from ortlaunch.worker.data import IGNORED, Samples
from ortlaunch.worker.data.own import seed_generators
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.evaluation.measure import measures
from ortlaunch.worker.evaluation.own_metric import OwnMetric
from ortlaunch.worker.evaluation.word_scores import word_outputs
from ortlaunch.worker.model.chunked_head import LABELS
from ortlaunch.worker.model.own_numbers import ValueMeans, loss_in
from ortlaunch.worker.process_group.agreement import Agreement
from ortlaunch.worker.session import Session

Batch = dict[str, torch.Tensor]


def evaluation_names(evaluated: dict[str, float]) -> dict[str, float]:
    """Return the metrics under their names in metrics.jsonl, which has those of training, too."""
    return {f"evaluation_{name}": value for name, value in evaluated.items()}


def turns(session: Session, samples: Samples) -> Iterator[tuple[Batch, range]]:
    """Yield this rank's micro batches with the indices of the samples that count in each.

    Ranks take turns, and all have equally many micro batches. A rank without samples left gets a
    batch of which no sample counts.
    """
    # With ZeRO 3 a forward pass is collective: every rank must run every turn.
    micro = session.plan.batch.micro_samples
    for turn in range(0, len(samples), session.group.size * micro):
        # Empty for a rank without samples left, which then runs sample 0.
        first = turn + session.group.rank * micro
        counted = range(first, min(first + micro, len(samples)))
        yield (
            session.batches.read(samples, [(index, 0) for index in counted or range(1)]),
            counted,
        )


@torch.no_grad()
def evaluate(
    session: Session, samples: Samples, agreed: Agreement | None = None
) -> dict[str, float] | None:
    """Return the mean loss over the evaluation corpus and the task's metrics, by name (collective).

    The loss is weighted as in training.

    Args:
        session: the session whose model is evaluated.
        samples: the evaluation corpus.
        agreed: if given, the ranks check after each micro batch whether to stop.

    Returns:
        The loss and the metrics; None if the ranks agreed to stop meanwhile.

    Raises:
        DataError: the weights of all samples sum to 0.
    """
    engine = session.engine
    group = session.group
    # The model's own random numbers are then those of any other evaluation of these weights.
    seed_generators(session.recipe.seed)
    own_metric = OwnMetric(session.recipe.train.metric)
    total = 0.0
    seen = 0.0
    numbers = ValueMeans()
    model = session.recipe.model
    counters = measures(model.task, engine)
    with _evaluating(engine.eval_module, engine.plain), _outputs(session) as output_of:
        engine.plain.hook("on_validation_epoch_start", numbers)
        for batch, counted in turns(session, samples):
            # At each micro batch, because an evaluation may be long.
            if agreed is not None and agreed.now().stops:
                return None
            weight = engine.loss_weight.of(batch, counted) if counted else 0.0
            session.progress.pulse.tick()
            taken = engine.to_device(batch)
            given = _passed(session, taken)
            loss = numbers.add(given, weight) if engine.plain.has_numbers else loss_in(given)
            total = total + float(loss) * weight
            seen = seen + weight
            # From `batch`, not from `taken`, which may have an added label.
            labels = {name: batch[name].to(engine.device) for name in LABELS if name in batch}
            output = output_of(given, taken)
            if model.traits.predicts:
                output = word_outputs(output, labels, engine.plain, engine.loss_weight.shifted)
            for counter in counters:
                counter.add(output, {**taken, **labels}, bool(counted))
            own_metric.add(counted, output, batch)
        engine.plain.hook("on_validation_epoch_end", numbers)
    # Gathered and summed here, not all-reduced, so that all ranks have the same bits.
    losses, weights = zip(*group.gather_numbers([total, seen]))
    if not sum(weights):
        raise DataError(
            f"data.evaluation: nothing counts in its {len(samples)} samples: train.loss_weight "
            "is 0 in all"
        )
    loss = sum(losses) / sum(weights)
    numbers.keep()
    found = {"loss": loss}
    for counter in counters:
        found |= counter.read(group, loss)
        confusion = getattr(counter, "confusion", None)
        # A model without a run has no folder for it.
        if confusion is not None and group.rank == 0 and session.run is not None:
            write_json_atomically(session.run.confusion, as_json(confusion))
    found |= numbers.read(group) if engine.plain.has_numbers else {}
    seed_generators(session.recipe.seed)
    # Last, because the user's names must differ from all others.
    return found | own_metric.read(group, found)


def _passed(session: Session, taken: Batch) -> Any:
    """Return the output of the engine's module for a batch; of a LightningModule in plain PyTorch.

    For engine ort a short last batch is filled with copies of its last sample, without labels.
    """
    # If a model reads sizes in Python, ONNX Runtime's graph would be exported again for a short
    # batch, and once more for the first batch of the next evaluation.
    # A validation_step may collect its outputs in Python, which a graph does not do.
    engine = session.engine
    module = engine.plain if session.recipe.model.traits.wrapper else engine.eval_module
    micro = session.plan.batch.micro_samples
    samples = {len(value) if value.dim() else 0 for value in taken.values()}
    graph = engine.record.engine.used == "ort" and not session.recipe.model.traits.is_own
    labels = taken.get("labels")
    # Labels of a regression have no value that means "ignored".
    can_fill = labels is not None and not labels.is_floating_point()
    if not graph or len(samples) > 1 or micro in samples or not can_fill:
        return module(**taken)
    (count,) = samples
    given = module(**{name: _filled(name, value, micro) for name, value in taken.items()})
    if not isinstance(given, Mapping):
        return given
    return {name: value[:count] if value.dim() else value for name, value in given.items()}


def _filled(name: str, value: torch.Tensor, rows: int) -> torch.Tensor:
    added = value[-1:].expand(rows - len(value), *value.shape[1:])
    return torch.cat([value, torch.full_like(added, IGNORED) if name in LABELS else added])


@contextlib.contextmanager
def _evaluating(*modules: nn.Module) -> Iterator[None]:
    """Switch dropout off while the context is open; all modules are in training mode after it."""
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()


@contextlib.contextmanager
def _outputs(session: Session) -> Iterator[Callable[[Any, Batch], Any]]:
    """Yield a function that returns the model's outputs beside the loss, for the metrics.

    Its arguments are the output of the engine's module and the batch. The built-in metrics need
    scores only. The user's own metric gets all outputs, or for a language model the result of
    `word_outputs`.
    """
    model = session.engine.plain.model
    traits = session.recipe.model.traits
    if session.recipe.train.metric is None or traits.predicts:
        yield lambda given, taken: given if isinstance(given, Mapping) else None
    # In eager PyTorch the pass itself has all outputs. For the other engines plain PyTorch runs a
    # second pass.
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
