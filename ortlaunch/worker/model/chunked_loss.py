"""Head and cross entropy over a large vocabulary in chunks of rows, without ever whole logits.

The forward pass computes logits, loss and gradients of a chunk together, and the probabilities
overwrite the logits. Liger's fused linear cross entropy and Apple's cut cross entropy do the same
on GPUs. All engines use one torch operator: this module registers it for autograd and
torch.compile, and ONNX Runtime's graph calls it (ortmodule's head_loss.py).
`torch.nn.functional.linear_cross_entropy` exists only from torch 2.13 on, and it can be neither
traced nor compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# ortmodule knows the operator by this name, and keeps its calls in ONNX Runtime's graph.
OPERATOR = "ortmodule::head_loss"
# The default ignore_index of torch's cross entropy.
IGNORED = -100


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunk_rows: int,
    needs_gradients: bool,
) -> Tensor:
    """Return the mean cross entropy of `hidden @ weight.T + bias` over labels other than -100.

    The result is nan if all labels are -100.

    Args:
        hidden: (rows, width); under autocast the matmuls have autocast's dtype.
        weight: (vocabulary, width).
        bias: (vocabulary,), or None.
        labels: (rows,).
        chunk_rows: the number of rows in a chunk.
        needs_gradients: compute gradients.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    of_bias = bias is not None and bias.requires_grad
    wanted_gradients = (
        needs_gradients,
        needs_gradients and weight.requires_grad,
        needs_gradients and of_bias,
    )
    loss: Tensor = torch.ops.ortmodule.head_loss(
        hidden, weight, bias, labels, chunk_rows, *wanted_gradients
    )[0]
    return loss


def _head_loss_gradients_and_gradient_factor(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunk_rows: int,
    *wanted_gradients: bool,
) -> tuple[Tensor, ...]:
    """Return the mean loss, the gradients of hidden, weight and bias, and the gradients' factor.

    The gradients still have to be multiplied by the factor. A gradient that is not in `wanted_gradients` is
    empty. Sums are in float32 or wider.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        labelled_rows = (labels != IGNORED).nonzero().squeeze(1)
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
        loss, *gradients, factor = _allocate_unfilled_loss_gradients_and_factor(
            hidden, weight, bias, labels, chunk_rows, *wanted_gradients
        )
        mean = 1 / max(len(labelled_rows), 1)
        # In float16 the gradients are those of the sum: divided by the number of labels they would
        # underflow, because the loss scale is applied later.
        share = 1.0 if hidden.dtype == torch.float16 else mean
        # One buffer for the logits of all chunks.
        logits = hidden.new_empty(min(chunk_rows, len(labelled_rows)), len(weight))
        for chunk_index, index in enumerate(labelled_rows.split(chunk_rows)):
            x = hidden[index]
            y = labels[index].unsqueeze(1)
            chunk = _linear_into_buffer(x, weight, bias, logits[: len(index)]).to(loss.dtype)
            loss += _softmax_in_place_and_sum_losses(chunk, y)
            if wanted_gradients[0]:
                # Probabilities less 1 at the label: the gradient of the sum of losses.
                chunk.scatter_(1, y, chunk.gather(1, y) - 1)
                narrow = chunk.to(x.dtype)
                gradients[0].index_copy_(0, index, torch.mm(narrow, weight).mul_(share))
                _add_chunk_to_head_gradients(
                    gradients[1:], chunk, narrow, x, share, chunk_index == 0
                )
        return loss / len(labelled_rows), *gradients, factor.fill_(mean / share)


def _allocate_unfilled_loss_gradients_and_factor(
    hidden: Tensor,
    weight: Tensor,
    bias: object,
    labels: object,
    rows: object,
    *wanted_gradients: bool,
) -> tuple[Tensor, ...]:
    """Allocate the operator's outputs, not yet filled."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    # Zeros, because rows without a label have no gradient.
    of_hidden = torch.zeros_like(hidden) if wanted_gradients[0] else hidden.new_empty(0)
    of_weight = hidden.new_empty(weight.shape if wanted_gradients[1] else 0, dtype=exact)
    of_bias = hidden.new_empty(len(weight) if wanted_gradients[2] else 0, dtype=exact)
    return (
        hidden.new_zeros((), dtype=exact),
        of_hidden,
        of_weight,
        of_bias,
        hidden.new_empty((), dtype=exact),
    )


