"""transformers' Trainer whose training passes run in ORTModule.

`self.model` stays the plain model: it is what callbacks see, what evaluation, prediction and
`generate` run, and what is saved. The ORTModule is inside `self.model_wrapped`, in
DistributedDataParallel or DeepSpeed's engine where there is one. Only this module overrides
Trainer's methods; its tests use transformers 5.23.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import TrainOutput

from ortmodule import ORTModule, Settings
from ortmodule._internal import options, pass_counters
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.json_types import Json
from ortmodule._internal.deepspeed.gradient_norm import fuse_gradient_norm_or_get_reason
from ortmodule._internal.errors import ORTModuleError
from ortmodule._internal.fused_adam import reason_tensor_is_too_large_or_empty
from ortmodule.trainer.arguments import ADAMW_ORT_FUSED, ortmodule_settings
from ortmodule.trainer.report import engine_and_optimizer_report, write_and_print_report


class ORTTrainer(Trainer):
    """transformers' Trainer, trained by ONNX Runtime; a drop-in for Optimum's ORTTrainer.

    Args:
        args: Trainer's arguments, by position or name.
        tokenizer: Optimum's name of `processing_class`.
        feature: accepted as in Optimum, without effect.
        onnx_model_path: accepted as in Optimum, without effect.
        settings: ORTModule's settings; None: from `save_onnx` and `onnx_log_level` of the arguments.
        kwargs: Trainer's arguments.
    """

    def __init__(
        self,
        *args: Any,
        tokenizer: Any = None,
        feature: str | None = None,
        onnx_model_path: Any = None,
        settings: Settings | None = None,
        **kwargs: Any,
    ) -> None:
        _warn_of_ignored_arguments(feature=feature, onnx_model_path=onnx_model_path)
        if tokenizer is not None:
            kwargs["processing_class"] = tokenizer
        self.settings = settings
        self.ort_module: ORTModule | None = None
        """The ORTModule of the newest `train`."""
        self.unfused_norm_reason: str | None = None
        """The measurement of gradients of DeepSpeed's optimizer; None without DeepSpeed."""
        super().__init__(*args, **kwargs)
        has_outside_loss = self.label_smoother is not None or getattr(
            self, "compute_loss_func", None
        )
        if has_outside_loss and (
            _is_argument_true(self.args, "use_module_with_loss")
            or _is_argument_true(self.args, "loss_in_train")
        ):
            warnings.warn(
                "use_module_with_loss: label_smoothing_factor and compute_loss_func are computed by "
                "PyTorch, outside ONNX Runtime's graph",
                stacklevel=2,
            )

    def report(self) -> Json:
        """Return what the newest `train` really ran, as in ort_report.json; empty before it."""
        if self.ort_module is None:
            return {}
        refusal = (
            _reason_fused_adam_is_refused_or_empty(self.args, self.model)
            if _is_ort_fused_adam(self.args)
            else ""
        )
        return engine_and_optimizer_report(
            self, self.ort_module.report(), self.unfused_norm_reason, refusal
        )

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as Trainer does, then print what ran and write it to ort_report.json.

        Raises:
            ORTModuleError: ONNX Runtime cannot train in this form of parallelism, or this model.
            MissingDependency: ONNX Runtime Training or its extensions are not installed.
        """
        self._refuse_unsupported_parallelism()
        options.load(self._ortmodule_settings())
        pass_counters.get_or_start_pass_counters().reset_pass_fallback_and_torch_call_counts()
        output = super().train(resume_from_checkpoint, trial, *args, **kwargs)
        if self.is_world_process_zero():
            write_and_print_report(self.report(), self._get_output_dir(trial))
        return output

    def evaluate(self, *args: Any, inference_with_ort: bool | None = None, **kwargs: Any) -> Any:
        """Evaluate as Trainer does, in PyTorch."""
        _warn_of_ignored_arguments(inference_with_ort=inference_with_ort)
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, inference_with_ort: bool | None = None, **kwargs: Any) -> Any:
        """Predict as Trainer does, in PyTorch."""
        _warn_of_ignored_arguments(inference_with_ort=inference_with_ort)
        return super().predict(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; it gets the ORTModule where Trainer gives it the model."""
        super().create_accelerator_and_postprocess()
        prepare = functools.partial(
            self._prepare_with_ort_module_in_training, self.accelerator.prepare
        )
        setattr(self.accelerator, "prepare", prepare)  # noqa: B010  # a method

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run Trainer's step.

        Raises:
            ORTModuleError: Trainer wraps the model in a way that leaves ONNX Runtime out.
        """
        if self.ort_module is None:
            raise ORTModuleError(
                "the model was not wrapped in ORTModule: this Trainer prepares it without "
                "accelerator.prepare. Train with one process for each device, without FSDP or "
                "tensor parallelism"
            )
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's step in the precision of training.

        accelerate has prepared the ORTModule for autocast, and not the plain model that runs here.
        """
        with self.accelerator.autocast():
            return super().prediction_step(*args, **kwargs)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """Return the class of the optimizer and its settings, as Trainer does."""
        if not _is_ort_fused_adam(args):
            trainer_choice: tuple[Any, Any] = Trainer.get_optimizer_cls_and_kwargs(args, model)
            return trainer_choice
        settings: dict[str, object] = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
        }
        if refusal := _reason_fused_adam_is_refused_or_empty(args, model):
            tally.add_end_note_once(
                f"{ADAMW_ORT_FUSED}: torch's fused AdamW runs instead: {refusal}"
            )
            return torch.optim.AdamW, {**settings, "fused": True}
        from onnxruntime.training.optim import FusedAdam
        from onnxruntime.training.optim.fused_adam import AdamWMode

        # Weight decay as in torch.optim.AdamW.
        return FusedAdam, {**settings, "adam_w_mode": AdamWMode.ADAMW_TORCH}

    def _ortmodule_settings(self) -> Settings:
        return self.settings or ortmodule_settings(self.args)

    def _refuse_unsupported_parallelism(self) -> None:
        """Raise an error for forms of parallelism in which ORTModule cannot train."""
        unsupported_form = ""
        if self.args.n_gpu > 1:
            unsupported_form = (
                "DataParallel on several GPUs: start one process for each GPU, with torchrun"
            )
        elif self.is_fsdp_enabled:
            unsupported_form = "FSDP: use DeepSpeed ZeRO 1 or 2"
        elif self.is_deepspeed_enabled and is_deepspeed_zero3_enabled():
            unsupported_form = "DeepSpeed ZeRO 3: use stage 1 or 2"
        if unsupported_form:
            raise ORTModuleError(
                f"ORTTrainer does not train with {unsupported_form}, or transformers' Trainer"
            )

    def _prepare_with_ort_module_in_training(
        self, original_prepare: Callable[..., Any], *objects: Any, **kwargs: Any
    ) -> Any:
        """Call accelerate's `original_prepare`, in training with the ORTModule instead of the model."""
        if not self.is_in_train or not any(item is self.model for item in objects):
            return original_prepare(*objects, **kwargs)
        model: Any = self.model
        _disable_caches_and_fill_config(model)
        # Built here, because the model has its device, weights and frozen layers by now.
        self.ort_module = ORTModule(model, self._ortmodule_settings())
        wrapped_objects = [self.ort_module if item is self.model else item for item in objects]
        prepared = original_prepare(*wrapped_objects, **kwargs)
        if self.is_deepspeed_enabled:
            self.unfused_norm_reason = fuse_gradient_norm_or_get_reason(prepared[0].optimizer)
        return prepared


