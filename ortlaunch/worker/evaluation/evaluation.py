"""A pass over the evaluation corpus: the loss by the run's engine, and the task's metrics.

Every sample counts once, counts are summed over the ranks, and dropout is off. Therefore the result
does not depend on the number of ranks or on the size of their last batches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.run_folder.records import json_values_of_record
from ortlaunch.worker.data import IGNORED, Batches, Samples
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.order import SampleEpoch
from ortlaunch.worker.data.user_data import seed_all_random_generators
from ortlaunch.worker.evaluation.evaluated_model import EvaluatedModel
from ortlaunch.worker.evaluation.measure import SAMPLE_INDICES, create_measures_of_task
from ortlaunch.worker.evaluation.user_metric import UserMetric
from ortlaunch.worker.evaluation.word_scores import language_model_metric_inputs
from ortlaunch.worker.model.chunked_head import LABELS
from ortlaunch.worker.model.precision import narrow_dtype_or_none
from ortlaunch.worker.model.returned_values import ValueMeans, loss_of_engine_output
from ortlaunch.worker.process_group.agreement import RankAgreement
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session
from ortlaunch.worker.tensor_batch import TensorBatch


def metrics_with_evaluation_prefix(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics under their names in metrics.jsonl, which has those of training, too."""
    return {f"evaluation_{name}": value for name, value in metrics.items()}


def rank_batches_and_counted_indices(
    batches: Batches, group: DistributedContext, samples: Samples
) -> Iterator[tuple[TensorBatch, range]]:
    """Yield this rank's micro batches with the indices of the samples that count in each.

    Ranks take turns, and all have equally many micro batches. A rank without samples left gets a
    batch of which no sample counts.
    """
    # With ZeRO 3 a forward pass is collective: every rank must run every turn.
    micro_samples = batches.batch.micro_samples
    for turn_start in range(0, len(samples), group.size * micro_samples):
        # Empty for a rank without samples left, which then runs sample 0.
        first_index = turn_start + group.rank * micro_samples
        counted_indices = range(first_index, min(first_index + micro_samples, len(samples)))
        yield (
            batches.read_and_stack_samples(
                samples, [SampleEpoch(index, 0) for index in counted_indices or range(1)]
            ),
            counted_indices,
        )


def seed_and_evaluate_loss_and_metrics_unless_stopped(
    session: Session, samples: Samples, rank_agreement: RankAgreement | None = None
) -> dict[str, float] | None:
    """Evaluate the model of a session, as `seed_and_evaluate_model_unless_stopped` does.

    The session's engine runs it, or plain PyTorch while the export of a graph would take longer
    than the graph would have saved.
    """
    engine = session.engine
    seconds = engine.evaluation_seconds_or_none
    if seconds is None or not seconds.is_export_longer_than_saving:
        return _evaluate_session_model(
            session, engine.record.engine.used, engine.eval_module, samples, rank_agreement
        )
    if session.group.rank == 0 and not engine.record.plain_evaluations:
        print(
            "evaluations run in plain PyTorch until a graph for them would have saved the "
            f"{seconds.export:.1f} s of its export",
            flush=True,
        )
    started_at = time.perf_counter()
    metrics = _evaluate_session_model(session, "eager", engine.plain, samples, rank_agreement)
    # The same on all ranks, so that they agree on the next evaluation.
    seconds.plain_so_far += max(session.group.gather_numbers([time.perf_counter() - started_at]))[0]
    engine.record.plain_evaluations += 1
    return metrics


def _evaluate_session_model(
    session: Session,
    engine_name: str,
    module: nn.Module,
    samples: Samples,
    rank_agreement: RankAgreement | None,
) -> dict[str, float] | None:
    engine = session.engine
    evaluated_model = EvaluatedModel(
        recipe=session.recipe,
        group=session.group,
        batches=session.batches,
        engine_name=engine_name,
        module=module,
        plain=engine.plain,
        loss_weight=engine.loss_weight,
        to_device=engine.to_device,
        count_progress=session.progress.shared_progress.count_progress_mark,
        samples=samples,
        confusion_path=session.run.confusion,
    )
    return seed_and_evaluate_model_unless_stopped(evaluated_model, rank_agreement)


