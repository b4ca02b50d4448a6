"""torch's fused attention for CPUs in ORT's graphs: `ortmodule::attention` and its gradient.

The backward pass uses the log-sum-exp of the scores, which the forward pass returns. So no pass
keeps the matrix of scores, and the forward pass runs once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ortmodule._internal.base import torch_calls

FORWARD = "ortmodule::attention"
BACKWARD = "ortmodule::attention_backward"
# This operator returns which keys a mask excludes, as one of the next three numbers.
MASKED = "ortmodule::masked"
NOTHING, LATER_KEYS, SOME = range(3)
# Rows of a mask that are compared at a time.
_BLOCK_ROWS = 128
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, int masked, float? scale, int swapped"
)
_RESULTS = "Tensor attended, Tensor sums"
# The name of the calls in torch_calls.
_COUNTED_NAME = "aten.scaled_dot_product_attention"
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


@functools.cache
def define_cpu_attention_operators_once() -> torch.library.Library:
    """Register the operators, once in a process.

    The operators exist for as long as the returned library.
    """
    library = torch.library.Library("ortmodule", "FRAGMENT")
    library.define(f"attention({_ARGUMENTS}) -> ({_RESULTS})")
    library.define(
        f"attention_backward(Tensor gradient, {_ARGUMENTS}, {_RESULTS}) -> (Tensor, Tensor, Tensor)"
    )
    library.define("masked(Tensor mask) -> Tensor")
    library.impl("masked", lambda mask: torch.tensor(_excluded_keys_code(mask)), "CPU")
    library.impl("attention", _compute_attention_and_log_sum_exp, "CPU")
    library.impl("attention_backward", _compute_query_key_value_gradients, "CPU")
    return library


def _excluded_keys_code(additive_mask: Tensor) -> int:
    """Return which keys a mask excludes: NOTHING, LATER_KEYS (all after the query) or SOME (others).

    Without a mask the kernel computes faster, and only half of the scores if later keys are
    excluded.

    Args:
        additive_mask: numbers to add to the scores, of shape (..., queries, keys).
    """
    if not additive_mask.numel() or not additive_mask.is_floating_point():
        return SOME
    # NumPy compares the bits on this thread: torch's threads would each wait for many small parts.
    additive_mask = torch.atleast_2d(additive_mask)
    queries, keys = additive_mask.shape[-2:]
    bits = additive_mask.view(_INTEGERS[additive_mask.itemsize]).numpy().reshape(-1, queries, keys)
    if _all_equal(bits, 0):
        return NOTHING
    excluded_bits = bits[0, 0, -1]
    # A number as low as the limit leaves nothing of a score's exponential.
    is_excluding = (
        additive_mask[..., 0, -1].flatten()[0] <= torch.finfo(additive_mask.dtype).min / 2
    )
    if queries != keys or not is_excluding or not _all_equal(bits[:, -1], 0):
        return SOME
    for start in range(0, queries, _BLOCK_ROWS):
        end = min(start + _BLOCK_ROWS, queries)
        block = np.where(np.tri(end - start, dtype=bool), 0, excluded_bits)
        if not (
            _all_equal(bits[:, start:end, :start], 0)
            and (bits[:, start:end, start:end] == block).all()
            and _all_equal(bits[:, start:end, end:], excluded_bits)
        ):
            return SOME
    return LATER_KEYS


def _all_equal(number_array: Any, expected_number: int) -> bool:
    return bool(
        number_array.min(initial=expected_number)
        == expected_number
        == number_array.max(initial=expected_number)
    )


def _compute_attention_and_log_sum_exp(*call_arguments: Any) -> tuple[Tensor, Tensor]:
    """Return attention, of shape (batch, length, heads, size), and the log-sum-exp of the scores.

    The arguments are those of `_heads_first_inputs_and_kernel_settings`.
    """
    with torch_calls.count_and_time_torch_call_and_record_error(_COUNTED_NAME):
        inputs, kernel_settings = _heads_first_inputs_and_kernel_settings(
            call_arguments[:3], *call_arguments[3:]
        )
        if not all(tensor.numel() for tensor in inputs):
            # The kernel divides by the lengths.
            exact_dtype = torch.promote_types(inputs[0].dtype, torch.float32)
            return torch.zeros_like(_swap_heads_and_length(inputs[0])), inputs[0].new_zeros(
                0, 0, 0, dtype=exact_dtype
            )
        attended, sums = getattr(torch.ops.aten, _KERNEL)(*inputs, **kernel_settings)
        return _swap_heads_and_length(attended), sums


def _compute_query_key_value_gradients(
    gradient: Tensor, *forward_arguments: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, each in the order of dimensions of its input."""
    *call_arguments, attended, sums = forward_arguments
    with torch_calls.count_and_time_torch_call_and_record_error(_COUNTED_NAME, is_backward=True):
        if not sums.numel():
            return tuple(map(torch.zeros_like, call_arguments[:3]))
        inputs, kernel_settings = _heads_first_inputs_and_kernel_settings(
            call_arguments[:3], *call_arguments[3:]
        )
        kernel = getattr(torch.ops.aten, f"{_KERNEL}_backward")
        kernel_gradients = kernel(
            _swap_heads_and_length(gradient),
            *inputs,
            _swap_heads_and_length(attended),
            sums,
            **kernel_settings,
        )
        originals = _swap_heads_and_length_by_bits(call_arguments[:3], call_arguments[-1])
        gradients = [
            _sum_gradient_over_shared_heads_and_batch(kernel_gradient, original)
            for kernel_gradient, original in zip(kernel_gradients, originals)
        ]
        return tuple(_swap_heads_and_length_by_bits(gradients, call_arguments[-1]))


