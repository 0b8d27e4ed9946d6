"""The tokenizer of a folder in Hugging Face layout, from all the files that speak of it."""

import hashlib
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.model import tokenizer_json
from jaxpaged.model.chat_templates import DEFAULT, ChatTemplates
from jaxpaged.model.checkpoint import folder_vocabulary, members
from jaxpaged.model.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_NO_LIMIT = 1_000_000_000

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def build_tokenizer(folder: pathlib.Path, vocab_size: int, *, max_len: int) -> Tokenizer:
    """The folder's tokenizer.

    A completion ends at the tokenizer's own end-of-sequence token and at every one that
    generation_config.json or config.json names.

    Args:
        folder: The model folder.
        vocab_size: Of the model; tokens beyond it have no embedding.
        max_len: Tokens of the longest sequence that the model's configuration declares.

    Raises:
        CheckpointError: A file is missing or damaged, or the files contradict each other.
    """
    settings = _settings(folder)
    _tell_settings(settings, max_len, str(folder / "tokenizer_config.json"))
    definition, where = _definition(folder, settings, vocab_size)
    named = _named_tokens(settings)
    ids = _ids(definition, named, where)
    eos_ids = _configured_eos_ids(folder, vocab_size)
    eos_ids |= {ids["eos_token"]} if "eos_token" in ids else set()
    leading_id = tokenizer_json.leading_id(definition)
    bos_id = ids.get("bos_token", leading_id)
    listed = _listed_ids(definition, settings, where)
    return Tokenizer(
        tokenizer_json.with_control_tokens(
            definition, named={*ids.values(), *listed}, others=eos_ids
        ),
        bos_id=bos_id,
        eos_ids=eos_ids,
        adds_bos=_adds_bos(settings, bos_id, leading_id, where),
        chat_templates=chat_templates(folder),
        where=where,
    )


def chat_templates(folder: pathlib.Path) -> ChatTemplates:
    """The folder's chat templates, from where transformers takes them.

    Files of their own (`chat_template.jinja` and those in `additional_chat_templates`) count
    instead of what tokenizer_config.json holds, which may be one template or several with names.

    Raises:
        CheckpointError: A file is damaged.
    """
    settings = _settings(folder)
    named = _named_tokens(settings)
    sources, name = _template_files(folder), "chat_template.jinja"
    if not sources:
        sources, name = _template_settings(folder, settings)
    return ChatTemplates(
        sources=sources,
        where=str(folder / name),
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        more_tokens={k: v for k, v in named.items() if k not in ("bos_token", "eos_token")},
    )


def digests(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 of the files of the tokenizer and of the chat templates.

    Raises:
        CheckpointError: There is no tokenizer that can be read.
    """
    read = [path.name for path in folder_vocabulary.files(folder)]
    return {
        "tokenizer": members.digest(folder, *read, *_SETTINGS),
        "chat_template": _template_digest(folder),
    }


def template_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Name to file of the chat templates that have a file of their own."""
    found = {}
    single = members.member(folder, "chat_template.jinja")
    if single is not None:
        found[DEFAULT] = single
    for path in members.inside(folder, "additional_chat_templates", ".jinja"):
        found[path.stem] = path
    return found


def _definition(
    folder: pathlib.Path, settings: Mapping[str, Any], vocab_size: int
) -> tuple[tokenizer_json.Definition, str]:
    """The definition, checked against the other files and the model, and its file."""
    content, where = folder_vocabulary.definition(folder, settings, vocab_size)
    definition = tokenizer_json.checked(content, where)
    _check_added_tokens(definition, settings, where)
    definition = _within(definition, vocab_size, where)
    largest = max(tokenizer_json.vocabulary(definition).values(), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{where}: has a token with id {largest}, but the model's vocabulary is {vocab_size}; "
            "the files belong to different models"
        )
    return definition, where


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


def _template_digest(folder: pathlib.Path) -> str:
    """The digest of the template files; that of the usual ones where there are no others."""
    usual = members.digest(folder, *_TEMPLATES)
    others = {name: path for name, path in template_files(folder).items() if path.parent != folder}
    if not others:
        return usual
    digest = hashlib.sha256(usual.encode())
    for name, path in sorted(others.items()):
        digest.update(f"{name}\n".encode() + hashlib.sha256(members.read_bytes(path)).digest())
    return digest.hexdigest()


def _listed_ids(
    definition: tokenizer_json.Definition, settings: Mapping[str, Any], where: str
) -> list[int]:
    """The ids of further special tokens, which are listed without a part of their own."""
    known = tokenizer_json.vocabulary(definition)
    found = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = settings.get(key)
        for value in values if isinstance(values, list) else ():
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str) and text in known:
                found.append(known[text])
            else:
                _log.warning(
                    "%s: %s of tokenizer_config.json names %r, which is no token and stays text",
                    where,
                    key,
                    text,
                )
    return found


def _tell_settings(settings: Mapping[str, Any], max_len: int, where: str) -> None:
    """Says what of the settings is another tool's, or contradicts the model's configuration."""
    limit = settings.get("model_max_length")
    # transformers writes 10**30 where nobody knows.
    if isinstance(limit, int | float) and 0 < limit < min(max_len, _NO_LIMIT):
        _log.warning(
            "%s: model_max_length is %d, max_position_embeddings of config.json is %d: somebody "
            "changed one of them, and the latter counts; if the model was trained for %d tokens, "
            "set engine.max_model_len to it",
            where,
            limit,
            max_len,
            limit,
        )
    if settings.get("add_eos_token") is True:
        _log.warning(
            "%s: add_eos_token is true; prompts stay open all the same, as they are to be "
            "completed",
            where,
        )


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
    extra = settings.get("extra_special_tokens")
    # Newer files list what is special to one model by names of its own.
    listed = {**settings, **extra} if isinstance(extra, Mapping) else settings
    for key, value in listed.items():
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
        if not isinstance(content, str) or str(known.get(content)) != token_id:
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


def _template_files(folder: pathlib.Path) -> dict[str, str]:
    files = template_files(folder)
    return {
        name: members.read_bytes(path).decode("utf-8", errors="replace")
        for name, path in files.items()
    }


def _template_settings(
    folder: pathlib.Path, settings: Mapping[str, Any]
) -> tuple[dict[str, str], str]:
    """The templates of chat_template.json or of tokenizer_config.json, and which it was."""
    name = "chat_template.json"
    source = _optional_object(folder, name).get("chat_template")
    if source is None:
        name = "tokenizer_config.json"
        source = settings.get("chat_template")
    if source is None:
        return {}, name
    if isinstance(source, list):
        entries = [entry if isinstance(entry, Mapping) else {} for entry in source]
        pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    else:
        pairs = list(source.items()) if isinstance(source, Mapping) else [(DEFAULT, source)]
    sources = {key: text for key, text in pairs if isinstance(key, str) and isinstance(text, str)}
    if len(sources) != len(pairs):
        raise CheckpointError(
            f"{folder / name}: chat_template is not text, or a list of texts with names"
        )
    return sources, name
