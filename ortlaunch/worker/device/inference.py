"""`ortlaunch device export`: a checkpoint as one graph for plain onnxruntime."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from ortlaunch.errors import EngineError
from ortlaunch.json_types import Json
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.worker.device.artifacts import LIMIT
from ortlaunch.worker.device.device import Device
from ortlaunch.worker.onnx.onnx_export import largest
from ortlaunch.worker.onnx.onnx_model import Batch, arrays

# Sizes of the batch for the comparison.
_SIZES = {"batch": 3, "length": 7}


def export(place: DeviceFolder, checkpoint: Path, to: Path) -> None:
    """Write a new folder with model.onnx, config and tokenizer.

    The graph is compared with the evaluation graph before the folder gets its name.

    Raises:
        InputError: the model returns a loss alone.
        EngineError: the outputs of the two graphs differ.
    """
    partial = to.with_name(f"{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    device = Device(place, checkpoint)
    outputs = device.save_for_inference(partial / "model.onnx")
    worst = _difference(device, place, partial / "model.onnx", outputs)
    # `not <=` also refuses nan.
    if not worst <= LIMIT:
        raise EngineError(
            f"model.onnx and {place.eval} differ by {worst:.3g}; the limit is {LIMIT:g}"
        )
    _copy_surroundings(place, partial)
    partial.replace(to)
    print(
        f"{', '.join(outputs)} differ from the evaluation graph's by at most {worst:.2g} (limit "
        f"{LIMIT:g})"
    )
    print(f"model for onnxruntime: {to / 'model.onnx'}")


def _difference(device: Device, place: DeviceFolder, path: Path, outputs: list[str]) -> float:
    import onnxruntime

    batch = _made_up(device, place)
    expected = device.evaluate(batch)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(outputs, arrays([each.name for each in session.get_inputs()], batch))
    return largest(float(abs(one - expected[name]).max()) for name, one in zip(outputs, found))


def _made_up(device: Device, place: DeviceFolder) -> Batch:
    """Return a random batch for the evaluation graph.

    Integers are 0 and 1, which are valid for any vocabulary and any number of classes.
    """
    import onnx

    # A fixed seed, so that the printed difference is reproducible.
    generator = torch.Generator().manual_seed(0)
    graph = onnx.load(str(place.eval)).graph
    named: Json = {each.name: each.type.tensor_type for each in graph.input}
    found = {}
    for name in device.inputs:
        shape = [_SIZES.get(axis.dim_param, axis.dim_value) for axis in named[name].shape.dim]
        dtype = torch.from_numpy(
            np.zeros(1, onnx.helper.tensor_dtype_to_np_dtype(named[name].elem_type))
        ).dtype
        numbers = torch.randn(shape, generator=generator)
        found[name] = numbers.to(dtype) if dtype.is_floating_point else (numbers > 0).to(dtype)
        # No text may be all padding, nor without a label.
        found[name][..., 0] = 1
    return found


def _copy_surroundings(place: DeviceFolder, folder: Path) -> None:
    """Copy config and tokenizer, in the layout of a transformers folder."""
    ours = {place.description.name, place.evaluation.name}
    for path in sorted(place.path.iterdir()):
        if path.suffix in (".json", ".txt", ".model", ".jinja") and path.name not in ours:
            shutil.copy(path, folder / path.name)
