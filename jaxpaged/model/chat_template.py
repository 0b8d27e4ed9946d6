"""A model's chat template: messages in, the prompt's text out.

The template comes from an untrusted file: it runs in Jinja's immutable sandbox, with a cap on its
own size, on what one expression may build by repetition, and on what it writes. Behaves as
transformers' `apply_chat_template` does. Knows nothing of tokens.
"""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from jaxpaged.errors import JaxPagedError
from jaxpaged.model import sandbox

MAX_TEMPLATE_CHARS = 1_000_000
_MAX_MESSAGE_CHARS = 500


class TemplateError(JaxPagedError):
    """A template is malformed, refuses its input, or writes too much; carries its own words."""


class ChatTemplate:
    """A compiled template, with the model's special tokens as its variables.

    Args:
        source: The template's text.
        bos_token: What `bos_token` stands for; None is the empty string.
        eos_token: What `eos_token` stands for; None is the empty string.
        more_tokens: Further variables, such as `pad_token`.

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
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise TemplateError(f"the chat template is malformed: {_words(error)}") from None

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
    ) -> str:
        """The prompt's text.

        Args:
            messages: Each with at least `role` and `content`.
            add_generation_prompt: End with the header of the assistant's turn.
            moment: What the template takes for now; None is when it was compiled.

        Raises:
            TemplateError: The template refuses the messages (its own message is kept), fails on
                them, or writes too much.
        """
        clock = {} if moment is None else {"strftime_now": moment.strftime}
        try:
            return sandbox.join(
                self._template.generate(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    tools=None,
                    documents=None,
                    **self._variables,
                    **clock,
                )
            )
        except sandbox.OutputTooLong:
            raise TemplateError(
                f"the chat template wrote more than {sandbox.MAX_OUTPUT_CHARS} characters"
            ) from None
        except sandbox.RUN_ERRORS as error:
            raise TemplateError(_words(error)) from None


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
    environment.filters["tojson"] = sandbox.json_filter()
    # Read once, so that all prompts of a job agree on the date.
    now = datetime.datetime.now()
    environment.globals["strftime_now"] = now.strftime
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _words(error: BaseException) -> str:
    message = str(error) or type(error).__name__
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "..."
