"""Parameters, bytes per rank and FLOPs of a recipe.

They are computed from the recipe's numbers alone, and from a pretrained model's config.json if it
is on this host. Weights, gradients and optimizer state are exact counts, compared with the live
tensors of two ranks in tests/worker/engine/test_memory_use_ranks.py; activations are an estimate.
BERT and decoders like Llama are counted here, and four more families in model_sizes.py; for other
models the result is None, and the worker counts them.
"""

from __future__ import annotations

from typing import Any

from ortlaunch.json_types import Json
from ortlaunch.launch_plan import Bytes, Memory
from ortlaunch.model_tasks import MODEL_TASKS
from ortlaunch.planning.activations import kept_beside_recomputation, layer_bytes
from ortlaunch.planning.model_sizes import SHAPES, shape_of
from ortlaunch.planning.startup import at_start, on_host, state_bytes
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.data import TokenizerTraining
from ortlaunch.recipe.fields.families import DECODERS, FAMILIES, SIZES, complete, sized
from ortlaunch.recipe.fields.models import Lora
from ortlaunch.recipe.fields.pretrained import config_of
from ortlaunch.recipe.rules.parity import compared_steps

# Logits of a chunk, and the least rows of one: the head's gradient is read and written for each
# chunk. Measured on a CPU.
_CHUNKS = {"cpu": (5 * 2**20, 128), "cuda": (2**25, 1024)}
# Peak memory of a process on a CPU beside the counted tensors, by engine: bytes, and shares of the
# model's bytes, of kept activations, and of all activations of a layer, kept or recomputed. Fitted
# to memory.json of 27 runs of BERT and Llama (26 to 407 MiB planned, torch 2.13, glibc 2.36). In
# eager mode these are holes between blocks, which layers leave also where they are recomputed: with
# at most 57 MiB of live tensors, a process took 170 MiB.
_OVERHEAD = {
    "eager": (10 << 20, 0.0, 0.0, 0.5),
    "inductor": (85 << 20, 0.0, 0.2, 0.0),
    "ort": (25 << 20, 0.4, 0.25, 0.0),
}
# DeepSpeed's modules, imported after the model is built: 125 MiB at once, the rest with its engine.
_DEEPSPEED = 160 << 20
# Modules that an evaluation of labels imports.
_TORCHMETRICS = 35 << 20
# Engine ort, once for Llama, whose graph writes out RMSNorm and rotary positions, and once for
# adapters.
_MORE_NODES = 25 << 20
# GPU memory beside tensors, not measured here: CUDA's context with torch's kernels; workspaces of
# cuBLAS and cuDNN, which engine ort has twice, torch's and ONNX Runtime's; NCCL's buffers.
_CONTEXT = 500 << 20
_WORKSPACES = 100 << 20
_NCCL = 300 << 20
# DeepSpeed's defaults, in elements: largest tensor that ZeRO 3 keeps whole on every rank, elements
# reduced at once, and elements that ZeRO 3 gathers at once.
_PERSISTENT = 100_000
_BUCKET = 500_000_000
_LIVE = 1_000_000_000


def padded_vocabulary(size: int) -> int:
    """Return the vocabulary rounded up to a multiple of 8, which tensor cores need for full speed."""
    return (size + 7) // 8 * 8


