"""Tensors of model families, from the fields of their configs.

The config is one that `families.config_with_family_defaults_or_none` or
`families.config_with_planned_size_names_or_none` returned. A
test compares the counts
with transformers, and those of adapters with peft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ortlaunch.base.json_types import Json
from ortlaunch.tables.families import DECODERS
from ortlaunch.tables.model_tasks import MODEL_TASKS

# Name, inputs and outputs of a linear layer.
LinearLayer = tuple[str, int, int]


class EqualLayers(NamedTuple):
    """Equal layers: their number, the linear layers of one, and its biases and norms."""

    layer_count: int
    linear_layers: list[LinearLayer]
    vector_sizes: list[int]


class ModelShape(NamedTuple):
    """A model: its layers, and the tensors of its embeddings, last norm and head."""

    layer_groups: list[EqualLayers]
    other_sizes: list[int]
    adaptable_layers: Sequence[LinearLayer] = ()
    """Linear layers of `other_sizes` that an adapter of their name, or of all linear layers, reaches."""

    def parameter_element_counts(self) -> list[int]:
        """Return the elements of each parameter."""
        layer_sizes = [
            size
            for layer_group in self.layer_groups
            for size in [
                *(a * b for _, a, b in layer_group.linear_layers),
                *layer_group.vector_sizes,
            ]
            * layer_group.layer_count
        ]
        return [*layer_sizes, *self.other_sizes]

    def linear_layer_input_and_output_sizes_or_none(
        self, names_or_all_linear: Sequence[str]
    ) -> list[tuple[int, int]] | None:
        """Return inputs and outputs of the linear layers of these names; None: one is unknown."""
        all_linear_layers = [
            *self.adaptable_layers,
            *(
                linear_layer
                for layer_group in self.layer_groups
                for linear_layer in layer_group.linear_layers * layer_group.layer_count
            ),
        ]
        known_names = {name for name, _, _ in all_linear_layers}
        wanted_names = (
            known_names if "all-linear" in names_or_all_linear else set(names_or_all_linear)
        )
        return (
            [(a, b) for name, a, b in all_linear_layers if name in wanted_names]
            if wanted_names <= known_names
            else None
        )


def _label_head_tensor_sizes(model_config: Json, task_name: str, hidden_size: int) -> list[int]:
    """Return weight and bias of a head for labels; nothing for tasks without."""
    traits = MODEL_TASKS[task_name]
    class_count = 1 if traits.label == "number" else model_config.get("num_labels", 2)
    return [hidden_size * class_count, class_count] if traits.has_new_head else []


def _linear_layers_and_vectors_of_bert_layer(
    hidden_size: int, inner_size: int, layer_names: tuple[str, ...]
) -> tuple[list[LinearLayer], list[int]]:
    """Return the linear layers of BERT's layer, with biases, and its two norms."""
    sizes = [(hidden_size, hidden_size)] * 4 + [
        (hidden_size, inner_size),
        (inner_size, hidden_size),
    ]
    linear_layers = [(name, a, b) for name, (a, b) in zip(layer_names, sizes)]
    return linear_layers, [*(b for _, _, b in linear_layers), *[hidden_size] * 4]


