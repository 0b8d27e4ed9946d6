"""The section `sampling` of a job file: how tokens are chosen and when a completion ends.

Ranges of numbers live in `SamplingParams`; here are the rules between keys.
"""

from typing import Annotated

import pydantic
from pydantic import BeforeValidator, Field, WithJsonSchema

from jaxpaged.job import logit_bias
from jaxpaged.job.section import (
    FieldInfo,
    NotEmpty,
    Section,
    Texts,
    TokenIds,
    check_by,
    empty_if_null,
)
from jaxpaged.request import MAX_BIASED, EarlyStopping, SamplingParams


def _null_or_one(value: object) -> object:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else [value]


_TokenId = Annotated[int, Field(ge=0)]

_Words = Annotated[
    Texts,
    BeforeValidator(_null_or_one, json_schema_input_type=NotEmpty | tuple[NotEmpty, ...] | None),
]
_StopTokens = Annotated[
    TokenIds,
    BeforeValidator(_null_or_one, json_schema_input_type=_TokenId | tuple[_TokenId, ...] | None),
]
_Bias = Annotated[tuple[tuple[int, float], ...], WithJsonSchema(logit_bias.json_schema(MAX_BIASED))]


class SamplingColumns(Section):
    """Input columns that set a parameter row by row; a null takes the job's value.

    What is missing here decides the output's columns, which all rows have in common, or means
    little for a single row.

    Attributes:
        max_tokens: A column of integers.
        min_tokens: A column of integers.
        temperature: A column of numbers.
        top_k: A column of integers.
        top_p: A column of numbers.
        min_p: A column of numbers.
        typical_p: A column of numbers.
        repetition_penalty: A column of numbers.
        presence_penalty: A column of numbers.
        frequency_penalty: A column of numbers.
        seed: A column of integers.
        ignore_eos: A column of truth values.
        stop: A column of texts or of lists of texts.
        stop_token_ids: A column of lists of integers.
        bad_words: A column of texts or of lists of texts.
        logit_bias: A column of maps from token ids to numbers, or of the same as JSON text.
    """

    max_tokens: str | None = None
    min_tokens: str | None = None
    temperature: str | None = None
    top_k: str | None = None
    top_p: str | None = None
    min_p: str | None = None
    typical_p: str | None = None
    repetition_penalty: str | None = None
    presence_penalty: str | None = None
    frequency_penalty: str | None = None
    seed: str | None = None
    ignore_eos: str | None = None
    stop: str | None = None
    stop_token_ids: str | None = None
    bad_words: str | None = None
    logit_bias: str | None = None


class SamplingSpec(Section):
    """How tokens are chosen and when a completion ends; see `SamplingParams`.

    Attributes:
        logit_bias: By token id what is added to its logit; -inf bans the token.
        columns: Parameters that come from the row instead.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: _Bias = ()
    bad_words: _Words = ()
    seed: int | None = None
    stop: _Words = ()
    stop_token_ids: _StopTokens = ()
    include_stop: bool = False
    stop_after: str | None = Field(default=None, json_schema_extra={"minLength": 1})
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    columns: SamplingColumns = SamplingColumns()

    @pydantic.field_validator("columns", mode="before")
    @classmethod
    def _empty_columns(cls, value: object) -> object:
        return empty_if_null(value)

    @pydantic.field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_pairs(cls, value: object) -> object:
        pairs = logit_bias.from_mapping({} if value is None else value)
        if len(pairs) > MAX_BIASED:
            raise ValueError(f"expected at most {MAX_BIASED} tokens, found {len(pairs)}")
        return pairs

    @pydantic.field_serializer("logit_bias")
    def _bias_mapping(self, value: tuple[tuple[int, float], ...]) -> dict[str, float | str]:
        return logit_bias.to_mapping(value)

    @pydantic.field_validator("early_stopping", mode="before")
    @classmethod
    def _check_early_stopping(cls, value: object) -> object:
        if isinstance(value, bool) or value == "never":
            return value
        raise ValueError(f'expected true, false or "never", found {value!r}')

    @pydantic.field_validator("*")
    @classmethod
    def _check_range(cls, value: object, info: FieldInfo) -> object:
        return check_by(SamplingParams, value, info.field_name)

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> "SamplingSpec":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        for name in ("best_of", "beam_width"):
            most = getattr(self, name)
            if most is not None and most < self.n:
                raise ValueError(
                    f"n is {self.n}, but {name} is {most}; n of them are kept, so {name} must be "
                    "at least n"
                )
        if self.beam_width is None:
            self._check_samples()
        else:
            self._check_beams(self.beam_width)
        return self

    def _check_samples(self) -> None:
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is of beam search alone; set beam_width, or leave it out")
        name = "n" if self.best_of is None else "best_of"
        # A row's own temperature is looked at when its turn comes.
        if (self.best_of or self.n) > 1 and not self.temperature and not self.columns.temperature:
            raise ValueError(
                f"{name} is {getattr(self, name)} and temperature 0, which gives the same "
                "completion each time; set temperature above 0, or beam_width for a beam search"
            )

    def _check_beams(self, width: int) -> None:
        others = {
            "best_of": self.best_of is not None,
            "temperature": self.temperature > 0,
            "columns.temperature": self.columns.temperature is not None,
            "stop_after": self.stop_after is not None,
        }
        for name, is_set in others.items():
            if is_set:
                raise ValueError(
                    f"beam_width {width} and {name} exclude each other; leave one of them out"
                )
