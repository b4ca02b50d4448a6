"""nn.RNN in a training export: ONNX Runtime has gradients of GRU and LSTM, and none of RNN.

An RNN is a GRU that keeps nothing of its state (update gate closed) and sees all of it (reset gate open).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from ortlaunch.ortmodule.tracing.symbolics import Graph, registered

_SHUT = 100.0  # sigmoid(-100) is 0, and sigmoid(100) is 1


def training_recurrent(export: Callable[..., Any]) -> Callable[..., Any]:
    """An export in which an RNN that will be trained is written as a GRU."""
    plain = importlib.import_module("torch.onnx.symbolic_opset9").rnn_tanh

    def symbolic(g: Any, *args: Any) -> Any:
        return plain(Graph(g, {"RNN": functools.partial(_gru, g)}), *args)

    def refused(g: Any, *args: Any) -> Any:
        raise RuntimeError(
            "nn.RNN with nonlinearity='relu' has no gradient in ONNX Runtime; 'tanh', nn.GRU and nn.LSTM have one"
        )

    trained = registered(registered(export, "aten::rnn_tanh", symbolic, 9), "aten::rnn_relu", refused, 9)

    @functools.wraps(export)
    def export_for_training(*args: Any, **kwargs: Any) -> Any:
        evaluated = kwargs["training"] == torch.onnx.TrainingMode.EVAL
        return (export if evaluated else trained)(*args, **kwargs)

    return export_for_training


def _gru(g: Any, x: Any, w: Any, r: Any, b: Any, *rest: Any, activations_s: Any, **settings: Any) -> Any:
    """The same inputs as ONNX's RNN has: w and r (directions, hidden, ...), b (directions, 2 hidden) or none."""
    from torch.onnx import symbolic_helper

    hidden = settings["hidden_size_i"]

    def constant(*gates: float) -> Any:
        values = torch.tensor(gates).repeat_interleave(hidden)
        return g.op("Constant", value_t=values.repeat(len(activations_s), 1))

    def part(first: int) -> Any:
        return symbolic_helper._slice_helper(g, b, axes=[1], starts=[first * hidden], ends=[(first + 1) * hidden])

    # Gates stand in the order update, reset, new; in a bias first those of the input, then those of the state.
    if symbolic_helper._is_none(b):
        b = constant(-_SHUT, _SHUT, 0.0, 0.0, 0.0, 0.0)
    else:
        b = g.op("Concat", constant(-_SHUT, _SHUT), part(0), constant(0.0, 0.0), part(1), axis_i=1)
    before = g.op("Constant", value_t=torch.tensor([0, 2 * hidden, 0, 0, 0, 0]))
    w, r = (g.op("Pad", weight, before) for weight in (w, r))
    return g.op("GRU", x, w, r, b, *rest, linear_before_reset_i=1, **settings)
