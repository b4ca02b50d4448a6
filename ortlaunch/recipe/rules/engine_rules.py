"""Rules among the fields of `engine`, and with precision, DeepSpeed and device.

Each rule yields (paths involved, message). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ortlaunch.recipe.fields.models import Recipe
from ortlaunch.recipe.fields.ort_variables import contradictions
from ortlaunch.recipe.rules.model_rules import function
from ortlaunch.recipe.text.place import Problem

# cluster:strategy:count, several of them separated by commas.
_PLAN = re.compile(r"[^:,\s]+:[012]:(-1|\d+)(,[^:,\s]+:[012]:(-1|\d+))*")
# Keys of ORT's JSON file of Triton settings.
_TRITON_KEYS = ("ops", "initializer", "min_nodes", "symbolic_shape_hint")
# field -> the reason why it does nothing on a CPU.
CUDA_ONLY = {
    "print_memory_stats": "it reads CUDA's allocator",
    "conv_algorithm_search": "it is cuDNN's",
    "triton": "Triton writes kernels for GPUs",
    "flash_attention": "it is a Triton kernel",
    "efficient_attention": "torch has that kernel for CUDA only",
    "tuning": "ONNX Runtime's tunable operators are for GPUs",
    "tuning_results": "ONNX Runtime's tunable operators are for GPUs",
}
# field -> the field without which it does nothing.
_NEEDS = {
    "triton_config": "triton",
    "flash_attention": "triton",
    "tuning_duration_ms": "tuning",
    "print_input_density": "compute_optimizer",
    "sparsity_optimizer": "compute_optimizer",
}


def engine_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield every broken rule about the engine's settings."""
    if recipe.engine.matmul_precision != "highest" and recipe.format.is_narrow:
        yield (
            ("engine.matmul_precision", "precision"),
            f"has no effect with {recipe.precision}: it changes the matmul of float32 only; "
            "leave it out",
        )
    yield from _onednn(recipe)
    yield from _chunked_loss(recipe)
    yield from function("engine.postprocess", recipe.engine.postprocess)
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
    # The fields below belong to engine ort; `_engine` of rules.py reports them with other engines.
    if recipe.engine.name != "ort":
        return
    yield from _pairs(recipe)
    yield from _memory(recipe)
    yield from _precision(recipe)
    yield from _triton(recipe)
    for name, message in contradictions(recipe.engine, recipe.launch.env):
        yield (f"launch.env.{name}", "engine"), message


def _chunked_loss(recipe: Recipe) -> Iterator[Problem]:
    if isinstance(recipe.engine.chunked_loss, str):
        return
    if not recipe.model.traits.predicts:
        yield (
            ("engine.chunked_loss", "model.task"),
            f"has no effect with task {recipe.model.task}, which has no output layer over a "
            "vocabulary; leave it out",
        )
    if recipe.zero and recipe.zero.stage == 3:
        yield (
            ("engine.chunked_loss", "zero.stage"),
            "has no effect with ZeRO 3, which shards the weight of the output layer; leave it out",
        )


def engine_device_rules(recipe: Recipe, device: str) -> Iterator[Problem]:
    """Yield the problems of settings that have no effect on the device."""
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
    own = ort_multiplies(recipe)
    if recipe.engine.matmul_precision != "highest" and own:
        yield (
            ("engine.matmul_precision", "launch.device"),
            f"has no effect with {own}: ONNX Runtime computes its matmul in float32; leave one out",
        )
    for name, why in CUDA_ONLY.items():
        if getattr(recipe.engine, name) != type(recipe.engine).model_fields[name].default:
            yield (f"engine.{name}", "launch.device"), f"has no effect on CPU: {why}; leave it out"


def _onednn(recipe: Recipe) -> Iterator[Problem]:
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
    if engine.onednn and engine.name == "ort" and (own := ort_multiplies(recipe)):
        yield (
            ("engine.onednn",),
            f"has no effect with {own}: ONNX Runtime computes the matmul; leave one out",
        )


def ort_multiplies(recipe: Recipe) -> str:
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


def _pairs(recipe: Recipe) -> Iterator[Problem]:
    engine = recipe.engine
    for name, other in _NEEDS.items():
        if getattr(engine, name) and not getattr(engine, other):
            yield (f"engine.{name}", f"engine.{other}"), f"has no effect without {other}: true"
    if engine.print_input_density and engine.sparsity_optimizer is False:
        yield (
            ("engine.print_input_density", "engine.sparsity_optimizer"),
            "has no effect without sparsity_optimizer, which measures the density",
        )
    for name in ("efficient_attention", "flash_attention"):
        if getattr(engine, name) and recipe.model.attention == "sdpa":
            yield (
                (f"engine.{name}", "model.attention"),
                "has no effect with attention sdpa: it replaces attention written as matmul "
                "and softmax; use eager",
            )


def _memory(recipe: Recipe) -> Iterator[Problem]:
    engine = recipe.engine
    if engine.memory_optimization_config and engine.memory_optimization:
        yield (
            ("engine.memory_optimization_config", "engine.memory_optimization"),
            f"has no effect at memory_optimization {engine.memory_optimization}, which chooses "
            "the subgraphs itself; set memory_optimization: 0",
        )
    checkpointing = recipe.model.gradient_checkpointing
    if engine.memory_optimization_config and checkpointing:
        yield (
            ("model.gradient_checkpointing", "engine.memory_optimization_config"),
            "has no effect beside memory_optimization_config, which lists the recomputed "
            "subgraphs; leave one out",
        )
    if engine.torch_matmul and (
        checkpointing or engine.memory_optimization or engine.memory_optimization_config
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
    for plan in engine.memory_optimization_config:
        if not _PLAN.fullmatch(plan):
            yield (
                ("engine.memory_optimization_config",),
                f"got {plan}; write cluster:strategy:count, as BiasGelu+:1:-1 (strategy 0, 1 or "
                "2; count -1 for all)",
            )
    if engine.memory_efficient_grad_management and recipe.zero:
        yield (
            ("engine.memory_efficient_grad_management", "zero"),
            "got true with DeepSpeed, which already consumes each gradient as it is ready; "
            "leave it out",
        )


def _precision(recipe: Recipe) -> Iterator[Problem]:
    for name in ("cast_propagation", "cast_propagation_level"):
        default = type(recipe.engine).model_fields[name].default
        # Only autocast inserts casts: that is fp16 without DeepSpeed.
        if getattr(recipe.engine, name) == default or (
            recipe.format.scales_loss and recipe.zero is None
        ):
            continue
        how = "DeepSpeed, whose weights are 16 bits wide" if recipe.zero else recipe.precision
        yield (
            (f"engine.{name}", "precision", "zero"),
            (
                f"has no effect with {how}: it moves the casts of autocast, which only fp16 without "
                "DeepSpeed has"
            ),
        )


def _triton(recipe: Recipe) -> Iterator[Problem]:
    config = recipe.engine.triton_config or {}
    for key in config:
        if key not in _TRITON_KEYS:
            yield (
                (f"engine.triton_config.{key}",),
                f"unknown key; valid here: {', '.join(_TRITON_KEYS)}",
            )
    chosen = config.get("initializer", "scalar")
    if chosen not in ("none", "scalar", "all"):
        yield ("engine.triton_config.initializer",), f"got {chosen}; it must be none, scalar or all"
