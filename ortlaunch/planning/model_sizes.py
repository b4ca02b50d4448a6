"""Tensors of model families, from the fields of their configs.

The config is one that `families.planned_config_or_none` returned. A row of the table of families
names its function here. A test compares the counts with transformers, and those of adapters with
peft.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple

from ortlaunch.tables.families import FAMILIES, PlannedConfig
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

    def block_layer_sides(self) -> list[tuple[int, int]]:
        """Return inputs and outputs of each linear layer of the repeated layers."""
        return [
            (inputs, outputs)
            for layer_group in self.layer_groups
            for _, inputs, outputs in layer_group.linear_layers * layer_group.layer_count
        ]

    def shape_without_block_layers(self) -> ModelShape:
        """Return the model without the linear layers of its repeated layers."""
        return self._replace(
            layer_groups=[group._replace(linear_layers=[]) for group in self.layer_groups]
        )

    def linear_layer_side_sizes_or_none(
        self, names_or_all_linear: Sequence[str]
    ) -> list[int] | None:
        """Return the sizes of the two sides, inputs and outputs, of each linear layer of these names.

        Returns:
            None if a name is unknown.
        """
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
            [side for name, *sides in all_linear_layers if name in wanted_names for side in sides]
            if wanted_names <= known_names
            else None
        )


def _label_head_tensor_sizes(
    model_config: PlannedConfig, task_name: str, hidden_size: int
) -> list[int]:
    """Return weight and bias of a head for labels; nothing for tasks without."""
    traits = MODEL_TASKS[task_name]
    if traits.compares == "embedding" or not traits.has_new_head:
        return []
    has_one_class = traits.label in ("number", "choice") or traits.compares
    class_count = 1 if has_one_class else model_config.get("num_labels", 2)
    return [hidden_size * class_count, class_count]


def _named_layers(model_config: PlannedConfig, sizes: list[tuple[int, int]]) -> list[LinearLayer]:
    """Return linear layers with their family's names."""
    names = FAMILIES[model_config["model_type"]].layer_names
    return [(name, a, b) for name, (a, b) in zip(names, sizes)]


def _linear_layers_and_vectors_of_bert_layer(
    model_config: PlannedConfig, inner_size: int
) -> tuple[list[LinearLayer], list[int]]:
    """Return the linear layers of BERT's layer, with biases, and its two norms."""
    width: int = model_config["hidden_size"]
    sizes = [(width, width)] * 4 + [(width, inner_size), (inner_size, width)]
    linear_layers = _named_layers(model_config, sizes)
    return linear_layers, [*(b for _, _, b in linear_layers), *[width] * 4]


def _equal_layers_of_bert(model_config: PlannedConfig) -> EqualLayers:
    """Return all layers of a model whose layers are BERT's."""
    return EqualLayers(
        model_config["num_hidden_layers"],
        *_linear_layers_and_vectors_of_bert_layer(model_config, model_config["intermediate_size"]),
    )


def bert_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    traits = MODEL_TASKS[task_name]
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
        [_equal_layers_of_bert(model_config)],
        [*other_sizes, *_label_head_tensor_sizes(model_config, task_name, hidden_size)],
        head_layers,
    )


def llama_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    inner_size = model_config["intermediate_size"]
    head_count = model_config["num_attention_heads"]
    head_size = model_config["head_dim"] or hidden_size // head_count
    query_size = head_count * head_size
    key_value_size = (model_config["num_key_value_heads"] or head_count) * head_size
    family = FAMILIES[model_config["model_type"]]
    sizes_by_name = {
        "q_proj": (hidden_size, query_size),
        "k_proj": (hidden_size, key_value_size),
        "v_proj": (hidden_size, key_value_size),
        "qkv_proj": (hidden_size, query_size + 2 * key_value_size),
        "o_proj": (query_size, hidden_size),
        "gate_proj": (hidden_size, inner_size),
        "up_proj": (hidden_size, inner_size),
        "gate_up_proj": (hidden_size, 2 * inner_size),
        "down_proj": (inner_size, hidden_size),
    }
    linear_layers = [(name, *sizes_by_name[name]) for name in family.layer_names]
    vector_sizes = [hidden_size] * (2 + family.extra_norms) + [
        head_size,
        head_size,
    ] * family.has_head_norms
    vector_sizes += (
        [query_size, key_value_size, key_value_size, hidden_size]
        if model_config["attention_bias"]
        else []
    )
    vector_sizes += [inner_size, inner_size, hidden_size] if model_config["mlp_bias"] else []
    is_tied = model_config.get("tie_word_embeddings", False) or MODEL_TASKS[task_name].label
    embedding_size = model_config.get("embedding_rows", model_config["vocab_size"]) * hidden_size
    head_sizes = (
        _last_token_head_tensor_sizes(model_config, task_name, hidden_size)
        if is_tied
        else [embedding_size]
    )
    layer_group = EqualLayers(model_config["num_hidden_layers"], linear_layers, vector_sizes)
    return ModelShape([layer_group], [embedding_size, hidden_size, *head_sizes])


