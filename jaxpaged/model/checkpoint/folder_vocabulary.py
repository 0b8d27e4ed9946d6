"""The definition of a folder's tokenizer: `tokenizer.json`, or what it can be made of without one.

    tokenizer.json             as it is
    tokenizer.model            a sentencepiece BPE, or tiktoken's lines of a Llama 3
    vocab.json, merges.txt     byte-level BPE as of GPT-2 or Qwen 2, as tokenizer_config.json says

Anything else is refused by name. Knows nothing of special tokens beyond those that the files list.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxpaged.errors import CheckpointError
from jaxpaged.model import tokenizer_json
from jaxpaged.model.checkpoint import (
    byte_level,
    gguf_sentencepiece,
    members,
    sentencepiece_file,
    tiktoken_file,
)
from jaxpaged.model.checkpoint.gguf_header import Value
from jaxpaged.model.checkpoint.gguf_metadata import Metadata

_JSON, _MODEL, _VOCAB, _MERGES, _ADDED = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)

# What other tokenizers are kept in, to name it.
_OTHERS = ("tekken.json", "vocab.txt", "spiece.model", "qwen.tiktoken", "tokenizer.tiktoken")

_REMEDY = (
    "make it with transformers, where you trust the model: "
    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)

_CONTROL, _UNKNOWN = 3, 2
_IS_ID = re.compile(r"[0-9]{1,9}")
_PREFIX = "tokenizer.ggml."

# By tokenizer_class without "Fast": how a text is cut, and what is done to it before.
_BYTE_LEVEL_CLASSES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "GPT2Tokenizer": (byte_level.GPT2, None),
    "Qwen2Tokenizer": (byte_level.QWEN2, {"type": "NFC"}),
}
_SENTENCEPIECE_CLASSES = ("LlamaTokenizer",)


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files that the definition is read from.

    Raises:
        CheckpointError: There is none that can be read.
    """
    for names in ((_JSON,), (_MODEL,), (_VOCAB, _MERGES)):
        found = [members.member(folder, name) for name in names]
        paths = [path for path in found if path is not None]
        if len(paths) == len(names):
            added = members.member(folder, _ADDED) if names != (_JSON,) else None
            return paths if added is None else [*paths, added]
    others = [name for name in (_VOCAB, _MERGES, *_OTHERS) if members.member(folder, name)]
    others += sorted(path.name for path in folder.glob("tokenizer.model.*"))
    only = f" (only {', '.join(others)}, which is not read)" if others else ""
    raise CheckpointError(f"{folder}: {_JSON} is missing{only}; {_REMEDY}")


def definition(
    folder: pathlib.Path, settings: Mapping[str, Any], vocab_size: int
) -> tuple[dict[str, Any], str]:
    """The content of a `tokenizer.json`, not checked yet, and the file it comes from.

    Args:
        folder: The model folder.
        settings: tokenizer_config.json.
        vocab_size: Of the model: no vocabulary has more tokens.

    Raises:
        CheckpointError: No file can be read, or one is damaged or of a kind that is not known.
    """
    main, *_ = files(folder)
    content = members.read_bytes(main)
    where = str(main)
    if main.name == _JSON:
        return members.parse_object(content, main), where
    if main.name == _VOCAB:
        made = _from_merges(folder, settings, where)
    elif tiktoken_file.is_tiktoken(content):
        made = _from_tiktoken(content, settings, where)
    else:
        made = _from_sentencepiece(content, settings, where)
    if len(made["model"]["vocab"]) > vocab_size:
        raise CheckpointError(
            f"{where}: has {len(made['model']['vocab']):,} tokens, but the model's vocabulary is "
            f"{vocab_size:,}; the files belong to different models"
        )
    made["added_tokens"] = _added_tokens(folder, settings, made)
    return made, where


