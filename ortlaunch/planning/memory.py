"""Count the parameters of a recipe's model, and estimate the memory of a rank.

The input is the recipe alone, with the config.json of a pretrained model if it is on this host.
Weights, gradients and optimizer state are exact: tests/worker/engine/test_memory_use_ranks.py
compares them with the live tensors of two ranks. Activations (activations.py) and overhead are
estimates. For models whose family is not in model_sizes.py the result is None; the worker measures
them in the run.
"""

from __future__ import annotations

from ortlaunch.json_types import Json
from ortlaunch.launch_plan import USUAL_PROCESS, Bytes, Memory, ProcessMemory
from ortlaunch.planning.activations import activation_bytes, sample_tokens
from ortlaunch.planning.loss_chunks import chunked
from ortlaunch.planning.model_sizes import SHAPES, Shape, shape_of
from ortlaunch.planning.startup import at_start, on_host, state_bytes
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import TokenizerTraining
from ortlaunch.recipe.fields.families import DECODERS, SIZES, complete, sized
from ortlaunch.recipe.fields.model import Lora
from ortlaunch.recipe.fields.pretrained import config_of
from ortlaunch.recipe.inputs import padded_vocabulary
from ortlaunch.recipe.rules.parity import compared_steps

# Overhead of a process on a CPU: its peak memory without the counted tensors, by engine. It is the
# sum of a number of bytes and of three shares: of the model's bytes, of the activations that are
# kept for the backward pass, and of all activations, recomputed ones included. A plan should rather
# be too high: fitted to memory.json of 60 runs of seven families (78 to 646 MiB, torch 2.13, glibc
# 2.36), of which most take 0.75 to 1.0 of it; engine ort's was lowered after BERT and Llama of two
# sizes had taken 0.71 to 0.88 of it, and take 0.8 to 1.02 now. The last share is the fragmentation of the heap on
# engine eager, which recomputed layers cause, too.
_OVERHEAD = {
    "eager": (15 << 20, 0.0, 0.0, 0.6),
    "inductor": (100 << 20, 0.0, 0.2, 0.0),
    "ort": (60 << 20, 0.4, 0.35, 0.0),
}
# Activations of plain PyTorch's pass that are in memory beside the engine's, as a share, while a
# step is compared; the heap keeps a part of them.
_COMPARED = 1.0
# DeepSpeed's modules without MLflow and TorchInductor, which no run imports, and its engine: 17 to 29
# MiB beside a run without it, at the tiny recipes.
_DEEPSPEED = 25 << 20
# Modules that an evaluation with labels imports.
_TORCHMETRICS = 35 << 20
# Added on engine ort for Llama, whose graph has many nodes for RMSNorm and rotary positions, and
# added (again) for adapters.
_MORE_NODES = 15 << 20
# GPU memory beside tensors, not measured: CUDA's context with torch's kernels; workspaces of cuBLAS
# and cuDNN, which torch and ONNX Runtime each have on engine ort; NCCL's buffers.
_CONTEXT = 500 << 20
_WORKSPACES = 100 << 20
_NCCL = 300 << 20
# DeepSpeed's defaults, in elements: the largest tensor that ZeRO 3 keeps whole on every rank; the
# elements reduced together; the elements that ZeRO 3 gathers together.
_PERSISTENT = 100_000
_BUCKET = 500_000_000
_LIVE = 1_000_000_000


def full_config(recipe: Recipe) -> Json | None:
    """Return the model's config with every default, or None if only transformers knows them."""
    own = recipe.model.config or {}
    known = config_of(recipe.model.pretrained) if recipe.model.pretrained else {}
    given = {**(known or {}), **own}
    tokenizer = recipe.data.tokenizer
    if (
        not recipe.model.pretrained
        and isinstance(tokenizer, TokenizerTraining)
        and "vocab_size" not in own
    ):
        given["vocab_size"] = padded_vocabulary(tokenizer.vocab_size)
    # If the model's own config is not known, the recipe must have all sizes.
    filled = None if known is None and not set(own) >= SIZES else complete(given)
    return filled or sized(given)


