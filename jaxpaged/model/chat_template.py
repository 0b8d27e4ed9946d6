"""A model's chat template: messages in, the prompt's text out.

The template comes from an untrusted file: it runs in Jinja's immutable sandbox, with a cap on its
own size, on what one expression may build by repetition, and on what it writes. Behaves as
transformers' `apply_chat_template` does. Knows nothing of tokens.
"""

import datetime
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from jaxpaged.errors import JaxPagedError
from jaxpaged.model import sandbox

MAX_TEMPLATE_CHARS = 1_000_000
_MAX_MESSAGE_CHARS = 500
_MAX_DATE_CHARS = 1000

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "continue_final_message",
        "eos_token",
        "messages",
        "raise_exception",
        "strftime_now",
        "cycler",
        "dict",
        "joiner",
        "namespace",
        "range",
    }
)
"""Names that have a meaning in every template and cannot be given another."""

# Where a final message is to be continued, until it is looked for in what the template wrote.
_OPEN_END = "\ufdd2"


class TemplateError(JaxPagedError):
    """A template is malformed, refuses its input, or writes too much; carries its own words."""


class ChatTemplate:
    """A compiled template, with the model's special tokens as its variables.

    Args:
        source: The template's text.
        bos_token: What `bos_token` stands for; None is the empty string.
        eos_token: What `eos_token` stands for; None is the empty string.
        more_tokens: Further variables, such as `pad_token`.

    Attributes:
        source: As given.
        reads: The variables of the template that a job may set.

    Raises:
        TemplateError: The template is too long or malformed.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        more_tokens: Mapping[str, str] | None = None,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(
                f"the chat template has {len(source)} characters; the most is {MAX_TEMPLATE_CHARS}"
            )
        self.source = source
        self._variables = dict(more_tokens or {})
        self._variables |= {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        try:
            with sandbox.bounded():
                environment = _environment()
                names = jinja2.meta.find_undeclared_variables(environment.parse(source))
                self._template = environment.from_string(source)
        # A `break` outside of a loop is found by Python's own compiler.
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise TemplateError(f"the chat template is malformed: {_words(error)}") from None
        self.reads = frozenset(names) - RESERVED - self._variables.keys()

    @property
    def variables(self) -> Mapping[str, str]:
        """The special tokens that the template can name, by the name it has for them."""
        return self._variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        moment: datetime.datetime | None = None,
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> str:
        """The prompt's text.

        Args:
            messages: Each with at least `role` and `content`.
            add_generation_prompt: End with the header of the assistant's turn.
            moment: What the template takes for now; None is when it was compiled.
            variables: Further variables, such as switches of the template or `tools`.
            continues: Leave the final message open instead: the text ends where its content does,
                white space at its end included, and no other turn begins.

        Raises:
            TemplateError: The template refuses the messages (its own message is kept), fails on
                them, or writes too much; or the final message that is to stay open is not
                written, or more than once.
        """
        if continues:
            return self._open_ended(messages, moment=moment, variables=variables)
        clock = {} if moment is None else {"strftime_now": _clock(moment)}
        try:
            with sandbox.bounded():
                return sandbox.join(
                    self._template.generate(
                        {"tools": None, "documents": None}
                        | dict(variables or {})
                        | self._variables
                        | clock,
                        messages=[dict(message) for message in messages],
                        add_generation_prompt=add_generation_prompt,
                    )
                )
        except sandbox.OutputTooLong:
            raise TemplateError(
                f"the chat template wrote more than {sandbox.MAX_OUTPUT_CHARS} characters"
            ) from None
        except sandbox.RUN_ERRORS as error:
            raise TemplateError(_words(error)) from None

    def _open_ended(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        moment: datetime.datetime | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """The text up to the end of the final message's content."""
        # Nothing like it is in the messages; it is no white space that a template would strip.
        text = repr(messages)
        ends = (f"{_OPEN_END}{number}{_OPEN_END}" for number in itertools.count())
        end = next(end for end in ends if repr(end)[1:-1] not in text)
        final = {**messages[-1], "content": f"{messages[-1]['content']}{end}"}
        rendered = self.render(
            [*messages[:-1], final],
            add_generation_prompt=False,
            moment=moment,
            variables=variables,
        )
        times = rendered.count(end)
        if times != 1:
            written = f"{times} times" if times else "not at all, or changed"
            raise TemplateError(
                f"the final message cannot be continued: the template writes it {written}"
            )
        return rendered[: rendered.index(end)]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it
    is only its content."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> sandbox.Environment:
    environment = sandbox.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    # Read once, so that all prompts of a job agree on the date.
    environment.globals["strftime_now"] = _clock(datetime.datetime.now())
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _clock(moment: datetime.datetime) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if len(form) > _MAX_DATE_CHARS:
            raise jinja2.TemplateError(f"a date's form of {len(form):,} characters is too large")
        return moment.strftime(form)

    return strftime_now


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _words(error: BaseException) -> str:
    message = str(error) or type(error).__name__
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "..."
