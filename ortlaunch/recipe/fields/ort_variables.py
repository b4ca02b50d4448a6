"""The environment variables that ORTModule 1.19.2 reads, their fields of `engine`, and conflicts.

The recipe is the only source of settings. A variable that has a field must agree with it. A
variable without a field of its own is in `engine.ort_variables`, or is refused with a reason. Pure;
both sides of a run import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ortlaunch.base.errors import PlanError
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.recipe.text.closest_names import closest_or_translated_name_or_none

PREFIX = "ORTMODULE_"


class OrtVariable(NamedTuple):
    """A variable's field, and the function from the variable's text to a value of that field.

    `means` raises ValueError or KeyError for a text without a meaning.
    """

    field: str
    parse_text: Callable[[str], Any]


def _flag(flag_text: str) -> bool:
    return {"0": False, "1": True}[flag_text]


def _refuse_text(text: str) -> Any:
    """Refuse any text: the variable names a file or a folder, the field has its content."""
    raise ValueError(text)


# Variable -> field of `engine`. A text without a meaning here counts as a contradiction.
ORT_VARIABLES = {
    "ORTMODULE_ONNX_OPSET_VERSION": OrtVariable("opset", int),
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": OrtVariable("compute_optimizer", _flag),
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER": OrtVariable("sparsity_optimizer", _flag),
    "ORTMODULE_MEMORY_OPT_LEVEL": OrtVariable("memory_optimization", int),
    "ORTMODULE_MEMORY_OPT_CONFIG": OrtVariable("memory_optimization_config", _refuse_text),
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": OrtVariable(
        "memory_efficient_grad_management", _flag
    ),
    "ORTMODULE_PRINT_INPUT_DENSITY": OrtVariable("print_input_density", _flag),
    # Only this policy has an equivalent: allow_fallback false.
    "ORTMODULE_FALLBACK_POLICY": OrtVariable(
        "allow_fallback", {"FALLBACK_DISABLE": False}.__getitem__
    ),
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": OrtVariable("deepcopy_before_export", _flag),
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": OrtVariable(
        "custom_autograd", {"0": "inline", "1": "python"}.__getitem__
    ),
    "ORTMODULE_LOG_LEVEL": OrtVariable("log_level", str.lower),
    "ORTMODULE_SAVE_ONNX_PATH": OrtVariable("save_onnx", str),
}
# Variable of `engine.ort_variables` -> the pattern of its text, and that in words. All act on GPUs alone.
FREE_VARIABLES = {
    "ORTMODULE_CONV_ALGO_SEARCH": ("HEURISTIC|EXHAUSTIVE", "HEURISTIC or EXHAUSTIVE"),
    "ORTMODULE_MAX_TUNING_DURATION_MS": ("[0-9]+", "a whole number"),
    **dict.fromkeys(
        ("ORTMODULE_TRITON_CONFIG_FILE", "ORTMODULE_TUNING_RESULTS_PATH"), (".+", "a path")
    ),
    **dict.fromkeys(
        (
            "ORTMODULE_ENABLE_TUNING",
            "ORTMODULE_PRINT_MEMORY_STATS",
            "ORTMODULE_TRITON_DEBUG",
            "ORTMODULE_USE_EFFICIENT_ATTENTION",
            "ORTMODULE_USE_FLASH_ATTENTION",
            "ORTMODULE_USE_TRITON",
        ),
        ("[01]", "0 or 1"),
    ),
}
# Variables that no recipe can set, with the reason; they are refused.
LEFT_OUT = {
    "ORTMODULE_ATEN_SDPA_FALLBACK": "supports sdpa only as of torch 2.4 and older; see engine.torch_operators",
    "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER": "has no effect in 1.19.2; engine.sparsity_optimizer also handles labels",
    "ORTMODULE_ENABLE_SPARSE_OPTIMIZER": "is documented, but 1.19.2 never reads it; see engine.sparsity_optimizer",
    "ORTMODULE_FALLBACK_RETRY": "would repeat a failed export in every step; see engine.allow_fallback",
    "ORTMODULE_SKIPCHECK_POLICY": "is set by ortlaunch's repairs: models with buffers fail under SKIP_CHECK_DISABLED",
    "ORTMODULE_CACHE_DIR": "makes evaluation run the training graph; every start exports its own",
    "ORTMODULE_ENABLE_ZERO_STAGE3": "is set by zero.stage",
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": "would keep gradient checkpointing out of the graph; see "
    "engine.memory_optimization",
    "ORTMODULE_JSON_CONFIG_PATH": "is read only by a function that ortlaunch does not call; "
    "set the fields under engine instead",
    "ORTMODULE_EXTERNAL_TORCH_CPP_EXTENSION_DIR": "is documented, but 1.19.2 never reads it",
    "ORTMODULE_EXTERNAL_TORCH_CUDA_EXTENSION_DIR": "is documented, but 1.19.2 never reads it",
}


def variables_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ORTModule's variables of an environment, sorted by name."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(PREFIX)}


def ort_variable_and_contradiction_pairs(
    engine: Engine, environ: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield (variable, problem) for each variable that contradicts the recipe or has no effect."""
    for name, variable_text in variables_in(environ).items():
        if message := _contradiction_message_or_none(engine, name, variable_text):
            yield name, message