def estimate(
    recipe: Recipe,
    micro_samples: int,
    ranks: int,
    device: str = "cpu",
    process: ProcessMemory = USUAL_PROCESS,
) -> Memory | None:
    """Return the memory of a rank, for each sharding, on `ranks` data-parallel ranks.

    Args:
        recipe: the recipe.
        micro_samples: samples of a micro batch.
        ranks: data-parallel ranks.
        device: cpu or cuda.
        process: bytes of a rank's process beside its model.

    Returns:
        None for models that are not known here.
    """
    config = full_config(recipe)
    if config is None or (
        config["model_type"] in DECODERS and recipe.model.traits.predicts == "masked"
    ):
        return None
    compares = compared_steps(recipe, config["model_type"]).steps
    shape = shape_of(config, recipe.model.task)
    tensors = trained = shape.tensors()
    if recipe.model.lora:
        adapters = _lora_tensors(recipe.model.lora, shape)
        if adapters is None:
            return None
        tensors = [*tensors, *adapters]
        trained = adapters
    parameters = sum(tensors)
    trainable = sum(trained)
    # Without DeepSpeed, 4 bytes in every precision: autocast keeps norms and softmax in float32.
    activations = activation_bytes(recipe, config, micro_samples, 4, device)
    not_recomputed = recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"gradient_checkpointing": False}),
            "engine": recipe.engine.model_copy(update={"memory_optimization": 0}),
        }
    )
    width = _width(recipe) if recipe.zero else 4
    all_activations = activation_bytes(not_recomputed, config, micro_samples, width, device)
    stages: list[tuple[str, Bytes]] = [("DDP", _plain(recipe, parameters, trainable, activations))]
    activations = activation_bytes(recipe, config, micro_samples, _width(recipe), device)
    for stage in range(4):
        tensors_of_stage = _off_gpu(
            recipe,
            _zero(recipe, tensors, trainable, activations, stage, ranks),
            trainable,
            stage,
            device,
        )
        stages.append(
            (
                f"ZeRO {stage}",
                tensors_of_stage._replace(
                    buckets=_bucket(recipe, parameters, trainable, stage, ranks, device)
                ),
            )
        )
    compared = 0
    if compares:
        eager = recipe.engine.model_copy(update={"name": "eager", "memory_optimization": 0})
        plain = recipe.model_copy(update={"engine": eager})
        compared = 2 * _width(recipe) * trainable
        # torch's allocator of a GPU uses the freed blocks of one pass for the other.
        if device == "cpu":
            kept = activation_bytes(plain, config, micro_samples, _width(recipe), device)
            compared += int(_COMPARED * kept)
    kind = "llama" if config["model_type"] in DECODERS else "bert"
    libraries = _contexts(recipe, ranks)
    stages = [
        (
            stage,
            parts._replace(
                overhead=compared
                + (
                    _overhead(recipe, parts, kind, all_activations)
                    if device == "cpu"
                    else libraries
                )
            ),
        )
        for stage, parts in stages
    ]
    chosen = f"ZeRO {recipe.zero.stage}" if recipe.zero else "DDP"
    chunk = chunked(
        recipe,
        micro_samples * sample_tokens(recipe, config),
        int(config["vocab_size"]),
        device,
    )
    return Memory(
        parameters, trainable, process, tuple(stages), chosen, (4 + state_bytes(recipe)) * trainable, chunk, compared,
        at_start(recipe, tensors, trainable, width, ranks),
        on_host(recipe, parameters, trainable, width, ranks, device),
    )  # fmt: skip


def _contexts(recipe: Recipe, ranks: int) -> int:
    """Return the GPU memory of libraries: CUDA contexts, workspaces, NCCL."""
    ort = recipe.engine.name in ("ort", "auto")
    return _CONTEXT + _WORKSPACES * (2 if ort else 1) + (_NCCL if ranks > 1 else 0)


def _overhead(recipe: Recipe, parts: Bytes, family: str, all_activations: int) -> int:
    """Return the bytes of a process beside the counted tensors (see _OVERHEAD).

    For engine `auto` this is the largest of all engines.

    Args:
        recipe: the recipe.
        parts: the counted bytes.
        family: llama or bert.
        all_activations: bytes of activations, recomputed ones included.
    """
    names = _OVERHEAD if recipe.engine.name == "auto" else [recipe.engine.name]
    modules = _DEEPSPEED if recipe.zero else 0
    if recipe.data.evaluation is not None and recipe.model.traits.label:
        modules += _TORCHMETRICS
    return modules + max(
        int(fixed + of_model * parts.model + of_kept * parts.activations + of_all * all_activations)
        + (
            _MORE_NODES * ((family == "llama") + (recipe.model.lora is not None))
            if name == "ort"
            else 0
        )
        for name in names
        for fixed, of_model, of_kept, of_all in [_OVERHEAD[name]]
    )


def why_unknown(recipe: Recipe) -> str:
    """Return the reason why `estimate` returns None for the recipe, and a remedy."""
    model = recipe.model
    if model.traits.is_own:
        return "your factory builds the model; a training records its memory in memory.json"
    known = config_of(model.pretrained) if model.pretrained else {}
    if known is None:
        repository, _, revision = str(model.pretrained).partition("@")
        return (
            f"the config of {model.pretrained} is not on this host, and a plan does not contact "
            f"the hub; give a local folder, or download it once: hf download {repository} "
            f"config.json{f' --revision {revision}' if revision else ''}"
        )
    kind = {**known, **(model.config or {})}.get("model_type")
    if kind not in SHAPES:
        return (
            f"models of type {kind} have no estimate; a training records its memory in memory.json"
        )
    if full_config(recipe) is None:
        return (
            f"a plan needs the sizes of a {kind} in model.config, as its config.json has them; "
            "a training records its memory in memory.json"
        )
    if model.lora is None:
        return f"models of type {kind} have no estimate for task {model.task}"
    lora = model.lora
    field = (
        "modules_to_save"
        if lora.modules_to_save
        else "target_parameters"
        if lora.target_parameters
        else "target_modules"
    )
    return (
        f"adapters with these model.lora.{field} have no estimate; a training records its memory "
        "in memory.json"
    )


