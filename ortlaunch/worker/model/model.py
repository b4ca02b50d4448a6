"""The model of a run, which returns its loss.

It is a model of transformers, from a config or from weights, or the user's own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.inputs import (
    pretrained_files_in_folder,
    refuse_lfs_pointers_and_unreadable_files,
    rounded_vocabulary_size,
)
from ortlaunch.recipe.text.closest_names import closest_or_translated_name_or_none
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.data import LoadedData, seed_and_call_user_function
from ortlaunch.worker.data.streams.hub import hub_error_reason_and_remedy
from ortlaunch.worker.data.tokenizer import download_revision_or_keep_name
from ortlaunch.worker.data.user_data import import_user_function, seed_all_random_generators
from ortlaunch.worker.data.vocabulary import class_number_by_label_in_recipe
from ortlaunch.worker.model import packing
from ortlaunch.worker.model.activation_offload import keep_saved_tensors_on_host_except
from ortlaunch.worker.model.adapters import (
    add_lora_adapters,
    lora_with_settings_of_published_adapters,
    refuse_frozen_embeddings_of_new_tokens,
)
from ortlaunch.worker.model.chunked_head import ChunkedHead
from ortlaunch.worker.model.parameter_groups import freeze_parameters_matching_patterns
from ortlaunch.worker.model.pretrained import (
    NOTHING_BUT_LOADED,
    LoadedNames,
    WeightFiles,
    build_parameters_without_memory,
    load_pretrained_resizing_vocabulary_and_list_names,
    may_weights_be_read_later,
    weight_files_or_none,
)
from ortlaunch.worker.model.quantized_weights import (
    quantized_loading_options,
    settle_quantized_layers,
)
from ortlaunch.worker.model.returned_values import (
    LOSS,
    ValueMeans,
    output_values_by_name_or_empty,
    scalars_beside_loss_by_name,
)
from ortlaunch.worker.process_group.distributed import DistributedContext

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SPECIAL_TOKEN_FIELDS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "cls_token_id",
    "sep_token_id",
    "mask_token_id",
)


# The names of transformers' outputs.
_SCORES = (
    "logits",
    "prediction_logits",
    "seq_relationship_logits",
    "start_logits",
    "end_logits",
)


class LossModule(nn.Module):
    """A model whose forward returns its scalar loss, or a dictionary of the loss and more values.

    `loss_of_engine_output` and `ValueMeans` read the loss and the values from this output.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.generates_with_cache: bool | None = None
        """The model's own `use_cache`; None if it has none."""
        self.tokenizer: Any = None
        """The tokenizer of the data; None for custom data."""
        self.loaded: LoadedNames | None = None
        self.weight_files: WeightFiles | None = None
        """Where parameters on the meta device have their values, if another rank does not."""
        self.chunked: ChunkedHead | None = None
        self.document_mask_reason: str | None = None
        """Why a mask keeps packed documents apart; "": attention does; None: there are none."""
        self.pack_traits = packing.CAUSAL
        self.has_numbers = False
        """Whether values that the model returns beside its loss are logged.

        This is for the user's own model. Logits of transformers' models are not returned.
        """
        self.offloads = False
        """Whether tensors for the backward pass are kept in host memory."""
        self.evaluates_with_scores = False
        """Whether forward returns logits, too, in evaluation, for the metrics.

        With a chunked head these are the inputs of the head.
        """

    def forward(self, **batch: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        if self.offloads and self.training:
            with keep_saved_tensors_on_host_except(self.model.parameters()):
                return self._loss_or_dict_of_loss_and_values(batch)
        return self._loss_or_dict_of_loss_and_values(batch)

    def _loss_or_dict_of_loss_and_values(
        self, batch: dict[str, torch.Tensor]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        document_ids = batch.get(packing.DOCUMENTS)
        if document_ids is not None:
            batch = packing.batch_with_documents_apart(batch, self.model, self.pack_traits)
        if self.chunked is not None:
            loss, output = self.chunked.chunked_loss_and_output(self.model, batch, self.training)
        else:
            output = self._output_with_loss(batch)
            loss = require_scalar_loss(output)
        other_values = scalars_beside_loss_by_name(output) if self.has_numbers else {}
        # ONNX Runtime does not permit an output that depends on no input.
        if torch.jit.is_tracing():
            other_values = {name: value + 0 * loss.detach() for name, value in other_values.items()}
        if self.evaluates_with_scores and not self.training:
            scores = {name: output[name] for name in _SCORES if name in output}
            if document_ids is not None and len(batch["input_ids"]) != len(document_ids):
                scores = packing.values_of_rows_as_packed(scores, document_ids)
            other_values |= scores
        return {LOSS: loss, **other_values} if other_values else loss

    def _output_with_loss(self, batch: dict[str, torch.Tensor]) -> Any:
        problem_type = getattr(getattr(self.model, "config", None), "problem_type", None)
        labels = batch.get("labels")
        if (
            problem_type == "multi_label_classification"
            and labels is not None
            and not labels.is_floating_point()
        ):
            raise InputError(
                f"labels of a batch are {labels.dtype}; custom samples of multi-label-classification "
                "have a float for each class, 1.0 or 0.0"
            )
        return self.model(**batch)

    def set_trainer_values_and_device(
        self, recipe: Recipe, plan: Plan, run: RunDir, group: DistributedContext, sample_count: int,
        first_step: int,
    ) -> None:  # fmt: skip
        """Give a LightningModule the sizes of its run and the step of its weights."""

    def call_lightning_hook(self, hook_name: str, value_means: ValueMeans) -> None:
        """Call a hook of a LightningModule; other models have none.

        Args:
            hook_name: the hook's name.
            value_means: counts the values that the hook logs.
        """

    def begin_lightning_step(
        self, step_index: int, samples_before_step: int, value_means: ValueMeans
    ) -> None:
        """Move a LightningModule to `step_index`, from 0, before which the run used `samples_before_step` samples."""

    def end_lightning_step(
        self, completed_steps: int, samples_seen: int, value_means: ValueMeans
    ) -> None:
        """Move a LightningModule to the end of a step, the run's `completed_steps`-th, from 1."""

    def with_engine_of(self, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Return the module that `wrap` puts on an engine: this one, or its model without the loss."""
        return wrap(self)

    def join_ranks(self, group: DistributedContext) -> None:
        """Let a loss that compares samples see those of all data-parallel ranks."""

    def compute_loss_of_own_rank(self) -> contextlib.AbstractContextManager[None]:
        """Leave the other ranks' samples out of the loss while the context is open."""
        return contextlib.nullcontext()

    def chunk_head_or_restore_it(self, chunked_head: ChunkedHead | None) -> None:
        """Compute head and loss in chunks from now on; with None, as the model itself does."""
        if self.chunked is not None:
            self.chunked.restore_head(self.model)
        self.chunked = chunked_head
        if chunked_head is not None:
            chunked_head.replace_head_by_identity(self.model)


def require_forward_takes_batch(
    model: nn.Module, batch: Mapping[str, object], weight_key: str | None = None
) -> None:
    """Check that the forward function of a user's model takes the values of a batch.

    Args:
        model: the user's model.
        batch: a batch of the training data.
        weight_key: the key of the loss's weights, which the model need not take.

    Raises:
        InputError: it lacks one, or takes one that no batch has.
    """
    # Such a hook may change the arguments.
    if model._forward_pre_hooks_with_kwargs:
        return
    signature = inspect.signature(model.forward)
    if weight_key not in signature.parameters:
        batch = {name: value for name, value in batch.items() if name != weight_key}
    try:
        signature.bind(**batch)
    except TypeError as error:
        raise InputError(
            f"model.factory: {type(model).__name__}.forward takes {', '.join(signature.parameters)}; "
            f"a batch of data.train has {', '.join(batch)}: {error}; give both the same names"
        ) from None


@contextlib.contextmanager
def disable_chunked_head(module: nn.Module) -> Iterator[None]:
    """Disable a LossModule's chunked head while the context is open; leave other modules as is."""
    chunked = getattr(module, "chunked", None)
    if not isinstance(module, LossModule) or chunked is None:
        yield
        return
    module.chunk_head_or_restore_it(None)
    try:
        yield
    finally:
        module.chunk_head_or_restore_it(chunked)


def require_scalar_loss(model_output: Any) -> torch.Tensor:
    """Return the loss in a model's output: the output itself, its `loss`, or a tuple's first item.

    Raises:
        InputError: there is no loss, or it is not a scalar.
    """
    loss = (
        model_output.get("loss")
        if isinstance(model_output, Mapping)
        else getattr(model_output, "loss", model_output)
    )
    if isinstance(loss, (tuple, list)) and loss:
        loss = loss[0]
    if not isinstance(loss, torch.Tensor) or loss.dim():
        description = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        names = [str(name) for name in output_values_by_name_or_empty(model_output)]
        keys = f" with {', '.join(names)}; name it loss" if names and LOSS not in names else ""
        raise InputError(
            f"the model's forward must return its loss, a scalar; got {description} in "
            f"{type(model_output).__name__}{keys}"
        )
    return loss


def seed_and_build_loss_module_on_cpu(
    recipe: Recipe, data: LoadedData, has_weights: bool = True, is_divided_later: bool = False
) -> LossModule:
    """Build the model in float32 on the CPU.

    The same seed gives the same weights on every rank and engine.

    Args:
        recipe: the run's recipe.
        data: the data, whose vocabulary and labels give sizes.
        has_weights: False: a model of transformers gets tensors without memory (torch's meta device),
            and the values come from another rank. A model of the user's own has weights in any case.
        is_divided_later: the values are only needed when the model is divided: those of a pretrained
            folder are read then, one parameter after another.
    """
    has_weights = has_weights or recipe.model.is_built_of_values
    seed_all_random_generators(recipe.seed)
    generates_with_cache = None
    loaded = weight_files = None
    if recipe.model.traits.is_own:
        model = seed_and_call_user_function(
            "model.factory", str(recipe.model.factory), recipe.model.arguments, recipe.seed
        )
        if not isinstance(model, nn.Module):
            what = (
                f"the class {model.__name__}, not an object of it"
                if isinstance(model, type)
                else type(model).__name__
            )
            raise InputError(f"model.factory returned {what}; it must return a torch.nn.Module")
        model = _unwrap_compiled_layers_in_place(model)
        _refuse_sparse_gradients(recipe, model)
    else:
        model, loaded, weight_files = _build_transformers_model(
            recipe, data, has_weights, is_divided_later
        )
        # transformers derives it from the class's name. For GPT2LMHeadModel it finds None, and
        # prints that None is unrecognized.
        vars(model)["loss_type"] = getattr(model, "loss_type", None) or "ForCausalLM"
        generates_with_cache = _switch_cache_off_and_return_setting(model)
    if recipe.model.lora:
        if loaded is not None and data.tokenizer is not None:
            lora = lora_with_settings_of_published_adapters(recipe.model.lora)
            refuse_frozen_embeddings_of_new_tokens(recipe, lora, data, model)
        with _meta_device_unless(has_weights):
            model = add_lora_adapters(model, recipe.model.lora, recipe.model.task)
    if recipe.model.freeze:
        freeze_parameters_matching_patterns(model, recipe.model.freeze)
    # After the adapters: with checkpointing on, peft would change the embeddings' output.
    if recipe.model.gradient_checkpointing:
        _enable_gradient_checkpointing(model)
    document_mask_reason = None
    if recipe.data.separates_documents and not is_on_meta_device(model):
        document_mask_reason = packing.choose_document_form_or_refuse(model, recipe)
    traits = recipe.model.traits
    loss_module = loss_module_of_model(model.train(), recipe)
    loss_module.generates_with_cache = generates_with_cache
    loss_module.tokenizer = data.tokenizer
    loss_module.loaded = loaded
    loss_module.document_mask_reason = document_mask_reason
    loss_module.pack_traits = packing.pack_traits_of_model(model, recipe.model.traits)
    loss_module.weight_files = weight_files
    loss_module.has_numbers = traits.is_own
    loss_module.offloads = recipe.model.offload_activations
    return loss_module


def loss_module_of_model(model: nn.Module, recipe: Recipe) -> LossModule:
    """Return the module of the recipe's task that computes the loss of a model."""
    traits = recipe.model.traits
    if traits.loss_module:
        loss_class = import_user_function("model.task", traits.loss_module)
        loss_module: LossModule = loss_class(model, recipe)
    elif traits.wrapper:
        loss_module = import_user_function("model.task", traits.wrapper)(model)
    else:
        loss_module = LossModule(model)
    return loss_module


def is_on_meta_device(model: nn.Module) -> bool:
    """Return whether the model was built without weights."""
    return any(parameter.is_meta for parameter in model.parameters())


def _meta_device_unless(has_weights: bool) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if has_weights else torch.device("meta")


def _unwrap_compiled_layers_in_place(model: nn.Module) -> nn.Module:
    """Return a model whose layers of `torch.compile` are compiled in place.

    A wrapper of `torch.compile` would add `_orig_mod.` to the names of weights, so that neither a
    checkpoint nor an export fitted the same model without it.
    """
    for part in list(model.modules()):
        layers = vars(part)["_modules"]
        layers.update(
            {
                name: _unwrap_compiled_layer_keeping_it_compiled(layer)
                for name, layer in layers.items()
            }
        )
    unwrapped: nn.Module = _unwrap_compiled_layer_keeping_it_compiled(model)
    return unwrapped


def _unwrap_compiled_layer_keeping_it_compiled(layer: Any) -> Any:
    if type(layer).__name__ != "OptimizedModule":
        return layer
    inner = vars(layer)["_modules"]["_orig_mod"]

    # torch would not compile `_call_impl` itself of its own layers.
    def call_inner(*args: Any, **kwargs: Any) -> Any:
        return inner._call_impl(*args, **kwargs)

    # As `inner.compile()` sets it, with the settings that the wrapper was made with.
    inner._compiled_call_impl = layer.dynamo_ctx(call_inner)
    return inner


def _refuse_sparse_gradients(recipe: Recipe, model: nn.Module) -> None:
    """Refuse layers with sparse gradients, unless the optimizer is torch's plain SGD.

    Raises:
        InputError: there is such a layer, and the recipe does more with its gradient.
    """
    sparse = [
        name for name, part in model.named_modules() if getattr(part, "sparse", False) is True
    ]
    optimizer_settings = recipe.optimizer
    is_plain = optimizer_settings.name == "sgd" and not (
        optimizer_settings.momentum or optimizer_settings.weight_decay or recipe.zero
    )
    if sparse and not (is_plain and recipe.train.max_grad_norm is None):
        raise InputError(
            f"model: {sparse[0]} has sparse gradients, which only optimizer.name=sgd takes, without "
            "momentum, weight_decay, train.max_grad_norm and zero; give it sparse=False"
        )


def _switch_cache_off_and_return_setting(model: nn.Module) -> bool | None:
    """Switch off the cache of keys and values; return the model's own `use_cache`.

    The cache is useful for generation only. The export restores the model's own value.
    """
    part_configs = (getattr(part, "config", None) for part in model.modules())
    configs = {id(config): config for config in part_configs if config is not None}
    own_values: list[bool | None] = [
        config.use_cache for config in configs.values() if hasattr(config, "use_cache")
    ]
    _set_use_cache(list(configs.values()), False)
    return own_values[0] if own_values else None


def restore_cache_setting(model: Any, own_use_cache: bool | None) -> None:
    """Restore the model's own `use_cache`, which training had switched off."""
    config = getattr(model, "config", None)
    if config is not None and own_use_cache is not None:
        _set_use_cache((config, config.get_text_config()), own_use_cache)


def _set_use_cache(configs: Iterable[Any], value: bool) -> None:
    """Set `use_cache` in those configs that have it."""
    for config in configs:
        if hasattr(config, "use_cache"):
            config.use_cache = value


def _enable_gradient_checkpointing(model: nn.Module) -> None:
    """Make the model recompute its layers in the backward pass."""
    try:
        is_transformers = hasattr(model, "supports_gradient_checkpointing")
        # transformers has this name from 5.23 on.
        newer = getattr(model, "activation_checkpointing_enable", None) if is_transformers else None
        enable = newer or getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise ValueError(
                f"{type(model).__name__} has no method gradient_checkpointing_enable; leave it out"
            )
        # Reentrant checkpoints need an input with a gradient, which LoRA does not have.
        enable(*([{"use_reentrant": False}] if is_transformers else []))
    except ValueError as error:
        raise InputError(f"model.gradient_checkpointing: {error}") from None


class _BuiltModel(NamedTuple):
    """A model of transformers, and where its weights came from or will."""

    model: nn.Module
    loaded: LoadedNames | None = None
    weight_files: WeightFiles | None = None


def _build_transformers_model(
    recipe: Recipe, data: LoadedData, has_weights: bool, is_divided_later: bool
) -> _BuiltModel:
    import transformers

    config = build_transformers_config_fitting_data_or_refuse(recipe, data)
    # transformers chooses sdpa for the models that have it.
    attention = None if recipe.model.attention == "auto" else recipe.model.attention
    auto = getattr(transformers, recipe.model.traits.auto_class)
    try:
        if not has_weights:
            # The type of a pretrained config is that of its file.
            options = {} if recipe.model.pretrained is None else {"torch_dtype": torch.float32}
            with torch.device("meta"):
                built = auto.from_config(config, attn_implementation=attention, **options)
            return _BuiltModel(built)
        if recipe.model.pretrained is None:
            return _BuiltModel(auto.from_config(config, attn_implementation=attention))
        if is_divided_later and may_weights_be_read_later(recipe, config.model_type):
            with build_parameters_without_memory():
                built = auto.from_config(
                    config, attn_implementation=attention, torch_dtype=torch.float32
                )
            folder = Path(download_revision_or_keep_name(recipe.model.pretrained))
            if files := weight_files_or_none(built, folder):
                return _BuiltModel(built, NOTHING_BUT_LOADED, files)
        loaded = load_pretrained_resizing_vocabulary_and_list_names(
            auto,
            download_revision_or_keep_name(recipe.model.pretrained),
            config,
            allows_other_head=recipe.model.traits.has_new_head,
            allows_partial=recipe.model.allow_partial,
            attn_implementation=attention,
            torch_dtype=torch.float32,
            **quantized_loading_options(recipe.model, config, auto),
        )
        if recipe.model.quantize is not None:
            settle_quantized_layers(loaded[0], recipe.model.quantize.compute or recipe.precision)
        return _BuiltModel(*loaded)
    except (OSError, ValueError) as error:
        reason = hub_error_reason_and_remedy(error, str(recipe.model.pretrained))
        raise InputError(f"model: {reason}") from error
    # The config's class accepts some wrong values, which then fail in the model's constructor.
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"model.config: {type(error).__name__}: {error}") from error


def build_transformers_config_fitting_data_or_refuse(recipe: Recipe, data: LoadedData) -> Any:
    """Return the config of a model of transformers, without its weights.

    Raises:
        InputError: recipe, data and model do not fit together.
    """
    from transformers import AutoConfig

    fields = dict(recipe.model.config or {})
    source = recipe.model.pretrained
    model_type = fields.pop("model_type", None)
    refuse_lfs_pointers_and_unreadable_files(
        pretrained_files_in_folder("model.pretrained", str(source))
    )
    try:
        config = (
            AutoConfig.for_model(model_type)
            if source is None
            else AutoConfig.from_pretrained(download_revision_or_keep_name(source))
        )
    except (OSError, ValueError) as error:
        if source is None:
            raise InputError(
                f"model.config.model_type: transformers knows no {model_type!r}"
            ) from None
        raise InputError(
            f"model.pretrained: got {source}: {hub_error_reason_and_remedy(error, source)}"
        ) from None
    if model_type not in (None, config.model_type):
        raise InputError(
            f"model.config.model_type: got {model_type}, and model.pretrained is of type "
            f"{config.model_type}"
        )
    _refuse_unknown_config_fields(fields, config)
    if data.class_names and fields.setdefault("num_labels", len(data.class_names)) != len(
        data.class_names
    ):
        problem = f"got {fields['num_labels']}, and the labels have {len(data.class_names)} names"
        raise InputError(f"model.config.num_labels: {problem}")
    recipe_labels = class_number_by_label_in_recipe(recipe)
    if data.label_names and recipe_labels and set(data.label_names) != recipe_labels.keys():
        problem = (
            f"got {', '.join(recipe_labels)}, and the labels are {', '.join(data.label_names)}"
        )
        raise InputError(
            f"model.config.{'label2id' if 'label2id' in fields else 'id2label'}: {problem}"
        )
    fields |= dict(recipe.model.traits.config_fields)
    fields = {**_config_fields_from_data(recipe, data, config), **fields}
    try:
        if source is None:
            config = AutoConfig.for_model(model_type, **fields)
        else:
            config.update(fields)
    # A wrong value may raise any exception in transformers.
    except Exception as error:
        raise InputError(f"model.config: {' '.join(str(error).split())}") from None
    refuse_data_exceeding_model_sizes(recipe, data, config)
    return config


def _refuse_unknown_config_fields(fields: dict[str, object], config: PreTrainedConfig) -> None:
    # transformers accepts any name without a warning.
    known_names = {
        *config.to_dict(),
        *getattr(config, "attribute_map", {}),
        "num_labels",
        "tie_word_embeddings",
        "head_dim",
        *(("decoder_start_token_id",) if config.is_encoder_decoder else ()),
    }
    for name in fields:
        if name not in known_names and not hasattr(config, name):
            guess = closest_or_translated_name_or_none(name, known_names)
            raise InputError(
                f"model.config.{name}: unknown key" + (f"; did you mean {guess}?" if guess else "")
            )


def _config_fields_from_data(
    recipe: Recipe, data: LoadedData, config: PreTrainedConfig
) -> dict[str, object]:
    """Return the config's fields that follow from tokenizer and labels, if the recipe has none."""
    config_fields: dict[str, object] = {}
    is_new_model = recipe.model.pretrained is None
    if data.tokenizer is not None:
        for name in _SPECIAL_TOKEN_FIELDS:
            token_id = getattr(data.tokenizer, name, None)
            is_set_by_recipe = (
                is_new_model or name.removesuffix("_id") in recipe.data.special_tokens
            )
            if (
                token_id is not None
                and hasattr(config, name)
                and (is_set_by_recipe or getattr(config, name) is None)
            ):
                config_fields[name] = token_id
            # The default is of another tokenizer.
            elif is_new_model and (getattr(config, name, None) or 0) >= len(data.tokenizer):
                config_fields[name] = None
    if data.tokenizer is not None and is_new_model:
        config_fields["vocab_size"] = rounded_vocabulary_size(len(data.tokenizer))
        # T5's config has none, and Marian's is its padding token: published models begin with it.
        start_id = getattr(config, "decoder_start_token_id", None)
        if config.is_encoder_decoder and (
            start_id is None
            or (start_id >= len(data.tokenizer) and start_id == config.pad_token_id)
        ):
            config_fields["decoder_start_token_id"] = data.tokenizer.pad_token_id
        if getattr(config, "forced_eos_token_id", None) is not None:
            config_fields["forced_eos_token_id"] = data.tokenizer.eos_token_id
    if data.class_names:
        config_fields["id2label"] = dict(enumerate(data.class_names))
        config_fields["label2id"] = {
            class_name: class_number for class_number, class_name in enumerate(data.class_names)
        }
    elif data.classes:
        config_fields["num_labels"] = max(config.num_labels or 0, data.classes)
    return config_fields


def refuse_data_exceeding_model_sizes(
    recipe: Recipe, data: LoadedData, config: PreTrainedConfig
) -> None:
    """Refuse data whose token ids, positions or labels exceed the model's sizes."""
    # They would fail in the middle of a pass.
    vocabulary_size = getattr(config.get_text_config(), "vocab_size", None)
    if (
        data.tokenizer is not None
        and vocabulary_size is not None
        and vocabulary_size < len(data.tokenizer)
    ):
        remedy = (
            ""
            if recipe.model.pretrained is None
            else f"; {rounded_vocabulary_size(len(data.tokenizer))} adds new ones"
        )
        problem = f"got {vocabulary_size}, and the tokenizer has {len(data.tokenizer)} words"
        raise InputError(f"model.config.vocab_size: {problem}{remedy}")
    start = getattr(config, "decoder_start_token_id", None)
    if isinstance(start, int) and vocabulary_size is not None and start >= vocabulary_size:
        raise InputError(
            f"model.config.decoder_start_token_id: got {start}, and the vocabulary has {vocabulary_size} "
            "tokens (model.config.vocab_size); give the id of the token that begins a text"
        )
    max_positions = getattr(config, "max_position_embeddings", None)
    lengths = {"sequence_length": recipe.data.sequence_length}
    if recipe.model.traits.label == "sequence":
        lengths["target_length"] = recipe.data.target_length
    for name, length in lengths.items():
        if max_positions is not None and length is not None and length > max_positions:
            raise InputError(
                f"data.{name}: got {length}, and the model has "
                f"max_position_embeddings: {max_positions}"
            )
    # transformers' classifiers of such models read a text where its end mark is.
    if (
        data.tokenizer is not None
        and config.is_encoder_decoder
        and recipe.model.traits.auto_class == "AutoModelForSequenceClassification"
        and (
            config.eos_token_id != data.tokenizer.eos_token_id
            or config.eos_token_id not in data.tokenizer("a")["input_ids"]
        )
    ):
        raise InputError(
            f"data.tokenizer: does not end texts with an end mark, where {config.model_type} reads a "
            'text\'s class; name one that it writes, as data.special_tokens: {eos_token: "[SEP]"}'
        )
    if (config.num_labels or 0) < data.classes:
        label, label_location = max(
            (getattr(samples, "largest", (-1, "")) for samples in data.parts_read), default=(-1, "")
        )
        problem = (
            f"{label_location} has label {label}"
            if label_location
            else f"the data has {data.classes} classes"
        )
        raise InputError(f"model.config.num_labels: got {config.num_labels}, and {problem}")
