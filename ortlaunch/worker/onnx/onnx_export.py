"""A model as an ONNX graph of its outputs, for batches and texts of any size.

torch's TorchScript exporter writes the graph, as ONNX Runtime 1.19 requires. An export succeeds
only if onnxruntime on the CPU computes the same outputs as PyTorch.
"""

from __future__ import annotations

import inspect
import shutil
import warnings
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ortlaunch.base.errors import EngineError, InputError, MissingDependency, first_message_line
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.compared_texts import Embedding
from ortlaunch.run_folder.export_records import OnnxCheck
from ortlaunch.worker.data import LoadedData, collate
from ortlaunch.worker.data.media.samples import load_media_processor_or_none
from ortlaunch.worker.data.mixture import indices_of_all_or_first_streamed_samples
from ortlaunch.worker.model.adapters import merge_adapters
from ortlaunch.worker.model.chunked_head import LABELS
from ortlaunch.worker.model.embedding import TextEncoder
from ortlaunch.worker.model.model import LossModule, restore_cache_setting
from ortlaunch.worker.onnx.user_model import (
    ExportedModule,
    model_with_row_outputs_and_batches,
    own_data_batches_of_three_two_and_one_samples,
)
from ortlaunch.worker.tensor_batch import TensorBatch
from ortlaunch.worker.weight_memory import WeightMemory
from ortmodule import export_onnx

OPSET = 17
# The largest allowed difference of a logit from PyTorch's.
DIFFERENCE_LIMIT = 1e-4
# Bytes: protobuf's 2 GiB, less room for the graph itself.
_MOST_IN_ONE_FILE = 2**31 - 2**16
# Tensors of a batch that are no inputs of the graph: labels, and the additions of packing.
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_ENCODER_INPUTS = ("input_ids", "attention_mask")
_LABELS = (*LABELS, "position_ids", "document_ids")


class VariableAxes(NamedTuple):
    """The variable axes of all inputs and outputs."""

    inputs: dict[str, dict[int, str]]
    """Input to its variable axes, each with the name of its size."""
    outputs: dict[str, dict[int, str]]
    """Output to its variable axes, each with the name of its size."""


class LogitsModel(ExportedModule):
    """A model of transformers without its loss: its logits."""

    def loss_and_other_tensor_outputs_by_name(self, *tensors: torch.Tensor) -> TensorBatch:
        """Return the same logits by transformers' names."""
        output = self.model(**dict(zip(self.inputs, tensors)), return_dict=True)
        logits_by_name = {name: value for name, value in output.items() if name.endswith("logits")}
        if not logits_by_name:
            raise InputError(f"--format onnx: {type(self.model).__name__} returns no logits")
        return logits_by_name


class EmbeddingGraph(ExportedModule):
    """A model of transformers with its pooling: a vector for each text."""

    def loss_and_other_tensor_outputs_by_name(self, *tensors: torch.Tensor) -> TensorBatch:
        """Return the vectors by sentence-transformers' name."""
        return {"sentence_embedding": self.model(**dict(zip(self.inputs, tensors)))}