def chunk_rows(asked: int | str, rows: int, vocabulary: int, device: str) -> int:
    """Return the rows of a chunk of the loss; 0: all logits are computed at once.

    asked: the field `engine.chunked_loss`: auto, off or a number of rows.
    rows: rows of all logits.
    vocabulary: columns of the logits.
    """
    if asked != "auto":
        return 0 if asked == "off" else int(asked)
    logits, least = _CHUNKS[device]
    # A multiple of 32 rows.
    chunk = max(least, logits // vocabulary // 32 * 32)
    return chunk if chunk < rows else 0


def chunked(recipe: Recipe, tokens: int, vocabulary: int, device: str) -> int:
    """Return the rows of a chunk if the recipe allows a chunked loss, else 0.

    The model may still refuse it.
    """
    whole = not recipe.model.traits.predicts or (recipe.zero and recipe.zero.stage == 3)
    return 0 if whole else chunk_rows(recipe.engine.chunked_loss, tokens, vocabulary, device)


def full_config(recipe: Recipe) -> Json | None:
    """Return the model's config with every default, or None if it is unknown without transformers."""
    own = recipe.model.config or {}
    known = config_of(recipe.model.pretrained) if recipe.model.pretrained else {}
    given = {**(known or {}), **own}
    # Without the model's own config the recipe has to give the sizes.
    filled = None if known is None and not set(own) >= SIZES else complete(given)
    config = filled or sized(given)
    tokenizer = recipe.data.tokenizer
    if (
        config
        and not recipe.model.pretrained
        and isinstance(tokenizer, TokenizerTraining)
        and "vocab_size" not in own
    ):
        config["vocab_size"] = padded_vocabulary(tokenizer.vocab_size)
    return config


def tensor_sizes(config: Json, task: str) -> list[int]:
    """Return the elements of each parameter of a BERT or a decoder with the head of `task`.

    Tied weights are counted once.
    """
    if config["model_type"] in SHAPES:
        return shape_of(config, task).tensors()
    return _bert(config, task) if config["model_type"] == "bert" else _llama(config, task)


def _bert(c: Json, task: str) -> list[int]:
    h = c["hidden_size"]
    i = c["intermediate_size"]
    vocab = c["vocab_size"]
    embeddings = [vocab * h, c["max_position_embeddings"] * h, c["type_vocab_size"] * h, h, h]
    # Four projections of attention, two of the feed-forward part, two norms; all with biases.
    layer = [*[h * h, h] * 4, h * i, i, i * h, h, *[h] * 4]
    pooler = [h * h, h]
    words = [
        h * h,
        h,
        h,
        h,
        vocab,
        *([] if c.get("tie_word_embeddings", True) else [vocab * h, vocab]),
    ]
    traits = MODEL_TASKS[task]
    labels = _labels(c, task)
    head = [*(pooler if traits.pools else []), *(words if traits.predicts else [])]
    head += [*([2 * h, 2] if traits.pairs else []), *([labels * h, labels] if traits.label else [])]
    return [*embeddings, *layer * c["num_hidden_layers"], *head]


def _labels(c: dict[str, Any], task: str) -> int:
    """Return the number of outputs of a head for labels."""
    return 1 if MODEL_TASKS[task].label == "number" else int(c.get("num_labels", 2))


def _llama(c: Json, task: str) -> list[int]:
    h = c["hidden_size"]
    i = c["intermediate_size"]
    vocab = c["vocab_size"]
    heads = c["num_attention_heads"]
    kv = c["num_key_value_heads"] or c["num_attention_heads"]
    width = c["head_dim"] or h // heads
    attention = [h * heads * width, h * kv * width, h * kv * width, heads * width * h]
    attention += [heads * width, kv * width, kv * width, h] if c["attention_bias"] else []
    mlp = [h * i, h * i, i * h, *([i, i, h] if c["mlp_bias"] else [])]
    head = [] if c.get("tie_word_embeddings", False) else [vocab * h]
    label = MODEL_TASKS[task].label
    if label:
        labels = _labels(c, task)
        head = [labels * h, *([labels] if label == "word" else [])]
    own = DECODERS[c["model_type"]]
    norms = [h] * (2 + own.norms) + [width, width] * own.head_norms
    return [vocab * h, *[*attention, *mlp, *norms] * c["num_hidden_layers"], h, *head]


def estimate(recipe: Recipe, micro_samples: int, ranks: int, device: str = "cpu") -> Memory | None:
    """Return the bytes per rank of a recipe on `ranks` data-parallel ranks.

    None for models that are not known here.
    """
    config = full_config(recipe)
    if config is None or (
        config["model_type"] in DECODERS and recipe.model.traits.predicts == "masked"
    ):
        return None
    compares = compared_steps(recipe, config["model_type"]).steps
    tensors = trained = tensor_sizes(config, recipe.model.task)
    if recipe.model.lora:
        adapters = _lora_tensors(recipe.model.lora, config, recipe.model.task)
        if adapters is None:
            return None
        tensors = [*tensors, *adapters]
        trained = adapters
    parameters = sum(tensors)
    trainable = sum(trained)
    # Autocast leaves norms, softmax and their results in float32.
    activations = _activations(recipe, config, micro_samples, 4, device)
    full = recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"gradient_checkpointing": False}),
            "engine": recipe.engine.model_copy(update={"memory_optimization": 0}),
        }
    )
    made = _activations(full, config, micro_samples, _width(recipe) if recipe.zero else 4, device)
    stages: list[tuple[str, Bytes]] = [("DDP", _plain(recipe, parameters, trainable, activations))]
    activations = _activations(recipe, config, micro_samples, _width(recipe), device)
    for stage in range(4):
        exact = _off_gpu(
            recipe,
            _zero(recipe, tensors, trainable, activations, stage, ranks),
            trainable,
            stage,
            device,
        )
        stages.append(
            (
                f"ZeRO {stage}",
                exact._replace(
                    buckets=_bucket(recipe, parameters, trainable, stage, ranks, device)
                ),
            )
        )
    kind = "llama" if config["model_type"] in DECODERS else "bert"
    libraries = _contexts(recipe, ranks)
    stages = [
        (
            stage,
            parts._replace(
                overhead=_overhead(recipe, parts, kind, made) if device == "cpu" else libraries
            ),
        )
        for stage, parts in stages
    ]
    chosen = f"ZeRO {recipe.zero.stage}" if recipe.zero else "DDP"
    chunk = chunked(
        recipe,
        micro_samples * _length(recipe, config),
        int(config["vocab_size"]),
        device,
    )
    compared = 2 * _width(recipe) * trainable if compares else 0
    width = _width(recipe) if recipe.zero else 4
    return Memory(
        parameters, trainable, tuple(stages), chosen, (4 + state_bytes(recipe)) * trainable, chunk, compared,
        at_start(recipe, tensors, trainable, width, ranks),
        on_host(recipe, parameters, trainable, width, ranks, device),
    )  # fmt: skip


