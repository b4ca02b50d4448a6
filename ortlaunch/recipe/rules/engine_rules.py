"""Rules among the fields of `engine`, and with precision, DeepSpeed and device.

Each rule yields (paths involved, message). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ortlaunch.recipe.fields.ort_variables import (
    free_variable_and_problem_pairs,
    ort_variable_and_contradiction_pairs,
)
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import names_of_non_default_fields
from ortlaunch.recipe.rules.model_rules import function_name_rules
from ortlaunch.recipe.rules.parity import parity_step_count_and_reason
from ortlaunch.recipe.text.source_location import Problem

# cluster:strategy:count, several of them separated by commas.
_RECOMPUTE_PLAN = re.compile(r"[^:,\s]+:[012]:(-1|\d+)(,[^:,\s]+:[012]:(-1|\d+))*")
# Fields about the comparison with plain PyTorch, which engine eager does not need.
_PARITY_FIELDS = ("parity_steps", "parity_tolerance")
# Fields that have an effect on every engine; all others belong to engine ort.
_FIELDS_OF_ALL_ENGINES = ("name", "matmul_precision", "onednn", "chunked_loss")
# field -> the field without which it does nothing.
_REQUIRED_FIELDS = {
    "print_input_density": "compute_optimizer",
    "sparsity_optimizer": "compute_optimizer",
}


def all_engine_section_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield every broken rule about the engine's settings."""
    yield from _engine_field_and_zero_3_rules(recipe)
    yield from _parity_field_rules(recipe)
    if recipe.engine.matmul_precision != "highest" and recipe.format.is_narrow:
        yield (
            ("engine.matmul_precision", "precision"),
            f"has no effect with {recipe.precision}: it changes the matmul of float32 only; "
            "leave it out",
        )
    yield from _onednn_rules(recipe)
    yield from _chunked_loss_rules(recipe)
    yield from function_name_rules("engine.postprocess", recipe.engine.postprocess)
    if recipe.model.lora and recipe.model.lora.target_parameters and recipe.engine.name == "ort":
        yield (
            ("model.lora.target_parameters", "engine.name"),
            "got engine ort, which has no adapters on single weights; use eager",
        )
    if recipe.model.offload_activations and recipe.engine.name != "eager":
        yield (
            ("model.offload_activations", "engine.name"),
            f"got engine {recipe.engine.name}; engine eager alone has it",
        )
    for name, message in free_variable_and_problem_pairs(recipe.engine):
        yield (f"engine.ort_variables.{name}",), message
    # The fields below belong to engine ort; `_name` reports them with other engines.
    if recipe.engine.name != "ort":
        return
    yield from _required_field_rules(recipe)
    yield from _memory_optimization_rules(recipe)
    for name, message in ort_variable_and_contradiction_pairs(recipe.engine, recipe.launch.env):
        yield (f"launch.env.{name}", "engine"), message


