"""The engines eager, inductor and ort: their parts, built in the required order, and their record.

The order is: ORTModule (or torch.compile), optimizer, DeepSpeed or DistributedDataParallel,
FP16_Optimizer. Only this module and ortmodule/ name ORTModule, FusedAdam and FP16_Optimizer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ortlaunch.launch_plan import Plan
from ortlaunch.machine import threads_per_rank
from ortlaunch.ortmodule.build import extensions
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.ort_variables import in_recipes_words
from ortlaunch.recipe.rules.best_rules import evaluates_with_scores
from ortlaunch.run_folder.engine_report import (
    ChunkedLoss,
    EngineChoice,
    EngineReport,
    FusedNorm,
    Inductor,
    OnnxRuntime,
    OptimizerChoice,
)
from ortlaunch.worker.engine.comparison import dropouts
from ortlaunch.worker.engine.flops import flops_per_token
from ortlaunch.worker.engine.memory_use import MemoryUse
from ortlaunch.worker.engine.optimizer import BuiltOptimizer, build_optimizer
from ortlaunch.worker.engine.ort_engine import (
    brief,
    build_ort,
    onnxruntime_report,
    ort_notes,
    wrapped_in_ort,
)
from ortlaunch.worker.engine.stepping import Batch, DeepSpeedStepper, Stepper, TorchStepper
from ortlaunch.worker.engine.torch_scheduler import TorchScheduler
from ortlaunch.worker.model.chunked_head import chunk_head
from ortlaunch.worker.model.loss_weight import LossWeight
from ortlaunch.worker.model.matmul_precision import (
    describe,
    keep_positions_exact,
    multiply_by_onednn,
)
from ortlaunch.worker.model.model import LossModule, require_arguments
from ortlaunch.worker.model.precision import narrow_dtype_of
from ortlaunch.worker.model.pretrained import loading_notes
from ortlaunch.worker.process_group.distributed import DistributedContext

if TYPE_CHECKING:
    from ortlaunch.ortmodule.witness import Witness

# Packages whose versions are in engine.json.
_PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "onnx",
    "mpi4py",
    "numpy",
)


@dataclass
class TrainingEngine:
    """A stepper and the record of the engine that runs.

    `plain` is the model without an engine. `another(plain)` is a module of this engine with the
    same weights.
    """

    stepper: Stepper
    eval_module: nn.Module
    record: EngineReport
    device: torch.device
    input_dtype: torch.dtype | None
    loss_weight: LossWeight
    flops_per_token: float | None
    witness: Witness | None = None
    memory: MemoryUse | None = None
    notes: tuple[str, ...] = field(default=())
    plain: Any = None
    another: Callable[[nn.Module], nn.Module] = field(default=lambda model: model)
    onnxruntime: Callable[[], OnnxRuntime | None] = field(default=lambda: None)
    """Returns the report of ONNX Runtime so far."""
    scheduler: TorchScheduler | None = None
    """The learning rates that a LightningModule configured; None: the recipe's schedule."""
    own_precision: bool = False
    """Whether the module keeps the matmul precision of its build and ignores torch's setting.

    This is so for ORT on CUDA.
    """

    def to_device(self, batch: Batch) -> Batch:
        """Move a batch to the device and cast floating-point tensors to the weights' dtype."""
        return _placed(self.loss_weight.prepared(batch), self.device, self.input_dtype)

    def to_compare(self) -> nn.Module:
        """Return a module without dropout and with torch's matmul precision.

        The run's own module is returned if it already is such a module.
        """
        return (
            self.another(self.plain)
            if dropouts(self.plain) or self.own_precision
            else self.eval_module
        )

    @contextlib.contextmanager
    def uncounted(self, compiled: bool) -> Iterator[None]:
        """Exclude passes from the run's counts while the context is open.

        Args:
            compiled: also exclude the graphs that torch.compile compiles meanwhile.
        """
        witness = self.witness.uncounted() if self.witness is not None else contextlib.nullcontext()
        inductor = self.record.engine.used == "inductor"
        with witness, _compiling_uncounted() if compiled and inductor else contextlib.nullcontext():
            yield

    def report(self) -> EngineReport:
        """Return the record, with the work of ONNX Runtime or torch.compile so far."""
        return replace(
            self.record,
            unused_parameters=list(self.stepper.unused),
            inductor=_compiled() if self.record.engine.used == "inductor" else None,
            onnxruntime=self.onnxruntime(),
        )


