"""The work of a step, counted without computing it, and the rates of this machine's operators.

Both are kept in the cache. `worker/tasks/engine_predictions.py` multiplies them. An operator has a kind, units
(floating point operations, bytes, or calls) and a size; the rate of a kind depends on the size.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeCopyMode,
    FakeTensorMode,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.hooks import RemovableHandle

from ortlaunch.recipe import Recipe
from ortlaunch.worker.data import IGNORED
from ortlaunch.worker.engine.flops import wait_for_device
from ortlaunch.worker.engine.optimizer import build_optimizer
from ortlaunch.worker.model.precision import narrow_dtype_or_none
from ortlaunch.worker.model.returned_values import loss_of_engine_output
from ortlaunch.worker.patching import replace_attribute_temporarily
from ortlaunch.worker.tensor_batch import TensorBatch

Rates = dict[str, list[tuple[float, float]]]
"""By kind of operator: (size, seconds of a unit), by ascending size."""


class StepWork(NamedTuple):
    """The work of a step of plain PyTorch on one rank."""

    operators: list[tuple[str, float, float]]
    """Kind, size, units."""
    model_bytes: int
    """Bytes of weights, gradients and optimizer state."""
    peak_bytes: int
    """Most bytes of live tensors at one time."""


if TYPE_CHECKING:
    from ortlaunch.worker.call_types import Args, Kwargs

# Kind of an operator that is neither a view nor counted in floating point operations, by its name
# without `_backward`; others move bytes, at the rate of an addition.
_KIND_BY_OPERATOR = {
    "native_layer_norm": "norm", "_fused_rms_norm": "norm", "native_group_norm": "norm",
    "_softmax": "softmax", "_safe_softmax": "softmax", "_log_softmax": "softmax",
    "_softmax_backward_data": "softmax", "_log_softmax_backward_data": "softmax",
    "bernoulli_": "random", "bernoulli": "random", "native_dropout": "random", "sum": "sum", "mean": "sum",
    "_fused_adamw_": "adam", "embedding_dense": "scatter", "index_put_": "scatter", "_index_put_impl_": "scatter",
    **dict.fromkeys(
        ("gelu", "silu", "tanh", "sigmoid", "exp", "log", "erf", "sin", "cos", "pow"), "vector"
    ),
}  # fmt: skip
# They compute nothing.
_FREE_OPERATORS = {
    "detach",
    "empty_like",
    "empty",
    "device",
    "new_empty",
    "alias",
    "_unsafe_view",
    "lift_fresh",
}
_COPIES = {"clone", "copy_", "_to_copy", "cat"}
# transformers' functions that decide whether attention needs a mask, and their module.
_MASKS = "transformers.masking_utils"
_DECISIONS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
# Elements of the tensors on which rates are measured: from within a cache to beyond all of them.
_SIZES = (2**12, 2**16, 2**19, 2**21, 2**23 - 2**16, 2**23)
_CACHED_BYTES = 2**20  # bytes; larger inputs and results of an operator are in no cache
_SECONDS = 0.03  # of measuring each size in a round, after one call without
# The least of some rounds counts, because other work slows one down; further rounds follow while
# rates contradict themselves.
_ROUNDS = 3
_MOST_ROUNDS = 6


class _OperatorCounter(TorchDispatchMode):
    """Counts the units of operators while it is active, by kind and size.

    labelled: share of the rows that the chunked loss computes.
    """

    def __init__(self, labelled_share: float = 1.0) -> None:
        super().__init__()
        self.labelled_share = labelled_share
        self.units = Counter[tuple[str, float]]()
        self.largest_bytes = 0
        """Bytes of the operator with the largest inputs and results."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in _FREE_OPERATORS:
            self._add_operator_work(func, name, args, kwargs or {}, out)
        return out

    def _add_operator_work(
        self, func: OpOverload, operator_name: str, args: Args, kwargs: Kwargs, out: object
    ) -> None:
        input_tensors, output_tensors = (
            [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]
            for tree in ((args, kwargs), out)
        )
        elements = sum(item.numel() for item in (*input_tensors, *output_tensors))
        size = sum(item.numel() * item.element_size() for item in (*input_tensors, *output_tensors))
        self.largest_bytes = max(self.largest_bytes, size)
        flops = _matmul_or_attention_flops(func, operator_name, args, kwargs, out)
        operator_kind = _KIND_BY_OPERATOR.get(operator_name.removesuffix("_backward"), "move")
        if operator_name in _COPIES and not all(item.is_contiguous() for item in input_tensors):
            operator_kind = "transpose"
        if flops:
            operator_kind = next(
                (item for item in ("attention", "bmm") if item in operator_name), "matmul"
            )
            causal = operator_kind == "attention" and args[
                7 if "backward" in operator_name else 4 :
            ][:1] == (True,)
            narrow = input_tensors[0].dtype != torch.float32
            operator_kind = f"{'causal ' * causal}{operator_kind}{' narrow' * narrow}"
            # The size of a matmul of equal sides with as many operations for each element.
            size = round(1.5 * flops / max(1, elements))
        if operator_name == "head_loss":
            # Logits, their softmax, and the gradients of hidden states and weight.
            rows, width = input_tensors[0].shape
            size = 4 * int(rows * len(input_tensors[1]) * self.labelled_share)
            self.units["softmax", 2 * size] += 2 * size
            operator_kind = "matmul"
            flops = 6 * width * size // 4
            size = round(3 / (1 / rows + 1 / width + 1 / len(input_tensors[1])))
        self.units["calls", 0] += 1
        self.units[operator_kind, size] += flops or size


