"""From one row's cells to the token ids that are completed and the parameters to do it with.

A row at fault is told from a good one by `RowFault`, one to pass over by `RowSkipped`. Knows
nothing of files, units or the engine.
"""

import dataclasses
import datetime
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.job.prompt import chosen_template, messages
from jaxpaged.job.prompt.prompt_limit import PromptLimit
from jaxpaged.job.prompt.prompt_template import PromptTemplate
from jaxpaged.job.prompt.prompt_tokenizer import PromptTokenizer
from jaxpaged.job.prompt.row_fault import RowFault, RowSkipped
from jaxpaged.job.prompt.row_params import RowParams
from jaxpaged.job.sampling_section import SamplingColumns
from jaxpaged.job.sections import InputSpec
from jaxpaged.job.spec import JobSpec
from jaxpaged.model.chat_template import TemplateError
from jaxpaged.model.tokenizer import TokenizerError
from jaxpaged.request import SamplingParams

_PREVIEW_CHARS = 160
_PARAMS_CHARS = 120

# What templates know by name; such a word cannot end a control token and begin another.
_WORD = re.compile(r"[\w-]+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row that can be handed to the engine.

    Attributes:
        ids: The token ids to complete.
        whole_ids: The token ids before anything was cut.
        params: How to sample, the row's own parameters in place.
        adapter: The name of the adapter that completes it; None for the model as it is.
        rendered: The protected text that was tokenized; None for token ids.
        question: What the row itself asks, protected, without the chat around it.
        has_special_text: The row holds text that reads like a special token.
        ends_in_answer: The chat ends in a message of the assistant, which another one follows.
    """

    ids: tuple[int, ...]
    whole_ids: tuple[int, ...]
    params: SamplingParams
    rendered: str | None
    question: str | None
    has_special_text: bool
    adapter: str | None = None
    ends_in_answer: bool = False

    @property
    def truncated(self) -> int:
        """Tokens that were cut out."""
        return len(self.whole_ids) - len(self.ids)

    @property
    def sha256(self) -> str:
        """Digest of the whole prompt's ids as little-endian 32-bit integers."""
        return hashlib.sha256(np.asarray(self.whole_ids, dtype="<i4").tobytes()).hexdigest()

    @property
    def params_text(self) -> str:
        """What tells the row's parameters from others that the same job may give a row."""
        own = [
            (field.name, getattr(self.params, field.name))
            for field in dataclasses.fields(self.params)
            if getattr(self.params, field.name) != field.default
        ]
        if self.adapter is not None:
            own.append(("adapter", self.adapter))
        text = " ".join(f"{name}={value!r}" for name, value in own)
        if len(text) <= _PARAMS_CHARS:
            return text
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def used_columns(spec: InputSpec, known: Sequence[str]) -> dict[str, str]:
    """The columns a prompt is made of, with the job file's key that names each.

    Names of a template that are no column of `known` are among them, unless Jinja knows them.

    Raises:
        ConfigError: A template is malformed.
    """
    source = spec.prompt_source
    if source not in ("prompt", "messages"):
        return {str(getattr(spec, source)): f"input.{source}"}
    return {
        name: key
        for key, text in _template_sources(spec)
        for name in sorted(PromptTemplate(text, key=key).names)
        if name in known or not PromptTemplate.is_builtin(name)
    }


def param_columns(columns: SamplingColumns) -> dict[str, str]:
    """The columns that set parameters, by the parameter's name."""
    return {name: column for name, column in columns.model_dump().items() if column is not None}


class _Text(NamedTuple):
    """What a row's prompt says."""

    rendered: str | None
    """Protected; None for token ids."""
    question: str | None
    """What the row itself asks, protected."""
    data: object
    """What of the row is in it, as the row has it."""
    ends_in_answer: bool = False


class PromptBuilder:
    """Makes the prompts of a job.

    Args:
        spec: The job.
        tokenizer: The model's.
        known: The columns of the input.
        moment: What a chat template takes for now, so that a job resumed another day has the
            same prompts; None is this moment.
        max_model_len: Most tokens of prompt and completion together; None leaves it to the engine
            to find prompts that are too long.

    Attributes:
        columns: The columns whose cells `build` wants.

    Raises:
        ConfigError: A template is malformed, or there is no chat template where one is needed.
    """

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: PromptTokenizer,
        known: Sequence[str],
        *,
        moment: datetime.datetime | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self._moment = moment
        self._tokenizer = tokenizer
        self._input = spec.input
        self._protect: Callable[[str], str] = tokenizer.protect
        if spec.input.allow_special_tokens:
            self._protect = str
        own_columns = param_columns(spec.sampling.columns)
        self._params = RowParams(spec.sampling_params(), own_columns)
        self._limit = None
        if max_model_len is not None:
            policy = spec.input.on_too_long
            self._limit = PromptLimit(max_model_len, policy, bos_id=tokenizer.bos_id)
        self._prompt_columns = tuple(used_columns(spec.input, known))
        self._adapters = spec.adapter_choice()
        chooser = () if spec.adapter_column is None else (spec.adapter_column,)
        self.columns = tuple(
            dict.fromkeys((*self._prompt_columns, *own_columns.values(), *chooser))
        )
        self._templates = [self._template(*source) for source in _template_sources(spec.input)]
        self._chat_template = None
        if spec.input.prompt_source.startswith("messages"):
            self._chat_template = chosen_template.choose(spec.input, tokenizer.chat_templates)
        self._variables = _map_text(spec.input.template_kwargs or {}, self._protect_phrase)

    def build(self, cells: Mapping[str, object]) -> Prompt:
        """The prompt of one row.

        Args:
            cells: The row's cells of `columns`, as Python values.

        Raises:
            RowFault: The row has no valid prompt or parameters.
            RowSkipped: The job passes over such a row.
        """
        try:
            text, whole_ids = self._whole(cells)
        except RowFault as fault:
            if fault.code == "null_prompt" and self._input.on_null == "skip":
                raise RowSkipped("null_prompt", fault.reason) from None
            raise
        if not whole_ids:
            raise RowFault("empty_prompt", "the prompt has no tokens")
        params = self._params.of(cells)
        adapter = None if self._adapters is None else self._adapters.of(cells)
        ids = whole_ids
        if self._limit is not None:
            ids = self._limit.apply(whole_ids, max_tokens=params.max_tokens)
        return Prompt(
            ids=ids,
            whole_ids=whole_ids,
            params=params,
            adapter=adapter,
            rendered=text.rendered,
            question=text.question,
            has_special_text=_any_text(text.data, self._tokenizer.has_special_text),
            ends_in_answer=text.ends_in_answer,
        )

    def text(self, prompt: Prompt) -> str:
        """What was tokenized, or what the given ids say; the whole of it, also if it was cut."""
        if prompt.rendered is None:
            return self._tokenizer.decode(prompt.whole_ids, skip_special_tokens=False)
        return self._tokenizer.unprotect(prompt.rendered)

    def preview(self, prompt: Prompt) -> str:
        """The beginning of what the row asks, for people."""
        if prompt.question is None:
            return self.text(prompt)[:_PREVIEW_CHARS]
        return self._tokenizer.unprotect(prompt.question)[:_PREVIEW_CHARS]

    def _whole(self, cells: Mapping[str, object]) -> tuple["_Text", tuple[int, ...]]:
        """The text, and the token ids before anything is cut."""
        text = self._text(cells)
        if text.rendered is None:
            return text, self._given_ids(cells[self._prompt_columns[0]])
        self._check_bytes(self._tokenizer.unprotect(text.rendered))
        try:
            return text, tuple(self._tokenizer.encode(text.rendered))
        except TokenizerError as error:
            raise RowFault("tokenizer_error", str(error)) from None

    def _text(self, cells: Mapping[str, object]) -> "_Text":
        """The text to tokenize; without one for token ids."""
        source = self._input.prompt_source
        used = [cells[name] for name in self._prompt_columns]
        if source == "prompt":
            text = self._templates[0].render(cells)
            return _Text(rendered=text, question=text, data=used)
        if source == "messages":
            roles = [message.role for message in self._input.messages or ()]
            contents = [template.render(cells) for template in self._templates]
            pairs = zip(roles, contents, strict=True)
            chat = [{"role": role, "content": content} for role, content in pairs]
            return self._chat(chat, data=used)
        cell = cells[self._prompt_columns[0]]
        if cell is None:
            raise RowFault("null_prompt", f"column {self._prompt_columns[0]!r} is null")
        if source == "messages_column":
            chat = messages.parse(cell)
            return self._chat([self._safe(message) for message in chat], data=chat)
        if source == "prompt_ids_column":
            return _Text(rendered=None, question=None, data=())
        if not isinstance(cell, str):
            raise RowFault("bad_type", f"column {self._prompt_columns[0]!r} is not text")
        text = self._protect(cell)
        return _Text(rendered=text, question=text, data=used)

    def _safe(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its text protected and its role as templates compare it."""
        role = message["role"]
        if not self._input.allow_special_tokens and self._tokenizer.has_special_text(role):
            raise RowFault("bad_type", "the role of a message holds a special token of the model")
        safe = {
            self._protect_phrase(key): _map_text(value, self._protect, self._protect_phrase)
            for key, value in message.items()
        }
        return safe | {"role": self._protect_phrase(role)}

    def _protect_phrase(self, text: str) -> str:
        """Text protected, but for words that templates know and look for: roles, keys, switches."""
        return text if _WORD.fullmatch(text) else self._protect(text)

    def _chat(self, chat: list[dict[str, Any]], *, data: object) -> "_Text":
        template = self._chat_template
        assert template is not None, "made at construction"
        question = chat[-1]["content"]
        ends_in_answer = chat[-1]["role"] == "assistant"
        continues = self._input.continue_final_message
        if continues and not ends_in_answer:
            raise RowFault(
                "template_error",
                "input.continue_final_message continues a final message of role 'assistant'; the "
                f"last one's is {self._tokenizer.unprotect(chat[-1]['role'])!r}",
            )
        if self._input.system_role == "merge":
            chat = messages.merge_system(chat)
        try:
            rendered = template.render(
                chat, moment=self._moment, variables=self._variables, continues=continues
            )
        except TemplateError as error:
            reason = f"the model's chat template: {error}"
            raise RowFault("template_error", self._tokenizer.unprotect(reason)) from None
        return _Text(
            rendered=rendered,
            question=question,
            data=data,
            ends_in_answer=ends_in_answer and not continues,
        )

    def _check_bytes(self, text: str) -> None:
        limit = self._input.max_prompt_bytes
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            reason = "the prompt holds half of a surrogate pair"
            raise RowFault("invalid_utf8", reason) from None
        if num_bytes > limit:
            raise RowFault(
                "prompt_too_long",
                f"the prompt has {num_bytes:,} bytes; input.max_prompt_bytes is {limit:,}",
            )

    def _given_ids(self, cell: object) -> tuple[int, ...]:
        name = self._prompt_columns[0]
        if not isinstance(cell, list):
            raise RowFault("bad_type", f"column {name!r} is not a list of token ids")
        for token_id in cell:
            if token_id is None:
                raise RowFault("null_prompt", f"column {name!r} has a null among its token ids")
            if not 0 <= token_id < self._tokenizer.vocab_size:
                raise RowFault(
                    "bad_type",
                    f"column {name!r}: token id {token_id} is not in the vocabulary of "
                    f"{self._tokenizer.vocab_size}",
                )
        return tuple(cell)

    def _template(self, key: str, source: str) -> PromptTemplate:
        return PromptTemplate(
            source, key=key, protect=self._protect, unprotect=self._tokenizer.unprotect
        )


def _template_sources(spec: InputSpec) -> list[tuple[str, str]]:
    """Each template of the job file with its key."""
    if spec.prompt is not None:
        return [("input.prompt", spec.prompt)]
    return [
        (f"input.messages[{index}].content", message.content)
        for index, message in enumerate(spec.messages or ())
    ]


def _map_text(
    value: Any,  # noqa: ANN401
    change: Callable[[str], str],
    change_key: Callable[[str], str] | None = None,
) -> Any:  # noqa: ANN401
    """The same nested value with every string changed, those that are keys in their own way."""
    change_key = change_key or change
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map_text(item, change, change_key) for item in value]
    if isinstance(value, dict):
        return {change_key(key): _map_text(item, change, change_key) for key, item in value.items()}
    return value


def _any_text(value: object, test: Callable[[str], bool]) -> bool:
    """Whether any string in the nested value passes."""
    if isinstance(value, str):
        return test(value)
    if isinstance(value, list | tuple):
        return any(_any_text(item, test) for item in value)
    return isinstance(value, dict) and any(
        _any_text(side, test) for pair in value.items() for side in pair
    )