def build_engine(
    recipe: Recipe, plan: Plan, model: LossModule, group: DistributedContext, sample: Batch
) -> TrainingEngine:
    """Put the model on its device and its engine.

    Args:
        recipe: the run's recipe.
        plan: the run's plan.
        model: the model that returns its loss.
        group: the ranks of the run.
        sample: one micro batch. Engine ort runs it once, forward and backward, so that a model that
            ONNX Runtime cannot run fails before step 1.

    Raises:
        EngineError: ONNX Runtime cannot run the model and the recipe does not allow a fallback.
    """
    torch.set_num_threads(plan.threads or threads_per_rank(group.local.local_world_size))
    if recipe.model.factory and not recipe.model.traits.wrapper:
        require_arguments(model.model, sample, recipe.train.loss_weight)
    exact = recipe.engine.matmul_precision == "highest"
    if not exact:
        keep_positions_exact(model)
    onednn = multiply_by_onednn(recipe, model, group.device)
    given = recipe
    recipe = _with_engine(recipe, onednn=onednn)
    # Before DeepSpeed: ZeRO 3 leaves only pieces of the weights on a rank.
    flops = flops_per_token(model.model, recipe.data.sequence_length)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    weight = LossWeight(recipe, model)
    chunked = _chunked(recipe, model, weight.prepared(sample), group)
    model.evaluates_with_scores = evaluates_with_scores(recipe)
    dtype = narrow_dtype_of(recipe.precision) if plan.deepspeed else None
    if dtype is not None:
        # DeepSpeed would cast them later: on the device, and after an export.
        cast_parameters(model, dtype)
    _move(model, group.device, recipe)
    used = recipe.engine.name
    fallback = ""
    module: nn.Module = model
    witness: Witness | None = None
    if used == "ort":
        module, witness, fallback = build_ort(
            recipe, model, group, _placed(weight.prepared(sample), group.device, dtype)
        )
        used = "eager" if fallback else "ort"
    if used == "inductor":
        # A profile needs marks in the kernels that inductor writes for a CPU.
        marks = {"cpp.enable_kernel_profile": True} if recipe.log.profile_steps else None
        model.compile(dynamic=False, options=marks)
    chosen = build_optimizer(
        recipe.optimizer, module, used, group.device, plan.deepspeed, group.size
    )
    stepper = _stepper(recipe, plan, module, chosen, group)
    fused_norm = _fp16_optimizer(recipe, used, stepper, group)
    record = EngineReport(
        engine=EngineChoice(recipe.engine.name, used, in_recipes_words(brief(fallback)) or None),
        device=group.device.type,
        precision=recipe.precision,
        matmul_precision=describe(recipe.engine.matmul_precision, group.device, onednn),
        ranks=group.size,
        threads_per_rank=torch.get_num_threads(),
        parameters=sum(size for size, _ in sizes),
        trained_parameters=sum(size for size, trained in sizes if trained),
        sharding=_sharding(recipe, group),
        optimizer=OptimizerChoice(
            recipe.optimizer.name, chosen.used, chosen.why or None, [*chosen.groups]
        ),
        chunked_loss=chunked,
        attention=_attention(model),
        pretrained=dict(model.loaded) if model.loaded else None,
        gradient_checkpointing=_recomputed(recipe, used),
        onnxruntime=None,
        # torch.__version__ names the build, too, as in 2.4.0+cu121.
        versions={**extensions.versions(_PACKAGES), "torch": torch.__version__},
        fp16_optimizer=fused_norm,
        # The session fills it in.
        freed_memory=None,
    )
    # For comparisons ORT needs a second module: the graph of the first keeps its dropout ratio.
    another = (
        functools.partial(
            wrapped_in_ort, _with_engine(recipe, matmul_precision="highest"), group=group
        )
        if used == "ort"
        else lambda _: module
    )
    own_precision = used == "ort" and group.device.type == "cuda" and not exact
    notes = (*loading_notes(model.loaded), *chosen.notes, *(ort_notes() if witness else ()))
    by_ort = functools.partial(onnxruntime_report, given, witness) if witness else lambda: None
    return TrainingEngine(
        stepper, module, record, group.device, dtype, weight, flops, witness, None, notes, model, another, by_ort,
        chosen.scheduler, own_precision,
    )  # fmt: skip


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters in place, and no buffer, as DeepSpeed does."""
    # Rotary frequencies are a buffer: those of a Llama in float16 are off by 0.99 rad at position
    # 4,096.
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _move(model: torch.nn.Module, device: torch.device, recipe: Recipe) -> None:
    """Move the model to its device; with ZeRO 3 move only its buffers."""
    if recipe.zero is None or recipe.zero.stage < 3:
        model.to(device)
        return
    # The device may have memory for pieces of the parameters only.
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _placed(batch: Batch, device: torch.device, dtype: torch.dtype | None) -> Batch:
    return {
        name: value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)
        for name, value in batch.items()
    }


def _with_engine(recipe: Recipe, **settings: Any) -> Recipe:
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=settings)})


def _stepper(
    recipe: Recipe, plan: Plan, module: nn.Module, chosen: BuiltOptimizer, group: DistributedContext
) -> Stepper:
    if plan.deepspeed is not None:
        return DeepSpeedStepper(module, chosen.optimizer, group, plan.deepspeed)
    steps = plan.batch.accumulation_steps
    norm = recipe.train.max_grad_norm
    return TorchStepper(module, chosen.optimizer, group, recipe.precision, steps, norm)


def _chunked(
    recipe: Recipe, model: LossModule, sample: Batch, group: DistributedContext
) -> ChunkedLoss:
    """Compute head and loss in chunks on every rank or on none; return the record."""
    # Ranks may decide differently, because their batches differ in size.
    chunked = chunk_head(recipe, model, sample, group.device.type)
    why = next((text for text in group.gather(chunked.why or "") if text), None)
    if why and chunked.rows:
        model.chunk(None)
    return ChunkedLoss(chunked.asked, None, why) if why else chunked


def _sharding(recipe: Recipe, group: DistributedContext) -> str:
    if recipe.zero:
        return f"DeepSpeed ZeRO {recipe.zero.stage}"
    return "DistributedDataParallel" if group.size > 1 else "none"


def _compiled() -> Inductor:
    """Return the graphs that torch.compile made and its graph breaks."""
    # A break leaves a piece of the model to eager PyTorch.
    from torch._dynamo.utils import counters

    return Inductor(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


@contextlib.contextmanager
def _compiling_uncounted() -> Iterator[None]:
    from torch._dynamo.utils import counters

    before = {name: counter.copy() for name, counter in counters.items()}
    yield
    counters.clear()
    counters.update(before)


def _recomputed(recipe: Recipe, used: str) -> str | None:
    """Return the component that recomputes layers for `model.gradient_checkpointing`, or None."""
    if not recipe.model.gradient_checkpointing:
        return None
    level = recipe.engine.memory_optimization or 1
    return (
        f"ONNX Runtime, memory_optimization: {level}" if used == "ort" else "torch.utils.checkpoint"
    )


def _attention(model: LossModule) -> str | None:
    return getattr(getattr(model.model, "config", None), "_attn_implementation", None)


def _fp16_optimizer(
    recipe: Recipe, used: str, stepper: Stepper, group: DistributedContext
) -> FusedNorm:
    """Install a fused overflow check and gradient norm in DeepSpeed's optimizer; return the record.

    It is ONNX Runtime's where that is possible, else ours.
    """
    from ortlaunch.ortmodule.deepspeed.gradient_norm import fuse_gradient_norm
    from ortlaunch.ortmodule.fp16_optimizer import fuse

    if recipe.zero is None or not isinstance(stepper, DeepSpeedStepper):
        why = "it modifies DeepSpeed's ZeRO optimizer, which this run does not use"
        return FusedNorm(False, None, why)
    if not recipe.zero.fused_gradient_norm:
        return FusedNorm(False, None, "zero.fused_gradient_norm is false")
    if used == "ort":
        return FusedNorm(*fuse(stepper.engine.optimizer, group.device.type))
    applied, by, why = fuse_gradient_norm(stepper.engine.optimizer)
    reasons = ("the engine has no ONNX Runtime", why)
    return FusedNorm(applied, by, "; ".join(reason for reason in reasons if reason))
