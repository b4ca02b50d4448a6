"""`ortlaunch device export`: a checkpoint as one graph for plain onnxruntime."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from ortlaunch.base.errors import EngineError
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.worker.device.artifacts import DIFFERENCE_LIMIT
from ortlaunch.worker.device.device import Device
from ortlaunch.worker.onnx.onnx_export import largest_or_nan
from ortlaunch.worker.onnx.onnx_model import graph_input_arrays
from ortlaunch.worker.tensor_batch import TensorBatch

# Sizes of the batch for the comparison.
_SIZES = {"batch": 3, "length": 7}


def write_checked_inference_folder(
    device_folder: DeviceFolder, checkpoint: Path, target_folder: Path
) -> None:
    """Write a new folder with model.onnx, config and tokenizer.

    The graph is compared with the evaluation graph before the folder gets its name.

    Raises:
        InputError: the model returns a loss alone.
        EngineError: the outputs of the two graphs differ.
    """
    partial = target_folder.with_name(f"{target_folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    device = Device(device_folder, checkpoint)
    outputs = device.write_inference_graph_and_list_outputs(partial / "model.onnx")
    largest_found = _largest_difference_on_random_batch(
        device, device_folder, partial / "model.onnx", outputs
    )
    # `not <=` also refuses nan.
    if not largest_found <= DIFFERENCE_LIMIT:
        raise EngineError(
            f"model.onnx and {device_folder.eval} differ by {largest_found:.3g}; the limit is {DIFFERENCE_LIMIT:g}"
        )
    _copy_config_and_tokenizer(device_folder, partial)
    partial.replace(target_folder)
    print(
        f"{', '.join(outputs)} differ from the evaluation graph's by at most {largest_found:.2g} (limit "
        f"{DIFFERENCE_LIMIT:g})\nmodel for onnxruntime: {target_folder / 'model.onnx'}"
    )


def _largest_difference_on_random_batch(
    device: Device, device_folder: DeviceFolder, graph_path: Path, output_names: list[str]
) -> float:
    import onnxruntime

    batch = _random_batch_for_evaluation_graph(device, device_folder)
    expected = device.evaluate_batch(batch)
    session = onnxruntime.InferenceSession(str(graph_path), providers=["CPUExecutionProvider"])
    output_arrays = session.run(
        output_names,
        graph_input_arrays([graph_input.name for graph_input in session.get_inputs()], batch),
    )
    return largest_or_nan(
        float(abs(output_array - expected[name]).max())
        for name, output_array in zip(output_names, output_arrays)
    )


def _random_batch_for_evaluation_graph(device: Device, device_folder: DeviceFolder) -> TensorBatch:
    """Return a random batch for the evaluation graph.

    Integers are 0 and 1, which are valid for any vocabulary and any number of classes.
    """
    import onnx

    # A fixed seed, so that the printed difference is reproducible.
    generator = torch.Generator().manual_seed(0)
    graph = onnx.load(str(device_folder.eval)).graph
    type_by_input = {graph_input.name: graph_input.type.tensor_type for graph_input in graph.input}
    random_batch = {}
    for name in device.inputs:
        shape = [
            _SIZES.get(axis.dim_param, axis.dim_value) for axis in type_by_input[name].shape.dim
        ]
        dtype = torch.from_numpy(
            np.zeros(1, onnx.helper.tensor_dtype_to_np_dtype(type_by_input[name].elem_type))
        ).dtype
        numbers = torch.randn(shape, generator=generator)
        random_batch[name] = (
            numbers.to(dtype) if dtype.is_floating_point else (numbers > 0).to(dtype)
        )
        # No text may be all padding, nor without a label.
        random_batch[name][..., 0] = 1
    return random_batch


def _copy_config_and_tokenizer(device_folder: DeviceFolder, folder: Path) -> None:
    """Copy config and tokenizer, in the layout of a transformers folder."""
    own_file_names = {device_folder.description.name, device_folder.evaluation.name}
    for path in sorted(device_folder.path.iterdir()):
        if path.suffix in (".json", ".txt", ".model", ".jinja") and path.name not in own_file_names:
            shutil.copy(path, folder / path.name)
