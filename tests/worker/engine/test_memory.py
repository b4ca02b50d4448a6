"""Planned memory: parameter counts compared with transformers and peft, and bytes by hand."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.launch_plan import Bytes, Memory
from ortlaunch.planning.memory import (
    estimate_rank_memory_or_none,
    merged_model_config_or_none_if_defaults_unknown,
)
from ortlaunch.planning.model_sizes import build_model_shape
from ortlaunch.recipe import Recipe, load_recipe
from ortlaunch.recipe.inputs import rounded_vocabulary_size
from ortlaunch.resolve import shipped
from ortlaunch.tables.families import planned_config_or_none
from ortlaunch.tables.model_tasks import MODEL_TASKS
from tests.makers import BERT, WORDS, bert

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96, "vocab_size": 500}  # fmt: skip
LLAMA_7B = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "intermediate_size": 11008, "vocab_size": 32000}  # fmt: skip
BERT_LARGE = {"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
              "intermediate_size": 4096, "vocab_size": 30528}  # fmt: skip
# Of encoders with a decoder there is no plan; a decoder has no choices, and its spans no classes.
LABELLED = [task for task, traits in MODEL_TASKS.items() if traits.label and task != "seq2seq"]
OF_DECODERS = [task for task in LABELLED if task not in ("multiple-choice", "question-answering")]


def transformers_model(config: dict[str, Any], task: str) -> nn.Module:
    """Return transformers' model of this config, without memory for its weights."""
    import transformers

    fields = {**config, **({"num_labels": 1} if task == "sequence-regression" else {})}
    kind = fields.pop("model_type")
    with torch.device("meta"):
        made: nn.Module = getattr(transformers, MODEL_TASKS[task].auto_class).from_config(
            transformers.AutoConfig.for_model(kind, **fields)
        )
    return made


