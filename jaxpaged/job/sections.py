"""The sections of a job file: strict, frozen values with a field for every key.

The ranges of the engine's numbers live in `EngineConfig`; here they are only asked. Knows nothing
of the files the paths lead to.
"""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, WithJsonSchema

from jaxpaged.config import Attention, DType, EngineConfig, KVDType, Preemption, WeightDType
from jaxpaged.job.section import FieldInfo, NotEmpty, Section, Texts, check_by, check_json
from jaxpaged.model.chat_template import RESERVED
from jaxpaged.storage import access
from jaxpaged.storage.local_store import Durability

MetricName = Literal["exact_match", "contains", "numeric_match", "regex_match"]

OnTooLong = Literal["error", "truncate_left", "truncate_right", "truncate_middle", "skip"]
"""What becomes of a row whose prompt leaves no room for a completion."""

OnNull = Literal["error", "skip"]
"""What becomes of a row whose prompt is null or would write a null."""

SystemRole = Literal["keep", "merge"]
"""Whether a chat's leading system message stays a message or joins the first user message."""

_Numbers = Annotated[tuple[float, ...], Field(strict=False)]
_Metrics = Annotated[tuple[MetricName, ...], Field(strict=False)]

_TEMPLATE_ENDINGS = (".jinja", ".jinja2", ".j2")

_ENGINE = EngineConfig.__dataclass_fields__

PROMPT_SOURCES = ("prompt", "prompt_column", "prompt_ids_column", "messages", "messages_column")
"""The keys of `input` of which a job has exactly one."""


class MessageSpec(Section):
    """One message of a chat.

    Attributes:
        role: As the model's chat template knows it: system, user, assistant.
        content: A Jinja template over the row's columns.
    """

    role: str = Field(min_length=1)
    content: str


