"""Rules over several fields of a recipe: (paths involved, message) for each one that is broken. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ortlaunch.recipe.dialects import closest
from ortlaunch.recipe.families import attention_dropout, complete, known_fields
from ortlaunch.recipe.models import Corpus, Recipe, TokenizerTraining

Problem = tuple[tuple[str, ...], str]  # dotted paths, the first one is where it is reported

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_FORMAT_FIELDS = {
    "text": ("path",),
    "jsonl": ("path", "text_column", "label_column"),
    "parquet": ("path", "text_column", "label_column"),
    "hub": ("name", "subset", "split", "text_column", "label_column"),
    "custom": ("factory", "arguments"),
}
_FORMAT_NEEDS = {"text": "path", "jsonl": "path", "parquet": "path", "hub": "name", "custom": "factory"}
_OPTIMIZER_FIELDS = {
    "fused_adam": ("betas", "epsilon"),
    "adamw": ("betas", "epsilon"),
    "lamb": ("betas", "epsilon"),
    "sgd": ("momentum",),
}
# DeepSpeed settings that the recipe owns: two sources of truth would disagree one day.
DEEPSPEED_OWNED = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "steps_per_print": "log.every_steps",
    "zero_optimization.stage": "zero.stage",
    "fp16.enabled": "precision",
    "bf16.enabled": "precision",
    "bfloat16": "precision",
    "tensorboard": "log.trackers",
}
# DeepSpeed ignores an unknown top-level key without a word.
_DEEPSPEED_KEYS = [
    "activation_checkpointing",
    "aio",
    "amp",
    "autotuning",
    "bf16",
    "checkpoint",
    "comms_logger",
    "communication_data_type",
    "compile",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "data_types",
    "dataloader_drop_last",
    "disable_allgather",
    "dump_state",
    "elasticity",
    "eigenvalue",
    "flops_profiler",
    "fp16",
    "fp32_allreduce",
    "grad_accum_dtype",
    "gradient_predivide_factor",
    "hybrid_engine",
    "load_universal_checkpoint",
    "memory_breakdown",
    "nebula",
    "pipeline",
    "pld",
    "prescale_gradients",
    "progressive_layer_drop",
    "seq_parallel_communication_data_type",
    "sparse_attention",
    "sparse_gradients",
    "tensor_parallel",
    "timers",
    "torch_autocast",
    "use_data_before_expert_parallelism",
    "use_node_local_storage",
    "wall_clock_breakdown",
    "weight_quantization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
]


def broken(recipe: Recipe) -> Iterator[Problem]:
    """Every rule that the recipe breaks."""
    for rule in (_model, _config, _corpora, _data, _batch, _optimizer, _schedule, _engine, _zero, _train, _launch):
        yield from rule(recipe)
    if recipe.launch.device != "auto":
        yield from device_rules(recipe, recipe.launch.device)


def device_rules(recipe: Recipe, device: str) -> Iterator[Problem]:
    """Precision against engine, DeepSpeed and a known device, `cpu` or `cuda`."""
    if device == "cpu" and recipe.engine.name == "ort" and recipe.precision != "fp32":
        yield (
            ("precision", "engine.name", "launch.device"),
            f"got {recipe.precision} with engine ort on CPU, where ONNX Runtime trains in fp32 only; "
            "use precision: fp32, or engine.name: eager",
        )
    elif device == "cpu" and recipe.precision == "fp16" and recipe.zero:
        yield (
            ("precision", "zero", "launch.device"),
            "got fp16 with DeepSpeed on CPU, which DeepSpeed refuses; use bf16 or fp32, or zero: null",
        )


def _model(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.task == "custom":
        if not model.factory:
            yield ("model.factory", "model.task"), 'is missing: task custom takes `factory: "package.module:function"`'
        for name in ("pretrained", "config", "lora"):
            if getattr(model, name) is not None:
                yield (f"model.{name}", "model.task"), "does nothing with task custom: the factory builds the model"
    else:
        if model.factory or model.arguments:
            name = "factory" if model.factory else "arguments"
            yield (f"model.{name}", "model.task"), f"is for task custom, and task is {model.task}"
        if not model.pretrained and not model.config:
            yield (
                ("model", "model.pretrained", "model.config"),
                "has neither `pretrained` (a folder or hub id) nor `config` (for random weights); give one",
            )
    yield from _function("model.factory", model.factory)


def _function(path: str, value: Any) -> Iterator[Problem]:
    if value and not _FUNCTION.fullmatch(value):
        yield (path,), f'got {value}; write it as "package.module:function"'


def _config(recipe: Recipe) -> Iterator[Problem]:
    config = recipe.model.config
    if config is None:
        return
    if "model_type" not in config and not recipe.model.pretrained:
        yield ("model.config",), "lacks model_type (as bert or llama), which says what the other fields mean"
    known = known_fields(config.get("model_type"))
    for key in config if known else ():
        if key not in (known or ()):
            guess = closest(key, known or ())
            advice = (
                f"did you mean {guess}?" if guess else f"transformers' {config['model_type']} config has no such field"
            )
            yield (f"model.config.{key}",), f"unknown key; {advice}"
    yield from _shape(recipe)


def _shape(recipe: Recipe) -> Iterator[Problem]:
    full = complete(recipe.model.config)
    if full is None or recipe.model.pretrained:
        return
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    wrong = [
        name for name in sizes if not isinstance(full[name], int) or isinstance(full[name], bool) or full[name] < 1
    ]
    for name in wrong:
        yield (f"model.config.{name}",), f"got {full[name]!r}; it must be a whole number from 1"
    if wrong:
        return
    if full.get("head_dim") is None and full["hidden_size"] % full["num_attention_heads"]:
        yield (
            ("model.config.num_attention_heads", "model.config.hidden_size"),
            f"hidden_size ({full['hidden_size']}) is not a multiple of num_attention_heads ({full['num_attention_heads']})",
        )
    length, positions = recipe.data.sequence_length, full["max_position_embeddings"]
    if length and isinstance(positions, int) and length > positions:
        yield (
            ("data.sequence_length", "model.config.max_position_embeddings"),
            f"got {length}, and the model has max_position_embeddings: {positions}; make one fit the other",
        )
    tokenizer = recipe.data.tokenizer
    if isinstance(tokenizer, TokenizerTraining) and "vocab_size" in (recipe.model.config or {}):
        if tokenizer.vocab_size > full["vocab_size"]:
            yield (
                ("data.tokenizer.vocab_size", "model.config.vocab_size"),
                f"got {tokenizer.vocab_size}, more than the model's vocab_size: {full['vocab_size']}",
            )


def _corpora(recipe: Recipe) -> Iterator[Problem]:
    for name in ("train", "evaluation"):
        corpus = getattr(recipe.data, name)
        if not isinstance(corpus, Corpus):
            continue
        needed = _FORMAT_NEEDS[corpus.format]
        if getattr(corpus, needed) is None:
            yield (f"data.{name}.{needed}", f"data.{name}"), f"is missing: format {corpus.format} takes `{needed}`"
        for key in sorted(corpus.model_fields_set - {"format"} - set(_FORMAT_FIELDS[corpus.format])):
            takes = ", ".join(_FORMAT_FIELDS[corpus.format])
            yield (f"data.{name}.{key}",), f"does nothing with format {corpus.format}, which takes {takes}"
        yield from _function(f"data.{name}.factory", corpus.factory)


def _data(recipe: Recipe) -> Iterator[Problem]:
    data, task = recipe.data, recipe.model.task
    own = isinstance(data.train, Corpus) and data.train.format == "custom"
    if (
        data.evaluation is not None
        and (isinstance(data.evaluation, Corpus) and data.evaluation.format == "custom") != own
    ):
        yield ("data.evaluation", "data.train"), "is of another kind than data.train: both custom, or neither"
    for key in ("tokenizer", "sequence_length"):
        if own and getattr(data, key) is not None:
            yield (f"data.{key}", "data.train"), "does nothing with custom data: its factory makes the tensors"
        if not own and getattr(data, key) is None:
            yield (f"data.{key}", "data"), "is missing: text needs a tokenizer and a sequence_length"
    if data.masked_lm is not None and (own or task not in ("masked-lm", "pretraining")):
        yield ("data.masked_lm", "model.task"), "is for the tasks masked-lm and pretraining on text"
    if task == "sequence-classification" and not own and getattr(data.train, "format", "text") == "text":
        yield (
            ("data.train", "model.task"),
            "has no labels; sequence-classification takes format jsonl, parquet, hub or custom",
        )


def _batch(recipe: Recipe) -> Iterator[Problem]:
    batch, launch = recipe.batch, recipe.launch
    total, micro, steps = batch.global_size, batch.micro_size, batch.accumulation_steps
    if [total, micro, steps].count(None) > 1:
        yield (
            ("batch",),
            "give two of global_size, micro_size and accumulation_steps: "
            "global_size = micro_size x accumulation_steps x ranks",
        )
        return
    per_rank = (micro or 1) * (steps or 1)
    if total is None:
        return
    shown = " x ".join(
        f"{name} ({value})" for name, value in (("micro_size", micro), ("accumulation_steps", steps)) if value
    )
    if total % per_rank:
        yield (
            ("batch.global_size", "batch.micro_size", "batch.accumulation_steps"),
            f"got {total}, which is not a multiple of {shown}; {_near_multiples(total, per_rank)}",
        )
    elif launch.nodes and launch.processes_per_node:
        yield from _batch_on(
            total, per_rank, shown, launch.nodes * launch.processes_per_node, exact=bool(micro and steps)
        )


def _batch_on(total: int, per_rank: int, shown: str, ranks: int, exact: bool) -> Iterator[Problem]:
    """The batch equation where the recipe itself says how many ranks there are."""
    paths = (
        "batch.global_size",
        "batch.micro_size",
        "batch.accumulation_steps",
        "launch.nodes",
        "launch.processes_per_node",
    )
    if exact and total != per_rank * ranks:
        yield paths, f"got {total}, but {shown} x {ranks} ranks = {per_rank * ranks}; leave one of the three out"
    elif total % (per_rank * ranks):
        near = _near_multiples(total, per_rank * ranks)
        yield paths, f"got {total}, which is not a multiple of {shown} x {ranks} ranks = {per_rank * ranks}; {near}"


def _near_multiples(total: int, unit: int) -> str:
    below, above = total // unit * unit, (total // unit + 1) * unit
    return f"{below} or {above} would do" if below else f"{above} would do"


def _optimizer(recipe: Recipe) -> Iterator[Problem]:
    optimizer, zero = recipe.optimizer, recipe.zero
    for key in sorted({"betas", "epsilon", "momentum"} & optimizer.model_fields_set):
        if key not in _OPTIMIZER_FIELDS[optimizer.name]:
            takes = " and ".join(_OPTIMIZER_FIELDS[optimizer.name])
            yield (f"optimizer.{key}", "optimizer.name"), f"does nothing with {optimizer.name}, which takes {takes}"
    if optimizer.name != "lamb" or zero is None:
        return
    if zero.stage > 0:
        yield (
            ("optimizer.name", "zero.stage"),
            f"got lamb with ZeRO {zero.stage}: LAMB scales each tensor by its own norm, and ZeRO cuts tensors into flat "
            "pieces, so every scale would be wrong; use fused_adam, or zero.stage: 0",
        )
    elif recipe.precision == "bf16":
        yield (
            ("optimizer.name", "precision", "zero"),
            "got lamb with bf16 under DeepSpeed, whose bf16 optimizer flattens tensors also at stage 0; use zero: null",
        )


def _schedule(recipe: Recipe) -> Iterator[Problem]:
    schedule = recipe.schedule
    if schedule.warmup_steps is not None and schedule.warmup_ratio is not None:
        yield ("schedule.warmup_ratio", "schedule.warmup_steps"), "is given beside warmup_steps; keep one"
    if schedule.warmup_steps is not None and schedule.warmup_steps > recipe.train.max_steps:
        yield (
            ("schedule.warmup_steps", "train.max_steps"),
            f"got {schedule.warmup_steps}, more than train.max_steps ({recipe.train.max_steps}): "
            "the learning rate would never reach its peak",
        )
    if "power" in schedule.model_fields_set and schedule.name != "polynomial":
        yield ("schedule.power", "schedule.name"), f"does nothing with {schedule.name}; it is polynomial's exponent"


def _engine(recipe: Recipe) -> Iterator[Problem]:
    engine = recipe.engine
    if engine.name != "ort":
        for key in sorted({"allow_fallback", "memory_optimization", "opset"} & engine.model_fields_set):
            yield (f"engine.{key}", "engine.name"), f"does nothing with engine {engine.name}; it is ort's"
        return
    if recipe.precision == "bf16":
        yield (
            ("precision", "engine.name"),
            "got bf16 with engine ort: ONNX Runtime 1.19.2 trains in fp32 and, on CUDA, fp16 (no bf16 Gemm on CPU, "
            "no bf16 in FusedAdam); use fp16, or engine.name: eager",
        )
    if recipe.zero and recipe.zero.stage == 3:
        yield (
            ("zero.stage", "engine.name"),
            "got 3 with engine ort, which needs whole weights in its graph (and a DeepSpeed function that is gone); "
            "use stage 2, or engine.name: eager",
        )
    dropout = attention_dropout(recipe.model.config)
    if recipe.model.attention == "sdpa" and dropout:
        yield (
            ("model.attention", "engine.name", "model.config"),
            f"got sdpa with attention dropout {dropout:g} on engine ort, which cannot build the gradient of sdpa's dropout; "
            "use eager or auto, or set the dropout to 0",
        )


def _zero(recipe: Recipe) -> Iterator[Problem]:
    settings: dict[str, Any] = recipe.zero.deepspeed if recipe.zero else {}
    for dotted, ours in DEEPSPEED_OWNED.items():
        first, _, second = dotted.partition(".")
        value = settings.get(first)
        if value is not None and (not second or (isinstance(value, dict) and second in value)):
            yield (f"zero.deepspeed.{dotted}",), f"is set by the recipe: change {ours} instead"
    for key in settings:
        if key not in _DEEPSPEED_KEYS and key not in DEEPSPEED_OWNED:
            guess = closest(key, _DEEPSPEED_KEYS)
            advice = f"did you mean {guess}?" if guess else "DeepSpeed would ignore it"
            yield (f"zero.deepspeed.{key}",), f"unknown DeepSpeed key; {advice}"


def _train(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.evaluate_every_steps and recipe.data.evaluation is None:
        yield (
            ("train.evaluate_every_steps", "data.evaluation"),
            "does nothing without data.evaluation; give that corpus",
        )


def _launch(recipe: Recipe) -> Iterator[Problem]:
    launch = recipe.launch
    per_node, nodes = launch.processes_per_node or 1, launch.nodes or 1
    if launch.launcher == "local" and per_node * nodes > 1:
        yield (
            ("launch.launcher", "launch.processes_per_node", "launch.nodes"),
            f"got local, which is one process, for {nodes} nodes x {per_node} processes; use torchrun, mpi or auto",
        )
    if launch.launcher == "torchrun" and nodes > 1:
        yield (
            ("launch.launcher", "launch.nodes"),
            f"got torchrun, which starts the ranks of one host, for {nodes} nodes; use mpi, or run "
            "`torchrun --nnodes ... --no-python ortlaunch train RECIPE` on each of them with launcher auto",
        )