def free_variable_and_problem_pairs(engine: Engine) -> Iterator[tuple[str, str]]:
    """Yield (variable, problem) for each wrong name or value in `engine.ort_variables`."""
    for name, value in engine.ort_variables.items():
        if name in FREE_VARIABLES:
            pattern, valid_text = FREE_VARIABLES[name]
            if not re.fullmatch(pattern, str(value)):
                yield name, f"got {value}; it must be {valid_text}"
        elif name in ORT_VARIABLES:
            yield name, f"has a field: set engine.{ORT_VARIABLES[name].field} instead"
        else:
            yield name, _unknown_variable_message(name)


def ort_variable_lines_or_refuse_contradiction(
    engine: Engine, environ: Mapping[str, str]
) -> list[str]:
    """Return a line on ORTModule's variables in the user's environment; none without such.

    Raises:
        PlanError: one contradicts the recipe.
    """
    contradiction_texts = [
        f"{variable_name}={environ[variable_name]} in your environment {message}"
        # The variables have no effect with other engines.
        for variable_name, message in (
            ort_variable_and_contradiction_pairs(engine, environ) if engine.name == "ort" else ()
        )
    ]
    if contradiction_texts:
        raise PlanError("\n".join(contradiction_texts))
    effect_text = (
        "from the recipe" if engine.name == "ort" else f"no effect with engine {engine.name}"
    )
    variables_text = ", ".join(
        f"{variable_name}={value}" for variable_name, value in variables_in(environ).items()
    )
    return [f"from your environment: {variables_text} ({effect_text})"] if variables_text else []


def _contradiction_message_or_none(
    engine: Engine, variable_name: str, variable_text: str
) -> str | None:
    if variable_name in FREE_VARIABLES:
        value = engine.ort_variables.get(variable_name)
        return (
            None
            if str(value) == variable_text
            else f"contradicts engine.ort_variables ({variable_name}: {_yaml(value)}); set it there instead"
        )
    variable = ORT_VARIABLES.get(variable_name)
    if variable is None:
        return _unknown_variable_message(variable_name)
    value = getattr(engine, variable.field)
    try:
        is_equal = variable.parse_text(variable_text) == value
    # KeyError: `_flag` and the tables look the text up.
    except (ValueError, KeyError):
        is_equal = False
    if is_equal:
        return None
    return f"contradicts engine.{variable.field} ({_yaml(value)}); set the field instead"


def _yaml(value: Any) -> str:
    """Return a field's value as a recipe writes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


def _unknown_variable_message(variable_name: str) -> str:
    if variable_name in LEFT_OUT:
        return f"{LEFT_OUT[variable_name]}; remove it"
    fields = {
        **{name: variable.field for name, variable in ORT_VARIABLES.items()},
        **dict.fromkeys(FREE_VARIABLES, "ort_variables"),
    }
    names_by_core = {_distinctive_part(variable): variable for variable in fields}
    closest_variable = names_by_core.get(
        closest_or_translated_name_or_none(_distinctive_part(variable_name), names_by_core) or ""
    )
    advice = (
        f"; did you mean {closest_variable}? That is engine.{fields[closest_variable]}"
        if closest_variable
        else "; remove it"
    )
    return f"is no variable of ORTModule 1.19.2{advice}"


def _distinctive_part(variable_name: str) -> str:
    """Return the distinctive part of a variable's name, for comparison of similar names."""
    # Most names share ENABLE_ or USE_, which would make them similar to each other.
    return re.sub(rf"^{PREFIX}((ENABLE|USE)_)?", "", variable_name)