def _engine_field_and_zero_3_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of the engine's name beside micro_size, ort's fields and ZeRO 3."""
    engine = recipe.engine
    # The rules of the other engines apply when one of them is chosen.
    if engine.name == "auto":
        if recipe.batch.micro_size == "auto":
            yield (
                ("engine.name", "batch.micro_size"),
                "got auto beside micro_size: auto, and each is measured with the other fixed; "
                "set one of them",
            )
        return
    if engine.name != "ort":
        for key in sorted(
            names_of_non_default_fields(engine) - {*_FIELDS_OF_ALL_ENGINES, *_PARITY_FIELDS}
        ):
            yield (
                (f"engine.{key}", "engine.name"),
                (
                    f"has no effect with engine {engine.name}: it is for ort; leave it out, or write "
                    "null"
                ),
            )
        return
    if recipe.parallel:
        yield (
            ("parallel", "engine.name"),
            "got parallel with engine ort: a graph of ONNX Runtime has its weights as a whole, and "
            + (
                "DeepSpeed's AutoTP exchanges activations within layers; use engine.name: eager, or leave "
                "out parallel"
                if recipe.zero
                else "FSDP2 gathers them layer by layer; use engine.name: eager, or zero: {stage: 2}"
            ),
        )
    if recipe.zero and recipe.zero.stage == 3:
        yield (
            ("zero.stage", "engine.name"),
            "got 3 with engine ort: ONNX Runtime 1.19.2 rebuilds DeepSpeed's ZeRO 3 hooks from "
            "their code of before "
            "0.16.9, and today's differ in name, closures and per-module classes; use stage 2, "
            "or engine.name: eager",
        )


def _parity_field_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of the fields for the comparison with plain PyTorch."""
    engine = recipe.engine
    set_fields = [key for key in _PARITY_FIELDS if key in names_of_non_default_fields(engine)]
    if recipe.parallel:
        if isinstance(engine.parity_steps, int) and engine.parity_steps > 1:
            yield (
                ("engine.parity_steps", "parallel"),
                f"got {engine.parity_steps} with parallel: rank 0 has the whole model before the "
                "first step alone; give 1 (ortlaunch parity: --steps 1)",
            )
    elif engine.name == "eager":
        for key in set_fields:
            yield (
                (f"engine.{key}", "engine.name"),
                (
                    "has no effect with engine eager: it compares another engine with plain "
                    "PyTorch; leave it out, or choose one: engine.name=ort"
                ),
            )
    elif engine.name != "auto" and not parity_step_count_and_reason(recipe).steps:
        for key in set(set_fields) - {"parity_steps"}:
            yield (
                (f"engine.{key}", "engine.parity_steps"),
                "has no effect without engine.parity_steps; set it as well",
            )
    elif engine.parity_steps != "auto" and recipe.zero and recipe.zero.stage == 3:
        yield (
            ("engine.parity_steps", "zero.stage"),
            f"got {engine.parity_steps} with ZeRO 3, where no rank has all weights for the "
            "comparison; use zero.stage: 2 for these steps",
        )


def _chunked_loss_rules(recipe: Recipe) -> Iterator[Problem]:
    if isinstance(recipe.engine.chunked_loss, str):
        return
    if not recipe.model.traits.predicts:
        yield (
            ("engine.chunked_loss", "model.task"),
            f"has no effect with task {recipe.model.task}, which has no output layer over a "
            "vocabulary; leave it out",
        )
    if sharding := recipe.output_layer_sharding:
        yield (
            ("engine.chunked_loss", "parallel.tensor" if recipe.parallel else "zero.stage"),
            f"has no effect with {sharding}, which shards the weight of the output layer; leave it out",
        )


def engine_device_rules(recipe: Recipe, device: str) -> Iterator[Problem]:
    """Yield the problems of settings that have no effect on the device."""
    if device == "cpu" and recipe.parallel and recipe.parallel.offload:
        yield (
            ("parallel.offload", "launch.device"),
            "has no effect on a CPU, where all is in host memory; leave it out",
        )
    if device != "cpu" and recipe.engine.onednn is not None:
        yield (
            ("engine.onednn", "launch.device"),
            f"has no effect on {device}: it changes torch's matmul on CPU only; leave it out",
        )
    if recipe.engine.name != "ort":
        return
    if device != "cpu":
        if recipe.engine.torch_matmul is not None:
            yield (
                ("engine.torch_matmul", "launch.device"),
                f"has no effect on {device}: it is for ONNX Runtime's CPU kernels; leave it out",
            )
        return
    # ONNX Runtime's CPU kernels have no lower precision for float32 matmuls.
    conflicting_setting = setting_that_disables_torch_matmul(recipe)
    if recipe.engine.matmul_precision != "highest" and conflicting_setting:
        yield (
            ("engine.matmul_precision", "launch.device"),
            f"has no effect with {conflicting_setting}: ONNX Runtime computes its matmul in float32; leave one out",
        )
    if recipe.engine.ort_variables:
        yield (
            ("engine.ort_variables", "launch.device"),
            "has no effect on CPU: these variables are for GPUs; leave it out",
        )