def _from_merges(folder: pathlib.Path, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = _class(settings)
    if kind not in _BYTE_LEVEL_CLASSES:
        _refuse(where, f"of tokenizer_class {kind!r}", _BYTE_LEVEL_CLASSES)
    steps, normalizer = _BYTE_LEVEL_CLASSES[kind]
    if settings.get("add_prefix_space"):
        _refuse(where, "with add_prefix_space", ("add_prefix_space: false",))
    vocab_path, merges_path, *_ = files(folder)
    vocab = members.parse_object(members.read_bytes(vocab_path), vocab_path)
    if not all(type(index) is int and index >= 0 for index in vocab.values()):
        raise CheckpointError(f"{where}: a token's id is not a whole number from 0")
    merges = []
    text = members.read_bytes(merges_path).decode("utf-8", errors="replace")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or line.startswith("#version"):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise CheckpointError(
                f"{merges_path}: line {number} is not a pair of tokens that make a third"
            )
        merges.append(pair)
    return byte_level.definition(vocab, merges, steps=steps, normalizer=normalizer)


def _from_tiktoken(content: bytes, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Llama 3's; its file does not have the special tokens, and other models cut otherwise."""
    ranks = tiktoken_file.read(content, where)
    is_llama = _class(settings) in ("PreTrainedTokenizer", "LlamaTokenizer")
    if not is_llama or not settings.get("added_tokens_decoder"):
        raise CheckpointError(
            f"{where}: a vocabulary of tiktoken without special tokens; it is read as that of a "
            "Llama 3 where tokenizer_config.json has tokenizer_class PreTrainedTokenizerFast and "
            f"added_tokens_decoder; otherwise {_REMEDY}"
        )
    made = byte_level.definition(
        tiktoken_file.vocabulary(ranks),
        tiktoken_file.merges(ranks),
        steps=byte_level.LLAMA3,
        ignore_merges=True,
    )
    return made | {"post_processor": _bos_in_front(settings, made)}


def _from_sentencepiece(content: bytes, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = _class(settings) if settings.get("tokenizer_class") else _SENTENCEPIECE_CLASSES[0]
    if kind not in _SENTENCEPIECE_CLASSES:
        _refuse(where, f"of tokenizer_class {kind!r}", _SENTENCEPIECE_CLASSES)
    found = sentencepiece_file.read(content, where)
    if found.model != "bpe":
        _refuse(where, f"of model_type {found.model!r}", ("bpe",))
    if len(set(found.pieces)) != len(found.pieces):
        raise CheckpointError(f"{where}: a piece is there twice")
    has_prefix = settings.get("add_prefix_space")
    has_prefix = found.has_prefix if has_prefix is None else has_prefix is True
    values: dict[str, Value] = {
        f"{_PREFIX}scores": [*found.scores],
        f"{_PREFIX}add_space_prefix": has_prefix,
        f"{_PREFIX}remove_extra_whitespaces": found.removes_spaces,
        f"{_PREFIX}precompiled_charsmap": found.has_charsmap,
    }
    metadata = Metadata(values=values, where=where)
    made = gguf_sentencepiece.definition(metadata, found.pieces, found.kinds)
    if settings.get("legacy") is False and has_prefix:
        # Only the text's own beginning gets a space, not what follows a special token.
        made["normalizer"] = None
        made["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first",
            "split": False,
        }
    made["added_tokens"] = [
        tokenizer_json.added_token(index, piece, special=True)
        for index, (piece, kind) in enumerate(zip(found.pieces, found.kinds, strict=True))
        if kind in (_CONTROL, _UNKNOWN)
    ]
    named = {"bos_token": "<s>"} | dict(settings)
    return made | {"post_processor": _bos_in_front(named, made)}


def _added_tokens(
    folder: pathlib.Path, settings: Mapping[str, Any], made: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The added tokens that the other files list, with the flags they have there."""
    tokens = {token["id"]: token for token in made.get("added_tokens", ())}
    special = set(_texts(settings))
    path = members.member(folder, _ADDED)
    listed = {} if path is None else members.parse_object(members.read_bytes(path), path)
    for text, index in listed.items():
        if type(index) is not int or index < 0:
            raise CheckpointError(f"{path}: the id of {text!r} is {index!r}; expected a number")
        tokens[index] = tokenizer_json.added_token(index, text, special=text in special)
    decoder = settings.get("added_tokens_decoder") or {}
    for index, token in decoder.items() if isinstance(decoder, Mapping) else ():
        if (
            isinstance(token, Mapping)
            and isinstance(token.get("content"), str)
            and _IS_ID.fullmatch(index)
        ):
            flags = {
                name: token[name]
                for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
                if isinstance(token.get(name), bool)
            }
            plain = tokenizer_json.added_token(int(index), token["content"], special=False)
            tokens[int(index)] = plain | flags
    return [tokens[index] for index in sorted(tokens)]


def _texts(settings: Mapping[str, Any]) -> list[str]:
    """The special tokens that the settings name."""
    values = [value for key, value in settings.items() if key.endswith("_token")]
    more = settings.get("additional_special_tokens")
    values += more if isinstance(more, list) else []
    contents = [value.get("content") if isinstance(value, Mapping) else value for value in values]
    return [content for content in contents if isinstance(content, str)]


def _bos_in_front(settings: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any] | None:
    """The post-processor of tokenizers that put a beginning-of-sequence token in front."""
    value = settings.get("bos_token")
    bos = value.get("content") if isinstance(value, Mapping) else value
    decoder = settings.get("added_tokens_decoder") or {}
    ids = dict(made["model"]["vocab"])
    for index, token in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(token, Mapping) and isinstance(index, str) and _IS_ID.fullmatch(index):
            ids[str(token.get("content"))] = int(index)
    if not isinstance(bos, str) or bos not in ids:
        return None
    return {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
    }


def _class(settings: Mapping[str, Any]) -> str:
    return str(settings.get("tokenizer_class")).removesuffix("Fast")


def _refuse(where: str, what: str, supported: Any) -> NoReturn:  # noqa: ANN401 - names
    raise CheckpointError(
        f"{where}: a tokenizer {what} is not read without {_JSON}; read are "
        f"{', '.join(supported)}; otherwise {_REMEDY}"
    )