def _contexts(recipe: Recipe, ranks: int) -> int:
    """Return the GPU memory of libraries: CUDA contexts, workspaces, NCCL."""
    ort = recipe.engine.name in ("ort", "auto")
    return _CONTEXT + _WORKSPACES * (2 if ort else 1) + (_NCCL if ranks > 1 else 0)


def _overhead(recipe: Recipe, parts: Bytes, family: str, made: int) -> int:
    """Return the bytes of a process beside counted tensors; of engine `auto` the most.

    made: bytes of activations, recomputed ones included.
    """
    names = _OVERHEAD if recipe.engine.name == "auto" else [recipe.engine.name]
    modules = _DEEPSPEED if recipe.zero else 0
    if recipe.data.evaluation is not None and recipe.model.traits.label:
        modules += _TORCHMETRICS
    return modules + max(
        int(least + of_model * parts.model + kept * parts.activations + of_made * made)
        + (
            _MORE_NODES * ((family == "llama") + (recipe.model.lora is not None))
            if name == "ort"
            else 0
        )
        for name in names
        for least, of_model, kept, of_made in [_OVERHEAD[name]]
    )


def why_unknown(recipe: Recipe) -> str:
    """Return why `estimate` returns None, and a remedy."""
    model = recipe.model
    if model.traits.is_own:
        return "your factory builds the model; a training records its memory in memory.json"
    known = config_of(model.pretrained) if model.pretrained else {}
    if known is None:
        return (
            f"the config of {model.pretrained} is not on this host, and a plan does not contact "
            f"the hub; give a local folder, or download it once: hf download {model.pretrained} "
            "config.json"
        )
    kind = {**known, **(model.config or {})}.get("model_type")
    if kind not in (*FAMILIES, *DECODERS, *SHAPES):
        return (
            f"models of type {kind} have no estimate; a training records its memory in memory.json"
        )
    return "adapters on these target_modules have no estimate; a training records its memory in memory.json"


