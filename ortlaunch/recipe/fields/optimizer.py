"""The recipe's section `optimizer`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ortlaunch.recipe.fields.section import (
    APPLIED,
    REFUSED,
    ChangeRule,
    Decay,
    NameIn,
    OneOrMore,
    Section,
    Text,
    Words,
    convert_list_to_tuple,
    effect_rule,
)
from ortlaunch.tables.optimizers import OPTIMIZERS, OptimizerTraits


def _rule_of_other_optimizer(old_name: Any, new_name: Any) -> ChangeRule:
    # The same state under another name: the checkpoint's can be loaded.
    states = [OPTIMIZERS[name].state for name in (old_name, new_name) if name in OPTIMIZERS]
    if len(states) == 2 and states[0] == states[1]:
        return effect_rule("the same values from other code")
    return ChangeRule(REFUSED, "optimizer", "its state is reset unless the checkpoint has it")


class ParameterGroup(Section):
    """Settings of some parameters, in place of the optimizer's."""

    match: OneOrMore
    """Patterns of parameter names, in which `*` matches any text, as `*.embed_tokens.weight`. Names
    are the model's own; engine.json lists them. A parameter belongs to the first group that matches
    it. A pattern that matches no trained parameter is an error."""
    name: Annotated[str, NameIn(OPTIMIZERS)] | None = None
    """Optimizer of these parameters: adamw, adamw_8bit, adafactor, muon or sgd; null:
    `optimizer.name`."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate; the schedule is that of all parameters. null: `optimizer.learning_rate`,
    and `optimizer.layer_decay`."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay, also of parameters that `no_decay` names; null: the optimizer's."""
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(convert_list_to_tuple)] | None = None
    """Decay of the first and second moment (adamw, adamw_8bit, fused_adam, lamb); null: the optimizer's."""
    epsilon: Annotated[float, Field(gt=0)] | None = None
    """Added to the denominator (adamw, adamw_8bit, fused_adam, lamb); null: the optimizer's."""
    momentum: Decay | None = None
    """Momentum (sgd, muon); null: the optimizer's."""


class Optimizer(Section, resume_rule=APPLIED):
    """How weights change."""

    name: Annotated[str, NameIn(OPTIMIZERS), _rule_of_other_optimizer] = "adamw"
    """`adamw`: torch's, fused where it has a kernel (engine.json names it), with decay before the
    step by rate x weight_decay. `fused_adam`: ONNX Runtime's on CUDA, which computes the same, and
    torch's fused AdamW elsewhere.
    `lamb`: the large-batch optimizer of BERT; not above ZeRO 0, where its trust ratio would be
    wrong. `muon`: torch's Muon for the matrices of layers (numbered parts of names, as `layers.3`),
    with the scale that lets AdamW's rates and decays fit, and AdamW for all other parameters; not
    above ZeRO 0. `adafactor`: transformers', which keeps one value for each row and column of a
    matrix, at the recipe's rate (relative_step and scale_parameter are False). `adamw_8bit`:
    bitsandbytes', which keeps moments in 8 bits, those of tensors below 4,096 values in 32 bits
    (extra `bitsandbytes`). Both not above ZeRO 0. `configured`, for task lightning: the
    optimizer and the scheduler that the module's configure_optimizers returns, whose rates are
    multiplied by learning_rate, usually 1."""
    # Required: no default would suit every model.
    learning_rate: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    # Strict mode accepts no list of YAML for a tuple; the validator converts it.
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(convert_list_to_tuple)] = (0.9, 0.999)
    """Decay of the first and second moment (adamw, adamw_8bit, fused_adam, lamb)."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator (adamw, adamw_8bit, fused_adam, lamb)."""
    momentum: Decay = 0.0
    """Momentum (sgd, muon); for muon 0 means 0.95."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay (adam, lamb); L2 for sgd."""
    no_decay: Words = ("bias", "norm", "LayerNorm")
    """Parameters whose name contains one of these words have no weight decay."""
    always_adapt: bool = False
    """lamb: scale every tensor by its own norm, as the paper's algorithm. False: only those with
    weight decay, as NVIDIA's FusedLAMB and Google's BERT."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate from each layer to the one below it, as in finetuning of BERT and
    ViT: the head has the whole rate, layer i of n the rate x layer_decay^(n - i), embeddings one
    factor less than layer 0. Layers are the numbered parts of parameter names, as `layers.3`."""
    groups: Annotated[tuple[ParameterGroup, ...], BeforeValidator(convert_list_to_tuple)] = ()
    """Settings of single parameters. The run prints the resulting groups, and engine.json lists
    each parameter with its group."""
    attributes: Text | None = None
    """`package.module:function` for groups that no pattern describes: it is called with the name and
    the parameter, and returns a mapping of the fields of a group, or None. It comes before
    `groups`."""

    @property
    def traits(self) -> OptimizerTraits:
        """The optimizer's row in the table of optimizers."""
        return OPTIMIZERS[self.name]

    @property
    def names(self) -> tuple[str, ...]:
        """The optimizers of all parameters, the first for those without a group of their own."""
        others = ("adamw",) if self.name == "muon" else ()
        return (self.name, *others, *(group.name for group in self.groups if group.name))