def _matmul_or_attention_flops(
    func: OpOverload, operator_name: str, args: Args, kwargs: Kwargs, out: object
) -> int:
    """Return the floating point operations of matmuls and attention; 0 for other operators."""
    flop_counter = flop_registry.get(func._overloadpacket)
    if flop_counter is not None:
        return int(flop_counter(*args, **kwargs, out_val=out))
    # torch's list leaves out the kernels for CPUs.
    if "attention_for_cpu" not in operator_name:
        return 0
    shapes = [argument.shape for argument in args if isinstance(argument, torch.Tensor)]
    if operator_name.endswith("backward"):
        return int(sdpa_backward_flop_count(*shapes[:4]))
    return int(sdpa_flop_count(*shapes[:3]))


def count_step_work(
    recipe: Recipe,
    model: nn.Module,
    batch: TensorBatch,
    device: torch.device,
    accumulation_steps: int,
    with_values: bool = False,
) -> StepWork:
    """Return the work and the peak of tensors of a step of plain PyTorch.

    Args:
        recipe: the run's recipe.
        model: the model on `device`, not sharded; it stays as it is.
        batch: one micro batch, on the CPU.
        device: the device of the training.
        accumulation_steps: passes of a step.
        with_values: compute the step on a copy of the model; else its tensors have no values.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    labels = batch.get("labels")
    labelled_share = 1.0 if labels is None else float((labels != IGNORED).float().mean())
    with contextlib.nullcontext() if with_values else FakeCopyMode(fake):
        model = copy.deepcopy(model)
    # The tracker warns of each backward pass of a module without inputs that have gradients.
    masks_context = (
        contextlib.nullcontext()
        if with_values
        else _let_transformers_skip_full_attention_masks(batch)
    )
    with (
        masks_context,
        contextlib.nullcontext() if with_values else fake,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        if not with_values:
            batch = {name: fake.from_tensor(value) for name, value in batch.items()}
        batch = {name: value.to(device) for name, value in batch.items()}
        optimizer = build_optimizer(recipe.optimizer, model, "eager", device).optimizer
        dtype = narrow_dtype_or_none(recipe.precision)
        memory = MemTracker()
        memory.track_external(model)
        # The tracker would register hooks on frozen parameters too, which torch refuses.
        for frozen in (item for item in model.parameters() if not item.requires_grad):
            no_hooks = RemovableHandle(OrderedDict()), RemovableHandle(OrderedDict())
            memory._param_to_grad_hook_handles[frozen] = no_hooks
        with memory, _OperatorCounter(labelled_share) as passes:
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = loss_of_engine_output(model(**batch))
            loss.backward()
        with _OperatorCounter() as update:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            nn.utils.get_total_norm(gradients, foreach=True)
            torch._foreach_mul_(gradients, 1.0)
            optimizer.step()
    state_tensors = [
        item for item in tree_leaves([*optimizer.state.values()]) if torch.is_tensor(item)
    ]
    # With accumulation the gradients of earlier passes are there from the beginning.
    earlier = gradients if accumulation_steps > 1 else []
    peak = sum(item["Total"] for item in memory.get_tracker_snapshot("peak").values())
    peak += sum(item.nbytes for item in (*state_tensors, *earlier))
    units = Counter({key: value * accumulation_steps for key, value in passes.units.items()})
    units.update(update.units)
    trained = [item for item in model.parameters() if item.requires_grad]
    state_bytes = sum(item.nbytes for item in (*model.parameters(), *trained, *state_tensors))
    return StepWork(
        [(operator_kind, size, value) for (operator_kind, size), value in units.items()],
        state_bytes,
        int(peak),
    )


@contextlib.contextmanager
def _let_transformers_skip_full_attention_masks(batch: Mapping[str, object]) -> Iterator[None]:
    """Make transformers leave out the attention mask if no mask of the batch hides a token.

    In a run transformers reads the values of a mask to decide this. Here they have none, and it
    would keep the mask: twice the operations, if the attention is causal. A mask that the model
    makes itself is assumed to hide no token.
    """
    masks = [mask for name, mask in batch.items() if name.endswith("attention_mask")]
    module = sys.modules.get(_MASKS)
    with contextlib.ExitStack() as stack:
        if module and all(isinstance(mask, torch.Tensor) and mask.all() for mask in masks):
            for name in set(_DECISIONS) & vars(module).keys():
                original = getattr(module, name)
                stack.enter_context(
                    replace_attribute_temporarily(module, name, _ignore_padding_mask(original))
                )
        yield


def _ignore_padding_mask(original_decision: Callable[..., bool]) -> Callable[..., bool]:
    def decide(padding_mask: object, *arguments: object, **keywords: object) -> bool:
        return original_decision(None, *arguments, **keywords)

    return decide


def measure_seconds_per_unit_by_operator(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return the seconds of a unit by kind and size, measured now for some seconds."""
    units: dict[str, dict[float, float]] = {}
    rates: Rates = {}
    for round_index in range(_MOST_ROUNDS):
        if round_index >= _ROUNDS and not operators_with_contradictory_rates(rates):
            break
        for operator_kind, call in _operator_kinds_with_sample_calls(device, dtype):
            with _OperatorCounter() as work:
                call()
            sizes = {
                size: units for (name, size), units in work.units.items() if name == operator_kind
            }
            size = max(sizes, key=lambda candidate_size: sizes[candidate_size])
            unit_seconds = _least_call_seconds(
                call, device, empties_caches=work.largest_bytes > _CACHED_BYTES
            ) / sum(sizes.values())
            curve = units.setdefault(operator_kind, {})
            curve[size] = min(unit_seconds, curve.get(size, unit_seconds))
        rates = {operator_kind: sorted(curve.items()) for operator_kind, curve in units.items()}
    return rates


