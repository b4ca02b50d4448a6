"""The engines eager, inductor and ort: their parts, built in the required order, and their record.

The order is: ORTModule (or torch.compile), optimizer, DeepSpeed or DistributedDataParallel,
FP16_Optimizer. Only this module and ortmodule/ name ORTModule, FusedAdam and FP16_Optimizer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.base.installed import installed_version_by_package_name
from ortlaunch.base.machine import threads_per_rank
from ortlaunch.base.units import count_with_noun, first_names_and_count_of_rest
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe
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
from ortlaunch.worker.engine.comparison import owner_name_and_ratio_of_active_dropouts
from ortlaunch.worker.engine.divided_comparison import ReferencePass, run_reference_pass_on_rank_0
from ortlaunch.worker.engine.flops import training_flops_per_token_or_none
from ortlaunch.worker.engine.memory_use import RankMemoryMeter
from ortlaunch.worker.engine.optimizer import (
    BuiltOptimizer,
    build_optimizer,
    require_trained_parameters,
)
from ortlaunch.worker.engine.ort_engine import (
    build_and_probe_ort_module_or_fall_back,
    first_and_last_error_line,
    first_two_rows_or_none,
    onnxruntime_report_so_far,
    unapplied_repair_and_export_notes,
    wrap_model_in_ortmodule,
)
from ortlaunch.worker.engine.stepping import (
    DeepSpeedStepper,
    ShardedStepper,
    Stepper,
    TorchStepper,
)
from ortlaunch.worker.engine.torch_scheduler import TorchScheduler
from ortlaunch.worker.model.chunked_head import chunk_head_if_trial_agrees_and_describe
from ortlaunch.worker.model.fsdp import parameters_without_dimension, shard_model_in_place
from ortlaunch.worker.model.loss_weight import LossWeight
from ortlaunch.worker.model.matmul_precision import (
    measure_matmul_precision_record,
    patch_rotary_to_multiply_elementwise,
    use_onednn_if_required_or_faster,
)
from ortlaunch.worker.model.model import LossModule, require_forward_takes_batch
from ortlaunch.worker.model.packing import packed_documents_text_or_none
from ortlaunch.worker.model.precision import narrow_dtype_or_none
from ortlaunch.worker.model.pretrained import notes_on_weights_not_loaded
from ortlaunch.worker.model.quantized_weights import (
    move_quantized_scales,
    parameter_element_count,
    quantized_form_and_count_text_or_none,
)
from ortlaunch.worker.model.tensor_parallel import dimension_by_parameter_pattern
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.tensor_batch import TensorBatch

if TYPE_CHECKING:
    from ortmodule.loops import PassAndGraphCounters

# The share of a pass in plain PyTorch that an evaluation graph saves. Measured on two cores of an AMD
# EPYC: 0.42 to 0.55 of a bare pass of BERT and Llama without oneDNN, 0.08 to 0.27 of a step with it.
_GRAPH_SAVING = 0.3
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
class EvaluationSeconds:
    """The seconds by which evaluations of engine ort choose between a graph and plain PyTorch."""

    export: float
    """Seconds of the export of the training graph, on the slowest rank."""
    plain_so_far: float = 0.0
    """Seconds of this start's evaluations in plain PyTorch."""

    @property
    def is_export_longer_than_saving(self) -> bool:
        """Whether an evaluation graph would not have saved the seconds of its export so far."""
        return self.plain_so_far * _GRAPH_SAVING < self.export


