"""Tensors of model families, from the fields of their configs.

The config is one that `families.complete` or `families.sized` returned. A test compares the counts
with transformers, and those of adapters with peft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ortlaunch.json_types import Json
from ortlaunch.model_tasks import MODEL_TASKS
from ortlaunch.recipe.fields.families import DECODERS

# Name, inputs and outputs of a linear layer.
Linear = tuple[str, int, int]


class Layers(NamedTuple):
    """Equal layers: their number, the linear layers of one, and its biases and norms."""

    number: int
    linear: list[Linear]
    vectors: list[int]


class Shape(NamedTuple):
    """A model: its layers, and the tensors of its embeddings, last norm and head."""

    layers: list[Layers]
    rest: list[int]
    adapted: Sequence[Linear] = ()
    """Linear layers of `rest` that an adapter of their name, or of all linear layers, reaches."""

    def tensors(self) -> list[int]:
        """Return the elements of each parameter."""
        of_layers = [
            size
            for each in self.layers
            for size in [*(a * b for _, a, b in each.linear), *each.vectors] * each.number
        ]
        return [*of_layers, *self.rest]

    def linear(self, names: Sequence[str]) -> list[tuple[int, int]] | None:
        """Return inputs and outputs of the linear layers of these names; None: one is unknown."""
        every = [*self.adapted, *(one for each in self.layers for one in each.linear * each.number)]
        known = {name for name, _, _ in every}
        wanted = known if "all-linear" in names else set(names)
        return [(a, b) for name, a, b in every if name in wanted] if wanted <= known else None


def _classes(c: Json, task: str, width: int) -> list[int]:
    """Return weight and bias of a head for labels; nothing for tasks without."""
    traits = MODEL_TASKS[task]
    count = 1 if traits.label == "number" else c.get("num_labels", 2)
    return [width * count, count] if traits.has_new_head else []


def _encoder_layer(h: int, i: int, names: tuple[str, ...]) -> tuple[list[Linear], list[int]]:
    """Return the linear layers of BERT's layer, with biases, and its two norms."""
    sizes = [(h, h)] * 4 + [(h, i), (i, h)]
    linear = [(name, a, b) for name, (a, b) in zip(names, sizes)]
    return linear, [*(b for _, _, b in linear), *[h] * 4]


def _bert(c: Json, task: str) -> Shape:
    h = c["hidden_size"]
    traits = MODEL_TASKS[task]
    names = ("query", "key", "value", "dense", "dense", "dense")
    layer = Layers(c["num_hidden_layers"], *_encoder_layer(h, c["intermediate_size"], names))
    heads = [("dense", h, h)] * (traits.pools + bool(traits.predicts))
    heads += [("seq_relationship", h, 2)] * traits.pairs
    rest = [c["vocab_size"] * h, c["max_position_embeddings"] * h, c["type_vocab_size"] * h, h, h]
    rest += [size for _, a, b in heads for size in (a * b, b)]
    if traits.predicts:
        tied = c.get("tie_word_embeddings", True)
        rest += [h, h, c["vocab_size"], *([] if tied else [c["vocab_size"] * h, c["vocab_size"]])]
    return Shape([layer], [*rest, *_classes(c, task, h)], heads)


def _llama(c: Json, task: str) -> Shape:
    h = c["hidden_size"]
    i = c["intermediate_size"]
    heads = c["num_attention_heads"]
    width = c["head_dim"] or h // heads
    q = heads * width
    kv = (c["num_key_value_heads"] or heads) * width
    own = DECODERS[c["model_type"]]
    linear = [
        ("q_proj", h, q), ("k_proj", h, kv), ("v_proj", h, kv), ("o_proj", q, h),
        ("gate_proj", h, i), ("up_proj", h, i), ("down_proj", i, h),
    ]  # fmt: skip
    if c["model_type"] == "phi3":
        linear = [
            ("qkv_proj", h, q + 2 * kv), ("o_proj", q, h), ("gate_up_proj", h, 2 * i),
            ("down_proj", i, h),
        ]  # fmt: skip
    vectors = [h] * (2 + own.norms) + [width, width] * own.head_norms
    vectors += [q, kv, kv, h] if c["attention_bias"] else []
    vectors += [i, i, h] if c["mlp_bias"] else []
    is_tied = c.get("tie_word_embeddings", False) or MODEL_TASKS[task].label
    head = _last_classes(c, task, h) if is_tied else [c["vocab_size"] * h]
    layer = Layers(c["num_hidden_layers"], linear, vectors)
    return Shape([layer], [c["vocab_size"] * h, h, *head])


def _last_classes(c: Json, task: str, width: int) -> list[int]:
    """Return the tensors of a decoder's head for labels: a class of the last token has no bias."""
    head = _classes(c, task, width)
    return head[:1] if MODEL_TASKS[task].pools else head


def _deberta(c: Json, task: str) -> Shape:
    h = c["hidden_size"]
    names = ("query_proj", "key_proj", "value_proj", "dense", "dense", "dense")
    layer = Layers(c["num_hidden_layers"], *_encoder_layer(h, c["intermediate_size"], names))
    # Of version 3: no absolute positions, one table of relative ones with a norm, shared projections.
    embeddings = [c["vocab_size"] * h, h, h, 2 * c["position_buckets"] * h, h, h]
    head = _head(c, task, h, h)
    return Shape([layer], [*embeddings, *head], [("dense", h, h)] * (len(head) > 2))


