"""Convert keys of adapters and of quantized base weights that several tools have."""

from __future__ import annotations

from ortlaunch.importers.draft import Draft, recipe_value_tree_located_at_node
from ortlaunch.importers.rules import (
    Rule,
    Rules,
    drop,
    first_of,
    needless,
    put,
)
from ortlaunch.recipe.fields.field_lookup import names_accepted_by_field

OTHER_FORM = drop("the forms here are nf4 and int8, by bitsandbytes")
# Keys with published adapters to continue.
_PUBLISHED_KEYS = ("lora_model_dir", "adapter_name_or_path")
_WITHOUT_ADAPTER = drop("a quantized weight is not trained, and there is no adapter")
IN_QUANTIZE = needless("model.quantize has it")


def init_rule(init_name: object) -> Rule:
    """Return the rule of a key that asks for peft's first values of this name; True: the default."""
    if init_name is True:
        return needless("peft's default")
    is_known = init_name in names_accepted_by_field(("model", "lora", "init"))
    return (
        put("model.lora.init", init_name) if is_known else drop("model.lora.init has no such value")
    )


def quantized_base_rule(form: str, has_double_scales: bool = True) -> Rule:
    """Return the rule of a key that asks for quantized base weights."""
    double = {} if has_double_scales else {"double": False}
    return first_of(
        (
            lambda key: (
                key.recipe_value("model.lora.r")
                or any(map(key.draft.config_value, _PUBLISHED_KEYS))
            ),
            put("model.quantize", {"type": form, **double}),
        ),
        otherwise=_WITHOUT_ADAPTER,
    )


def published_adapters_rules(draft: Draft, key_name: str, prefixes: tuple[str, ...]) -> Rules:
    """Return the rules of a config that continues published adapters, which have their own fields.

    Args:
        draft: the config.
        key_name: the key with their folder.
        prefixes: how the names of keys begin that describe adapters.
    """
    if not draft.config_value(key_name):
        return {}
    in_adapters = needless(f"the adapters of {key_name} have it")
    names = [name for name in draft.config if name.startswith(prefixes) and name != key_name]
    return {**dict.fromkeys(names, in_adapters), key_name: put("model.lora.pretrained")}


def change_division_that_quantized_weights_lack(draft: Draft) -> None:
    """Leave out what divides or moves weights in a way that quantized ones do not have."""
    node = draft.recipe_tree.find_subtree(("model", "quantize"))
    if node is None:
        return
    is_int8 = draft.expected_recipe_value_or_none("model.quantize.type") == "int8"
    for key_path in (("parallel",) if is_int8 else ("parallel", "offload"),):
        if draft.recipe_tree.find_subtree(key_path) is not None:
            draft.recipe_tree = draft.recipe_tree.remove_key(key_path)
            reason = f"without {'.'.join(key_path)}, which {'int8' if is_int8 else 'nf4'} lacks"
            draft.add_remark("changed", "model.quantize", node, reason)
    if draft.expected_recipe_value_or_none("zero.stage") == 3:
        draft.recipe_tree = draft.recipe_tree.copy_with_subtree(
            ("zero", "stage"), recipe_value_tree_located_at_node(2, node)
        )
        draft.add_remark(
            "changed", "model.quantize", node, "zero.stage: 2; 3 divides no packed weights"
        )