def _heads_first_inputs_and_kernel_settings(
    query_key_value: Sequence[Tensor],
    additive_mask: Tensor | None,
    excluded_keys_code: int,
    score_scale: float | None,
    swapped_bits: int,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the inputs of shape (batch, heads, length, size), and the settings with the mask.

    The kernel requires as many keys as queries in batch and heads, and a mask of the whole shape.

    Args:
        query_key_value: query, key and value, of shape (batch, heads, length, size), or as `swapped_bits` states.
        additive_mask: numbers to add to the scores.
        excluded_keys_code: which keys are excluded; without a mask NOTHING or LATER_KEYS.
        score_scale: the factor of the scores; None: 1 / sqrt(size).
        swapped_bits: bits 0, 1 and 2: whether query, key and value have shape (batch, length, heads,
            size). Models make them in this order, and change it only where they need the other.
    """
    # Where the elements of one head are no neighbours, the kernel returns wrong values. ORT's tensors
    # are contiguous, and are not copied.
    heads_first_tensors = _swap_heads_and_length_by_bits(
        [tensor.contiguous() for tensor in query_key_value], swapped_bits
    )
    # The batch size of the tensors that are not shared by all samples.
    batch_size = next(
        (tensor.shape[0] for tensor in heads_first_tensors if tensor.shape[0] != 1), 1
    )
    inputs = [
        _repeat_for_batch_and_heads(tensor, batch_size, heads_first_tensors[0].shape[1])
        for tensor in heads_first_tensors
    ]
    if excluded_keys_code != SOME:
        additive_mask = None
    if additive_mask is not None:
        # A boolean mask whose type the export did not know: ORT passes bool as uint8.
        if not additive_mask.is_floating_point():
            additive_mask = (
                heads_first_tensors[0]
                .new_zeros(additive_mask.shape)
                .masked_fill_(additive_mask == 0, -torch.inf)
            )
        additive_mask = additive_mask.to(heads_first_tensors[0].dtype).expand(
            *inputs[0].shape[:3], inputs[1].shape[2]
        )
    is_causal = excluded_keys_code == LATER_KEYS
    return inputs, {
        "dropout_p": 0.0,
        "is_causal": is_causal,
        "attn_mask": additive_mask,
        "scale": score_scale,
    }


def _repeat_for_batch_and_heads(
    heads_first_tensor: Tensor, batch_size: int, head_count: int
) -> Tensor:
    """Return a tensor with a copy for each sample and head that share a part of it."""
    if heads_first_tensor.shape[:2] == (batch_size, head_count):
        return heads_first_tensor
    return heads_first_tensor.expand(batch_size, -1, -1, -1).repeat_interleave(
        head_count // heads_first_tensor.shape[1], 1
    )


def _swap_heads_and_length_by_bits(tensors: Sequence[Tensor], swapped_bits: int) -> list[Tensor]:
    """Return the tensors with dimensions 1 and 2 swapped where the bit of its place is set."""
    return [
        _swap_heads_and_length(tensor) if swapped_bits >> position & 1 else tensor
        for position, tensor in enumerate(tensors)
    ]


def _swap_heads_and_length(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def _sum_gradient_over_shared_heads_and_batch(gradient: Tensor, original_tensor: Tensor) -> Tensor:
    """Return a gradient summed over the heads and the samples that share a part of a tensor."""
    if gradient.shape == original_tensor.shape:
        return gradient
    shared = gradient.unflatten(1, (original_tensor.shape[1], -1))
    return shared.sum_to_size(*original_tensor.unsqueeze(2).shape).squeeze(2)