def _head(c: Json, task: str, h: int, e: int) -> list[int]:
    """Return a head of BERT's kind: a layer and a norm before words, a pooler before a class.

    The weights of the words are those of the embeddings.

    Args:
        c: the config.
        task: the task of the model.
        h: width of the layers.
        e: width of the embeddings.
    """
    if MODEL_TASKS[task].predicts:
        return [h * e, e, e, e, c["vocab_size"]]
    return [*([h * h, h] if MODEL_TASKS[task].pools else []), *_classes(c, task, h)]


def _modernbert(c: Json, task: str) -> Shape:
    h = c["hidden_size"]
    i = c["intermediate_size"]
    count = c["num_hidden_layers"]
    linear = [("Wqkv", h, 3 * h), ("Wo", h, h), ("Wi", h, 2 * i), ("Wo", i, h)]
    # The first layer has one norm, the others two; norms of embeddings, of the end, of the head.
    rest = [c["vocab_size"] * h, h, h, h * h, h, *[h] * (count - 1)]
    words = [c["vocab_size"]] if MODEL_TASKS[task].predicts else []
    layers = [Layers(count, linear, [h])]
    return Shape(layers, [*rest, *words, *_classes(c, task, h)], [("dense", h, h)])


def _roberta(c: Json, task: str) -> Shape:
    h = c["hidden_size"]
    # ELECTRA's embeddings may be narrower than its layers.
    e: int = c.get("embedding_size") or h
    names = ("query", "key", "value", "dense", "dense", "dense")
    layer = Layers(c["num_hidden_layers"], *_encoder_layer(h, c["intermediate_size"], names))
    tables = c["vocab_size"] + c["max_position_embeddings"] + c["type_vocab_size"]
    rest = [tables * e, e, e, *([] if e == h else [e * h, h])]
    adapted = [("embeddings_project", e, h)] * (e != h)
    adapted += [("dense", h, e)] * bool(MODEL_TASKS[task].predicts)
    return Shape([layer], [*rest, *_head(c, task, h, e)], adapted)


def _distilbert(c: Json, task: str) -> Shape:
    h = c["hidden_size"]
    names = ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2")
    layer = Layers(c["num_hidden_layers"], *_encoder_layer(h, c["intermediate_size"], names))
    rest = [(c["vocab_size"] + c["max_position_embeddings"]) * h, h, h]
    adapted = [("vocab_transform", h, h)] * bool(MODEL_TASKS[task].predicts)
    return Shape([layer], [*rest, *_head(c, task, h, h)], adapted)


def _gpt2(c: Json, task: str) -> Shape:
    h = c["hidden_size"]
    i = c["intermediate_size"]
    linear = [("c_attn", h, 3 * h), ("c_proj", h, h), ("c_fc", h, i), ("c_proj", i, h)]
    layer = Layers(c["num_hidden_layers"], linear, [3 * h, h, i, h, *[h] * 4])
    return _decoder(c, task, layer, c["positions"])


def _opt(c: Json, task: str) -> Shape:
    h = c["hidden_size"]
    names = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    layer = Layers(c["num_hidden_layers"], *_encoder_layer(h, c["intermediate_size"], names))
    # Its first two positions are those of padding.
    return _decoder(c, task, layer, c["max_position_embeddings"] + 2)


def _decoder(c: Json, task: str, layer: Layers, positions: int) -> Shape:
    """Return a decoder with learned positions, whose head has the weights of the embeddings."""
    h = c["hidden_size"]
    return Shape([layer], [(c["vocab_size"] + positions) * h, h, h, *_last_classes(c, task, h)])


def _vit(c: Json, task: str) -> Shape:
    h = c["hidden_size"]
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
    layer = Layers(c["num_hidden_layers"], *_encoder_layer(h, c["intermediate_size"], names))
    patch = 3 * c["patch_size"] ** 2 * h
    return Shape([layer], [patch, h, h, c["positions"] * h, h, h, *_classes(c, task, h)])


def _whisper(c: Json, task: str) -> Shape:
    h = c["d_model"]
    attention = ("q_proj", "k_proj", "v_proj", "out_proj")
    linear, vectors = _encoder_layer(h, c["encoder_ffn_dim"], (*attention, "fc1", "fc2"))
    # Keys have no bias. Cross attention has a norm of its own.
    encoder = Layers(c["encoder_layers"], linear, vectors[1:])
    cross = [(name, h, h) for name in attention]
    decoder = Layers(c["decoder_layers"], [*linear, *cross], [*vectors[1:], *[h] * 5])
    audio = [3 * c["num_mel_bins"] * h, h, 3 * h * h, h, c["max_source_positions"] * h, h, h]
    words = [c["vocab_size"] * h, c["max_target_positions"] * h, h, h]
    return Shape([encoder, decoder], [*audio, *words])


# The function that returns a family's shape.
SHAPES: dict[str, Callable[[Json, str], Shape]] = {
    "bert": _bert,
    **dict.fromkeys(DECODERS, _llama),
    "deberta-v2": _deberta,
    "distilbert": _distilbert,
    "electra": _roberta,
    "gpt2": _gpt2,
    "modernbert": _modernbert,
    "opt": _opt,
    "roberta": _roberta,
    "vit": _vit,
    "whisper": _whisper,
}


def shape_of(config: Json, task: str) -> Shape:
    """Return the tensors of a model with the head of `task`; tied weights are counted once."""
    return SHAPES[config["model_type"]](config, task)
