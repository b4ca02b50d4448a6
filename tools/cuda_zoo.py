"""List nodes without a CUDA kernel in training graphs of transformers, in fp32, fp16 and bf16.

    tools/cuda_zoo.py [TASK:FAMILY ...] [--save FOLDER] [--precisions ...]

It needs no GPU. Models are the small ones of the zoo (tests/zoo/families.py), with all weights in
the precision, as under ZeRO. A graph is built as for a GPU and stopped before its session; in bf16
the repairs of ortmodule/src/ortmodule/_internal/graph_repairs/bfloat16.py are applied. The output has, for each
family, operators that bf16 takes from torch or computes in float32, and in each precision the nodes
without a CUDA kernel by the table. `--save` keeps the graphs for `tools/cuda_kernels.py --place`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ortlaunch.worker.engine.engine import cast_floating_point_parameters_in_place
from ortmodule import ORTModule
from ortmodule._internal.base.repair_registry import TRAINING
from ortmodule._internal.base.settings import Settings
from ortmodule._internal.base.source_guard import owning_class_or_module
from ortmodule._internal.graph_repairs import bfloat16
from ortmodule._internal.module import import_ortmodule_with_all_repairs
from ortmodule._internal.native import cuda_kernels
from ortmodule._internal.torch_in_graph import torch_kernels
from tests.zoo import families

FAMILIES = """
masked-lm:bert masked-lm:roberta masked-lm:distilbert masked-lm:albert masked-lm:electra masked-lm:deberta-v2
masked-lm:mpnet causal-lm:gpt2 causal-lm:llama causal-lm:mistral causal-lm:qwen2 causal-lm:qwen3 causal-lm:gemma2
causal-lm:phi causal-lm:opt causal-lm:gpt_neox causal-lm:falcon causal-lm:mixtral causal-lm:olmo2
sequence-classification:bert image-classification:vit image-classification:resnet image-classification:convnext
image-classification:swin speech-seq2seq:whisper ctc:wav2vec2
"""
PRECISIONS = ("float32", "float16", "bfloat16")


class Stopped(RuntimeError):
    """Raised when a graph is built, to stop before its session."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=FAMILIES.split())
    parser.add_argument("--save", type=Path)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # nothing is computed; more threads only take memory
    import_ortmodule_with_all_repairs()
    for name in options.families:
        for precision in options.precisions:
            began = time.monotonic()
            torch.manual_seed(0)
            try:
                found = _tried(name, precision, options.save)
            # One family that cannot be built must not end the list.
            except Exception as error:
                found = (
                    f"not built: {type(error).__name__}: "
                    f"{' '.join(str(error.__cause__ or error).split())[-300:]}"
                )
            print(f"{name} {precision}: {found} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def _tried(name: str, precision: str, folder: Path | None) -> str:
    task, _, family = name.partition(":")
    model, batch = families.cases(task)[family]()
    dtype = getattr(torch, precision)
    cast_floating_point_parameters_in_place(model, dtype)
    batch = {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()
    }
    graph = _built(model.train(), batch)
    # The difference of the two counts is the work of the repair.
    before = _without_kernel(graph)
    if precision == "bfloat16":
        bfloat16.replace_bfloat16_nodes_without_kernel_or_refuse(graph)
    after = _without_kernel(graph)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(graph, str(folder / f"{name.replace(':', '-')}-{precision}.onnx"))
    return (
        f"{len(graph.graph.node)} nodes; without a kernel {dict(after)}; completed "
        f"{dict(before - after)}"
    )


def _built(model: Any, batch: dict[str, torch.Tensor]) -> onnx.ModelProto:
    def stop(manager: Any) -> None:
        raise Stopped

    module = ORTModule(model, Settings(threads=1))
    with (
        contextlib.suppress(Stopped),
        mock.patch.object(
            torch_kernels, "replace_training_nodes_by_torch_calls"
        ),  # a repair for CPUs only
        mock.patch.object(owning_class_or_module(TRAINING), "_create_execution_agent", stop),
    ):
        module(**batch)
    built: onnx.ModelProto = module._torch_module._execution_manager(
        True
    )._onnx_models.optimized_model
    return built


def _without_kernel(model: onnx.ModelProto) -> Counter[str]:
    types = cuda_kernels.declared_or_inferred_type_by_tensor_name(model.graph)
    opset = Settings().opset or 17
    return Counter(
        f"{node.op_type}<{types.get(node.input[0], '') if node.input else ''}>"
        for node in model.graph.node
        if node.op_type != "Constant"
        and not cuda_kernels.has_cuda_kernel_for_types(node, types, opset)
    )


if __name__ == "__main__":
    sys.exit(main())