def write_and_check_onnx_folder(
    recipe: Recipe, export_folder: Path, trained_module: LossModule, data: LoadedData
) -> OnnxCheck:
    """Write model.onnx, config and tokenizer into an existing folder.

    Weights above 2 GiB are written into a second file, model.onnx_data.

    Returns:
        The comparison with PyTorch.

    Raises:
        EngineError: the exporter cannot write the model, or the outputs differ from PyTorch's.
        InputError: the model returns nothing that could be an output.
        MissingDependency: onnx or onnxruntime is not installed.
    """
    _require_onnx_packages()
    model: Any = trained_module.model.float()
    if recipe.model.lora:
        model = merge_adapters(model, WeightMemory(export_folder))
    exported_module: ExportedModule
    if recipe.model.traits.is_own:
        exported_module, batches = model_with_row_outputs_and_batches(recipe, model, data)
    else:
        batches = three_media_batches_or_none_for_texts(
            recipe, model, data
        ) or three_text_batches_of_own_data(model, data)
        settings = recipe.model.text_comparison
        if isinstance(settings, Embedding):
            batches = [{name: batch[name] for name in _ENCODER_INPUTS} for batch in batches]
            exported_module = EmbeddingGraph(TextEncoder(model, settings), _ENCODER_INPUTS).eval()
        else:
            exported_module = LogitsModel(model, tuple(batches[0])).eval()
    sizes = _input_and_output_variable_axis_names(exported_module, batches)
    fixed_values = _write_graph_and_list_fixed_values(
        exported_module, batches[0], sizes, export_folder
    )
    # In transformers' models such values are sizes; the comparison shows whether they matter.
    decisions = fixed_values if recipe.model.traits.is_own else []
    for source_location in decisions:
        print(
            f"{source_location}: Python reads a tensor's value here: the graph always uses the value from "
            "the traced batch (for a size write x.shape[0] without int)"
        )
    inputs = _used_graph_inputs_printing_others(export_folder / "model.onnx", [*sizes.inputs])
    largest_found = largest_or_nan(
        largest_output_difference_of_graph_from_pytorch(
            exported_module, batch, export_folder / "model.onnx"
        )
        for batch in batches
    )
    # `not <=` also refuses nan.
    if not largest_found <= DIFFERENCE_LIMIT:
        raise EngineError(
            f"ONNX Runtime's outputs differ from PyTorch's by {largest_found:.3g}; the limit is {DIFFERENCE_LIMIT:g}"
        )
    _save_config_and_preprocessors(
        trained_module, model, export_folder, (data.tokenizer, load_media_processor_or_none(recipe))
    )
    shapes = [_sample_count_and_length(batch, sizes) for batch in batches]
    input_axes = {name: sizes.inputs[name] for name in inputs}
    axes = {name: [*axes] for name, axes in {**input_axes, **sizes.outputs}.items()}
    has_external_data = (export_folder / _EXTERNAL_DATA).exists()
    return OnnxCheck(
        OPSET,
        inputs,
        list(sizes.outputs),
        largest_found,
        DIFFERENCE_LIMIT,
        shapes,
        has_external_data,
        axes,
        decisions,
    )


def _sample_count_and_length(batch: TensorBatch, sizes: VariableAxes) -> list[int]:
    """Return the sizes of the first input's variable axes: samples and, if variable, length."""
    name, value = next(iter(batch.items()))
    return [value.size(axis) for axis in sizes.inputs[name]]


_EXTERNAL_DATA = "model.onnx_data"


def _require_onnx_packages() -> None:
    try:
        for name in ("onnx", "onnxruntime"):
            import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f'--format onnx needs {error.name}: pip install "ortlaunch[ort-cpu]", '
            "or onnx and onnxruntime"
        ) from None


@torch.no_grad()
def three_media_batches_or_none_for_texts(
    recipe: Recipe, model: Any, data: LoadedData
) -> list[TensorBatch] | None:
    """Return three batches of images or recordings of the run's data; None for texts.

    A decoder gets the words before each label, as in training.
    """
    batches = own_data_batches_of_three_two_and_one_samples(recipe, data)
    if "input_ids" in batches[0]:
        return None
    inputs = []
    for batch in batches:
        graph_inputs = {name: value for name, value in batch.items() if name not in _LABELS}
        if model.config.is_encoder_decoder and "labels" in batch:
            # In training transformers does this inside the pass.
            decoder_ids = batch["labels"].roll(1, 1)
            decoder_ids[:, 0] = model.config.decoder_start_token_id
            graph_inputs["decoder_input_ids"] = decoder_ids.masked_fill(
                decoder_ids < 0, model.config.pad_token_id
            )
        inputs.append(graph_inputs)
    return inputs