@dataclass(frozen=True)
class TrainingEngine:
    """A stepper and the record of the engine that runs."""

    stepper: Stepper
    eval_module: nn.Module
    plain: LossModule
    """The model without an engine."""
    record: EngineReport
    device: torch.device
    input_dtype: torch.dtype | None
    loss_weight: LossWeight
    flops_per_token: float | None
    witness: PassAndGraphCounters | None
    notes: tuple[str, ...]
    wrap_another_model: Callable[[nn.Module], nn.Module]
    """Returns a module of this engine with the weights of a model."""
    onnxruntime_so_far: Callable[[], OnnxRuntime | None]
    """Returns the report of ONNX Runtime so far."""
    scheduler: TorchScheduler | None
    """The learning rates that a LightningModule configured; None: the recipe's schedule."""
    keeps_build_precision: bool
    """Whether the module keeps the matmul precision of its build and ignores torch's setting.

    This is so for ORT on CUDA.
    """
    evaluation_seconds_or_none: EvaluationSeconds | None
    """None: evaluations run on `eval_module`."""
    reference_pass: ReferencePass | None = None
    """The first pass in plain PyTorch, to compare that of a divided model with; None: none."""
    memory_use: RankMemoryMeter | None = None

    def to_device(self, batch: TensorBatch) -> TensorBatch:
        """Move a batch to the device and cast floating-point tensors to the weights' dtype."""
        return _move_and_cast_batch(
            self.loss_weight.batch_without_weight_key_with_counted_label(batch),
            self.device,
            self.input_dtype,
        )

    def module_without_dropout_for_comparison(self) -> nn.Module:
        """Return a module without dropout and with torch's matmul precision.

        The run's own module is returned if it already is such a module.
        """
        return (
            self.wrap_another_model(self.plain)
            if owner_name_and_ratio_of_active_dropouts(self.plain) or self.keeps_build_precision
            else self.eval_module
        )

    @contextlib.contextmanager
    def exclude_passes_from_counts(self, with_compilations: bool) -> Iterator[None]:
        """Exclude passes from the run's counts while the context is open.

        Args:
            with_compilations: also exclude the graphs that torch.compile compiles meanwhile.
        """
        uncounted_witness = (
            self.witness.exclude_passes_from_counts()
            if self.witness is not None
            else contextlib.nullcontext()
        )
        is_inductor = self.record.engine.used == "inductor"
        with (
            uncounted_witness,
            _restore_compile_counters_after()
            if with_compilations and is_inductor
            else contextlib.nullcontext(),
        ):
            yield

    def engine_report_so_far(self) -> EngineReport:
        """Return the record, with the work of ONNX Runtime or torch.compile so far."""
        return replace(
            self.record,
            unused_parameters=list(self.stepper.unused_parameters),
            inductor=_inductor_report() if self.record.engine.used == "inductor" else None,
            onnxruntime=self.onnxruntime_so_far(),
        )


