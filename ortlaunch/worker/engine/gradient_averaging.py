"""Gradient averaging by DistributedDataParallel, or by hand if the loss leaves parameters out.

DistributedDataParallel waits for the gradient of every parameter. If one does not come, it does not
average any gradient of that bucket. Its find_unused_parameters is no help: it inspects only the
last micro batch of an accumulation, and parameters that earlier micro batches used may differ from
rank to rank.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ortlaunch.base.errors import EngineError
from ortlaunch.worker.model.fsdp import part_of_this_rank
from ortlaunch.worker.process_group.distributed import DistributedContext


class GradientAveraging:
    """A model whose gradients are averaged in the last backward pass of a step.

    The first pass shows whether every rank uses every trained parameter. All ranks make the same
    decision.
    """

    def __init__(self, model: nn.Module, group: DistributedContext) -> None:
        self.group = group
        ids = [group.device.index] if group.device.type == "cuda" else None
        self.module = nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True
        )
        self.trained_parameters = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        self.unused_names: tuple[str, ...] = ()
        """Trained parameters without a gradient on some rank in the first pass.

        If there are any, gradients are averaged by hand.
        """
        self._has_checked = False

    @contextlib.contextmanager
    def average_gradients_around_last_pass(self, is_last_pass: bool) -> Iterator[None]:
        """Average gradients around one forward and backward pass.

        Args:
            is_last_pass: this is the last pass of the accumulation; gradients are averaged only then.

        Raises:
            EngineError: a parameter was used in the first pass and not in this one.
        """
        by_hand = bool(self.unused_names) or not self._has_checked
        with self.module.no_sync() if by_hand or not is_last_pass else contextlib.nullcontext():
            yield
        if not self._has_checked:
            self._gather_and_print_unused_parameters()
        if is_last_pass and by_hand:
            self._all_reduce_mean_of_each_gradient()
        elif is_last_pass:
            self._raise_if_ddp_missed_gradients()

    def _gather_and_print_unused_parameters(self) -> None:
        unused_on_rank = [
            name for name, parameter in self.trained_parameters.items() if parameter.grad is None
        ]
        unused_on_some_rank = set().union(*self.group.gather(unused_on_rank))
        self.unused_names = tuple(
            name for name in self.trained_parameters if name in unused_on_some_rank
        )
        self._has_checked = True
        if self.unused_names:
            self.group.print_on_rank_0(
                f"the loss does not use {first_five_names_text(self.unused_names)}: gradients are averaged after "
                "the backward pass, not during it; freeze unused parameters "
                "(requires_grad_(False)) to save time"
            )

    def _all_reduce_mean_of_each_gradient(self) -> None:
        """Average the gradients by hand, with the same result as DistributedDataParallel.

        A parameter that no rank used keeps no gradient.
        """
        is_used = torch.tensor(
            [p.grad is not None for p in self.trained_parameters.values()], dtype=torch.uint8
        )
        is_used = is_used.to(self.group.device)
        dist.all_reduce(is_used, dist.ReduceOp.MAX)
        under_way: list[torch.distributed.Work] = []
        for parameter, is_used_by_some in zip(self.trained_parameters.values(), is_used.tolist()):
            if is_used_by_some:
                parameter.grad = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
                parameter.grad /= self.group.size
                under_way.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in under_way:
            work.wait()
        # The next forward pass then copies rank 0's buffers, as after an averaging pass.
        self.module.require_forward_param_sync = True

    def _raise_if_ddp_missed_gradients(self) -> None:
        # DistributedDataParallel itself reports a missing gradient in the next forward pass only,
        # when the weights have changed already.
        try:
            self.module._check_reducer_finalized()
        except RuntimeError as error:
            reported_indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            names = list(self.trained_parameters)
            missing = (
                [names[int(parameter_index)] for parameter_index in reported_indices[1].split()]
                if reported_indices
                else ["some parameters"]
            )
            raise EngineError(
                f"the loss of this step does not use {first_five_names_text(missing)} on rank "
                f"{self.group.rank}, but the first step's loss did, so gradients could not be "
                "averaged; use every trained parameter in every forward pass (as 0 * "
                "parameter.sum()), freeze it, or train with DeepSpeed: zero={stage: 0}"
            ) from None


class UsedParameterRecorder:
    """The trained parameters that the first step's loss reaches, by hooks on their gradients."""

    def __init__(self, model: nn.Module, group: DistributedContext) -> None:
        self._group = group
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._used: set[str] = set()
        self._hooks = [
            parameter.register_hook(lambda _, name=name: self._used.add(name))
            for name, parameter in self._trained.items()
        ]

    def remove_hooks_and_gather_unused_names(self) -> tuple[str, ...]:
        """Return the parameters that no rank's loss has used, and end the record (collective)."""
        for hook in self._hooks:
            hook.remove()
        used = set().union(*self._group.gather([*self._used]))
        return tuple(name for name in self._trained if name not in used)


class UsedParameterComparison:
    """Whether the losses of all ranks use the same trained parameters.

    FSDP2 adds up the gradients that each rank has, layer by layer. If the ranks used other
    parameters, it would add gradients of different ones, or wait without end.
    """

    def __init__(self, model: nn.Module, group: DistributedContext) -> None:
        self.unused_names: tuple[str, ...] = ()
        """Trained parameters that the last loss does not use."""
        # Another group: the comparison does not wait for the device.
        self._group = group.duplicate_on_new_cpu_group()
        self._name_by_gathered_parameter: dict[torch.Tensor, str] = {}
        for prefix, layer in model.named_modules():
            if hasattr(layer, "unshard") and hasattr(layer, "reshard"):
                layer.unshard()
                # Of a unit within it the parameters are not gathered.
                self._name_by_gathered_parameter |= {
                    parameter: name
                    for name, parameter in layer.named_parameters(prefix)
                    if parameter.requires_grad and part_of_this_rank(parameter) is parameter
                }
                layer.reshard()

    def require_same_on_all_ranks(self, loss: torch.Tensor) -> None:
        """Compare before the backward pass of a loss (collective).

        Raises:
            EngineError: a rank uses parameters that another one does not use.
        """
        names = self._name_by_gathered_parameter
        used = {names[leaf] for leaf in _parameters_used_by_loss(loss) if leaf in names}
        self.unused_names = tuple(name for name in names.values() if name not in used)
        checksums = self._group.gather_numbers([zlib.crc32(repr(self.unused_names).encode())])
        if checksums.count(checksums[0]) < len(checksums):
            unused_by_rank = [*map(set, self._group.gather(self.unused_names))]
            differing = sorted(set.union(*unused_by_rank) - set.intersection(*unused_by_rank))
            raise EngineError(
                f"the loss of this step uses {first_five_names_text(differing)} on some ranks only, "
                "and FSDP2 averages the gradients of parameters that all ranks use; use every "
                "trained parameter in every forward pass (as 0 * parameter.sum(), in the layer that "
                "has it), freeze it, or train without parallel"
            )


def _parameters_used_by_loss(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors whose gradients the backward pass of a loss computes."""
    # The nodes are kept: a node that is freed could give its place to another one.
    nodes: list[Any] = [loss.grad_fn]
    seen = {*nodes}
    for node in nodes:
        if hasattr(node, "variable"):
            yield node.variable
        following = {n for n, _ in getattr(node, "next_functions", ()) if n is not None} - seen
        seen |= following
        nodes += following


def first_five_names_text(parameter_names: Collection[str]) -> str:
    shown = ", ".join(list(parameter_names)[:5])
    return shown if len(parameter_names) <= 5 else f"{shown} and {len(parameter_names) - 5} more"