def three_text_batches_of_own_data(model: nn.Module, data: LoadedData) -> list[TensorBatch]:
    """Return three batches of the run's own data: padded, shorter, and with a single sample.

    Raises:
        InputError: the model reads and writes text, for which one graph does not suffice.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            f"--format onnx: {type(model).__name__} reads and writes text, for which a graph of an "
            "encoder and one of a decoder are needed; `optimum-cli export onnx` makes both of the "
            "run's export"
        )
    if data.recipe.model.traits.label == "choice":
        raise InputError(
            f"--format onnx: a graph of {type(model).__name__}, whose samples are several texts, is "
            "not written here; `optimum-cli export onnx` makes one of the run's export"
        )
    samples = data.evaluation or data.train
    indices = indices_of_all_or_first_streamed_samples(samples)
    full_batch = collate(
        [samples.sample(indices[index % len(indices)], epoch=0) for index in range(3)]
    )
    if full_batch["input_ids"].dim() > 2:
        # Several texts of a sample are rows of the graph.
        full_batch = {
            name: full_batch[name].flatten(0, 1)[:3] for name in full_batch if name in _TEXT_INPUTS
        }
    length = full_batch["input_ids"].size(1)
    batch = {}
    for name in _graph_input_names(model, full_batch):
        batch[name] = full_batch.get(
            name, torch.full_like(full_batch["input_ids"], int(name == "attention_mask"))
        )
    padded = {name: value.clone() for name, value in batch.items()}
    padding_id = getattr(data.tokenizer, "pad_token_id", None) or 0
    for row, kept_length in enumerate((length, length // 2 + 1, length // 4 + 1)):
        padded["attention_mask"][row, kept_length:] = 0
        padded["input_ids"][row, kept_length:] = padding_id
    shorter = {name: value[:2, : length // 2 + 1] for name, value in padded.items()}
    return [padded, shorter, {name: value[:1] for name, value in batch.items()}]


def _graph_input_names(model: nn.Module, batch: TensorBatch) -> list[str]:
    """Return the names of the graph's inputs, in the order of the parameters of forward.

    They are the batch's tensors without labels, the mask, and token types if the model has several.
    """
    forward_parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in batch or "attention_mask" not in forward_parameters:
        raise InputError(
            f"--format onnx needs a text model with input_ids and attention_mask; got {[*batch]}"
        )
    wanted_names = {"attention_mask", *batch} - {*_LABELS}
    if (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        wanted_names.add("token_type_ids")
    return [name for name in forward_parameters if name in wanted_names]


@torch.no_grad()
def _input_and_output_variable_axis_names(
    exported_module: ExportedModule, batches: list[TensorBatch]
) -> VariableAxes:
    """Return the variable axes: axis 0, and axes whose size differs between the batches.

    Axes with equal sizes in every batch get one name.
    """
    name_by_sizes: dict[tuple[int, ...], str] = {}

    def axes_of_batches(named_tensors: list[TensorBatch]) -> dict[str, dict[int, str]]:
        axes_by_name: dict[str, dict[int, str]] = {}
        for name in named_tensors[0]:
            axes_by_name[name] = {0: "batch"}
            for axis, sizes in [
                *enumerate(zip(*(tensors[name].shape for tensors in named_tensors)))
            ][1:]:
                if len({*sizes}) > 1:
                    axes_by_name[name][axis] = name_by_sizes.setdefault(
                        sizes, f"length_{len(name_by_sizes) + 1}" if name_by_sizes else "length"
                    )
        return axes_by_name

    return VariableAxes(
        axes_of_batches(batches),
        axes_of_batches(
            [
                exported_module.loss_and_other_tensor_outputs_by_name(*batch.values())
                for batch in batches
            ]
        ),
    )


def _write_graph_and_list_fixed_values(
    exported_module: ExportedModule, batch: TensorBatch, sizes: VariableAxes, export_folder: Path
) -> list[str]:
    """Write and check model.onnx, with the weights in a second file if they are too large for one.

    Returns:
        The locations in Python code that read a tensor's value, which tracing makes a constant.
    """
    import onnx

    _require_evaluation_mode(exported_module)
    parts = export_folder / "parts"
    parts.mkdir()
    with warnings.catch_warnings(record=True) as trace_warnings:
        warnings.simplefilter("ignore")
        # Tracing warns of everything that it makes a constant.
        warnings.simplefilter("always", torch.jit.TracerWarning)
        try:
            export_onnx(
                exported_module, [*batch.values()], str(parts / "model.onnx"), input_names=[*sizes.inputs],
                output_names=[*sizes.outputs], dynamic_axes={**sizes.inputs, **sizes.outputs}, opset_version=OPSET,
            )  # fmt: skip
        # The exporter raises many classes of errors; each of them is reported.
        except Exception as error:
            raise EngineError(
                f"--format onnx: the model does not export: {first_message_line(error)}"
            ) from error
    # The exporter sets every module to the mode of the outermost one.
    _require_evaluation_mode(exported_module)
    file_sizes = [path.stat().st_size for path in parts.iterdir()]
    # For such a model the exporter has written a file for each tensor.
    if sum(file_sizes) > _MOST_IN_ONE_FILE:
        graph = onnx.load(str(parts / "model.onnx"))
        onnx.save_model(
            graph,
            str(export_folder / "model.onnx"),
            save_as_external_data=True,
            location=_EXTERNAL_DATA,
        )
    else:
        (parts / "model.onnx").replace(export_folder / "model.onnx")
    shutil.rmtree(parts)
    onnx.checker.check_model(str(export_folder / "model.onnx"), full_check=True)
    # Other warnings of tracing are not about values that Python reads.
    python_reads = (
        trace_warning
        for trace_warning in trace_warnings
        if str(trace_warning.message).startswith("Converting a tensor to a Python")
    )
    return [
        *dict.fromkeys(
            f"{trace_warning.filename}:{trace_warning.lineno}" for trace_warning in python_reads
        )
    ]


def _require_evaluation_mode(module: nn.Module) -> None:
    training = [name for name, part in module.named_modules() if part.training]
    assert not training, f"not in evaluation mode: {training[:3]}"


def _used_graph_inputs_printing_others(graph_path: Path, input_names: list[str]) -> list[str]:
    """Return the inputs that the graph has, and print the others.

    The exporter leaves out inputs on which no output depends, such as weights of the loss.
    """
    import onnx

    graph_inputs = {
        graph_input.name
        for graph_input in onnx.load(str(graph_path), load_external_data=False).graph.input
    }
    if unused := [name for name in input_names if name not in graph_inputs]:
        print(f"not inputs of the graph, because no output depends on them: {', '.join(unused)}")
    return [name for name in input_names if name in graph_inputs]


@torch.no_grad()
def largest_output_difference_of_graph_from_pytorch(
    exported_module: ExportedModule, batch: TensorBatch, graph_path: Path
) -> float:
    """Return the largest difference of any output from PyTorch's, on the CPU.

    Raises:
        EngineError: ONNX Runtime cannot run the graph, or returns another shape.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # ONNX Runtime would also print the error that it raises.
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            str(graph_path), options, providers=["CPUExecutionProvider"]
        )
        input_arrays = {
            graph_input.name: batch[graph_input.name].numpy()
            for graph_input in session.get_inputs()
        }
        ort_outputs = session.run(
            [*exported_module.loss_and_other_tensor_outputs_by_name(*batch.values())], input_arrays
        )
    # onnxruntime has a class of its own for each type of error.
    except Exception as error:
        raise EngineError(
            f"--format onnx: ONNX Runtime cannot run it: {first_message_line(error)}"
        ) from error
    return largest_or_nan(
        _largest_tensor_difference(torch.from_numpy(ort_output), torch_output)
        for ort_output, torch_output in zip(ort_outputs, exported_module(*batch.values()))
    )