def _least_call_seconds(
    timed_call: Callable[[], object], device: torch.device, empties_caches: bool
) -> float:
    """Return the least duration of a call, which other work disturbs least."""
    call_seconds = list[float]()
    others = torch.ones(2**24 if empties_caches else 0, device=device)
    start_of_all = time.perf_counter()
    while not call_seconds or (
        time.perf_counter() - start_of_all < _SECONDS and len(call_seconds) < 100
    ):
        if empties_caches:
            # A step uses more memory between two uses of a tensor than the caches have.
            others.add_(1)
        wait_for_device(device)
        start = time.perf_counter()
        timed_call()
        wait_for_device(device)
        call_seconds.append(time.perf_counter() - start)
    return min(call_seconds)


def _operator_kinds_with_sample_calls(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each kind with a call that consists of it, for several sizes."""

    def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    def forward_and_backward(
        function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> Callable[[], object]:
        gradient = function(*inputs).detach()
        return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)

    for input_dtype, name in {
        torch.float32: "",
        dtype: "" if dtype == torch.float32 else " narrow",
    }.items():
        for n in (16, 64, 128, 256, 512, 1024):
            yield (
                f"matmul{name}",
                forward_and_backward(
                    torch.mm,
                    random_tensor(n, n, dtype=input_dtype),
                    random_tensor(n, n, dtype=input_dtype),
                ),
            )
        for n in (32, 64, 128, 256):
            factors = [random_tensor(16, n, n, dtype=input_dtype) for _ in range(2)]
            yield f"bmm{name}", forward_and_backward(torch.bmm, *factors)
        for n in (64, 256, 1024):
            heads = [random_tensor(1, 8, n, 64, dtype=input_dtype) for _ in range(3)]
            yield (
                f"attention{name}",
                forward_and_backward(functional.scaled_dot_product_attention, *heads),
            )
            causal = functools.partial(functional.scaled_dot_product_attention, is_causal=True)
            yield f"causal attention{name}", forward_and_backward(causal, *heads)
    for n in _SIZES:
        x = random_tensor(n // 512, 512)
        y = x.detach()
        z = y.clone()
        yield "vector", forward_and_backward(functional.gelu, x)
        yield "norm", forward_and_backward(lambda x: functional.layer_norm(x, (512,)), x)
        yield "softmax", forward_and_backward(lambda x: functional.log_softmax(x, -1), x)
        yield "move", functools.partial(torch.add, y, z)
        yield "sum", functools.partial(torch.sum, y, 0)
        yield "random", functools.partial(torch.bernoulli, y, 0.9)
        yield "transpose", y.view(-1, 8, 64).transpose(0, 1).contiguous
        rows = torch.randint(n // 512, (n // 2048 or 1,), device=device)
        table = random_tensor(n // 512, 512)
        yield "scatter", forward_and_backward(functools.partial(functional.embedding, rows), table)
        weight = nn.Parameter(y.clone())
        weight.grad = y
        yield "adam", torch.optim.AdamW([weight], fused=True).step
    layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(8)]
    module = nn.Sequential(*layers).to(device)
    yield "calls", lambda: module(random_tensor(1, 1, 8)).sum().backward()


def operators_with_contradictory_rates(seconds_per_unit_by_operator: Rates) -> list[str]:
    """Return the kinds whose larger operators take far more time a unit than smaller ones.

    A larger product of matrices is about as fast a unit. Other operators may be slower by as much as
    memory is slower than caches.
    """
    contradictory = []
    for operator, curve in seconds_per_unit_by_operator.items():
        max_ratio = 4 if operator.startswith(("matmul", "bmm")) else 20
        fastest_unit_seconds = math.inf
        for _, unit_seconds in curve:
            if unit_seconds > max_ratio * fastest_unit_seconds:
                contradictory.append(operator)
                break
            fastest_unit_seconds = min(fastest_unit_seconds, unit_seconds)
    return contradictory
