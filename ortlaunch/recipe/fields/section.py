"""What the recipe's sections share: their base model, and the kinds of values that several of them
take."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

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
# locations.
WORD = "<word>"
MAPPING = "<mapping>"
LIST = "<list>"
NUMBER = "<number>"


def tuple_of(value: object) -> object:
    """A list of YAML as a tuple; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def _tuple_of_one_or_more(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple_of(value)


def _number_or_auto(value: object) -> str:
    return WORD if value == "auto" else NUMBER


# More of anything is a slip of the finger, and what is counted out would take for ever.
MOST = 10**9

Text = Annotated[str, Field(min_length=1)]
Words = Annotated[tuple[Text, ...], BeforeValidator(tuple_of)]
OneOrMore = Annotated[
    tuple[Text, ...],
    BeforeValidator(_tuple_of_one_or_more),
    Field(min_length=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ]
        }
    ),
]
Positive = Annotated[int, Field(ge=1, le=MOST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveOrAuto = Annotated[
    Annotated[Positive, Tag(NUMBER)] | Annotated[Literal["auto"], Tag(WORD)],
    Discriminator(_number_or_auto),
]
CountOrAuto = Annotated[
    Annotated[int, Field(ge=0, le=MOST), Tag(NUMBER)] | Annotated[Literal["auto"], Tag(WORD)],
    Discriminator(_number_or_auto),
]
SecondsOrAuto = Annotated[
    Annotated[float, Field(ge=1, le=MOST), Tag(NUMBER)] | Annotated[Literal["auto"], Tag(WORD)],
    Discriminator(_number_or_auto),
]


RowsOrWord = Annotated[
    Annotated[Positive, Tag(NUMBER)] | Annotated[Literal["auto", "off"], Tag(WORD)],
    Discriminator(lambda value: WORD if value in ("auto", "off") else NUMBER),
    BeforeValidator(lambda value: "off" if value is False else value),  # as YAML reads it
]


OperatorsOrWord = Annotated[
    Annotated[Words, Tag(NUMBER)] | Annotated[Literal["auto", "off"], Tag(WORD)],
    Discriminator(lambda value: NUMBER if isinstance(value, (list, tuple)) else WORD),
    BeforeValidator(lambda value: "off" if value is False else value),  # as YAML reads it
]


class NameIn:
    """For `Annotated[str, NameIn(table)]`: a name of the table, with the error and the schema of a
    Literal of them."""

    def __init__(self, table: Collection[str], *others: str) -> None:
        self._table = table
        self._others = others

    @property
    def names(self) -> tuple[str, ...]:
        """All that are accepted, as the table has them now."""
        return (*self._others, *self._table)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._accept)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.names), "type": "string"}

    def _accept(self, value: object) -> str:
        if isinstance(value, str) and value in self.names:
            return value
        *first, last = map(repr, self.names)
        raise PydanticKnownError(
            "literal_error", {"expected": " or ".join([", ".join(first), last])}
        )


class Section(BaseModel):
    """What every section shares: frozen, strict types, unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )


DOES_NOTHING = "does nothing with {}, which takes {}; leave it out, or write null"


def chosen(section: BaseModel) -> set[str]:
    """Fields with another value than their default: a resolved recipe writes all of them."""
    defaults = type(section).model_fields
    return {
        name
        for name in section.model_fields_set
        if getattr(section, name) != defaults[name].default
    }