def _last_token_head_tensor_sizes(
    model_config: PlannedConfig, task_name: str, hidden_size: int
) -> list[int]:
    """Return the tensors of a decoder's head for labels: a class of the last token has no bias."""
    head_sizes = _label_head_tensor_sizes(model_config, task_name, hidden_size)
    return head_sizes[:1] if MODEL_TASKS[task_name].pools else head_sizes


def deberta_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
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
        [_equal_layers_of_bert(model_config)],
        [*embedding_sizes, *head_sizes],
        [("dense", hidden_size, hidden_size)] * (len(head_sizes) > 2),
    )


def _bert_word_or_label_head_tensor_sizes(
    model_config: PlannedConfig, task_name: str, hidden_size: int, embedding_size: int
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


def modernbert_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    inner_size = model_config["intermediate_size"]
    layer_count = model_config["num_hidden_layers"]
    sizes = [
        (hidden_size, 3 * hidden_size),
        (hidden_size, hidden_size),
        (hidden_size, 2 * inner_size),
        (inner_size, hidden_size),
    ]
    linear_layers = _named_layers(model_config, sizes)
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


def roberta_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    # ELECTRA's embeddings may be narrower than its layers.
    embedding_size: int = model_config.get("embedding_size") or hidden_size
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
        [_equal_layers_of_bert(model_config)],
        [
            *other_sizes,
            *_bert_word_or_label_head_tensor_sizes(
                model_config, task_name, hidden_size, embedding_size
            ),
        ],
        adaptable_layers,
    )


def distilbert_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    other_sizes = [
        (model_config["vocab_size"] + model_config["max_position_embeddings"]) * hidden_size,
        hidden_size,
        hidden_size,
    ]
    adaptable_layers = [("vocab_transform", hidden_size, hidden_size)] * bool(
        MODEL_TASKS[task_name].predicts
    )
    return ModelShape(
        [_equal_layers_of_bert(model_config)],
        [
            *other_sizes,
            *_bert_word_or_label_head_tensor_sizes(
                model_config, task_name, hidden_size, hidden_size
            ),
        ],
        adaptable_layers,
    )


def gpt2_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    inner_size = model_config["intermediate_size"]
    sizes = [
        (hidden_size, 3 * hidden_size),
        (hidden_size, hidden_size),
        (hidden_size, inner_size),
        (inner_size, hidden_size),
    ]
    linear_layers = _named_layers(model_config, sizes)
    layer_group = EqualLayers(
        model_config["num_hidden_layers"],
        linear_layers,
        [3 * hidden_size, hidden_size, inner_size, hidden_size, *[hidden_size] * 4],
    )
    return _tied_decoder_shape_with_positions(
        model_config, task_name, layer_group, model_config["positions"]
    )


def opt_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    # Its first two positions are those of padding.
    return _tied_decoder_shape_with_positions(
        model_config,
        task_name,
        _equal_layers_of_bert(model_config),
        model_config["max_position_embeddings"] + 2,
    )


def _tied_decoder_shape_with_positions(
    model_config: PlannedConfig, task_name: str, layer_group: EqualLayers, position_count: int
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


def vit_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    patch_size = 3 * model_config["patch_size"] ** 2 * hidden_size
    return ModelShape(
        [_equal_layers_of_bert(model_config)],
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


def whisper_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    hidden_size = model_config["hidden_size"]
    linear_layers, vector_sizes = _linear_layers_and_vectors_of_bert_layer(
        model_config, model_config["intermediate_size"]
    )
    # Keys have no bias. Cross attention has a norm of its own.
    encoder_layers = EqualLayers(model_config["encoder_layers"], linear_layers, vector_sizes[1:])
    cross_layers = linear_layers[:4]
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
        model_config["positions"] * hidden_size,
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


def t5_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    width, inner_width = model_config["hidden_size"], model_config["intermediate_size"]
    head_count = model_config["num_attention_heads"]
    attention_width = head_count * (model_config["head_dim"] or 0)
    attention = [(name, width, attention_width) for name in "qkv"] + [("o", attention_width, width)]
    is_gated = model_config["feed_forward_proj"].startswith("gated")
    inner_names = ("wi_0", "wi_1") if is_gated else ("wi",)
    inner = [(name, width, inner_width) for name in inner_names] + [("wo", inner_width, width)]
    layer_groups = [
        EqualLayers(model_config["encoder_layers"], [*attention, *inner], [width] * 2),
        EqualLayers(model_config["decoder_layers"], [*attention, *attention, *inner], [width] * 3),
    ]
    # Only the first layer of each half has weights of relative positions.
    bias_sizes = [model_config["relative_attention_num_buckets"] * head_count] * 2
    # transformers 5 ties the output layer to the words, whatever the config has.
    word_count = model_config["vocab_size"] * width
    return ModelShape(layer_groups, [word_count, *bias_sizes, width, width])


def build_model_shape(model_config: PlannedConfig, task_name: str) -> ModelShape:
    """Return the tensors of a model with the head of `task_name`; tied weights are counted once."""
    module_name, _, function_name = FAMILIES[model_config["model_type"]].shape.partition(":")
    shape_function = getattr(importlib.import_module(module_name), function_name)
    model_shape: ModelShape = shape_function(model_config, task_name)
    return model_shape
