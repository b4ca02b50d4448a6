"""Head and cross entropy over a large vocabulary, a chunk of rows at a time: whole logits never exist.

Logits, loss and the gradients of a chunk are made at once, in the forward pass, the probabilities in the place of the
logits, as Liger's fused linear cross entropy and Apple's cut cross entropy do on GPUs. One operator of torch's for
every engine: autograd and torch.compile know it from here, ONNX Runtime's graph calls it
(ortmodule/torch_in_graph/head_loss.py). `torch.nn.functional.linear_cross_entropy` exists from torch 2.13 on only, and
is neither traced nor compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ortlaunch.ortmodule.torch_in_graph.head_loss import OPERATOR

IGNORED = -100


def chunked_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, rows: int, train: bool
) -> Tensor:
    """Mean cross entropy of `hidden @ weight.T + bias` over the labels that are not -100; nan where all are.

    Args:
        hidden: rows x width; under autocast products are made in its type.
        weight: vocabulary x width; bias: vocabulary.
        labels: one a row.
        rows: how many make a chunk.
        train: gradients are wanted.
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
    """The mean loss, the gradients of hidden, weight and bias (empty where not wanted), and a factor that they lack.

    Sums are in float32 at least. In float16 the gradients are those of the sum: divided by the number of labels they
    would vanish, for the loss scale comes later.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        counted = (labels != IGNORED).nonzero().squeeze(1)
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
        loss, *gradients, factor = _outputs(hidden, weight, bias, labels, rows, *wanted)
        mean = 1 / max(len(counted), 1)
        share = 1.0 if hidden.dtype == torch.float16 else mean
        logits = hidden.new_empty(min(rows, len(counted)), len(weight))
        for number, index in enumerate(counted.split(rows)):
            x = hidden[index]
            y = labels[index].unsqueeze(1)
            chunk = _product(x, weight, bias, logits[: len(index)]).to(loss.dtype)
            loss += _into_probabilities(chunk, y)
            if wanted[0]:
                chunk.scatter_(1, y, chunk.gather(1, y) - 1)  # the gradient of the loss's sum
                narrow = chunk.to(x.dtype)
                gradients[0].index_copy_(0, index, torch.mm(narrow, weight).mul_(share))
                _add(gradients[1:], chunk, narrow, x, share, number == 0)
        return loss / len(counted), *gradients, factor.fill_(mean / share)


def _outputs(
    hidden: Tensor, weight: Tensor, bias: object, labels: object, rows: object, *wanted: bool
) -> tuple[Tensor, ...]:
    """What the operator returns, not yet filled; rows without a label have no gradient."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
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
    """Softmax in place; returns the sum of the losses.

    The largest probability has no logarithm of 0, as a label's may have. (`max`, which also says where, takes longer
    than all the rest.)
    """
    largest = logits.amax(1, keepdim=True)
    of_label = logits.gather(1, labels)
    torch.softmax(logits, 1, out=logits)
    return (largest - of_label - logits.amax(1, keepdim=True).log()).sum()


def _add(
    gradients: list[Tensor], of_logits: Tensor, narrow: Tensor, x: Tensor, share: float, first: bool
) -> None:
    """What a chunk adds to the gradients of weight and bias; `narrow` is `of_logits` as precise as x."""
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
    # Not differentiable themselves, so that ctx may hold them without a circle, and autograd fills no zeros for them.
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.gradients = output[1:4]
    ctx.factor = output[4]
    ctx.dtype = inputs[1].dtype


def _backward(ctx: Any, gradient: Tensor, *others: Any) -> tuple[Any, ...]:
    if ctx.gradients is None:
        raise RuntimeError(
            "the gradients of a chunked loss are there once: its graph cannot be run backward again"
        )
    (of_hidden, *of_head), ctx.gradients = ctx.gradients, None
    factor = gradient * ctx.factor
    if not _is_one(factor):
        for each in (of_hidden, *of_head):
            each.mul_(factor)
    found = [of_hidden, *(each.to(ctx.dtype) for each in of_head)]
    return *(each if each.numel() else None for each in found), *(None,) * 5


def _is_one(factor: Tensor) -> bool:
    """As it is without loss scale and accumulation; only where it costs nothing to ask, which torch.compile cannot."""
    return type(factor) is Tensor and factor.device.type == "cpu" and float(factor) == 1.0


def _define() -> None:
    bools = "bool of_hidden, bool of_weight, bool of_bias"
    tensors = ", ".join(["Tensor"] * 5)
    torch.library.define(
        OPERATOR,
        f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int rows, {bools}) -> ({tensors})",
    )
    torch.library.impl(OPERATOR, ("CPU", "CUDA"), _head_loss)
    torch.library.register_fake(OPERATOR, _outputs)
    torch.library.register_autograd(OPERATOR, _backward, setup_context=_keep)


_define()