def _onednn_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of `engine.onednn` where matmuls are not torch's float32 ones."""
    engine = recipe.engine
    if engine.onednn is None:
        return
    if recipe.format.is_narrow:
        yield (
            ("engine.onednn", "precision"),
            f"has no effect with {recipe.precision}: it changes the matmul of float32 only; "
            "leave it out",
        )
    if engine.matmul_precision != "highest":
        yield (
            ("engine.onednn", "engine.matmul_precision"),
            f"has no effect with matmul_precision {engine.matmul_precision}, which is oneDNN's; "
            "leave one out",
        )
    if (
        engine.onednn
        and engine.name == "ort"
        and (conflicting_setting := setting_that_disables_torch_matmul(recipe))
    ):
        yield (
            ("engine.onednn",),
            f"has no effect with {conflicting_setting}: ONNX Runtime computes the matmul; leave one out",
        )


def setting_that_disables_torch_matmul(recipe: Recipe) -> str:
    """Return the setting that keeps torch's matmuls out of ORT's graph on a CPU; "" if none."""
    engine = recipe.engine
    if engine.torch_matmul is False:
        return "torch_matmul: false"
    if recipe.model.gradient_checkpointing:
        return "model.gradient_checkpointing, which becomes memory_optimization"
    fields = (
        "memory_optimization",
        "memory_optimization_config",
        "memory_efficient_grad_management",
    )
    return next((name for name in fields if getattr(engine, name)), "")


def _required_field_rules(recipe: Recipe) -> Iterator[Problem]:
    engine = recipe.engine
    for field_name, required_field in _REQUIRED_FIELDS.items():
        if getattr(engine, field_name) and not getattr(engine, required_field):
            yield (
                (f"engine.{field_name}", f"engine.{required_field}"),
                f"has no effect without {required_field}: true",
            )
    if engine.print_input_density and engine.sparsity_optimizer is False:
        yield (
            ("engine.print_input_density", "engine.sparsity_optimizer"),
            "has no effect without sparsity_optimizer, which measures the density",
        )


def _memory_optimization_rules(recipe: Recipe) -> Iterator[Problem]:
    engine = recipe.engine
    if engine.memory_optimization_config and engine.memory_optimization:
        yield (
            ("engine.memory_optimization_config", "engine.memory_optimization"),
            f"has no effect at memory_optimization {engine.memory_optimization}, which chooses "
            "the subgraphs itself; set memory_optimization: 0",
        )
    uses_checkpointing = recipe.model.gradient_checkpointing
    if engine.memory_optimization_config and uses_checkpointing:
        yield (
            ("model.gradient_checkpointing", "engine.memory_optimization_config"),
            "has no effect beside memory_optimization_config, which lists the recomputed "
            "subgraphs; leave one out",
        )
    if engine.torch_matmul and (
        uses_checkpointing or engine.memory_optimization or engine.memory_optimization_config
    ):
        yield (
            ("engine.torch_matmul", "engine.memory_optimization", "model.gradient_checkpointing"),
            "has no effect with memory optimization, which recomputes only ONNX Runtime's own "
            "matmul; leave it out",
        )
    if engine.torch_matmul and engine.memory_efficient_grad_management:
        yield (
            ("engine.torch_matmul", "engine.memory_efficient_grad_management"),
            "has no effect with memory_efficient_grad_management, whose graph has no weights "
            "to identify the matmul; leave one out",
        )
    for recompute_plan in engine.memory_optimization_config:
        if not _RECOMPUTE_PLAN.fullmatch(recompute_plan):
            yield (
                ("engine.memory_optimization_config",),
                f"got {recompute_plan}; write cluster:strategy:count, as BiasGelu+:1:-1 (strategy 0, 1 or "
                "2; count -1 for all)",
            )
    if engine.memory_efficient_grad_management and recipe.zero:
        yield (
            ("engine.memory_efficient_grad_management", "zero"),
            "got true with DeepSpeed, which already consumes each gradient as it is ready; "
            "leave it out",
        )
