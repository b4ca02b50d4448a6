"""Low-rank adapters beside frozen weights, by peft (`model.lora`): added, and merged for an export."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

from torch import nn

from ortlaunch.base.errors import InputError, MissingDependency
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.model import Lora
from ortlaunch.tables.model_tasks import MODEL_TASKS
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.data.tokenizer import (
    download_revision_or_keep_name,
    tokens_without_pretrained_weights,
)
from ortlaunch.worker.model.quantized_weights import (
    quantized_layers,
    replace_quantized_layers_by_whole_ones,
)


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
    if missing and not lora.target_parameters:
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
    _require_lora_target_modules_exist(model, lora)
    traits = MODEL_TASKS[task]
    saved_modules = [*filter(None, [traits.new_head]), *lora.modules_to_save]
    # peft's names of new heads. It saves all layers whose names end so, and fails for an adapter there.
    excluded_names = [*saved_modules, *(("classifier", "score") if traits.peft else ())]
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear"
        if "all-linear" in lora.target_modules
        else list(lora.target_modules),
        target_parameters=list(lora.target_parameters) or None,
        task_type=traits.peft,
        modules_to_save=saved_modules or None,
        exclude_modules=f".*({'|'.join(map(re.escape, excluded_names))})"
        if excluded_names
        else None,
    )
    # peft 0.21 reads an attribute that transformers 5.23 renamed: the user cannot change that.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
    try:
        adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise InputError(f"model.lora.target_modules: {error}") from None
    return adapted


def merge_adapters(adapted: Any) -> Any:
    """Return the model with the adapters merged into its weights; `adapted` is used up.

    Quantized weights become whole ones first: peft would round the sum to the quantized form again.

    Raises:
        ValueError: a merged weight has inf or nan.
    """
    if not any(quantized_layers(adapted)):
        return adapted.merge_and_unload(safe_merge=True)
    import peft

    trained = {name: p.data for name, p in adapted.named_parameters() if p.requires_grad}
    config = copy.copy(adapted.peft_config["default"])
    # The values follow.
    config.init_lora_weights = True
    whole = peft.get_peft_model(replace_quantized_layers_by_whole_ones(adapted.unload()), config)
    # One by one: FSDP2's layers have neither `load_state_dict` nor `to` any more.
    for name, parameter in whole.named_parameters():
        parameter.data = trained.get(name, parameter.data).float()
    merged = whole.merge_and_unload(safe_merge=True)
    dtype = next(iter(trained.values())).dtype
    for parameter in merged.parameters():
        parameter.data = parameter.data.to(dtype)
    return merged
