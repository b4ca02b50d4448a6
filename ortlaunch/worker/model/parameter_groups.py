"""Parameter groups: the rate, the weight decay and the optimizer of each parameter."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from ortlaunch.base.errors import InputError
from ortlaunch.base.json_types import Json
from ortlaunch.recipe.fields.optimizer import Optimizer, ParameterGroup
from ortlaunch.run_folder.engine_report import OptimizerGroup
from ortlaunch.worker.data.user_data import import_user_function

# Names of settings in torch's groups, where they differ from the recipe's.
_TORCH_NAMES = {"betas": "betas", "epsilon": "eps", "momentum": "momentum"}
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each of its own parameter groups, as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Share the groups and the states of the parts, which have no parameter in common."""
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        # The parts' own mappings: a change of a rate or of a state must reach them.
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # no overloads
        """Step each optimizer once."""
        loss = closure() if closure else None
        for part in self.parts:
            part.step()
        return loss


def named_parameters_without_prefix(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters by their names in the user's model, which LossModule contains."""
    return [(name.removeprefix("model."), p) for name, p in module.named_parameters()]


def freeze_parameters_matching_patterns(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters for which the last pattern that matches does not begin with `!`.

    Raises:
        InputError: a pattern matches no parameter.
    """
    named = dict(model.named_parameters())
    _require_each_pattern_matches(
        "model.freeze", [pattern.removeprefix("!") for pattern in patterns], named, "parameter"
    )
    for name, parameter in named.items():
        matching = [pattern for pattern in patterns if _matches(name, [pattern.removeprefix("!")])]
        if matching and not matching[-1].startswith("!"):
            parameter.requires_grad_(False)


def build_parameter_groups_and_notes(
    optimizer_settings: Optimizer, module: nn.Module
) -> tuple[list[Json], tuple[str, ...]]:
    """Return the groups of trained parameters as torch's optimizers take them, and notes.

    A group also has the name of its optimizer in the recipe, as `optimizer`, and its rate as a
    factor of the recipe's, as `rate_factor`, unless it is 1.

    Raises:
        InputError: a pattern of `groups` matches no trained parameter, or the values of
            `attributes` are not valid.
    """
    named = [(name, p) for name, p in named_parameters_without_prefix(module) if p.requires_grad]
    names = [name for name, _ in named]
    patterns = [pattern for group in optimizer_settings.groups for pattern in group.match]
    _require_each_pattern_matches("optimizer.groups", patterns, names, "trained parameter")
    depths = layer_count_above_by_parameter_name(
        [name for name, _ in named_parameters_without_prefix(module)]
    )
    undecayed_names = {
        name for name in names for word in optimizer_settings.no_decay if word in name
    }
    group_of_parameter = _parameter_group_finder(optimizer_settings)
    group_by_settings: dict[str, Json] = {}
    for name, parameter in named:
        group = group_of_parameter(name, parameter)
        settings: Json = {
            "optimizer": group.name or _default_optimizer_name(optimizer_settings, name, parameter)
        }
        factor = (
            optimizer_settings.layer_decay ** depths[name]
            if group.learning_rate is None
            else group.learning_rate / optimizer_settings.learning_rate
        )
        if factor != 1:
            settings |= {"lr": optimizer_settings.learning_rate * factor, "rate_factor": factor}
        for field, key in _TORCH_NAMES.items():
            if getattr(group, field) is not None:
                settings[key] = getattr(group, field)
        usual_decay = 0.0 if name in undecayed_names else optimizer_settings.weight_decay
        settings["weight_decay"] = usual_decay if group.weight_decay is None else group.weight_decay
        group_by_settings.setdefault(str(settings), {"params": [], **settings})["params"].append(
            parameter
        )
    # Parameters with weight decay come first, in the order of the model.
    return sorted(
        group_by_settings.values(), key=lambda group: not group["weight_decay"]
    ), _unmatched_no_decay_notes(optimizer_settings, names)


def parameter_group_records(
    parameter_groups: Sequence[Json], module: nn.Module, learning_rate: float
) -> list[OptimizerGroup]:
    """Return the record of the groups, the frozen parameters as the last one.

    Args:
        parameter_groups: those of `parameter_groups`.
        module: the model with the parameters.
        learning_rate: the recipe's learning rate.
    """
    named = named_parameters_without_prefix(module)
    names = {id(parameter): name for name, parameter in named}
    records = [
        OptimizerGroup(
            group["optimizer"],
            learning_rate * group.get("rate_factor", 1.0),
            group["weight_decay"],
            sum(p.numel() for p in group["params"]),
            [names[id(p)] for p in group["params"]],
        )
        for group in parameter_groups
    ]
    if frozen := [(name, p.numel()) for name, p in named if not p.requires_grad]:
        sizes = sum(size for _, size in frozen)
        records.append(OptimizerGroup(None, 0.0, 0.0, sizes, [name for name, _ in frozen]))
    return records


def layer_count_above_by_parameter_name(parameter_names: Sequence[str]) -> dict[str, int]:
    """Return the number of layers above each parameter, in the stack that it belongs to.

    The number in a name's path is its layer. Parameters without one belong to the stack beside or
    below which they are. Before the stack's layers they are embeddings, with one more layer above
    than layer 0 has; after them they are the head, with none.
    """
    layers = {
        name: (name[: match.start()], int(match[1]))
        for name in parameter_names
        if (match := _LAYER.search(name))
    }
    counts: dict[str, int] = {}
    for stack, layer in layers.values():
        counts[stack] = max(counts.get(stack, 0), layer + 1)
    first_positions = {
        stack: parameter_names.index(next(n for n in layers if layers[n][0] == stack))
        for stack in counts
    }
    depths = {}
    for position, name in enumerate(parameter_names):
        if name in layers:
            stack, layer = layers[name]
            depths[name] = counts[stack] - layer
            continue
        # The stack of the nearest module that contains both.
        nearest_stack = max(
            counts, key=lambda stack: _leading_name_parts_in_common(stack, name), default=""
        )
        depths[name] = (
            counts[nearest_stack] + 1
            if nearest_stack in first_positions and position < first_positions[nearest_stack]
            else 0
        )
    return depths


def _leading_name_parts_in_common(stack: str, parameter_name: str) -> int:
    """Return the number of leading parts that two names share, without the stack's own name."""
    pairs = zip(stack.split(".")[:-1], parameter_name.split("."))
    return next(
        (
            part_index
            for part_index, (stack_part, name_part) in enumerate(pairs)
            if stack_part != name_part
        ),
        stack.count("."),
    )


def _default_optimizer_name(recipe: Optimizer, name: str, parameter: nn.Parameter) -> str:
    """Return the optimizer of a parameter without a group; muon is for matrices of layers."""
    if recipe.name != "muon" or (parameter.ndim == 2 and _LAYER.search(name)):
        return recipe.name
    return "adamw"


def _parameter_group_finder(
    optimizer_settings: Optimizer,
) -> Callable[[str, nn.Parameter], ParameterGroup]:
    attributes = optimizer_settings.attributes and import_user_function(
        "optimizer.attributes", optimizer_settings.attributes
    )
    default_group = ParameterGroup(match=("*",))

    def find_group(name: str, parameter: nn.Parameter) -> ParameterGroup:
        returned_fields = attributes(name, parameter) if callable(attributes) else None
        if returned_fields is not None:
            return _parse_user_parameter_group(
                returned_fields, f"{optimizer_settings.attributes}({name!r}, ...)"
            )
        return next(
            (
                recipe_group
                for recipe_group in optimizer_settings.groups
                if _matches(name, recipe_group.match)
            ),
            default_group,
        )

    return find_group


def _parse_user_parameter_group(returned_fields: Any, call_text: str) -> ParameterGroup:
    if not isinstance(returned_fields, Mapping):
        raise InputError(
            f"optimizer.attributes: {call_text} returned {returned_fields!r}; it must return a mapping of the "
            "fields of optimizer.groups, or None"
        )
    try:
        return ParameterGroup(match=("*",), **returned_fields)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
        raise InputError(
            f"optimizer.attributes: {call_text} returned {returned_fields!r}: {problems}"
        ) from None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _require_each_pattern_matches(
    recipe_field: str, patterns: Iterable[str], known_names: Collection[str], name_type: str
) -> None:
    unmatched = [
        pattern
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in known_names)
    ]
    if unmatched:
        near = [*difflib.get_close_matches(unmatched[0], known_names, 3, 0.4), *known_names][:3]
        raise InputError(
            f"{recipe_field}: no {name_type} matches {', '.join(unmatched)}; the names are like {', '.join(near)}"
        )


def _unmatched_no_decay_notes(
    optimizer_settings: Optimizer, parameter_names: Sequence[str]
) -> tuple[str, ...]:
    """Return a note if words of `no_decay` are in no trained parameter's name."""
    unmatched = [
        word
        for word in optimizer_settings.no_decay
        if not any(word in name for name in parameter_names)
    ]
    # The default lists the norms of several model families, of which each model has only some:
    # only the user's own names make a note.
    is_user_setting = (
        optimizer_settings.no_decay != Optimizer.model_fields["no_decay"].default
        and optimizer_settings.weight_decay > 0
    )
    if not (unmatched and is_user_setting):
        return ()
    return (f"optimizer.no_decay: no parameter's name contains {', '.join(unmatched)}",)
