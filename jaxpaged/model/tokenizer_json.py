"""The content of a `tokenizer.json`: changes made before the library reads it.

A definition is the parsed JSON object, and one that `checked` has returned everywhere else; the
functions return a new one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxpaged.errors import CheckpointError

Definition = Mapping[str, Any]


def checked(definition: Definition, where: str) -> Definition:
    """The definition itself, once the parts that are read here are known to be well-formed.

    Raises:
        CheckpointError: They are not; the message names the part.
    """
    model = definition.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("vocab"), Mapping | list):
        raise CheckpointError(f"{where}: model with a vocab is missing; not a tokenizer.json")
    if not _is_vocabulary(model["vocab"]):
        raise CheckpointError(f"{where}: vocab of model is malformed")
    added = definition.get("added_tokens") or []
    if not isinstance(added, list) or not all(map(_is_added_token, added)):
        raise CheckpointError(f"{where}: added_tokens is malformed")
    checked = {**definition, "added_tokens": added}
    try:
        first = leading_id(checked)
    except (AttributeError, LookupError, TypeError):
        raise CheckpointError(f"{where}: post_processor is malformed") from None
    if first is not None and (type(first) is not int or first not in vocabulary(checked).values()):
        raise CheckpointError(
            f"{where}: its post_processor puts token {first!r} in front, which there is not"
        )
    return checked


def special_tokens(definition: Definition) -> dict[str, int]:
    """Literal to id of every control token."""
    return {
        token["content"]: token["id"] for token in definition["added_tokens"] if token["special"]
    }


def added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    """An entry of `added_tokens` that is found anywhere in a text and takes no spaces along."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def with_control_tokens(
    definition: Definition, *, named: Iterable[int], others: Iterable[int]
) -> Definition:
    """The definition in which more tokens are control tokens.

    Args:
        definition: Files sometimes list an end-of-sequence token as an ordinary added token, or
            only in the vocabulary.
        named: Tokens that the tokenizer's settings give a part; become control tokens.
        others: Become control tokens only if they are added tokens. One that is only in the
            vocabulary stays what text is made of, even when it ends a sequence.
    """
    by_id = {token["id"]: dict(token) for token in definition["added_tokens"]}
    wanted = set(named)
    missing = wanted - by_id.keys()
    for text, index in _model_vocabulary(definition).items() if missing else ():
        if index in missing:
            by_id[index] = added_token(index, text, special=True)
    for index in wanted.union(others) & by_id.keys():
        by_id[index]["special"] = True
    return {**definition, "added_tokens": [by_id[index] for index in sorted(by_id)]}


def renamed(definition: Definition, names: Mapping[str, str]) -> dict[str, Any]:
    """The definition with the tokens in `names` renamed, under the ids they had."""
    model = dict(definition["model"])
    tokens = model["vocab"]
    if isinstance(tokens, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in tokens]
    else:
        model["vocab"] = {names.get(token, token): index for token, index in tokens.items()}
    if "merges" in model:
        # What is merged into a renamed token could not be found any more.
        merges = (
            merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]
        )
        model["merges"] = [
            [left, right]
            for left, right in merges
            if not names.keys() & {left, right, left + right}
        ]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in definition["added_tokens"]
    ]
    return {**definition, "added_tokens": added, "model": model, "post_processor": None}


def vocabulary(definition: Definition) -> dict[str, int]:
    """Token to id, added tokens included."""
    return _model_vocabulary(definition) | {
        token["content"]: token["id"] for token in definition["added_tokens"]
    }


def leading_id(definition: Definition) -> int | None:
    """The token that the post-processor puts in front of a text; None when there is none."""
    processor = definition.get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        first = next(iter(step.get("single") or ()), {})
        if step.get("type") == "TemplateProcessing" and "SpecialToken" in first:
            token = step["special_tokens"][first["SpecialToken"]["id"]]
            return token["ids"][0]
    return None


def makes_literals(definition: Definition) -> bool:
    """Whether the normalizer can make the literal of a control token of another text.

    Those of sentencepiece put spaces in front and another character in their place, no more.
    """
    normalizer = definition.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    makes = any(
        step.get("type") not in (None, "Prepend") and not _is_of_spaces(step) for step in steps
    )
    return makes and any(
        token["special"] and token.get("normalized") for token in definition["added_tokens"]
    )


def _is_of_spaces(step: Mapping[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("pattern") == {"String": " "}


def _is_vocabulary(tokens: Mapping[str, Any] | list[Any]) -> bool:
    if isinstance(tokens, Mapping):
        return all(type(index) is int for index in tokens.values())
    return all(
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
        for entry in tokens
    )


def _is_added_token(token: object) -> bool:
    return (
        isinstance(token, Mapping)
        and type(token.get("id")) is int
        and isinstance(token.get("content"), str)
        and isinstance(token.get("special"), bool)
    )


def _model_vocabulary(definition: Definition) -> dict[str, int]:
    tokens = definition["model"]["vocab"]
    if isinstance(tokens, list):
        return {token: index for index, (token, _) in enumerate(tokens)}
    return tokens