def _bert_shape(model_config: Json, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    traits = MODEL_TASKS[task_name]
    layer_names = ("query", "key", "value", "dense", "dense", "dense")
    layer_group = EqualLayers(
        model_config["num_hidden_layers"],
        *_linear_layers_and_vectors_of_bert_layer(
            hidden_size, model_config["intermediate_size"], layer_names
        ),
    )
    head_layers = [("dense", hidden_size, hidden_size)] * (traits.pools + bool(traits.predicts))
    head_layers += [("seq_relationship", hidden_size, 2)] * traits.pairs
    other_sizes = [
        model_config["vocab_size"] * hidden_size,
        model_config["max_position_embeddings"] * hidden_size,
        model_config["type_vocab_size"] * hidden_size,
        hidden_size,
        hidden_size,
    ]
    other_sizes += [size for _, a, b in head_layers for size in (a * b, b)]
    if traits.predicts:
        is_tied = model_config.get("tie_word_embeddings", True)
        other_sizes += [
            hidden_size,
            hidden_size,
            model_config["vocab_size"],
            *(
                []
                if is_tied
                else [model_config["vocab_size"] * hidden_size, model_config["vocab_size"]]
            ),
        ]
    return ModelShape(
        [layer_group],
        [*other_sizes, *_label_head_tensor_sizes(model_config, task_name, hidden_size)],
        head_layers,
    )


def _llama_shape(model_config: Json, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    inner_size = model_config["intermediate_size"]
    head_count = model_config["num_attention_heads"]
    head_size = model_config["head_dim"] or hidden_size // head_count
    query_size = head_count * head_size
    key_value_size = (model_config["num_key_value_heads"] or head_count) * head_size
    decoder_traits = DECODERS[model_config["model_type"]]
    linear_layers = [
        ("q_proj", hidden_size, query_size),
        ("k_proj", hidden_size, key_value_size),
        ("v_proj", hidden_size, key_value_size),
        ("o_proj", query_size, hidden_size),
        ("gate_proj", hidden_size, inner_size),
        ("up_proj", hidden_size, inner_size),
        ("down_proj", inner_size, hidden_size),
    ]
    if model_config["model_type"] == "phi3":
        linear_layers = [
            ("qkv_proj", hidden_size, query_size + 2 * key_value_size),
            ("o_proj", query_size, hidden_size),
            ("gate_up_proj", hidden_size, 2 * inner_size),
            ("down_proj", inner_size, hidden_size),
        ]
    vector_sizes = [hidden_size] * (2 + decoder_traits.norms) + [
        head_size,
        head_size,
    ] * decoder_traits.head_norms
    vector_sizes += (
        [query_size, key_value_size, key_value_size, hidden_size]
        if model_config["attention_bias"]
        else []
    )
    vector_sizes += [inner_size, inner_size, hidden_size] if model_config["mlp_bias"] else []
    is_tied = model_config.get("tie_word_embeddings", False) or MODEL_TASKS[task_name].label
    head_sizes = (
        _last_token_head_tensor_sizes(model_config, task_name, hidden_size)
        if is_tied
        else [model_config["vocab_size"] * hidden_size]
    )
    layer_group = EqualLayers(model_config["num_hidden_layers"], linear_layers, vector_sizes)
    return ModelShape(
        [layer_group], [model_config["vocab_size"] * hidden_size, hidden_size, *head_sizes]
    )


def _last_token_head_tensor_sizes(
    model_config: Json, task_name: str, hidden_size: int
) -> list[int]:
    """Return the tensors of a decoder's head for labels: a class of the last token has no bias."""
    head_sizes = _label_head_tensor_sizes(model_config, task_name, hidden_size)
    return head_sizes[:1] if MODEL_TASKS[task_name].pools else head_sizes


def _deberta_shape(model_config: Json, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    layer_names = ("query_proj", "key_proj", "value_proj", "dense", "dense", "dense")
    layer_group = EqualLayers(
        model_config["num_hidden_layers"],
        *_linear_layers_and_vectors_of_bert_layer(
            hidden_size, model_config["intermediate_size"], layer_names
        ),
    )
    # Of version 3: no absolute positions, one table of relative ones with a norm, shared projections.
    embedding_sizes = [
        model_config["vocab_size"] * hidden_size,
        hidden_size,
        hidden_size,
        2 * model_config["position_buckets"] * hidden_size,
        hidden_size,
        hidden_size,
    ]
    head_sizes = _bert_word_or_label_head_tensor_sizes(
        model_config, task_name, hidden_size, hidden_size
    )
    return ModelShape(
        [layer_group],
        [*embedding_sizes, *head_sizes],
        [("dense", hidden_size, hidden_size)] * (len(head_sizes) > 2),
    )


def _bert_word_or_label_head_tensor_sizes(
    model_config: Json, task_name: str, hidden_size: int, embedding_size: int
) -> list[int]:
    """Return a head of BERT's kind: a layer and a norm before words, a pooler before a class.

    The weights of the words are those of the embeddings.

    Args:
        model_config: the config.
        task_name: the task of the model.
        hidden_size: width of the layers.
        embedding_size: width of the embeddings.
    """
    if MODEL_TASKS[task_name].predicts:
        return [
            hidden_size * embedding_size,
            embedding_size,
            embedding_size,
            embedding_size,
            model_config["vocab_size"],
        ]
    return [
        *([hidden_size * hidden_size, hidden_size] if MODEL_TASKS[task_name].pools else []),
        *_label_head_tensor_sizes(model_config, task_name, hidden_size),
    ]


def _modernbert_shape(model_config: Json, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    inner_size = model_config["intermediate_size"]
    layer_count = model_config["num_hidden_layers"]
    linear_layers = [
        ("Wqkv", hidden_size, 3 * hidden_size),
        ("Wo", hidden_size, hidden_size),
        ("Wi", hidden_size, 2 * inner_size),
        ("Wo", inner_size, hidden_size),
    ]
    # The first layer has one norm, the others two; norms of embeddings, of the end, of the head.
    other_sizes = [
        model_config["vocab_size"] * hidden_size,
        hidden_size,
        hidden_size,
        hidden_size * hidden_size,
        hidden_size,
        *[hidden_size] * (layer_count - 1),
    ]
    word_bias_sizes = [model_config["vocab_size"]] if MODEL_TASKS[task_name].predicts else []
    layer_groups = [EqualLayers(layer_count, linear_layers, [hidden_size])]
    return ModelShape(
        layer_groups,
        [
            *other_sizes,
            *word_bias_sizes,
            *_label_head_tensor_sizes(model_config, task_name, hidden_size),
        ],
        [("dense", hidden_size, hidden_size)],
    )


def _roberta_shape(model_config: Json, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    # ELECTRA's embeddings may be narrower than its layers.
    embedding_size: int = model_config.get("embedding_size") or hidden_size
    layer_names = ("query", "key", "value", "dense", "dense", "dense")
    layer_group = EqualLayers(
        model_config["num_hidden_layers"],
        *_linear_layers_and_vectors_of_bert_layer(
            hidden_size, model_config["intermediate_size"], layer_names
        ),
    )
    table_rows = (
        model_config["vocab_size"]
        + model_config["max_position_embeddings"]
        + model_config["type_vocab_size"]
    )
    other_sizes = [
        table_rows * embedding_size,
        embedding_size,
        embedding_size,
        *([] if embedding_size == hidden_size else [embedding_size * hidden_size, hidden_size]),
    ]
    adaptable_layers = [("embeddings_project", embedding_size, hidden_size)] * (
        embedding_size != hidden_size
    )
    adaptable_layers += [("dense", hidden_size, embedding_size)] * bool(
        MODEL_TASKS[task_name].predicts
    )
    return ModelShape(
        [layer_group],
        [
            *other_sizes,
            *_bert_word_or_label_head_tensor_sizes(
                model_config, task_name, hidden_size, embedding_size
            ),
        ],
        adaptable_layers,
    )


def _distilbert_shape(model_config: Json, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    layer_names = ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2")
    layer_group = EqualLayers(
        model_config["num_hidden_layers"],
        *_linear_layers_and_vectors_of_bert_layer(
            hidden_size, model_config["intermediate_size"], layer_names
        ),
    )
    other_sizes = [
        (model_config["vocab_size"] + model_config["max_position_embeddings"]) * hidden_size,
        hidden_size,
        hidden_size,
    ]
    adaptable_layers = [("vocab_transform", hidden_size, hidden_size)] * bool(
        MODEL_TASKS[task_name].predicts
    )
    return ModelShape(
        [layer_group],
        [
            *other_sizes,
            *_bert_word_or_label_head_tensor_sizes(
                model_config, task_name, hidden_size, hidden_size
            ),
        ],
        adaptable_layers,
    )


def _gpt2_shape(model_config: Json, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    inner_size = model_config["intermediate_size"]
    linear_layers = [
        ("c_attn", hidden_size, 3 * hidden_size),
        ("c_proj", hidden_size, hidden_size),
        ("c_fc", hidden_size, inner_size),
        ("c_proj", inner_size, hidden_size),
    ]
    layer_group = EqualLayers(
        model_config["num_hidden_layers"],
        linear_layers,
        [3 * hidden_size, hidden_size, inner_size, hidden_size, *[hidden_size] * 4],
    )
    return _tied_decoder_shape_with_positions(
        model_config, task_name, layer_group, model_config["positions"]
    )


def _opt_shape(model_config: Json, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    layer_names = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    layer_group = EqualLayers(
        model_config["num_hidden_layers"],
        *_linear_layers_and_vectors_of_bert_layer(
            hidden_size, model_config["intermediate_size"], layer_names
        ),
    )
    # Its first two positions are those of padding.
    return _tied_decoder_shape_with_positions(
        model_config, task_name, layer_group, model_config["max_position_embeddings"] + 2
    )


def _tied_decoder_shape_with_positions(
    model_config: Json, task_name: str, layer_group: EqualLayers, position_count: int
) -> ModelShape:
    """Return a decoder with learned positions, whose head has the weights of the embeddings."""
    hidden_size = model_config["hidden_size"]
    return ModelShape(
        [layer_group],
        [
            (model_config["vocab_size"] + position_count) * hidden_size,
            hidden_size,
            hidden_size,
            *_last_token_head_tensor_sizes(model_config, task_name, hidden_size),
        ],
    )


def _vit_shape(model_config: Json, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    layer_names = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
    layer_group = EqualLayers(
        model_config["num_hidden_layers"],
        *_linear_layers_and_vectors_of_bert_layer(
            hidden_size, model_config["intermediate_size"], layer_names
        ),
    )
    patch_size = 3 * model_config["patch_size"] ** 2 * hidden_size
    return ModelShape(
        [layer_group],
        [
            patch_size,
            hidden_size,
            hidden_size,
            model_config["positions"] * hidden_size,
            hidden_size,
            hidden_size,
            *_label_head_tensor_sizes(model_config, task_name, hidden_size),
        ],
    )


def _whisper_shape(model_config: Json, task_name: str) -> ModelShape:
    hidden_size = model_config["d_model"]
    attention_names = ("q_proj", "k_proj", "v_proj", "out_proj")
    linear_layers, vector_sizes = _linear_layers_and_vectors_of_bert_layer(
        hidden_size, model_config["encoder_ffn_dim"], (*attention_names, "fc1", "fc2")
    )
    # Keys have no bias. Cross attention has a norm of its own.
    encoder_layers = EqualLayers(model_config["encoder_layers"], linear_layers, vector_sizes[1:])
    cross_layers = [(name, hidden_size, hidden_size) for name in attention_names]
    decoder_layers = EqualLayers(
        model_config["decoder_layers"],
        [*linear_layers, *cross_layers],
        [*vector_sizes[1:], *[hidden_size] * 5],
    )
    audio_sizes = [
        3 * model_config["num_mel_bins"] * hidden_size,
        hidden_size,
        3 * hidden_size * hidden_size,
        hidden_size,
        model_config["max_source_positions"] * hidden_size,
        hidden_size,
        hidden_size,
    ]
    word_sizes = [
        model_config["vocab_size"] * hidden_size,
        model_config["max_target_positions"] * hidden_size,
        hidden_size,
        hidden_size,
    ]
    return ModelShape([encoder_layers, decoder_layers], [*audio_sizes, *word_sizes])


# The function that returns a family's shape.
SHAPE_BY_MODEL_TYPE: dict[str, Callable[[Json, str], ModelShape]] = {
    "bert": _bert_shape,
    **dict.fromkeys(DECODERS, _llama_shape),
    "deberta-v2": _deberta_shape,
    "distilbert": _distilbert_shape,
    "electra": _roberta_shape,
    "gpt2": _gpt2_shape,
    "modernbert": _modernbert_shape,
    "opt": _opt_shape,
    "roberta": _roberta_shape,
    "vit": _vit_shape,
    "whisper": _whisper_shape,
}


def build_model_shape(model_config: Json, task_name: str) -> ModelShape:
    """Return the tensors of a model with the head of `task_name`; tied weights are counted once."""
    return SHAPE_BY_MODEL_TYPE[model_config["model_type"]](model_config, task_name)