@torch.no_grad()
def seed_and_evaluate_model_unless_stopped(
    evaluated_model: EvaluatedModel, rank_agreement: RankAgreement | None = None
) -> dict[str, float] | None:
    """Return the mean loss over the evaluation corpus and the task's metrics, by name (collective).

    The loss is weighted as in training.

    Args:
        evaluated_model: the model, how it runs, and the evaluation corpus.
        rank_agreement: if given, the ranks check after each micro batch whether to stop.

    Returns:
        The loss and the metrics; None if the ranks agreed to stop meanwhile.

    Raises:
        DataError: the weights of all samples sum to 0.
    """
    recipe, group, plain = evaluated_model.recipe, evaluated_model.group, evaluated_model.plain
    samples = evaluated_model.samples
    data_group = group.data_parallel
    # FSDP2 gathers weights in 16 bits, in evaluations, too; inputs may be float32.
    gathered_dtype = narrow_dtype_or_none(recipe.precision) if group.has_fsdp2 else None
    # The model's own random numbers are then those of any other evaluation of these weights.
    seed_all_random_generators(recipe.seed)
    own_metric = UserMetric(recipe.train.metric)
    weighted_loss = 0.0
    total_weight = 0.0
    returned_values = ValueMeans()
    counters = create_measures_of_task(recipe.model.task, evaluated_model)
    with (
        _evaluate_then_train_mode(evaluated_model.module, plain),
        _yield_function_for_metric_outputs(evaluated_model) as output_of,
    ):
        plain.call_lightning_hook("on_validation_epoch_start", returned_values)
        for batch, counted_indices in rank_batches_and_counted_indices(
            evaluated_model.batches, data_group, samples
        ):
            # At each micro batch, because an evaluation may be long.
            if rank_agreement is not None and rank_agreement.agree_on_request_now().stops:
                return None
            weight = (
                evaluated_model.loss_weight.weight_of_micro_batch(batch, counted_indices)
                if counted_indices
                else 0.0
            )
            evaluated_model.count_progress()
            device_batch = evaluated_model.to_device(batch)
            with torch.autocast(
                group.device.type, gathered_dtype, enabled=gathered_dtype is not None
            ):
                module_output = _run_forward_filling_short_ort_batch(evaluated_model, device_batch)
            loss = (
                returned_values.add_values_and_return_loss(module_output, weight)
                if plain.has_numbers
                else loss_of_engine_output(module_output)
            )
            weighted_loss = weighted_loss + float(loss) * weight
            total_weight = total_weight + weight
            # From `batch`, not from `taken`, which may have an added label.
            labels = {name: batch[name].to(group.device) for name in LABELS if name in batch}
            output = output_of(module_output, device_batch)
            if recipe.model.traits.predicts:
                output = language_model_metric_inputs(
                    output, labels, plain, evaluated_model.loss_weight.shifted
                )
            labels[SAMPLE_INDICES] = torch.tensor(counted_indices)
            for counter in counters:
                counter.count_micro_batch(output, {**device_batch, **labels}, bool(counted_indices))
            own_metric.keep_arrays_of_samples_if_metric_is_set(counted_indices, output, batch)
        plain.call_lightning_hook("on_validation_epoch_end", returned_values)
    # Gathered and summed here, not all-reduced, so that all ranks have the same bits.
    losses, weights = zip(*data_group.gather_numbers([weighted_loss, total_weight]))
    if not sum(weights):
        raise DataError(
            f"data.evaluation: nothing counts in its {len(samples)} samples: train.loss_weight "
            "is 0 in all"
        )
    loss = sum(losses) / sum(weights)
    returned_values.keep_step()
    metrics = {"loss": loss}
    for counter in counters:
        metrics |= counter.metrics_over_ranks(data_group, loss)
        confusion = getattr(counter, "confusion", None)
        if confusion is not None and group.rank == 0 and evaluated_model.confusion_path:
            write_json_atomically(evaluated_model.confusion_path, json_values_of_record(confusion))
    metrics |= returned_values.means_over_ranks_and_reset(data_group) if plain.has_numbers else {}
    seed_all_random_generators(recipe.seed)
    # Last, because the user's names must differ from all others.
    metrics |= own_metric.call_on_rank_0_and_share_values(group, metrics)
    # Ranks decide by them: those that computed the same layers may differ in the last bits.
    return metrics if data_group is group else dict(group.gather(metrics)[0])


