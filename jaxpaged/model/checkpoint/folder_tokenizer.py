"""The tokenizer of a folder in Hugging Face layout, from all the files that speak of it."""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.model import tokenizer_json
from jaxpaged.model.chat_template import ChatTemplate, TemplateError
from jaxpaged.model.checkpoint import members
from jaxpaged.model.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")

_FILE = "tokenizer.json"


def build_tokenizer(folder: pathlib.Path, vocab_size: int) -> Tokenizer:
    """The folder's tokenizer.

    A completion ends at the tokenizer's own end-of-sequence token and at every one that
    generation_config.json or config.json names.

    Args:
        folder: The model folder.
        vocab_size: Of the model; tokens beyond it have no embedding.

    Raises:
        CheckpointError: A file is missing or damaged, or the files contradict each other.
    """
    where = str(folder / _FILE)
    settings = _settings(folder)
    definition = _definition(folder, settings, vocab_size)
    named = _named_tokens(settings)
    ids = _ids(definition, named, where)
    eos_ids = _configured_eos_ids(folder, vocab_size)
    eos_ids |= {ids["eos_token"]} if "eos_token" in ids else set()
    leading_id = tokenizer_json.leading_id(definition)
    bos_id = ids.get("bos_token", leading_id)
    return Tokenizer(
        tokenizer_json.with_control_tokens(definition, named=ids.values(), others=eos_ids),
        bos_id=bos_id,
        eos_ids=eos_ids,
        adds_bos=_adds_bos(settings, bos_id, leading_id, where),
        chat_template=_chat_template(folder, settings, named),
        where=where,
    )


def check_present(folder: pathlib.Path) -> pathlib.Path:
    """The tokenizer's main file.

    Raises:
        CheckpointError: It is missing.
    """
    path = members.member(folder, _FILE)
    if path is None:
        raise CheckpointError(
            f"{folder}: {_FILE} is missing; make it with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return path


def _definition(
    folder: pathlib.Path, settings: Mapping[str, Any], vocab_size: int
) -> tokenizer_json.Definition:
    """tokenizer.json, checked against the other files and the model."""
    path = check_present(folder)
    content = members.parse_object(members.read_bytes(path), path)
    definition = tokenizer_json.checked(content, str(path))
    _check_added_tokens(definition, settings, str(path))
    definition = _within(definition, vocab_size, str(path))
    largest = max(tokenizer_json.vocabulary(definition).values(), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path}: has a token with id {largest}, but the model's vocabulary is {vocab_size}; "
            "the files belong to different models"
        )
    return definition


def _ids(
    definition: tokenizer_json.Definition, named: Mapping[str, str], where: str
) -> dict[str, int]:
    known = tokenizer_json.vocabulary(definition)
    for key in ("bos_token", "eos_token"):
        if key in named and named[key] not in known:
            raise CheckpointError(
                f"{where}: {named[key]!r} is missing, which tokenizer_config.json names as {key}"
            )
    return {key: known[token] for key, token in named.items() if token in known}


def _settings(folder: pathlib.Path) -> dict[str, Any]:
    """tokenizer_config.json, over special_tokens_map.json."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= {k: v for k, v in _optional_object(folder, name).items() if v is not None}
    return settings


def _optional_object(folder: pathlib.Path, name: str) -> dict[str, Any]:
    path = members.member(folder, name)
    return {} if path is None else members.parse_object(members.read_bytes(path), path)


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, each written as text or as an object with it."""
    named = {}
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(content, str) and content:
            named[key] = content
    return named


def _within(
    definition: tokenizer_json.Definition, vocab_size: int, where: str
) -> tokenizer_json.Definition:
    """The definition without added tokens that the model has no embedding for."""
    added = definition["added_tokens"]
    beyond = [token["content"] for token in added if token["id"] >= vocab_size]
    if not beyond:
        return definition
    _log.warning(
        "%s: tokens %s are beyond the model's vocabulary of %d and stay text",
        where,
        beyond,
        vocab_size,
    )
    return {**definition, "added_tokens": [t for t in added if t["id"] < vocab_size]}


def _check_added_tokens(
    definition: tokenizer_json.Definition, settings: Mapping[str, Any], where: str
) -> None:
    """Older files list added tokens a second time; the lists must not differ."""
    known = tokenizer_json.vocabulary(definition)
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise CheckpointError(f"{where}: added_tokens_decoder is not an object")
    for token_id, token in listed.items():
        content = token.get("content") if isinstance(token, Mapping) else None
        if content is None or str(known.get(content)) != token_id:
            raise CheckpointError(
                f"{where}: token {content!r} with id {token_id} is missing, which "
                "added_tokens_decoder of tokenizer_config.json names; save the tokenizer again "
                "with transformers"
            )


def _configured_eos_ids(folder: pathlib.Path, vocab_size: int) -> set[int]:
    """Every end-of-sequence token of the configuration files, which may name one or several."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _optional_object(folder, name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise CheckpointError(
                    f"{folder / name}: eos_token_id is {value!r}; expected token ids from 0 and "
                    f"below the vocabulary of {vocab_size}"
                )
            found.add(token_id)
    return found


def _adds_bos(
    settings: Mapping[str, Any], bos_id: int | None, leading_id: int | None, where: str
) -> bool:
    explicit = settings.get("add_bos_token")
    if isinstance(explicit, bool):
        return explicit
    if leading_id is not None and leading_id != bos_id:
        raise CheckpointError(
            f"{where}: its post_processor puts token {leading_id} in front, but bos_token of "
            f"tokenizer_config.json has id {bos_id}"
        )
    return leading_id is not None


def _chat_template(
    folder: pathlib.Path, settings: Mapping[str, Any], named: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of chat_template.jinja, chat_template.json or tokenizer_config.json."""
    name, source = _template_source(folder, settings)
    if source is None:
        return None
    more = {k: v for k, v in named.items() if k not in ("bos_token", "eos_token")}
    try:
        return ChatTemplate(
            source,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token"),
            more_tokens=more,
        )
    except TemplateError as error:
        raise CheckpointError(f"{folder / name}: {error}") from None


def _template_source(folder: pathlib.Path, settings: Mapping[str, Any]) -> tuple[str, str | None]:
    path = members.member(folder, "chat_template.jinja")
    if path is not None:
        return path.name, members.read_bytes(path).decode("utf-8", errors="replace")
    name = "chat_template.json"
    source = _optional_object(folder, name).get("chat_template")
    if source is None:
        name = "tokenizer_config.json"
        source = settings.get("chat_template")
    if isinstance(source, list):
        # Several named ones; like transformers, the one called "default" is used.
        named = [entry for entry in source if isinstance(entry, Mapping)]
        source = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise CheckpointError(f"{folder / name}: chat_template is not text")
    return name, source
