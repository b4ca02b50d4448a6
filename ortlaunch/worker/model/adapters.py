"""Low-rank adapters beside frozen weights, by peft (`model.lora`): added, and merged for an export."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any, cast

import torch
from torch import nn

from ortlaunch.base.errors import InputError, MissingDependency
from ortlaunch.base.units import first_names_and_count_of_rest
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.model import Lora
from ortlaunch.tables.model_tasks import MODEL_TASKS
from ortlaunch.worker.data import IGNORED, LoadedData, collate
from ortlaunch.worker.data.tokenizer import (
    download_revision_or_keep_name,
    tokens_without_pretrained_weights,
)
from ortlaunch.worker.model.packing import split_packed_documents_into_rows_or_copy_unpacked
from ortlaunch.worker.model.quantized_weights import (
    quantized_layers,
    replace_quantized_layers_by_whole_ones,
)
from ortlaunch.worker.patching import replace_attribute_temporarily
from ortlaunch.worker.weight_memory import WeightMemory

# Samples whose layer inputs give the first values of adapters, and those of one pass.
_EVA_SAMPLES = 32
_EVA_BATCH = 8


def refuse_frozen_embeddings_of_new_tokens(
    recipe: Recipe, lora: Lora, data: LoadedData, model: Any
) -> None:
    """Refuse adapters that leave the embeddings of new tokens as they began.

    Raises:
        InputError: there are new tokens, and a layer of their embeddings stays frozen.
    """
    from transformers import AutoConfig

    source_config = AutoConfig.from_pretrained(
        download_revision_or_keep_name(str(recipe.model.pretrained))
    ).get_text_config()
    new_tokens = tokens_without_pretrained_weights(
        recipe.data, data.tokenizer, source_config.vocab_size
    )
    # The same weight has one name.
    layers = {
        id(layer.weight): name.rpartition(".")[2]
        for name, layer in [*model.named_modules()][::-1]
        if layer in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    frozen = {*layers.values()} - {*lora.modules_to_save, *lora.target_modules}
    if new_tokens and frozen:
        trained = ", ".join(sorted({*lora.modules_to_save, *layers.values()}))
        raise InputError(
            f"model.lora: {', '.join(new_tokens[:4])} of data.tokenizer are new to model.pretrained, and "
            f"{', '.join(sorted(frozen))} would stay frozen, so that the model never learns them; "
            f"set model.lora.modules_to_save: [{trained}]"
        )


def _require_lora_target_modules_exist(model: nn.Module, lora: Lora) -> None:
    """Refuse names of target modules that no layer has; peft would leave some of them out in silence.

    Raises:
        InputError: with the names of layers that have a weight matrix.
    """
    layers = [name for name, _ in model.named_modules()]
    missing = [
        target
        for target in lora.target_modules
        if target != "all-linear" and not any(f".{name}".endswith(f".{target}") for name in layers)
    ]
    # Weights of target_parameters may be all; the default of target_modules is then of no matter.
    if missing and not (lora.target_parameters or lora.target_pattern):
        names = {
            name.rpartition(".")[2]
            for name, layer in model.named_modules()
            if getattr(getattr(layer, "weight", None), "ndim", 0) == 2
        }
        raise InputError(
            f"model.lora.target_modules: the model has no layer {', '.join(missing)}; its layers "
            f"with a weight matrix are {', '.join(sorted(names))}"
        )


def add_lora_adapters(model: nn.Module, lora: Lora, task: str) -> nn.Module:
    """Return the model with adapters, beside which only `modules_to_save` and a new head train.

    Raises:
        InputError: peft has no adapter for a target.
        MissingDependency: peft is not installed.
    """
    try:
        import peft
    except ImportError:
        raise MissingDependency('model.lora needs peft: pip install "ortlaunch[lora]"') from None
    # peft 0.21 reads an attribute that transformers 5.23 renamed: the user cannot change that.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
    # Our own error comes after it.
    warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
    # Empty adapters would need their values on ranks that do not compute them.
    warnings.filterwarnings("ignore", message="lora with eva initialization used with low_cpu")
    traits = MODEL_TASKS[task]
    if lora.pretrained:
        return _load_published_adapters(model, lora.pretrained, traits.has_new_head)
    _require_lora_target_modules_exist(model, lora)
    saved_modules = [*filter(None, [traits.new_head]), *lora.modules_to_save]
    # peft's names of new heads. It saves all layers whose names end so, and fails for an adapter there.
    excluded_names = [
        *saved_modules,
        *(("classifier", "score", "qa_outputs") if traits.peft else ()),
    ]
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear"
        if "all-linear" in lora.target_modules
        else lora.target_pattern or list(lora.target_modules),
        target_parameters=list(lora.target_parameters) or None,
        task_type=traits.peft,
        modules_to_save=saved_modules or None,
        exclude_modules=f".*({'|'.join(map(re.escape, excluded_names))})"
        if excluded_names
        else None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        init_lora_weights=True if lora.init == "default" else lora.init,
        # All layers keep their rank, so that the shapes do not depend on the data.
        eva_config=peft.EvaConfig(rho=1.0) if lora.init == "eva" else None,
    )
    thread_count = torch.get_num_threads()
    # Singular values differ in their last bits with the threads, and a run that continues with other
    # ranks must find the same base.
    torch.set_num_threads(thread_count if lora.init == "default" else 1)
    try:
        adapted: nn.Module = peft.get_peft_model(model, config)
    # Each of them for fields that do not fit the model, or each other.
    except (ValueError, TypeError, NotImplementedError) as error:
        raise InputError(f"model.lora: {error}") from None
    finally:
        torch.set_num_threads(thread_count)
    _require_patterns_match(adapted, lora)
    return adapted


def set_adapters_from_layer_inputs(adapted: Any, samples: Any, rank: int) -> None:
    """Give adapters their first values by peft's EVA, from the first samples.

    Raises:
        InputError: the samples have fewer learned tokens than adapters have ranks.
    """
    from peft import initialize_lora_eva_weights

    batches = []
    for begin in range(0, min(len(samples), _EVA_SAMPLES), _EVA_BATCH):
        indices = range(begin, min(begin + _EVA_BATCH, len(samples)))
        batch = collate([samples.sample(index, 0) for index in indices])
        batches.append(split_packed_documents_into_rows_or_copy_unpacked(batch))
        learned_tokens = int((batch["labels"] != IGNORED).sum())
        # peft would wait for more of them for ever.
        if learned_tokens < rank:
            raise InputError(
                f"model.lora.init: got eva, and {_EVA_BATCH} of the first samples have "
                f"{learned_tokens} learned tokens, fewer than model.lora.r: {rank}"
            )
    initialize_lora_eva_weights(
        adapted, batches, gather_distributed_inputs=False, show_progress_bar=False
    )


def _require_patterns_match(adapted: nn.Module, lora: Lora) -> None:
    """Refuse a pattern that matches no layer with an adapter; peft would ignore it.

    Raises:
        InputError: there is one.
    """
    names = [name for name, layer in adapted.named_modules() if hasattr(layer, "lora_A")]
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, field):
            # As peft compares.
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                raise InputError(
                    f"model.lora.{field}: {pattern} matches no layer with an adapter; they are "
                    f"{first_names_and_count_of_rest(names, 4)}"
                )


def lora_with_settings_of_published_adapters(lora: Lora) -> Lora:
    """Return `lora` with the layers of published adapters, if it names some.

    Raises:
        InputError: they cannot be read.
    """
    if lora.pretrained is None:
        return lora
    import peft

    try:
        config: Any = peft.PeftConfig.from_pretrained(
            download_revision_or_keep_name(lora.pretrained)
        )
    except (OSError, ValueError) as error:
        raise InputError(f"model.lora.pretrained: got {lora.pretrained}: {error}") from None
    targets = config.target_modules or ()
    return lora.model_copy(
        update={
            "modules_to_save": tuple(config.modules_to_save or ()),
            "target_modules": (targets,) if isinstance(targets, str) else tuple(targets),
        }
    )


def _load_published_adapters(model: nn.Module, source: str, has_new_head: bool) -> nn.Module:
    """Return the model with the adapters of a folder or the hub, to be trained further.

    Raises:
        InputError: they cannot be read, or are of another model or task.
    """
    import peft

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            adapted: Any = peft.PeftModel.from_pretrained(
                model,
                download_revision_or_keep_name(source),
                is_trainable=True,
                torch_device="cpu",
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"model.lora.pretrained: got {source}: {reason}") from None
    problem = next(
        (str(item.message) for item in caught if "adapter keys" in str(item.message)), ""
    )
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    if has_new_head and all(".lora_" in name for name in trained):
        problem = "they have no head for the task, which would stay at random"
    if problem or not trained:
        raise InputError(f"model.lora.pretrained: got {source}: {problem or 'nothing is trained'}")
    return cast("nn.Module", adapted)


def merge_adapters(adapted: Any, weight_memory: WeightMemory) -> Any:
    """Return the model with the adapters merged into its weights; `adapted` is used up.

    Quantized weights become whole ones first: peft would round the sum to the quantized form again.
    Each new weight goes to `weight_memory` before the next one is made.

    Raises:
        ValueError: a merged weight has inf or nan.
    """
    if not any(quantized_layers(adapted)):
        return _merge_and_keep_weights(adapted, weight_memory)
    import peft

    trained = {name: p.data for name, p in adapted.named_parameters() if p.requires_grad}
    config = copy.copy(adapted.peft_config["default"])
    # The values follow.
    config.init_lora_weights = True
    with weight_memory.keep_registered_parameters():
        base = replace_quantized_layers_by_whole_ones(adapted.unload())
    whole = peft.get_peft_model(base, config)
    # One by one: FSDP2's layers have neither `load_state_dict` nor `to` any more.
    for name, parameter in whole.named_parameters():
        parameter.data = trained.get(name, parameter.data).float()
    merged = _merge_and_keep_weights(whole, weight_memory)
    dtype = next(iter(trained.values())).dtype
    weight_memory.cast_and_keep_parameters(merged, dtype)
    return merged


def _merge_and_keep_weights(adapted: Any, weight_memory: WeightMemory) -> Any:
    tuner = adapted.base_model
    replace_layer = tuner._replace_module

    def replace_layer_and_keep_weights(
        parent: nn.Module, name: str, merged_layer: nn.Module, adapted_layer: nn.Module
    ) -> None:
        weight_memory.cast_and_keep_parameters(merged_layer, None)
        replace_layer(parent, name, merged_layer, adapted_layer)

    with replace_attribute_temporarily(tuner, "_replace_module", replace_layer_and_keep_weights):
        return adapted.merge_and_unload(safe_merge=True)