def build_engine(
    recipe: Recipe,
    plan: Plan,
    model: LossModule,
    group: DistributedContext,
    sample_batch: TensorBatch,
    compares_divided_model: bool = False,
) -> TrainingEngine:
    """Put the model on its device and its engine.

    Args:
        recipe: the run's recipe.
        plan: the run's plan.
        model: the model that returns its loss.
        group: the ranks of the run.
        sample_batch: one micro batch. Engine ort runs it once, forward and backward, so that a model that
            ONNX Runtime cannot run fails before step 1.
        compares_divided_model: run a pass in plain PyTorch before the model is divided.

    Raises:
        EngineError: ONNX Runtime cannot run the model and the recipe does not allow a fallback.
    """
    torch.set_num_threads(plan.threads or threads_per_rank(group.local.local_world_size))
    model.join_ranks(group.data_parallel)
    if recipe.model.factory and not recipe.model.traits.wrapper:
        require_forward_takes_batch(model.model, sample_batch, recipe.train.loss_weight)
    is_exact = recipe.engine.matmul_precision == "highest"
    if not is_exact:
        patch_rotary_to_multiply_elementwise(model)
    onednn = use_onednn_if_required_or_faster(recipe, model, group.device)
    requested_recipe = recipe
    recipe = _replace_engine_fields(recipe, onednn=onednn)
    # Before DeepSpeed: ZeRO 3 leaves only pieces of the weights on a rank.
    model_flops = training_flops_per_token_or_none(model.model, recipe.data.sequence_length)
    sizes = [(parameter_element_count(p), p.requires_grad) for p in model.parameters()]
    quantized_weights_text = quantized_form_and_count_text_or_none(recipe.model.quantize, model)
    loss_weight = LossWeight(recipe, model)
    chunked_loss = _chunk_head_on_all_ranks_or_none(
        recipe, model, loss_weight.batch_without_weight_key_with_counted_label(sample_batch), group
    )
    model.evaluates_with_scores = evaluates_with_scores(recipe)
    dtype = narrow_dtype_or_none(recipe.precision) if plan.deepspeed else None
    if dtype is not None:
        # DeepSpeed would cast them later: on the device, and after an export.
        cast_floating_point_parameters_in_place(model, dtype)
    reference_pass = (
        run_reference_pass_on_rank_0(
            model,
            loss_weight.batch_without_weight_key_with_counted_label(sample_batch),
            recipe.precision,
            group,
            uses_autocast=plan.deepspeed is None,
        )
        if compares_divided_model
        else None
    )
    _move_model_or_buffers_if_weights_are_divided(model, group, recipe)
    move_quantized_scales(model, group.device)
    require_trained_parameters(model, recipe.model.freeze or ())
    engine_name = recipe.engine.name
    fallback = whole_batch_reason = ""
    evaluation_seconds = None
    module: nn.Module = model
    witness: PassAndGraphCounters | None = None
    if engine_name == "ort":

        def prepare_for_model(batch: TensorBatch) -> TensorBatch:
            batch = loss_weight.batch_without_weight_key_with_counted_label(batch)
            return _move_and_cast_batch(batch, group.device, dtype)

        few_rows = first_two_rows_or_none(sample_batch)
        module, witness, fallback, whole_batch_reason, export_seconds = (
            build_and_probe_ort_module_or_fall_back(
                recipe,
                model,
                group,
                prepare_for_model(sample_batch),
                None if few_rows is None else prepare_for_model(few_rows),
            )
        )
        engine_name = "eager" if fallback else "ort"
        if not fallback:
            evaluation_seconds = EvaluationSeconds(export_seconds)
    # A profile needs marks in the kernels that inductor writes for a CPU.
    marks = {"cpp.enable_kernel_profile": True} if recipe.log.profile_steps else {}
    unit_count = 0
    if group.has_fsdp2 and recipe.parallel is not None:
        _require_no_layerdrop(model)
        unit_count = shard_model_in_place(
            model,
            recipe.parallel,
            group,
            # FSDP2 would cast packed weights, too.
            None if recipe.model.quantize else narrow_dtype_or_none(recipe.precision),
            marks if engine_name == "inductor" else None,
        )
    elif engine_name == "inductor":
        module = model.with_engine_of(functools.partial(_compile_in_place, options=marks or None))
    built_optimizer = build_optimizer(
        recipe.optimizer, module, engine_name, group.device, plan.deepspeed, group.size
    )
    stepper = _create_deepspeed_or_torch_stepper(recipe, plan, module, built_optimizer, group)
    fused_norm = _install_fused_gradient_norm_and_describe(recipe, stepper)
    record = EngineReport(
        engine=EngineChoice(
            recipe.engine.name,
            engine_name,
            first_and_last_error_line(fallback) or None,
        ),
        device=group.device.type,
        precision=recipe.precision,
        matmul_precision=measure_matmul_precision_record(
            recipe.engine.matmul_precision, group.device, onednn
        ),
        ranks=group.size,
        threads_per_rank=torch.get_num_threads(),
        parameters=sum(size for size, _ in sizes),
        trained_parameters=sum(size for size, is_trained in sizes if is_trained),
        sharding=_sharding_name(recipe, group, unit_count, [*parameters_without_dimension(model)]),
        optimizer=OptimizerChoice(
            recipe.optimizer.name,
            built_optimizer.used,
            built_optimizer.replacement_reason or None,
            [*built_optimizer.groups],
        ),
        chunked_loss=chunked_loss,
        attention=_attention_implementation(model),
        pretrained=dict(model.loaded) if model.loaded else None,
        quantized_weights=quantized_weights_text,
        packed_documents=packed_documents_text_or_none(
            model.document_mask_reason, recipe.data.sequence_length or 0
        ),
        gradient_checkpointing=_gradient_checkpointing_component_or_none(recipe, engine_name),
        onnxruntime=None,
        # torch.__version__ names the build, too, as in 2.4.0+cu121.
        versions={
            **installed_version_by_package_name(_PACKAGES),
            "torch": torch.__version__,
        },
        fp16_optimizer=fused_norm,
        # The session fills it in.
        freed_memory=None,
        tensor_slices=dimension_by_parameter_pattern(model)
        if group.mesh is not None and group.mesh.tensor > 1
        else None,
    )
    # For comparisons ORT needs a second module: the graph of the first keeps its dropout ratio.
    wrap_another_model = (
        functools.partial(
            wrap_model_in_ortmodule,
            _replace_engine_fields(recipe, matmul_precision="highest"),
            group=group,
        )
        if engine_name == "ort"
        else lambda _: module
    )
    keeps_build_precision = engine_name == "ort" and group.device.type == "cuda" and not is_exact
    notes = (
        *notes_on_weights_not_loaded(model.loaded),
        *built_optimizer.notes,
        *(unapplied_repair_and_export_notes() if witness else ()),
        *(
            [
                "the export ran a whole micro batch and not a few rows: "
                f"{first_and_last_error_line(whole_batch_reason)}"
            ]
            if whole_batch_reason
            else []
        ),
    )
    ort_report = (
        functools.partial(onnxruntime_report_so_far, requested_recipe, witness)
        if witness
        else lambda: None
    )
    return TrainingEngine(
        stepper=stepper,
        eval_module=module,
        plain=model,
        record=record,
        device=group.device,
        input_dtype=dtype,
        loss_weight=loss_weight,
        flops_per_token=model_flops,
        witness=witness,
        notes=notes,
        wrap_another_model=wrap_another_model,
        onnxruntime_so_far=ort_report,
        scheduler=built_optimizer.scheduler,
        keeps_build_precision=keeps_build_precision,
        evaluation_seconds_or_none=evaluation_seconds,
        reference_pass=reference_pass,
    )


