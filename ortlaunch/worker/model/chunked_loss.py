"""Head and cross entropy over a large vocabulary in chunks of rows, without ever whole logits.

The forward pass computes logits, loss and gradients of a chunk together, and the probabilities
overwrite the logits. Liger's fused linear cross entropy and Apple's cut cross entropy do the same
on GPUs. All engines use one torch operator: this module registers it for autograd and
torch.compile, and ONNX Runtime's graph calls it (ortmodule/torch_in_graph/head_loss.py).
`torch.nn.functional.linear_cross_entropy` exists only from torch 2.13 on, and it can be neither
traced nor compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ortlaunch.ortmodule.torch_in_graph.head_loss import OPERATOR

# The default ignore_index of torch's cross entropy.
IGNORED = -100


def chunked_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, rows: int, train: bool
) -> Tensor:
    """Return the mean cross entropy of `hidden @ weight.T + bias` over labels other than -100.

    The result is nan if all labels are -100.

    Args:
        hidden: (rows, width); under autocast the matmuls have autocast's dtype.
        weight: (vocabulary, width).
        bias: (vocabulary,), or None.
        labels: (rows,).
        rows: the number of rows in a chunk.
        train: compute gradients.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    of_bias = bias is not None and bias.requires_grad
    wanted = (train, train and weight.requires_grad, train and of_bias)
    loss: Tensor = torch.ops.ortlaunch.head_loss(hidden, weight, bias, labels, rows, *wanted)[0]
    return loss


def _head_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, rows: int, *wanted: bool
) -> tuple[Tensor, ...]:
    """Return the mean loss, the gradients of hidden, weight and bias, and the gradients' factor.

    The gradients still have to be multiplied by the factor. A gradient that is not in `wanted` is
    empty. Sums are in float32 or wider.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        counted = (labels != IGNORED).nonzero().squeeze(1)
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
        loss, *gradients, factor = _outputs(hidden, weight, bias, labels, rows, *wanted)
        mean = 1 / max(len(counted), 1)
        # In float16 the gradients are those of the sum: divided by the number of labels they would
        # underflow, because the loss scale is applied later.
        share = 1.0 if hidden.dtype == torch.float16 else mean
        # One buffer for the logits of all chunks.
        logits = hidden.new_empty(min(rows, len(counted)), len(weight))
        for number, index in enumerate(counted.split(rows)):
            x = hidden[index]
            y = labels[index].unsqueeze(1)
            chunk = _product(x, weight, bias, logits[: len(index)]).to(loss.dtype)
            loss += _into_probabilities(chunk, y)
            if wanted[0]:
                # Probabilities less 1 at the label: the gradient of the sum of losses.
                chunk.scatter_(1, y, chunk.gather(1, y) - 1)
                narrow = chunk.to(x.dtype)
                gradients[0].index_copy_(0, index, torch.mm(narrow, weight).mul_(share))
                _add(gradients[1:], chunk, narrow, x, share, number == 0)
        return loss / len(counted), *gradients, factor.fill_(mean / share)


def _outputs(
    hidden: Tensor, weight: Tensor, bias: object, labels: object, rows: object, *wanted: bool
) -> tuple[Tensor, ...]:
    """Allocate the operator's outputs, not yet filled."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    # Zeros, because rows without a label have no gradient.
    of_hidden = torch.zeros_like(hidden) if wanted[0] else hidden.new_empty(0)
    of_weight = hidden.new_empty(weight.shape if wanted[1] else 0, dtype=exact)
    of_bias = hidden.new_empty(len(weight) if wanted[2] else 0, dtype=exact)
    return (
        hidden.new_zeros((), dtype=exact),
        of_hidden,
        of_weight,
        of_bias,
        hidden.new_empty((), dtype=exact),
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return (
        torch.mm(x, weight.t(), out=out)
        if bias is None
        else torch.addmm(bias, x, weight.t(), out=out)
    )


def _into_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Apply softmax in place; return the sum of the losses."""
    # The loss is computed from the largest probability, whose logarithm is finite: the probability
    # of a label may be 0. `amax`, because `max` also returns the index and takes longer than all
    # the rest.
    largest = logits.amax(1, keepdim=True)
    of_label = logits.gather(1, labels)
    torch.softmax(logits, 1, out=logits)
    return (largest - of_label - logits.amax(1, keepdim=True).log()).sum()


def _add(
    gradients: list[Tensor], of_logits: Tensor, narrow: Tensor, x: Tensor, share: float, first: bool
) -> None:
    """Add the part of a chunk to the gradients of weight and bias.

    `narrow` is `of_logits` in the dtype of `x`. The first chunk overwrites the gradients.
    """
    of_weight, of_bias = gradients
    if of_bias.numel():
        part = of_logits.sum(0).mul_(share)
        of_bias.copy_(part) if first else of_bias.add_(part)
    if not of_weight.numel():
        return
    if x.dtype == of_weight.dtype:
        of_weight.addmm_(narrow.t(), x, beta=0 if first else 1, alpha=share)
        return
    part = torch.mm(narrow.t(), x)
    torch.mul(part, share, out=of_weight) if first else of_weight.add_(part, alpha=share)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # The outputs are not differentiable themselves: so ctx may hold them without a reference cycle,
    # and autograd makes no zero gradients for them.
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.gradients = output[1:4]
    ctx.factor = output[4]
    ctx.dtype = inputs[1].dtype


def _backward(ctx: Any, gradient: Tensor, *others: Any) -> tuple[Any, ...]:
    # The gradients are scaled in place below, so that they serve for one backward pass only.
    if ctx.gradients is None:
        raise RuntimeError(
            "a chunked loss has its gradients only once: its graph cannot run backward again"
        )
    (of_hidden, *of_head), ctx.gradients = ctx.gradients, None
    factor = gradient * ctx.factor
    if not _is_one(factor):
        for each in (of_hidden, *of_head):
            each.mul_(factor)
    found = [of_hidden, *(each.to(ctx.dtype) for each in of_head)]
    return *(each if each.numel() else None for each in found), *(None,) * 5


def _is_one(factor: Tensor) -> bool:
    """Return whether the factor is 1, as without loss scale and accumulation; False if unknown."""
    # Only read on a CPU, where that is free of cost. torch.compile cannot read a value.
    return type(factor) is Tensor and factor.device.type == "cpu" and float(factor) == 1.0


def _define() -> None:
    bools = "bool of_hidden, bool of_weight, bool of_bias"
    tensors = ", ".join(["Tensor"] * 5)
    torch.library.define(
        OPERATOR,
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int rows, "
        f"{bools}) -> ({tensors})",
    )
    torch.library.impl(OPERATOR, ("CPU", "CUDA"), _head_loss)
    torch.library.register_fake(OPERATOR, _outputs)
    torch.library.register_autograd(OPERATOR, _backward, setup_context=_keep)


_define()