def _plain(recipe: Recipe, parameters: int, trainable: int, activations: int) -> Bytes:
    """Return the bytes of a training without DeepSpeed.

    Weights stay in float32: without DeepSpeed a lower precision is that of autocast.
    """
    return Bytes(4 * parameters, 4 * trainable, state_bytes(recipe) * trainable, activations)


def _width(recipe: Recipe) -> int:
    return recipe.format.bytes


def _zero(
    recipe: Recipe, tensors: list[int], trainable: int, activations: int, stage: int, ranks: int
) -> Bytes:
    """Return the bytes of a rank in a ZeRO stage, without offload."""
    width = _width(recipe)
    # DeepSpeed keeps a float32 master copy beside the weights: in a 16-bit precision in every
    # stage, in fp32 from stage 1 on.
    master = 0 if stage == 0 and width == 4 else 4
    optimizer = (master + state_bytes(recipe)) * trainable
    whole = width * trainable
    share = -(-width * trainable // ranks)
    # ORTModule returns all gradients together, before stage 2 can keep only this rank's share.
    ort = stage == 2 and ranks > 1 and recipe.engine.name in ("ort", "auto")
    return Bytes(
        weights=width * (sum(tensors) if stage < 3 else _kept_by_zero_3(recipe, tensors, ranks)),
        gradients=share + (whole if ort else 0) if stage >= 2 else whole,
        optimizer=-(-optimizer // (ranks if stage >= 1 else 1)),
        activations=activations,
    )


def _off_gpu(recipe: Recipe, whole: Bytes, trainable: int, stage: int, device: str) -> Bytes:
    """Return the part of a stage's bytes that is left on the device with `zero.offload`.

    On a CPU it is all of them: offloaded tensors are in the same memory.
    """
    offload = recipe.zero.offload if recipe.zero and device == "cuda" else None
    if offload is None or not stage:
        return whole
    if offload.optimizer:
        # From stage 2 on, each gradient leaves the GPU before the next one is computed, except on
        # engine ort, which computes all of them first.
        kept = recipe.engine.name in ("ort", "auto") or stage < 2
        whole = whole._replace(optimizer=0, gradients=_width(recipe) * trainable if kept else 0)
    return whole._replace(weights=0) if offload.parameters and stage == 3 else whole


def _kept_by_zero_3(recipe: Recipe, tensors: list[int], ranks: int) -> int:
    """Return the number of elements that ZeRO 3 keeps on each rank.

    A rank has its piece of every tensor. In addition it keeps each small tensor in full, once that
    has been gathered.
    """
    small = int(_setting(recipe, "stage3_param_persistence_threshold", _PERSISTENT))
    return sum(-(-size // ranks) for size in tensors) + sum(
        size for size in tensors if size <= small
    )


def _bucket(
    recipe: Recipe, parameters: int, trainable: int, stage: int, ranks: int, device: str
) -> int:
    """Return the bytes of DeepSpeed's buffers.

    They hold gradients that are reduced and, in stage 3 on a GPU, weights that are gathered.
    """
    size = int(_setting(recipe, "reduce_bucket_size", _BUCKET)) if stage else _BUCKET
    gathered = 0
    # On a CPU only the written part of a buffer takes memory; on a GPU it is allocated in full.
    if stage == 0 or device == "cpu":
        size = min(size, trainable)
    elif stage == 3:
        gathered = min(int(_setting(recipe, "stage3_max_live_parameters", _LIVE)), parameters)
    return _width(recipe) * (size + gathered) if ranks > 1 or stage else 0


def _setting(recipe: Recipe, name: str, default: float) -> float:
    """Return a setting of the section zero_optimization of DeepSpeed's config, or the default."""
    section = recipe.zero.deepspeed.get("zero_optimization", {}) if recipe.zero else {}
    value = section.get(name, default) if isinstance(section, dict) else default
    return value if isinstance(value, (int, float)) else default


def _lora_tensors(lora: Lora, shape: Shape) -> list[int] | None:
    """Return the number of elements of each matrix of the adapters; None: an unknown target."""
    if lora.target_parameters or lora.modules_to_save:
        return None
    linear = shape.linear(lora.target_modules)
    # Each adapter has two matrices, of r x input and output x r elements.
    return None if linear is None else [lora.r * side for pair in linear for side in pair]
