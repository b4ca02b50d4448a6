"""Plans of recipes/models compared with transformers, peft and the tensors that torch saves."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import pytest
import torch

from ortlaunch.planning.memory import (
    estimate_rank_memory_or_none,
    merged_model_config_or_none_if_defaults_unknown,
)
from ortlaunch.planning.model_sizes import build_model_shape
from ortlaunch.recipe import Recipe, load_recipe
from ortlaunch.recipe.fields.model import Lora
from ortlaunch.resolve import shipped
from ortlaunch.tables.families import (
    FAMILIES,
    planned_config_or_none,
)
from ortlaunch.tables.model_tasks import MODEL_TASKS
from ortlaunch.worker.model.adapters import add_lora_adapters
from tests.makers import bert
from tests.worker.model.test_gradient_checkpointing_ranks import saved

pytestmark = pytest.mark.skipif(
    version("transformers") < "5", reason="transformers 4 lacks some types"
)
# Fields of the models' own configs beside the recipes' sizes.
OWN: dict[str, dict[str, Any]] = {
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
                   "norm_rel_ebd": "layer_norm", "position_biased_input": False,
                   "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "whisper": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    "phi3": {"pad_token_id": 0},
}  # fmt: skip
MODELS = [
    name.removeprefix("models/")
    for name in shipped.shipped_recipe_names()
    if name.startswith("models/")
    and not name.endswith("-lora")
    # BERT's layers are compared in test_activations.py, T5's below.
    and not any(word in name for word in ("minilm", "squad", "t5-small"))
]
# Decoders have the same tests in tests/worker/engine/test_memory.py.
PUBLISHED = {
    "modernbert-base": 149_606_402,
    "deberta-v3-base": 184_423_682,
    "whisper-small": 241_734_912,
    "vit-base": 85_806_346,
}


def recipe(name: str) -> Recipe:
    """Return a curated recipe by name."""
    return load_recipe(shipped.shipped_recipe_path_or_refuse(f"models/{name}")).recipe


def built(recipe: Recipe, device: str, **more: Any) -> Any:
    """Return transformers' model of a recipe's sizes, from random weights."""
    import transformers

    fields = dict(recipe.model.config or {})
    kind = fields.pop("model_type")
    fields |= OWN.get(kind, {}) | more
    if kind == "deberta-v2":
        fields["pooler_hidden_size"] = fields["hidden_size"]
    if kind == "whisper":
        fields["decoder_ffn_dim"] = fields["encoder_ffn_dim"]
        fields["decoder_attention_heads"] = fields["encoder_attention_heads"]
    auto = getattr(transformers, recipe.model.traits.auto_class)
    with torch.device(device):
        return auto.from_config(transformers.AutoConfig.for_model(kind, **fields))


def test_each_family_is_compared() -> None:
    """Every family of planning/model_sizes.py is compared, here or with BERT and Llama."""
    published = {(recipe(name).model.config or {})["model_type"] for name in PUBLISHED}
    assert published | {"bert", "t5", *LIKE_LLAMA, *SMALL} == set(FAMILIES)


# Sizes of small models, and the tasks that their family has.
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_WORDS = {"vocab_size": 96, "max_position_embeddings": 512}
_ENCODES = ("masked-lm", "sequence-classification", "sequence-regression", "token-classification")
_DECODES = ("causal-lm", *_ENCODES[1:])
SMALL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "deberta-v2": ({**_SIZES, "vocab_size": 96, "position_buckets": 16, "type_vocab_size": 0, **OWN["deberta-v2"]},
                   _ENCODES),
    "distilbert": ({"dim": 128, "hidden_dim": 320, "n_layers": 2, "n_heads": 4, **_WORDS}, _ENCODES),
    "electra": ({**_SIZES, **_WORDS, "embedding_size": 64, "type_vocab_size": 2}, _ENCODES),
    "gpt2": ({"n_embd": 128, "n_inner": 320, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 96,
              "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, _DECODES),
    "modernbert": ({**_SIZES, "vocab_size": 96, **OWN["modernbert"]}, _ENCODES),
    "opt": ({"hidden_size": 128, "ffn_dim": 320, "num_hidden_layers": 2, "num_attention_heads": 4,
             "word_embed_proj_dim": 128, **_WORDS}, _DECODES[:-1]),
    "roberta": ({**_SIZES, **_WORDS, "type_vocab_size": 1}, _ENCODES),
}  # fmt: skip


# Decoders whose layers tests/worker/engine/test_memory.py compares.
LIKE_LLAMA = ("llama", "mistral", "phi3", "qwen3", "gemma3_text")


@pytest.mark.parametrize("kind", LIKE_LLAMA)
def test_fields_that_a_config_leaves_out_have_the_familys_defaults(kind: str) -> None:
    """The plan has transformers' parameters for a config of sizes alone."""
    import transformers

    fields = {**_SIZES, "vocab_size": 96}
    config = transformers.AutoConfig.for_model(kind, **fields, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    planned = planned_config_or_none({"model_type": kind, **fields})
    assert planned is not None
    sizes = build_model_shape(planned, "causal-lm").parameter_element_counts()
    assert sum(sizes) == sum(weight.numel() for weight in model.parameters())
    assert planned["max_position_embeddings"] == config.max_position_embeddings


@pytest.mark.parametrize("kind", SMALL)
def test_sizes_are_those_of_transformers(kind: str) -> None:
    """The plan has transformers' parameters, with the head of each task of the family."""
    import transformers

    fields, tasks = SMALL[kind]
    for task in tasks:
        more = {"num_labels": 1 if task == "sequence-regression" else 3}
        if kind == "deberta-v2":
            more["pooler_hidden_size"] = 128
        config = transformers.AutoConfig.for_model(kind, **fields, **more)
        with torch.device("meta"):
            model = getattr(transformers, MODEL_TASKS[task].auto_class).from_config(config)
        planned = planned_config_or_none({"model_type": kind, **fields, "num_labels": 3})
        assert planned is not None
        sizes = build_model_shape(planned, task).parameter_element_counts()
        assert sum(sizes) == sum(weight.numel() for weight in model.parameters()), task


# Families of which peft finds linear layers beside those of the plan's layers, and two decoders.
ADAPTED = {
    **SMALL,
    "bert": ({**_SIZES, **_WORDS, "type_vocab_size": 2}, ("pretraining", *_ENCODES)),
    "llama": ({**_SIZES, **_WORDS, "num_key_value_heads": 2}, _DECODES),
}


# peft says that it treats the layers of GPT-2 as they are.
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_of_all_linear_layers_are_pefts(kind: str) -> None:
    """The plan counts them with those of the head, for each task; a head for labels has none."""
    pytest.importorskip("peft")
    import transformers

    fields, tasks = ADAPTED[kind]
    lora = Lora(r=4, target_modules=("all-linear",))
    for task in tasks:
        more = {"pooler_hidden_size": 128} if kind == "deberta-v2" else {}
        config = transformers.AutoConfig.for_model(kind, **fields, **more, num_labels=1)
        with torch.device("meta"):
            model = getattr(transformers, MODEL_TASKS[task].auto_class).from_config(config)
            adapted = add_lora_adapters(model, lora, task)
        # A head for labels is trained as a whole, and has no adapter.
        count = sum(p.numel() for name, p in adapted.named_parameters() if ".lora_" in name)
        data = {"train": {"format": "jsonl", "path": "x"}, "tokenizer": "x", "sequence_length": 128}
        own = {"model_type": kind, **fields, "num_labels": 1}
        model = {"task": task, "config": own, "lora": lora.model_dump()}
        memory = estimate_rank_memory_or_none(bert(model=model, data=data, zero=None), 1, 1)
        assert memory is not None
        assert memory.trainable == count, task


@pytest.mark.parametrize("kind", sorted(set(SMALL) - {"deberta-v2", "modernbert"}))
def test_a_layer_of_other_families_keeps_what_is_planned(kind: str) -> None:
    """The planned bytes of one more layer are within a tenth of those that torch saves."""
    import transformers

    ids = torch.randint(3, 90, (2, 128))
    measured, planned = [], []
    for layers in (2, 3):
        count = {"distilbert": "n_layers", "gpt2": "n_layer"}.get(kind, "num_hidden_layers")
        fields = {**SMALL[kind][0], count: layers}
        config = transformers.AutoConfig.for_model(kind, **fields)
        net = transformers.AutoModelForSequenceClassification.from_config(config).train()
        weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        loss = functools.partial(net, **batch, labels=torch.tensor([0, 1]))
        measured.append(saved(lambda loss=loss: loss().loss, weights)[1])
        made = bert(
            model={"task": "sequence-classification", "config": {"model_type": kind, **fields}},
            data={
                "train": {"format": "jsonl", "path": "x"},
                "tokenizer": "x",
                "sequence_length": 128,
            },
            engine={"name": "eager"},
            zero=None,
        )
        memory = estimate_rank_memory_or_none(made, 2, 1, "cpu")
        assert memory is not None
        planned.append(dict(memory.by_stage)["DDP"].activations)
    assert planned[1] - planned[0] == pytest.approx(measured[1] - measured[0], rel=0.1)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("form", ["relu", "gated-gelu"])
def test_t5_keeps_what_is_planned(form: str, dropout: float) -> None:
    """The plan has T5's parameters, and its layers' bytes are within 1 % of those that torch saves."""
    from transformers import T5Config, T5ForConditionalGeneration

    measured, planned = [], []
    for layers in ((1, 1), (2, 1), (1, 2)):
        fields = {"d_model": 64, "d_kv": 8, "d_ff": 192, "num_layers": layers[0], "vocab_size": 96,
                  "num_decoder_layers": layers[1], "num_heads": 4, "dropout_rate": dropout,
                  "feed_forward_proj": form}  # fmt: skip
        config = T5Config(**fields, decoder_start_token_id=0, use_cache=False)
        net: Any = T5ForConditionalGeneration(config).train()
        weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
        labels = torch.randint(3, 90, (2, 32))
        forward = functools.partial(net, input_ids=torch.randint(3, 90, (2, 128)), labels=labels)
        measured.append(saved(lambda run=forward: run().loss, weights)[1])
        made = bert(
            model={"task": "seq2seq", "config": {"model_type": "t5", **fields}},
            data={"train": {"format": "jsonl", "path": "x"}, "tokenizer": "x",
                  "sequence_length": 128, "target_length": 32},
            engine={"name": "eager"},
            zero=None,
        )  # fmt: skip
        memory = estimate_rank_memory_or_none(made, 2, 1, "cpu")
        assert memory is not None
        assert memory.parameters == sum(p.numel() for p in net.parameters())
        planned.append(dict(memory.by_stage)["DDP"].activations)
    for more in (1, 2):
        difference = measured[more] - measured[0]
        assert planned[more] - planned[0] == pytest.approx(difference, rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    """Parameters, and those of adapters, are those of transformers and peft."""
    peft = pytest.importorskip("peft")
    whole = recipe(name)
    model = built(whole, "meta")
    assert sum(weight.numel() for weight in model.parameters()) == PUBLISHED[name]
    assert (
        sum(
            build_model_shape(
                merged_model_config_or_none_if_defaults_unknown(whole) or {}, whole.model.task
            ).parameter_element_counts()
        )
        == PUBLISHED[name]
    )
    adapters = recipe(f"{name}-lora")
    assert adapters.model.lora is not None
    lora = peft.LoraConfig(
        r=adapters.model.lora.r, target_modules=list(adapters.model.lora.target_modules)
    )
    trained = [p.numel() for p in peft.get_peft_model(model, lora).parameters() if p.requires_grad]
    planned = estimate_rank_memory_or_none(adapters, 1, 1, "cuda")
    assert planned is not None
    assert planned.trainable == sum(trained)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_what_is_planned(name: str) -> None:
    """The planned bytes of one more layer are within a tenth of those that torch saves."""
    measured, planned = zip(*(kept(recipe(name), layers) for layers in (2, 3)))
    assert planned[1] - planned[0] == pytest.approx(measured[1] - measured[0], rel=0.1)


def kept(whole: Recipe, layers: int) -> tuple[int, int]:
    """Return the bytes that a small model in fp32 saves for its backward pass, and the plan's."""
    sizes = dict(whole.model.config or {})
    # DeBERTa's tables of positions are small beside the scores of its whole length only.
    length = 512 if sizes["model_type"] == "deberta-v2" else 128
    small = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32, "num_hidden_layers": layers, "d_model": 128, "encoder_ffn_dim": 320,
             "encoder_attention_heads": 4, "encoder_layers": layers, "decoder_layers": 1, "vocab_size": 96,
             "image_size": 88, "patch_size": 8, "max_source_positions": 128, "num_labels": 2}  # fmt: skip
    sizes.update({key: small[key] for key in small if key in sizes})
    model = whole.model.model_copy(update={"config": sizes, "gradient_checkpointing": False})
    text = whole.data.sequence_length is not None
    data = whole.data.model_copy(update={"sequence_length": length if text else None})
    engine = whole.engine.model_copy(update={"name": "eager"})
    made = whole.model_copy(
        update={"model": model, "data": data, "engine": engine, "zero": None, "precision": "fp32"}
    )
    positions = {} if sizes["model_type"] == "vit" else {"max_position_embeddings": 512}
    net = built(made, "cpu", **positions).train()
    # Each of the two samples of an embedding has a query and a document.
    rows = 4 if whole.model.task == "embedding" else 2
    ids = torch.randint(3, 90, (rows, length))
    labels = torch.tensor([0, 1]) if "classification" in whole.model.task else ids
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not text:
        batch = {
            "image-classification": {"pixel_values": torch.randn(2, 3, 88, 88)},
            "speech-seq2seq": {"input_features": torch.randn(2, 80, 256)},
        }[whole.model.task]
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def loss() -> torch.Tensor:
        output = net(**batch, **({} if whole.model.traits.compares else {"labels": labels}))
        value: torch.Tensor = output[0].sum()  # the loss, or the hidden states
        return value

    measured = saved(loss, weights)[1]
    memory = estimate_rank_memory_or_none(made, 2, 1, "cuda")
    assert memory is not None
    return measured, dict(memory.by_stage)["DDP"].activations
