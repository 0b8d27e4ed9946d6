"""All chat templates of a model: which there are, and the one that a job wants.

Knows nothing of the files they come from, and nothing of jobs.
"""

import dataclasses
from collections.abc import Mapping

from jaxpaged.errors import ConfigError
from jaxpaged.model.chat_template import ChatTemplate

DEFAULT = "default"
"""The name of the template that is taken where none is asked for."""

WITH_TOOLS = "tool_use"
"""The name of the template that is taken instead where there are tools, as transformers does."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplates:
    """The templates' texts, not compiled, and what they have in common.

    Attributes:
        sources: Text by name.
        bos_token: What `bos_token` stands for; None is the empty string.
        eos_token: What `eos_token` stands for; None is the empty string.
        more_tokens: Further variables, such as `pad_token`.
        where: The file they are from, for messages.
    """

    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bos_token: str | None = None
    eos_token: str | None = None
    more_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    where: str = "chat_template"

    def compiled(self, source: str) -> ChatTemplate:
        """The template of a text, of these or of the user's own.

        Raises:
            TemplateError: It is malformed.
        """
        return ChatTemplate(
            source,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            more_tokens=self.more_tokens,
        )

    def default(self) -> ChatTemplate | None:
        """The template that is taken where none is asked for; None where there is none.

        Raises:
            TemplateError: It is malformed.
        """
        source = self.sources.get(DEFAULT)
        return None if source is None else self.compiled(source)

    def source(self, name: str | None, *, has_tools: bool) -> str | None:
        """The text that a name asks for; None where no name is given and there is no default.

        Raises:
            ConfigError: There is no template of this name.
        """
        if name is None:
            usual = self.sources.get(DEFAULT)
            return self.sources.get(WITH_TOOLS, usual) if has_tools else usual
        if name not in self.sources:
            raise ConfigError(
                f"input.chat_template: the model has no chat template {name!r}; "
                f"{self.listed()}. The path of a template of your own has a / in it or ends in "
                ".jinja"
            )
        return self.sources[name]

    def listed(self) -> str:
        """The names there are, for messages."""
        if not self.sources:
            return "it has none at all"
        return "its templates are " + ", ".join(map(repr, sorted(self.sources)))