def _plain(recipe: Recipe, parameters: int, trainable: int, activations: int) -> Bytes:
    """Return the bytes of a training without DeepSpeed.

    Weights stay float32, and lower precision is autocast's.
    """
    return Bytes(4 * parameters, 4 * trainable, state_bytes(recipe) * trainable, activations)


def _width(recipe: Recipe) -> int:
    return recipe.format.bytes


def _zero(
    recipe: Recipe, tensors: list[int], trainable: int, activations: int, stage: int, ranks: int
) -> Bytes:
    """Return the bytes of a rank in a ZeRO stage, without offload."""
    width = _width(recipe)
    # DeepSpeed keeps a float32 master copy beside the weights, also in fp32 from stage 1 on.
    master = 0 if stage == 0 and width == 4 else 4
    optimizer = (master + state_bytes(recipe)) * trainable
    whole = width * trainable
    share = -(-width * trainable // ranks)
    # ORTModule returns all gradients at once, also where stage 2 keeps a share of each.
    ort = stage == 2 and ranks > 1 and recipe.engine.name in ("ort", "auto")
    return Bytes(
        weights=width * (sum(tensors) if stage < 3 else _kept_by_zero_3(recipe, tensors, ranks)),
        gradients=share + (whole if ort else 0) if stage >= 2 else whole,
        optimizer=-(-optimizer // (ranks if stage >= 1 else 1)),
        activations=activations,
    )


def _off_gpu(recipe: Recipe, whole: Bytes, trainable: int, stage: int, device: str) -> Bytes:
    """Return the part of a stage's bytes that stays on the GPU.

    On a CPU, offloaded tensors are in the same memory.
    """
    offload = recipe.zero.offload if recipe.zero and device == "cuda" else None
    if offload is None or not stage:
        return whole
    if offload.optimizer:
        # From stage 2 on, gradients leave the GPU as they are reduced, before the next ones exist;
        # ort computes all of them first.
        kept = recipe.engine.name in ("ort", "auto") or stage < 2
        whole = whole._replace(optimizer=0, gradients=_width(recipe) * trainable if kept else 0)
    return whole._replace(weights=0) if offload.parameters and stage == 3 else whole


def _kept_by_zero_3(recipe: Recipe, tensors: list[int], ranks: int) -> int:
    """Return the elements that ZeRO 3 keeps on each rank.

    These are a piece of every tensor, and the small tensors, which stay whole beside their pieces
    once they were gathered.
    """
    small = int(_setting(recipe, "stage3_param_persistence_threshold", _PERSISTENT))
    return sum(-(-size // ranks) for size in tensors) + sum(
        size for size in tensors if size <= small
    )


def _bucket(
    recipe: Recipe, parameters: int, trainable: int, stage: int, ranks: int, device: str
) -> int:
    """Return the bytes of DeepSpeed's buffers.

    They hold gradients that are reduced and, in stage 3 on a GPU, weights that are gathered. The
    kernel gives a process only the pages that it writes; CUDA allocates all.
    """
    size = int(_setting(recipe, "reduce_bucket_size", _BUCKET)) if stage else _BUCKET
    gathered = 0
    if stage == 0 or device == "cpu":
        size = min(size, trainable)
    elif stage == 3:
        gathered = min(int(_setting(recipe, "stage3_max_live_parameters", _LIVE)), parameters)
    return _width(recipe) * (size + gathered) if ranks > 1 or stage else 0


def _setting(recipe: Recipe, name: str, default: float) -> float:
    """Return one of DeepSpeed's own settings under zero_optimization."""
    section = recipe.zero.deepspeed.get("zero_optimization", {}) if recipe.zero else {}
    value = section.get(name, default) if isinstance(section, dict) else default
    return value if isinstance(value, (int, float)) else default


def _lora_tensors(lora: Lora, c: Json, task: str) -> list[int] | None:
    """Return the elements of each adapter's two matrices, or None for an unknown target module."""
    if lora.target_parameters or lora.modules_to_save:
        return None
    if c["model_type"] in SHAPES:
        linear = shape_of(c, task).linear(lora.target_modules)
        return None if linear is None else [lora.r * side for pair in linear for side in pair]
    h = c["hidden_size"]
    i = c["intermediate_size"]
    heads = c["num_attention_heads"]
    width = (c.get("head_dim") or h // heads) * heads
    narrow = width // heads * (c.get("num_key_value_heads") or heads)
    llama = {
        "q_proj": (h, width), "k_proj": (h, narrow), "v_proj": (h, narrow), "o_proj": (width, h),
        "gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h),
    }  # fmt: skip
    if c["model_type"] == "phi3":
        llama = {
            "qkv_proj": (h, width + 2 * narrow), "o_proj": (width, h),
            "gate_up_proj": (h, 2 * i), "down_proj": (i, h),
        }  # fmt: skip
    shapes = (
        llama if c["model_type"] != "bert" else {"query": (h, h), "key": (h, h), "value": (h, h)}
    )
    heads_of_bert: list[tuple[int, int]] = []
    if "all-linear" in lora.target_modules:
        names = sorted(shapes)
        if c["model_type"] == "bert":
            # BERT's other layers share the name `dense`.
            names += ["dense", "intermediate", "output"]
            shapes |= {"dense": (h, h), "intermediate": (h, i), "output": (i, h)}
            # Pooler and transform; the layers that output labels or words get no adapter.
            traits = MODEL_TASKS[task]
            heads_of_bert = [(h, h)] * (traits.pools + bool(traits.predicts)) + (
                [(h, 2)] if traits.pairs else []
            )
    else:
        names = sorted(set(lora.target_modules))
        if not set(names) <= set(shapes):
            return None
    layers = [shapes[name] for name in names] * int(c["num_hidden_layers"])
    # Each adapter has two matrices, of r x input and output x r elements.
    return [lora.r * side for pair in (*layers, *heads_of_bert) for side in pair]


def _activations(recipe: Recipe, c: Json, micro: int, width: int, device: str) -> int:
    """Return the bytes of activations of a rank."""
    length = _length(recipe, c)
    layers = int(c["num_hidden_layers"])
    tokens = micro * length
    a_layer = tokens * layer_bytes(recipe, c, length, width, device)
    logits = _logits(recipe, c, tokens, device)
    if recipe.model.gradient_checkpointing or recipe.engine.memory_optimization:
        # Each layer's input, and the loss or one layer computed again. These two do not exist at
        # the same time, but a process on a CPU keeps the blocks of one while it computes the other.
        beside = a_layer + logits if device == "cpu" else max(a_layer, logits)
        kept = int(c["hidden_size"]) * width
        kept += kept_beside_recomputation(recipe, c, length, width, device)
        return layers * tokens * kept + beside
    return layers * a_layer + logits


def _length(recipe: Recipe, c: Json) -> int:
    """Return the tokens of a sample; of images and sounds by the model's config."""
    return recipe.data.sequence_length or int(c.get("positions", 0))


def _logits(recipe: Recipe, c: Json, tokens: int, device: str) -> int:
    """Return the bytes of head and loss beside the weights, in float32."""
    if recipe.model.traits.label:
        return 0
    vocabulary = int(c["vocab_size"])
    chunk = chunked(recipe, tokens, vocabulary, device)
    # Whole logits, their log-softmax and the gradients of both: measured on CPU with BERT and
    # Llama, fp32 and bf16.
    if not chunk:
        return 16 * tokens * vocabulary
    # A chunk in float32, in a 16-bit precision also in 16 bits, and the head's gradient, which is kept
    # until the backward pass.
    waiting = 0 if recipe.model.lora else 4 * vocabulary * int(c["hidden_size"])
    return (10 if recipe.format.is_narrow else 4) * min(chunk, tokens) * vocabulary + waiting