def parameters(model: nn.Module, trained: bool = False) -> int:
    """Return the number of parameters of a model; tied ones count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


@pytest.mark.parametrize("task", ["pretraining", "masked-lm", *LABELLED])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"type_vocab_size": 3, "max_position_embeddings": 77},
        {"num_labels": 5},
        pytest.param(
            {"tie_word_embeddings": False},
            marks=pytest.mark.skipif(
                version("transformers") < "5",
                reason="transformers 4 ties the bias of the words even so",
            ),
        ),
        {"num_hidden_layers": 1, "intermediate_size": 100, "vocab_size": 333},
    ],
    ids=str,
)
def test_bert_has_transformers_count(task: str, fields: dict[str, Any]) -> None:
    """The count of BERT's parameters equals transformers', with each head."""
    config = {**BERT, **fields}
    assert sum(
        build_model_shape(planned_config_or_none(config) or {}, task).parameter_element_counts()
    ) == parameters(transformers_model(config, task))


@pytest.mark.parametrize("task", ["causal-lm", *OF_DECODERS])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        {"head_dim": 32, "num_key_value_heads": 2, "tie_word_embeddings": True},
        {"head_dim": 32, "attention_bias": True},
        {"num_labels": 7},
    ],
    ids=str,
)
def test_llama_has_transformers_count(task: str, fields: dict[str, Any]) -> None:
    """The count of Llama's parameters equals transformers', with all options of the config."""
    config = {**LLAMA, **fields}
    assert sum(
        build_model_shape(planned_config_or_none(config) or {}, task).parameter_element_counts()
    ) == parameters(transformers_model(config, task))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama3-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
        ("gemma3-1b", 999_885_952),
        ("mistral-7b", 7_248_023_552),
        ("phi4-mini", 3_836_021_760),
        ("smollm2-1.7b", 1_711_376_384),
    ],
)
@pytest.mark.skipif(version("transformers") < "5", reason="transformers 4 lacks some types")
def test_curated_models_have_their_sizes(name: str, published: int) -> None:
    """The decoders of recipes/models have their published sizes, here and in transformers."""
    config = (
        load_recipe(shipped.shipped_recipe_path_or_refuse(f"models/{name}")).recipe.model.config
        or {}
    )
    assert (
        sum(
            build_model_shape(
                planned_config_or_none(config) or {}, "causal-lm"
            ).parameter_element_counts()
        )
        == published
    )
    assert parameters(transformers_model(config, "causal-lm")) == published
    adapters = load_recipe(shipped.shipped_recipe_path_or_refuse(f"models/{name}-lora")).recipe
    planned = estimate_rank_memory_or_none(adapters, 1, 1, "cuda")
    peft = pytest.importorskip("peft")
    with_adapters = peft.get_peft_model(
        transformers_model(config, "causal-lm"), peft.LoraConfig(r=16, target_modules="all-linear")
    )
    assert planned is not None
    assert planned.trainable == parameters(with_adapters, trained=True)


@pytest.mark.parametrize(
    ("config", "task", "published"),
    [
        (LLAMA_7B, "causal-lm", 6_738_415_616),
        ({"model_type": "llama"}, "causal-lm", 6_738_415_616),
        ({**BERT_LARGE, "vocab_size": 30522}, "pretraining", 336_226_108),
    ],
    ids=["Llama-2-7b", "a Llama config's defaults", "BERT-large"],
)
def test_published_sizes(config: dict[str, Any], task: str, published: int) -> None:
    """The models of the shipped recipes have their published sizes, here and in transformers."""
    assert (
        sum(
            build_model_shape(planned_config_or_none(config) or {}, task).parameter_element_counts()
        )
        == published
    )
    assert parameters(transformers_model(config, task)) == published


@pytest.mark.parametrize(
    ("config", "task", "modules"),
    [
        (LLAMA, "causal-lm", ["q_proj", "v_proj"]),
        (
            {**LLAMA, "num_key_value_heads": 2},
            "causal-lm",
            ["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        ),
        (
            {**LLAMA, "head_dim": 32, "num_key_value_heads": 1},
            "causal-lm",
            ["q_proj", "v_proj", "o_proj"],
        ),
        (BERT, "masked-lm", ["query", "value"]),
        (BERT, "masked-lm", ["key"]),
        (BERT, "pretraining", ["dense"]),
        (LLAMA, "causal-lm", ["all-linear"]),
        ({**LLAMA, "num_key_value_heads": 2}, "causal-lm", ["all-linear"]),
        (BERT, "masked-lm", ["all-linear"]),
        (BERT, "pretraining", ["all-linear"]),
    ],
)
def test_adapters_have_pefts_count(config: dict[str, Any], task: str, modules: list[str]) -> None:
    """The counts of trained and of all parameters with LoRA equal peft's."""
    import peft

    targets = modules[0] if modules == ["all-linear"] else modules
    made = peft.get_peft_model(
        transformers_model(config, task), peft.LoraConfig(r=4, target_modules=targets)
    )
    memory = known(
        bert(model={"task": task, "config": config, "lora": {"r": 4, "target_modules": modules}})
    )
    assert (memory.parameters, memory.trainable) == (
        parameters(made),
        parameters(made, trained=True),
    )


def known(recipe: Recipe, micro: int = 2, ranks: int = 1) -> Memory:
    """Return the estimate of a recipe, which must have one."""
    memory = estimate_rank_memory_or_none(recipe, micro, ranks)
    assert memory is not None
    return memory


@pytest.mark.parametrize(
    "model",
    [
        {"task": "causal-lm", "config": {"model_type": "gpt2"}},
        {"task": "masked-lm", "config": {"model_type": "bert"}, "pretrained": "somewhere"},
        {"task": "masked-lm", "pretrained": "somewhere"},
        {"task": "masked-lm", "config": LLAMA},
        {"task": "causal-lm", "config": LLAMA, "lora": {"target_modules": ["q_proj", "lm_head"]}},
    ],
)
def test_no_guess_where_the_count_is_not_known(model: dict[str, Any]) -> None:
    """There is no estimate for other models, weights on disk and unusual adapters."""
    # The worker counts those after it has built the model.
    assert estimate_rank_memory_or_none(bert(model=model), 2, 1) is None


# Optimizer and precision -> bytes per parameter of (weights, gradients, optimizer) on one rank.
WIDTHS = {
    ("adamw", "fp32"): {"DDP": (4, 4, 8), "ZeRO 0": (4, 4, 8), "ZeRO 1": (4, 4, 12)},
    ("fused_adam", "bf16"): {"DDP": (4, 4, 8), "ZeRO 0": (2, 2, 12), "ZeRO 1": (2, 2, 12)},
    ("lamb", "fp16"): {"DDP": (4, 4, 8), "ZeRO 0": (2, 2, 12)},
    ("sgd", "fp32"): {"DDP": (4, 4, 0), "ZeRO 0": (4, 4, 0), "ZeRO 1": (4, 4, 4)},
}