def _run_forward_filling_short_ort_batch(
    evaluated_model: EvaluatedModel, device_batch: TensorBatch
) -> Any:
    """Return the output of the engine's module for a batch; of a LightningModule in plain PyTorch.

    For engine ort a short last batch is filled with copies of its last sample, without labels.
    """
    # If a model reads sizes in Python, ONNX Runtime's graph would be exported again for a short
    # batch, and once more for the first batch of the next evaluation.
    # A validation_step may collect its outputs in Python, which a graph does not do.
    traits = evaluated_model.recipe.model.traits
    module = evaluated_model.plain if traits.wrapper else evaluated_model.module
    micro_samples = evaluated_model.batches.batch.micro_samples
    samples = {len(value) if value.dim() else 0 for value in device_batch.values()}
    is_graph = evaluated_model.engine_name == "ort" and not traits.is_own
    labels = device_batch.get("labels")
    # Labels of a regression have no value that means "ignored".
    can_fill = labels is not None and not labels.is_floating_point()
    if not is_graph or len(samples) > 1 or micro_samples in samples or not can_fill:
        return module(**device_batch)
    (count,) = samples
    module_output = module(
        **{
            name: _repeat_last_row_without_labels(name, value, micro_samples)
            for name, value in device_batch.items()
        }
    )
    if not isinstance(module_output, Mapping):
        return module_output
    return {name: value[:count] if value.dim() else value for name, value in module_output.items()}


def _repeat_last_row_without_labels(
    value_name: str, tensor: torch.Tensor, row_count: int
) -> torch.Tensor:
    added = tensor[-1:].expand(row_count - len(tensor), *tensor.shape[1:])
    return torch.cat([tensor, torch.full_like(added, IGNORED) if value_name in LABELS else added])


@contextlib.contextmanager
def _evaluate_then_train_mode(*modules: nn.Module) -> Iterator[None]:
    """Switch dropout off while the context is open; all modules are in training mode after it."""
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()


@contextlib.contextmanager
def _yield_function_for_metric_outputs(
    evaluated_model: EvaluatedModel,
) -> Iterator[Callable[[Any, TensorBatch], Any]]:
    """Yield a function that returns the model's outputs beside the loss, for the metrics.

    Its arguments are the output of the engine's module and the batch. The built-in metrics need
    scores only. The user's own metric gets all outputs, or for a language model the result of
    `language_model_metric_inputs`.
    """
    model = evaluated_model.plain.model
    traits = evaluated_model.recipe.model.traits
    if evaluated_model.recipe.train.metric is None or traits.predicts:
        yield (
            lambda module_output, device_batch: (
                module_output if isinstance(module_output, Mapping) else None
            )
        )
    # In eager PyTorch the pass itself has all outputs. For the other engines plain PyTorch runs a
    # second pass.
    elif evaluated_model.engine_name == "eager":
        eager_outputs: list[Any] = []
        handle = model.register_forward_hook(lambda _, __, output: eager_outputs.append(output))
        try:
            yield lambda module_output, device_batch: eager_outputs.pop()
        finally:
            handle.remove()
    else:
        yield lambda module_output, device_batch: model(
            **{
                name: value
                for name, value in device_batch.items()
                if traits.is_own or name not in LABELS
            }
        )