def largest_or_nan(differences: Iterable[float]) -> float:
    """Return the largest difference; nan if any is nan."""
    # Python's max ignores a nan that is not the first value.
    return float(torch.tensor([*differences], dtype=torch.float64).max())


def _largest_tensor_difference(ort_output: torch.Tensor, torch_output: torch.Tensor) -> float:
    if ort_output.shape != torch_output.shape:
        shapes = f"shape {tuple(ort_output.shape)} by ONNX Runtime, and {tuple(torch_output.shape)} by PyTorch"
        raise EngineError(
            f"--format onnx: an output has {shapes}; sizes that forward reads in Python are fixed"
        )
    if not ort_output.numel():
        return 0.0
    absolute_difference = (ort_output.double() - torch_output.double()).abs()
    # The difference of equal infinities is nan, so that equal values are set to 0.
    return float(absolute_difference.masked_fill(ort_output == torch_output, 0.0).max())


def _save_config_and_preprocessors(
    trained_module: LossModule, model: Any, export_folder: Path, preprocessors: Iterable[Any]
) -> None:
    """Write config, tokenizer and processor beside the graph, as in a transformers folder."""
    restore_cache_setting(model, trained_module.generates_with_cache)
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        model.config.save_pretrained(export_folder)
    for part in preprocessors:
        if part is not None:
            part.save_pretrained(export_folder)