@pytest.mark.parametrize(("names", "widths"), WIDTHS.items(), ids=str)
def test_bytes_on_one_rank(names: tuple[str, str], widths: dict[str, tuple[int, int, int]]) -> None:
    """Weights, gradients and optimizer state have the expected bytes per parameter."""
    memory = known(bert(optimizer={"name": names[0], "learning_rate": 0.1}, precision=names[1]))
    stages = dict(memory.by_stage)
    for stage, (weights, gradients, optimizer) in widths.items():
        found = stages[stage]
        assert found[:3] == tuple(
            memory.parameters * width for width in (weights, gradients, optimizer)
        )
        assert found.total == sum(found)


def test_sgd_with_momentum_has_state() -> None:
    """SGD with momentum has one float32 of state per parameter."""
    memory = known(bert(optimizer={"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}))
    assert dict(memory.by_stage)["DDP"].optimizer == 4 * memory.parameters


VIT = {"model_type": "vit", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
       "intermediate_size": 96, "image_size": 32, "patch_size": 8}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "more"),
    [("sequence-classification", 35 << 20), ("image-classification", 35 << 20), ("masked-lm", 0)],
)
def test_an_evaluation_of_labels_imports_torchmetrics(task: str, more: int) -> None:
    """The overhead of an evaluation with labels contains torchmetrics."""
    # Its modules stay in the process: without them the plan had 94 MiB, and 152 MiB were measured.
    is_image = task == "image-classification"
    model = {"task": task, "config": VIT if is_image else BERT}
    held_out = {"format": "folder" if is_image else "jsonl", "path": "b"}
    others = {"processor": "p"} if is_image else WORDS
    data = {**others, "train": {**held_out, "path": "a"}}
    plain, evaluated = (
        known(bert(model=model, data=each)) for each in (data, {**data, "evaluation": held_out})
    )
    assert dict(evaluated.by_stage)["DDP"].overhead - dict(plain.by_stage)["DDP"].overhead == more


def test_torch_keeps_the_bytes_that_are_said() -> None:
    """A real AdamW step keeps the planned bytes of state, apart from its step counters."""
    model = nn.Linear(100, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 100)).sum().backward()
    optimizer.step()
    state = [
        value for one in optimizer.state.values() for name, value in one.items() if name != "step"
    ]
    # Two moments of 4 bytes.
    assert sum(value.nbytes for value in state) == 8 * parameters(model)