class InputSpec(Section):
    """Which rows are read and what their prompts are; exactly one of the five prompt sources.

    Attributes:
        path: A Parquet file, a folder of them, a glob, or a list of these; paths or URLs.
        prompt: A Jinja template over the row's columns; the text is completed as it is.
        prompt_column: The column that holds the text to complete.
        prompt_ids_column: The column that holds token ids, taken as they are.
        messages: A chat, put through the model's chat template.
        messages_column: The column that holds a chat: list<struct<role, content>> or JSON text.
        columns: The columns carried into the output; None carries all.
        allow_special_tokens: The text of a special token in a row counts as that token; by
            default it stays text.
        max_prompt_bytes: Longest prompt, in UTF-8 bytes, that is tokenized at all.
        on_too_long: What becomes of a row whose prompt tokens leave no room for a completion: a
            row error, a prompt cut on the left, on the right or in the middle, or nothing.
        on_null: What becomes of a row whose prompt is null or would write a null.
        system_role: "merge" puts a chat's leading system messages in front of the content of its
            first user message, for templates that refuse the role.
        chat_template: The template for chats: the name of one of the model's, or the path of a
            Jinja file (with a / in it, or ending in .jinja); None takes the model's default.
        template_kwargs: Variables of the chat template, such as enable_thinking; one that it does
            not read is an error.
        continue_final_message: A chat's final message, which must be the assistant's, is left
            open and continued, instead of answered by another message.
    """

    model_config = pydantic.ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in PROMPT_SOURCES
            ]
        }
    )

    path: Texts
    prompt: str | None = None
    prompt_column: str | None = None
    prompt_ids_column: str | None = None
    messages: Annotated[tuple[MessageSpec, ...], Field(strict=False)] | None = Field(
        default=None, json_schema_extra={"minItems": 1}
    )
    messages_column: str | None = None
    columns: Texts | None = Field(default=None, json_schema_extra={"uniqueItems": True})
    allow_special_tokens: bool = False
    max_prompt_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    on_too_long: OnTooLong = "error"
    on_null: OnNull = "error"
    system_role: SystemRole = "keep"
    chat_template: str | None = Field(default=None, min_length=1)
    template_kwargs: Annotated[
        dict[str, Any] | None,
        WithJsonSchema({"patternProperties": {r"^[A-Za-z_]\w*$": {}}, "type": ["object", "null"]}),
    ] = None
    continue_final_message: bool = False

    @property
    def prompt_source(self) -> str:
        """The name of the prompt source that is set."""
        return next(name for name in PROMPT_SOURCES if getattr(self, name) is not None)

    @property
    def chat_template_path(self) -> str | None:
        """The file of `chat_template`, if that is none of the model's names."""
        name = self.chat_template
        is_path = name is not None and ("/" in name or name.endswith(_TEMPLATE_ENDINGS))
        return name if is_path else None

    @pydantic.field_validator(
        "path",
        mode="before",
        json_schema_input_type=NotEmpty | Annotated[tuple[NotEmpty, ...], Field(min_length=1)],
    )
    @classmethod
    def _one_path(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @pydantic.field_validator("path")
    @classmethod
    def _check_paths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("expected at least one path, found an empty list")
        return tuple(_check_place(path) for path in value)

    @pydantic.field_validator("messages")
    @classmethod
    def _some_messages(cls, value: tuple[MessageSpec, ...] | None) -> object:
        if value is not None and not value:
            raise ValueError("expected at least one message, found an empty list")
        return value

    @pydantic.field_validator("columns")
    @classmethod
    def _no_column_twice(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else _unique(value)

    @pydantic.field_validator("template_kwargs")
    @classmethod
    def _check_names(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = sorted(RESERVED.intersection(value or ()))
        if taken:
            raise ValueError(
                f"{', '.join(taken)} cannot be set: every chat template has it already"
            )
        return check_json(value)

    @pydantic.model_validator(mode="after")
    def _chat_keys(self) -> "InputSpec":
        if self.messages is None and self.messages_column is None:
            for name in ("chat_template", "template_kwargs", "continue_final_message"):
                if getattr(self, name) not in (None, False):
                    raise ValueError(
                        f"{name} is for chats; set messages or messages_column, or leave it out"
                    )
        if self.continue_final_message and self.messages and self.messages[-1].role != "assistant":
            raise ValueError(
                "continue_final_message continues a final message of role assistant; the last of "
                f"messages has role {self.messages[-1].role!r}"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _one_prompt_source(self) -> "InputSpec":
        found = [name for name in PROMPT_SOURCES if getattr(self, name) is not None]
        if len(found) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join(PROMPT_SOURCES)}; "
                f"found {' and '.join(found) or 'none of them'}"
            )
        return self


class OutputSpec(Section):
    """Where the completions go and what is kept with them.

    Attributes:
        path: The folder of part files; a path or a URL.
        rows_per_part: Rows of a part file, the unit that is finished or redone as a whole.
        token_ids: Also write every token id that was sampled.
        prompt: Also write the text that was tokenized.
        explode: A row for each completion of an input row instead of a list of completions.
        durability: What a finished part survives: "machine", a power loss; "process", the end of
            the process.
        journal_interval: Most seconds of finished rows that a kill can cost.
        report_samples: The report's page shows some prompts and completions.
    """

    path: str = Field(json_schema_extra={"minLength": 1})
    rows_per_part: int = Field(default=2048, ge=1)
    token_ids: bool = False
    prompt: bool = False
    explode: bool = False
    durability: Durability = "machine"
    journal_interval: float = Field(default=5.0, ge=0, le=3600)
    report_samples: bool = True

    @pydantic.field_validator("path")
    @classmethod
    def _check_path(cls, value: str) -> str:
        return _check_place(value)


class RopeSpec(Section):
    """Another rotation than the model's own, with the keys of rope_parameters in a config.json.

    Attributes:
        rope_type: yarn, linear, dynamic, llama3 or longrope.
        factor: How many times longer sequences get.
        rope_theta: Base of the wavelengths; by default the model's.
        partial_rotary_factor: Which part of a head is rotated; by default the model's.
        original_max_position_embeddings: The context that the model was first trained with; of
            yarn, llama3 and longrope.
        low_freq_factor: Of llama3.
        high_freq_factor: Of llama3.
        attention_factor: Of yarn and longrope: what rotated queries and keys are multiplied by.
        beta_fast: Of yarn.
        beta_slow: Of yarn.
        mscale: Of yarn.
        mscale_all_dim: Of yarn.
        truncate: Of yarn.
        short_factor: Of longrope: a divisor for each rotated pair.
        long_factor: Of longrope: a divisor for each rotated pair.
    """

    rope_type: str
    factor: float | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: _Numbers | None = None
    long_factor: _Numbers | None = None

    @pydantic.model_serializer
    def parameters(self) -> dict[str, Any]:
        """The keys that are set, as a config.json has them."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return {name: value for name, value in (values | lists).items() if value is not None}


class EngineSpec(Section):
    """Sizes and limits of the engine; see `EngineConfig`.

    Attributes:
        rope: Another rotation than the model's own, for sequences longer than it was made for.
    """

    dtype: DType | None = None
    weight_dtype: WeightDType | None = None
    kv_dtype: KVDType | None = None
    max_model_len: int | None = None
    max_num_seqs: int = _ENGINE["max_num_seqs"].default
    max_num_batched_tokens: int | None = None
    block_size: int = _ENGINE["block_size"].default
    num_blocks: int | None = None
    memory_utilization: float = _ENGINE["memory_utilization"].default
    prefix_cache: bool = _ENGINE["prefix_cache"].default
    preemption: Preemption = _ENGINE["preemption"].default
    swap_space: float = _ENGINE["swap_space"].default
    attention: Attention = _ENGINE["attention"].default
    deterministic: bool | None = None
    rope: RopeSpec | None = None

    @pydantic.field_validator("*")
    @classmethod
    def _check_range(cls, value: object, info: FieldInfo) -> object:
        if isinstance(value, RopeSpec):
            return value
        return check_by(EngineConfig, value, info.field_name)


class EvalSpec(Section):
    """How completions are scored.

    Attributes:
        reference: The column with the right answers.
        metrics: What is computed for each row, as the column `score_<metric>`.
        by: A carried column; scores are also given for each of its values.
        answer_after: Only what a completion says behind the last place where this text stands is
            scored, such as behind "</think>"; a completion without it is scored as a whole.
    """

    reference: str
    metrics: _Metrics = Field(json_schema_extra={"minItems": 1, "uniqueItems": True})
    by: str | None = None
    answer_after: str | None = Field(default=None, min_length=1)

    @pydantic.field_validator("metrics")
    @classmethod
    def _some_metrics(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("expected at least one metric, found an empty list")
        return _unique(value)


def _check_place(path: str) -> str:
    if not path or "\0" in path:
        raise ValueError(f"expected a path, found {path!r}")
    return path if access.split(path) is None else access.check_url(path)


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is listed twice")
    return names
