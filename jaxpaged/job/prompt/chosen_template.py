"""The chat template that a job's chats go through: the model's, one of several, or the user's own.

Reads the user's file; knows nothing of rows.
"""

import hashlib
import pathlib

from jaxpaged.errors import ConfigError
from jaxpaged.job.sections import InputSpec
from jaxpaged.model.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate, TemplateError
from jaxpaged.model.chat_templates import ChatTemplates


def choose(spec: InputSpec, templates: ChatTemplates) -> ChatTemplate:
    """The compiled template, which reads every variable that the job sets.

    Raises:
        ConfigError: There is no such template, it is malformed, or it knows nothing of a variable.
    """
    source = _source(spec, templates)
    if source is None:
        raise ConfigError(_missing(spec, templates))
    try:
        template = templates.compiled(source)
    except TemplateError as error:
        raise ConfigError(f"{_place(spec)}: {error}") from None
    _check_variables(spec, templates, template)
    return template


def digest(spec: InputSpec, templates: ChatTemplates) -> str:
    """SHA-256 of the template that the job names or brings.

    Raises:
        ConfigError: There is no such template.
    """
    source = _source(spec, templates) or ""
    return hashlib.sha256(f"input.chat_template\n{source}".encode(errors="replace")).hexdigest()


def _source(spec: InputSpec, templates: ChatTemplates) -> str | None:
    if spec.chat_template_path is not None:
        return _read(spec.chat_template_path)
    has_tools = bool((spec.template_kwargs or {}).get("tools"))
    return templates.source(spec.chat_template, has_tools=has_tools)


def _read(path: str) -> str:
    try:
        with pathlib.Path(path).open("rb") as file:
            # A character has at most four bytes.
            content = file.read(4 * MAX_TEMPLATE_CHARS + 1)
        return content.decode()
    except OSError as error:
        raise ConfigError(
            f"input.chat_template: {path} cannot be read: {error.strerror}; give the path of a "
            "Jinja template, relative to the job file, or the name of one of the model's templates"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"input.chat_template: {path} is not UTF-8 text of at most {MAX_TEMPLATE_CHARS:,} "
            "characters"
        ) from None


def _missing(spec: InputSpec, templates: ChatTemplates) -> str:
    if templates.sources:
        return (
            f"input.{spec.prompt_source}: the model has no chat template called 'default'; "
            f"{templates.listed()}: choose one with input.chat_template"
        )
    return (
        f"input.{spec.prompt_source}: the model has no chat template; use input.prompt or "
        "input.prompt_column, which take plain text, or give a template with input.chat_template"
    )


def _place(spec: InputSpec) -> str:
    return "input.chat_template" if spec.chat_template else f"input.{spec.prompt_source}"


def _check_variables(spec: InputSpec, templates: ChatTemplates, template: ChatTemplate) -> None:
    """A switch that a template does not know would change nothing, unnoticed."""
    for name in spec.template_kwargs or {}:
        if name in templates.more_tokens:
            raise ConfigError(
                f"input.template_kwargs.{name} is a special token of the model and cannot be set"
            )
        if name not in template.reads:
            known = ", ".join(sorted(template.reads)) or "none at all"
            raise ConfigError(
                f"input.template_kwargs.{name}: the chat template does not read it; the variables "
                f"it reads are {known}"
            )