def test_zero_shards_over_the_ranks() -> None:
    """Each stage divides one more type of tensor by the ranks, rounded up, but not activations."""
    alone, shared = (dict(known(bert(zero={"stage": 3}), ranks=ranks).by_stage) for ranks in (1, 7))
    up = {
        name: -(-getattr(alone["ZeRO 1"], name) // 7)
        for name in ("weights", "gradients", "optimizer")
    }
    assert shared["DDP"] == alone["DDP"]
    # Only several ranks need its bucket.
    assert shared["ZeRO 0"][:4] == alone["ZeRO 0"][:4]
    whole = alone["ZeRO 1"]
    assert shared["ZeRO 1"] == whole._replace(optimizer=up["optimizer"])
    assert shared["ZeRO 2"] == whole._replace(optimizer=up["optimizer"], gradients=up["gradients"])
    pieces = shared["ZeRO 3"]
    assert pieces == Bytes(
        pieces.weights,
        up["gradients"],
        up["optimizer"],
        whole.activations,
        whole.buckets,
        pieces.overhead,
    )
    # Every tensor of this BERT is below DeepSpeed's 100,000 elements: each stays whole beside its
    # seventh.
    assert 0 <= pieces.weights - whole.weights - up["weights"] < 4 * 100


def test_zero_3_keeps_small_tensors_whole() -> None:
    """Tensors up to DeepSpeed's threshold stay whole beside their pieces."""
    # With the default threshold biases and norms stay whole, then none, then all tensors.
    config = {**BERT, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    sizes = build_model_shape(
        planned_config_or_none(config) or {}, "masked-lm"
    ).parameter_element_counts()
    # By hand: each of 2 layers has 4 biases of 512, biases of 1024 and 512, and 4 vectors of norms.
    # Outside the layers are type embeddings (2 x 512) and their norm, and the head's bias, norm and
    # bias of the words.
    small = (
        2 * (4 * 512 + 1024 + 512 + 4 * 512) + 2 * 512 + 2 * 512 + 3 * 512 + config["vocab_size"]
    )
    whole = {"null": small, 0: 0, 10**9: sum(sizes)}
    for threshold, expected in whole.items():
        own = (
            {}
            if threshold == "null"
            else {"zero_optimization": {"stage3_param_persistence_threshold": threshold}}
        )
        model = {"task": "masked-lm", "config": config}
        found = dict(
            known(bert(model=model, zero={"stage": 3, "deepspeed": own}), ranks=2).by_stage
        )["ZeRO 3"].weights
        assert found == 4 * (sum(-(-size // 2) for size in sizes) + expected), threshold


@pytest.mark.parametrize(
    ("device", "ranks", "expected"),
    [("cpu", 2, (0, 1, 1, 1, 1)), ("cpu", 1, (0, 0, 1, 1, 1)), ("cuda", 2, (0, 1, 0, 0, 0))],
)
def test_buckets_of_gradients(device: str, ranks: int, expected: tuple[int, ...]) -> None:
    """The buckets for the reduction of gradients have the expected size."""
    # On CUDA (0 in `expected`) they have half a billion elements; on a CPU (1) no more than there
    # are parameters. ZeRO 3 on CUDA also gathers weights, here all of them.
    made = bert(precision="bf16")
    memory = estimate_rank_memory_or_none(made, 2, ranks, device)
    assert memory is not None
    found = [parts.buckets for _, parts in memory.by_stage]
    most = [0, 0 if ranks == 1 else 2 * memory.trainable, *[2 * 500_000_000] * 3]
    gathered = [0, 0, 0, 0, 2 * memory.parameters if device == "cuda" else 0]
    assert found == [
        2 * memory.trainable * one + most[n] * (1 - one) + gathered[n]
        for n, one in enumerate(expected)
    ]
    assert found[0] == 0


@pytest.mark.parametrize(
    ("zero", "chosen"),
    [(None, "DDP"), *(({"stage": stage}, f"ZeRO {stage}") for stage in range(4))],
)
def test_chosen_stage(zero: dict[str, Any] | None, chosen: str) -> None:
    """The plan marks the stage of the recipe."""
    assert known(bert(zero=zero)).chosen == chosen


@pytest.mark.parametrize(
    ("sections", "width"),
    [
        ({}, 12),
        ({"precision": "bf16"}, 12),
        ({"zero": {"stage": 1}}, 12),
        ({"zero": {"stage": 2}, "precision": "bf16"}, 12),
    ],
    ids=str,
)
def test_bytes_of_a_checkpoint(sections: dict[str, Any], width: int) -> None:
    """A checkpoint has the float32 weights and the optimizer state of all ranks together."""
    # With DeepSpeed the float32 weights are its master weights.
    adam = {"name": "adamw", "learning_rate": 0.1}
    made = bert(optimizer=adam, **sections)
    assert (
        known(made).checkpoint == known(made, ranks=7).checkpoint == width * known(made).parameters
    )


def test_a_checkpoint_of_adapters_is_small() -> None:
    """A checkpoint has no frozen weights, with and without DeepSpeed."""
    model = {"task": "causal-lm", "config": LLAMA, "lora": {"r": 4}}
    adam = {"name": "adamw", "learning_rate": 0.1}
    memory = known(bert(model=model, optimizer=adam))
    # The weight and two moments, of 4 bytes each.
    assert memory.checkpoint == 12 * memory.trainable
    sharded = known(bert(model=model, optimizer=adam, zero={"stage": 1}))
    assert sharded.checkpoint == 12 * memory.trainable


def activations(**sections: Any) -> int:
    """Return the estimated bytes of activations."""
    return dict(known(bert(**sections)).by_stage)["DDP"].activations


@pytest.mark.parametrize(
    ("sections", "less"),
    [
        (
            {"model": {"task": "masked-lm", "config": {**BERT, "attention_probs_dropout_prob": 0}}},
            "no scores are kept",
        ),
        ({"engine": {"name": "ort", "memory_optimization": 1}}, "layers are computed again"),
        ({"model": {"task": "sequence-classification", "config": BERT}}, "no logits a word"),
    ],
)
def test_what_saves_activations(sections: dict[str, Any], less: str) -> None:
    """Each setting that saves activations lowers the estimate."""
    assert activations(**sections) < activations(), less


@pytest.mark.parametrize(
    ("config", "tokenizer", "words"),
    [
        ({}, {"train": "wordpiece", "vocab_size": 30522}, 30528),
        ({}, {"train": "wordpiece"}, 30528),
        ({}, {"train": "bpe", "vocab_size": 1000}, 1000),
        ({"vocab_size": 50000}, {"train": "bpe", "vocab_size": 1000}, 50000),
        ({}, "a-folder", 30522),
    ],
)
def test_vocabulary_of_the_tokenizer(config: dict[str, Any], tokenizer: Any, words: int) -> None:
    """A tokenizer that the run trains sets the vocabulary, padded to 8, unless the config does."""
    model = {"task": "masked-lm", "config": {"model_type": "bert", **config}}
    found = merged_model_config_or_none_if_defaults_unknown(
        bert(model=model, data={**WORDS, "tokenizer": tokenizer})
    )
    assert (found or {})["vocab_size"] == words


@pytest.mark.parametrize(("size", "padded"), [(1, 8), (8, 8), (9, 16), (30522, 30528)])
def test_padded_vocabulary(size: int, padded: int) -> None:
    """The vocabulary is rounded up to a multiple of 8."""
    assert rounded_vocabulary_size(size) == padded


def test_plan_of_llama_for_eight_gpus() -> None:
    """The plan of Llama-2-7b in fp16 on 8 ranks has 16 bytes per parameter, sharded by stage."""
    model = {"task": "causal-lm", "config": LLAMA_7B}
    adam = {"name": "fused_adam", "learning_rate": 1e-4}
    memory = known(bert(model=model, optimizer=adam, precision="fp16", zero={"stage": 1}), ranks=8)
    n = 6_738_415_616
    # Weights, gradients and optimizer state.
    found = [sum(parts[:3]) for _, parts in memory.by_stage]
    # Small enough for ZeRO 3 to keep whole, with 2 bytes each.
    norms = 65 * 4096
    assert found == [16 * n, 16 * n, 4 * n + 12 * n // 8, 2 * n + 14 * n // 8, 2 * n + 2 * norms]


@pytest.mark.parametrize(
    ("sections", "gradients", "start", "host"),
    [
        ({"zero": {"stage": 2}}, 2 / 8, 4, (4, 0, 12 / 8, 0)),
        ({"zero": {"stage": 2}, "engine": {"name": "ort"}}, 2 + 2 / 8, 4, (4, 0, 12 / 8, 0)),
        ({"zero": {"stage": 2, "offload": {"optimizer": "cpu"}}}, 0, 4, (4, (16 + 2) / 8, 12 / 8, 0)),
        ({"zero": None, "checkpoint": {"async": False}}, 4, 4, (4, 0, 0, 0)),
        (
            {"zero": {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "nvme_path": "/x"}}},
            0, 2 / 8 + 2 * 32000 * 4096 / 6_738_415_616, (4, 2 / 8, 12 / 8, (16 + 2) / 8),
        ),
    ],
)  # fmt: skip
def test_start_and_host_of_llama(
    sections: dict[str, Any], gradients: float, start: float, host: Any
) -> None:
    """The plan has the expected bytes of gradients, the start's peak, host memory and files."""
    # In bytes per parameter. ORTModule adds whole gradients.
    adam = {"name": "fused_adam", "learning_rate": 1e-4}
    model = {"task": "causal-lm", "config": LLAMA_7B}
    memory = estimate_rank_memory_or_none(
        bert(model=model, optimizer=adam, precision="fp16", **sections), 1, 8, "cuda"
    )
    assert memory is not None
    n = 6_738_415_616
    assert dict(memory.by_stage)[memory.chosen].gradients == pytest.approx(n * gradients)
    assert memory.start == pytest.approx(n * start)
    assert memory.host[:4] == pytest.approx([n * each for each in host])
