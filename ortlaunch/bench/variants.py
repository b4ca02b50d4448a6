"""Variants of a bench: the recipe once for each engine and each combination of varied keys.

A variant that the recipe's rules, this machine or the installed packages refuse stays in the list
with its reason.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ortlaunch import doctor
from ortlaunch.base.errors import InputError
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.resolve.prepare import require_launcher_can_start_hosts
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder.folder import RunDir

ENGINES = ("ort", "inductor", "eager")
# Fields of `engine` for the comparison of inductor with plain PyTorch.
_INDUCTOR_FIELDS = ("parity_steps", "parity_tolerance")
_VARY_FORM = (
    "write it as --vary key.path=first,second, for example --vary engine.memory_optimization=0,1"
)
_OPENING_BRACKETS = {")": "(", "]": "[", "}": "{"}


class Variant(NamedTuple):
    """A recipe with one engine and one value of each varied key; resolved, or refused."""

    engine: str
    # `key.path=value` of each varied key.
    varied_overrides: tuple[str, ...]
    resolved_run: ResolvedRun | None = None
    # The reason; "" if the variant is not refused.
    refusal: str = ""

    @property
    def name(self) -> str:
        """A short name for tables, such as `ort memory_optimization=1`."""
        override_parts = (text.partition("=") for text in self.varied_overrides)
        return " ".join(
            [
                self.engine,
                *(f"{key.rpartition('.')[2]}={value}" for key, _, value in override_parts),
            ]
        )

    @property
    def folder_name(self) -> str:
        """The name in a form for folders."""
        return re.sub(r"[^A-Za-z0-9._=-]+", "-", self.name).strip("-")

    def overrides_that_make_variant_without_fallback(
        self, engine_section: Engine
    ) -> tuple[str, ...]:
        """Return the overrides that make this variant of a recipe; `engine_section`: its section `engine`."""
        # No fallback: plain PyTorch must not be measured under ort's name.
        fallback_override = ("engine.allow_fallback=false",) if self.engine == "ort" else ()
        return (
            *overrides_that_replace_engine(self.engine, engine_section),
            *fallback_override,
            *self.varied_overrides,
        )


def overrides_that_replace_engine(
    engine_name: str, engine_section: Engine, keeps_parity_fields: bool = False
) -> tuple[str, ...]:
    """Return overrides that replace the recipe's engine, and drop fields of ort for other engines.

    Args:
        engine_name: the new engine.
        engine_section: the recipe's section `engine_name`.
        keeps_parity_fields: whether inductor keeps the fields of its comparison with plain PyTorch.
    """
    if engine_name == "ort":
        return ("engine.name=ort",)
    kept_fields = {
        "matmul_precision",
        "chunked_loss",
        *(_INDUCTOR_FIELDS if keeps_parity_fields and engine_name == "inductor" else ()),
    }
    kept_values = engine_section.model_dump(include=kept_fields, exclude_defaults=True)
    return (f"engine={json.dumps({'name': engine_name, **kept_values})}",)


def variants_of_engines_and_varied_keys(
    engine_names: Sequence[str], vary_options: Sequence[str]
) -> list[Variant]:
    """Return a variant for each combination of an engine and a value of every varied key.

    Variants that differ only in the engine are neighbours; otherwise the order is the given one.

    Raises:
        InputError: an engine is unknown or given twice, a `--vary` is not of the form
            `key=values`, or two variants are the same.
    """
    unknown_engines = [engine for engine in engine_names if engine not in ENGINES]
    if unknown_engines or len(set(engine_names)) < len(engine_names):
        raise InputError(
            f"--engines {','.join(engine_names)}: give one or more of {', '.join(ENGINES)}, each once"
        )
    overrides_by_option = [_overrides_of_vary_option_or_refuse(text) for text in vary_options]
    combined_variants = [
        Variant(engine, varied_overrides)
        for varied_overrides in itertools.product(*overrides_by_option)
        for engine in engine_names
    ]
    # Slugs are compared, because each variant needs its own folder.
    folder_names = [variant.folder_name for variant in combined_variants]
    repeated_name = next(
        (
            variant.name
            for variant in combined_variants
            if folder_names.count(variant.folder_name) > 1
        ),
        None,
    )
    if repeated_name:
        raise InputError(f"--vary: {repeated_name} is given twice")
    return combined_variants


def _overrides_of_vary_option_or_refuse(vary_option: str) -> list[str]:
    key, equals_sign, values = vary_option.partition("=")
    value_texts = list(split_at_commas_outside_brackets(values))
    if not equals_sign or not key.strip() or not all(value_texts):
        raise InputError(f"--vary {vary_option}: {_VARY_FORM}")
    # An override of the engine would contradict the variant's name.
    if key.strip() in ("engine", "engine.name"):
        raise InputError(f"--vary {vary_option}: use --engines to choose engines")
    return [f"{key.strip()}={value}" for value in value_texts]


def split_at_commas_outside_brackets(text: str) -> Iterator[str]:
    """Split `0,{a: [1, 2]},x` into `0`, `{a: [1, 2]}` and `x`.

    Commas inside brackets and quotes separate nothing.
    """
    value_text = ""
    open_brackets: list[str] = []
    for character in text:
        if open_brackets and open_brackets[-1] in "'\"":
            if character == open_brackets[-1]:
                open_brackets.pop()
        elif character in "'\"([{":
            open_brackets.append(character)
        elif open_brackets and open_brackets[-1] == _OPENING_BRACKETS.get(character):
            open_brackets.pop()
        elif character == "," and not open_brackets:
            yield value_text.strip()
            value_text = ""
            continue
        value_text += character
    yield value_text.strip()


def resolve_variant_or_record_refusal(variant: Variant, base_run: ResolvedRun) -> Variant:
    """Return the variant with its plan, or with the reason why it cannot run here."""
    try:
        overrides = variant.overrides_that_make_variant_without_fallback(
            base_run.recipe_file.recipe.engine
        )
        resolved_run = base_run.apply_overrides(*overrides).replace_task("bench")
        doctor.require_packages_and_extensions_installed(
            resolved_run.recipe_file.recipe, resolved_run.world
        )
        require_launcher_can_start_hosts(resolved_run.world, RunDir(variant.folder_name))
    except InputError as error:
        return variant._replace(refusal=str(error))
    return variant._replace(resolved_run=resolved_run)
