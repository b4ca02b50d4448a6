"""Shared parts of the recipe's sections: their base model, and types of several fields."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticKnownError, core_schema

# Branches of "a word, a mapping or a list" and of "a number or auto", as they appear in pydantic's
# error locations; check.py removes them there. Angle brackets cannot be part of a field's name.
WORD = "<word>"
MAPPING = "<mapping>"
LIST = "<list>"
PART = "<part>"
NUMBER = "<number>"


def convert_list_to_tuple(yaml_value: object) -> object:
    """Return a list of YAML as a tuple, and any other value as it is."""
    return tuple(yaml_value) if isinstance(yaml_value, list) else yaml_value


def _convert_to_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else convert_list_to_tuple(value)


def _branch_of_number_or_auto(value: object) -> str:
    return WORD if value == "auto" else NUMBER


# A larger number is a typing error, and a loop over that many items would never end.
MAX_COUNT = 10**9

Text = Annotated[str, Field(min_length=1)]
# Tuples, because sections are frozen; strict mode would refuse YAML's lists without the validator.
Words = Annotated[tuple[Text, ...], BeforeValidator(convert_list_to_tuple)]
OneOrMore = Annotated[
    tuple[Text, ...],
    BeforeValidator(_convert_to_tuple),
    Field(min_length=1),
    # Without it the schema would show the tuple alone, and editors would mark a single text as
    # wrong.
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ]
        }
    ),
]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveOrAuto = Annotated[
    Annotated[Positive, Tag(NUMBER)] | Annotated[Literal["auto"], Tag(WORD)],
    Discriminator(_branch_of_number_or_auto),
]
CountOrAuto = Annotated[
    Annotated[int, Field(ge=0, le=MAX_COUNT), Tag(NUMBER)] | Annotated[Literal["auto"], Tag(WORD)],
    Discriminator(_branch_of_number_or_auto),
]
SecondsOrAuto = Annotated[
    Annotated[float, Field(ge=1, le=MAX_COUNT), Tag(NUMBER)]
    | Annotated[Literal["auto"], Tag(WORD)],
    Discriminator(_branch_of_number_or_auto),
]


RowsOrWord = Annotated[
    Annotated[Positive, Tag(NUMBER)] | Annotated[Literal["auto", "off"], Tag(WORD)],
    Discriminator(lambda value: WORD if value in ("auto", "off") else NUMBER),
    # YAML 1.1 reads a plain `off` as false.
    BeforeValidator(lambda value: "off" if value is False else value),
]


OperatorsOrWord = Annotated[
    Annotated[Words, Tag(NUMBER)] | Annotated[Literal["auto", "off"], Tag(WORD)],
    Discriminator(lambda value: NUMBER if isinstance(value, (list, tuple)) else WORD),
    # As in RowsOrWord.
    BeforeValidator(lambda value: "off" if value is False else value),
]


class NameIn:
    """A name of a table, for `Annotated[str, NameIn(table)]`; errors are those of a Literal.

    The schema is a Literal's, too.
    """

    def __init__(self, table: Collection[str], *others: str) -> None:
        self._table = table
        self._others = others

    @property
    def names(self) -> tuple[str, ...]:
        """The accepted names, read from the table at each use."""
        return (*self._others, *self._table)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._require_name_of_table)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.names), "type": "string"}

    def _require_name_of_table(self, value: object) -> str:
        if isinstance(value, str) and value in self.names:
            return value
        *other_names, last_name = map(repr, self.names)
        # The type of a Literal's error: messages.py then handles both alike.
        raise PydanticKnownError(
            "literal_error", {"expected": " or ".join([", ".join(other_names), last_name])}
        )


EFFECT = "applied"
REFUSED = "refused"


class ChangeRule(NamedTuple):
    """The verdict on a change of a field."""

    verdict: str
    """`applied`, or `refused`: it is applied only with `allow`."""
    allow_name: str = ""
    """Name of `--allow` that lets the change take effect; "" if none does."""
    explanation: str = ""
    """Further information for the user."""


RuleOrFunction = ChangeRule | Callable[[Any, Any], ChangeRule]

APPLIED = ChangeRule(EFFECT)
OTHER_MODEL = ChangeRule(REFUSED, "model")
OTHER_DATA = ChangeRule(REFUSED, "data")


def effect_rule(explanation: str) -> ChangeRule:
    """Return the rule of a change that takes effect, with an explanation."""
    return ChangeRule(EFFECT, explanation=explanation)


class Section(BaseModel):
    """Base of all sections: frozen, strict types, unknown keys are errors.

    `resume_rule` of a class is the rule of its fields where they changed since a checkpoint was
    written; a field of another kind has its own, as `Annotated[..., rule]`. A change that would make
    the resumed run another training requires `--allow NAME`. All other changes take effect.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        # Without it pydantic would accept "1" for 1 and 1 for true.
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        # `--help` imports these models without validating anything; build them at their first use.
        defer_build=True,
    )
    resume_rule: ClassVar[RuleOrFunction | None] = None

    def __init_subclass__(cls, resume_rule: RuleOrFunction | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.resume_rule = resume_rule or cls.resume_rule


# Format of rules' messages: (the choice that ignores the field, the fields that it uses).
NO_EFFECT_MESSAGE = "has no effect with {}, which takes {}; leave it out, or write null"


def names_of_non_default_fields(section: BaseModel) -> set[str]:
    """Return the fields whose value is not the default; a resolved recipe sets every field."""
    defaults = type(section).model_fields
    return {
        name
        for name in section.model_fields_set
        if getattr(section, name) != defaults[name].default
    }