def _linear_into_buffer(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return (
        torch.mm(x, weight.t(), out=out)
        if bias is None
        else torch.addmm(bias, x, weight.t(), out=out)
    )


def _softmax_in_place_and_sum_losses(logits: Tensor, labels: Tensor) -> Tensor:
    # The loss is computed from the largest probability, whose logarithm is finite: the probability
    # of a label may be 0. `amax`, because `max` also returns the index and takes longer than all
    # the rest.
    largest = logits.amax(1, keepdim=True)
    of_label = logits.gather(1, labels)
    torch.softmax(logits, 1, out=logits)
    return (largest - of_label - logits.amax(1, keepdim=True).log()).sum()


def _add_chunk_to_head_gradients(
    gradients: list[Tensor],
    logit_gradients: Tensor,
    narrow_gradients: Tensor,
    hidden_rows: Tensor,
    scale: float,
    is_first_chunk: bool,
) -> None:
    """Add the part of a chunk to the gradients of weight and bias.

    `narrow_gradients` is `logit_gradients` in the dtype of `hidden_rows`. The first chunk overwrites the gradients.
    """
    of_weight, of_bias = gradients
    if of_bias.numel():
        part = logit_gradients.sum(0).mul_(scale)
        if is_first_chunk:
            of_bias.copy_(part)
        else:
            of_bias.add_(part)
    if not of_weight.numel():
        return
    if hidden_rows.dtype == of_weight.dtype:
        of_weight.addmm_(
            narrow_gradients.t(), hidden_rows, beta=0 if is_first_chunk else 1, alpha=scale
        )
        return
    part = torch.mm(narrow_gradients.t(), hidden_rows)
    if is_first_chunk:
        torch.mul(part, scale, out=of_weight)
    else:
        of_weight.add_(part, alpha=scale)


def _keep_gradients_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
) -> None:
    # The outputs are not differentiable themselves: so ctx may hold them without a reference cycle,
    # and autograd makes no zero gradients for them.
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.gradients = output[1:4]
    ctx.factor = output[4]
    ctx.dtype = inputs[1].dtype


def _scale_kept_gradients_once(ctx: Any, gradient: Tensor, *others: Any) -> tuple[Any, ...]:
    # The gradients are scaled in place below, so that they serve for one backward pass only.
    if ctx.gradients is None:
        raise RuntimeError(
            "a chunked loss has its gradients only once: its graph cannot run backward again"
        )
    (of_hidden, *of_head), ctx.gradients = ctx.gradients, None
    factor = gradient * ctx.factor
    if not _is_known_to_be_one(factor):
        for head_gradient in (of_hidden, *of_head):
            head_gradient.mul_(factor)
    input_gradients = [of_hidden, *(head_gradient.to(ctx.dtype) for head_gradient in of_head)]
    return *(
        head_gradient if head_gradient.numel() else None for head_gradient in input_gradients
    ), *(None,) * 5


def _is_known_to_be_one(factor: Tensor) -> bool:
    """Return whether the factor is 1, as without loss scale and accumulation; False if unknown."""
    # Only read on a CPU, where that is free of cost. torch.compile cannot read a value.
    return type(factor) is Tensor and factor.device.type == "cpu" and float(factor) == 1.0


def _register_head_loss_operator_with_autograd() -> None:
    bools = "bool of_hidden, bool of_weight, bool of_bias"
    tensors = ", ".join(["Tensor"] * 5)
    torch.library.define(
        OPERATOR,
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int rows, "
        f"{bools}) -> ({tensors})",
    )
    torch.library.impl(OPERATOR, ("CPU", "CUDA"), _head_loss_gradients_and_gradient_factor)
    torch.library.register_fake(OPERATOR, _allocate_unfilled_loss_gradients_and_factor)
    torch.library.register_autograd(
        OPERATOR, _scale_kept_gradients_once, setup_context=_keep_gradients_for_backward
    )


_register_head_loss_operator_with_autograd()