class ORTSeq2SeqTrainer(ORTTrainer, Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer, trained by ONNX Runtime; `generate` runs in PyTorch."""


def _disable_caches_and_fill_config(model: torch.nn.Module) -> None:
    """Switch off caches of keys and values, which no graph can return, and prepare the config.

    Trainer switches off the cache in the model's own config only; T5's decoder has another one.
    """
    for layer in model.modules():
        config: Any = getattr(layer, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    if isinstance(model, PreTrainedModel):
        # Each save sets these. ORTModule would see a change at the first one, and export again.
        name = "dtype" if hasattr(model.config, "dtype") else "torch_dtype"
        setattr(model.config, name, str(model.dtype).removeprefix("torch."))
        model.config.architectures = [type(model).__name__]


def _is_argument_true(args: TrainingArguments, argument_name: str) -> bool:
    return bool(getattr(args, argument_name, False))


def _is_ort_fused_adam(args: TrainingArguments) -> bool:
    return str(args.optim) == ADAMW_ORT_FUSED


def _reason_fused_adam_is_refused_or_empty(args: TrainingArguments, model: Any) -> str:
    """Return why ONNX Runtime's FusedAdam cannot train the model; empty if it can."""
    # By the arguments' device: DeepSpeed moves the parameters later.
    if args.device.type != "cuda":
        return "ONNX Runtime's is for CUDA only"
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    # DeepSpeed flattens them into one tensor.
    return reason_tensor_is_too_large_or_empty([sum(sizes)] if args.deepspeed else sizes)


def _warn_of_ignored_arguments(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            warnings.warn(
                f"{name}={value!r} has no effect: evaluation and prediction run in PyTorch, and "
                "no ONNX model is exported for them; Optimum exports one",
                stacklevel=3,
            )