def _compile_in_place(module: nn.Module, options: dict[str, Any] | None) -> nn.Module:
    module.compile(dynamic=False, options=options)
    return module


def cast_floating_point_parameters_in_place(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters in place, and no buffer, as DeepSpeed does."""
    # Rotary frequencies are a buffer: those of a Llama in float16 are off by 0.99 rad at position
    # 4,096.
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _require_no_layerdrop(model: nn.Module) -> None:
    """Check that the model leaves out no layers at random.

    Raises:
        InputError: it does.
    """
    for _, name, ratio in owner_name_and_ratio_of_active_dropouts(model):
        if "layerdrop" in name:
            raise InputError(
                f"parallel: {name} is {ratio:g}, so that each rank leaves out other layers, and FSDP2 "
                f"gathers a layer on all ranks; set it to 0 (model.config: {{{name}: 0.0}})"
            )


def _move_model_or_buffers_if_weights_are_divided(
    model: torch.nn.Module, group: DistributedContext, recipe: Recipe
) -> None:
    if group.mesh is None and (recipe.zero is None or recipe.zero.stage < 3):
        model.to(group.device)
        return
    # The device may have memory for pieces of the parameters only.
    for buffer in model.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.to(group.device)


def _move_and_cast_batch(
    batch: TensorBatch, device: torch.device, dtype: torch.dtype | None
) -> TensorBatch:
    return {
        name: value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)
        for name, value in batch.items()
    }


def _replace_engine_fields(recipe: Recipe, **engine_fields: Any) -> Recipe:
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=engine_fields)})


def _create_deepspeed_or_torch_stepper(
    recipe: Recipe,
    plan: Plan,
    module: nn.Module,
    built_optimizer: BuiltOptimizer,
    group: DistributedContext,
) -> Stepper:
    if plan.deepspeed is not None:
        return DeepSpeedStepper(
            module,
            built_optimizer.optimizer,
            group,
            plan.deepspeed,
            recipe.parallel.tensor_plan if recipe.parallel else None,
        )
    steps = plan.batch.accumulation_steps
    norm = recipe.train.max_grad_norm
    stepper_class = ShardedStepper if group.has_fsdp2 else TorchStepper
    return stepper_class(module, built_optimizer.optimizer, group, recipe.precision, steps, norm)


def _chunk_head_on_all_ranks_or_none(
    recipe: Recipe, model: LossModule, sample_batch: TensorBatch, group: DistributedContext
) -> ChunkedLoss:
    """Compute head and loss in chunks on every rank or on none; return the record."""
    # Ranks may decide differently, because their batches differ in size.
    chunked_loss = chunk_head_if_trial_agrees_and_describe(
        recipe, model, sample_batch, group.device.type
    )
    reason = next((text for text in group.gather(chunked_loss.why or "") if text), None)
    if reason and chunked_loss.rows:
        model.chunk_head_or_restore_it(None)
    return ChunkedLoss(chunked_loss.asked, None, reason) if reason else chunked_loss


def _sharding_name(
    recipe: Recipe, group: DistributedContext, unit_count: int, scalar_names: Sequence[str]
) -> str:
    mesh = group.mesh
    if recipe.zero:
        autotp_text = f", AutoTP: {mesh.tensor} ranks compute each layer" if mesh else ""
        return f"DeepSpeed ZeRO {recipe.zero.stage}{autotp_text}"
    if mesh:
        tensor_text = f" x {mesh.tensor} of each layer" if mesh.tensor > 1 else ""
        return (
            f"FSDP2: {mesh.replicate} x the model, each on {count_with_noun(mesh.shard, 'rank')}"
            f"{tensor_text}, gathered in {count_with_noun(unit_count, 'layer')} and the rest"
            + (
                f"; whole on each: {first_names_and_count_of_rest(scalar_names, 4)}"
                if scalar_names
                else ""
            )
        )
    return "DistributedDataParallel" if group.size > 1 else "none"


def _inductor_report() -> Inductor:
    """Return the graphs that torch.compile made and its graph breaks."""
    # A break leaves a piece of the model to eager PyTorch.
    from torch._dynamo.utils import counters

    return Inductor(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


@contextlib.contextmanager
def _restore_compile_counters_after() -> Iterator[None]:
    from torch._dynamo.utils import counters

    counts_before = {name: counter.copy() for name, counter in counters.items()}
    yield
    counters.clear()
    counters.update(counts_before)


def _gradient_checkpointing_component_or_none(recipe: Recipe, engine_name: str) -> str | None:
    """Return the component that recomputes layers for `model.gradient_checkpointing`, or None."""
    if not recipe.model.gradient_checkpointing:
        return None
    level = recipe.engine.memory_optimization or 1
    return (
        f"ONNX Runtime, memory_optimization: {level}"
        if engine_name == "ort"
        else "torch.utils.checkpoint"
    )


def _attention_implementation(model: LossModule) -> str | None:
    return getattr(getattr(model.model, "config", None), "_attn_implementation", None)


def _install_fused_gradient_norm_and_describe(recipe: Recipe, stepper: Stepper) -> FusedNorm:
    """Install a fused overflow check and gradient norm in DeepSpeed's optimizer; return the record."""
    from ortmodule.loops import fuse_gradient_norm_or_get_reason

    if recipe.zero is None or not isinstance(stepper, DeepSpeedStepper):
        reason = "it modifies DeepSpeed's ZeRO optimizer, which this run does not use"
    elif not recipe.zero.fused_gradient_norm:
        reason = "zero.fused_gradient_norm is false"
    else:
        reason = fuse_gradient_norm_or_get_reason(stepper.engine.optimizer)
    return FusedNorm(not reason, reason)
