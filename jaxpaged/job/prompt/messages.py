"""A cell that holds a chat, in any spelling, as a list of messages.

A list of structs, JSON text of the same, and a list made in Python give the same messages, so that
their prompts are the same. Knows nothing of templates and tokens.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxpaged.job.prompt.row_fault import RowFault

_REQUIRED = ("role", "content")


def parse(cell: object) -> list[dict[str, object]]:
    """The messages of a cell, each with `role` and `content` as text.

    Other fields are kept; one that is null counts as absent, because a list of structs cannot
    leave a field out.

    Raises:
        RowFault: `null_prompt` for a null chat, message or content; `empty_prompt` for no
            messages; `bad_type` for anything that is not a chat.
    """
    if isinstance(cell, str):
        cell = _from_json(cell)
    if cell is None:
        raise RowFault("null_prompt", "the chat is null")
    if not isinstance(cell, list):
        _refuse(f"expected a list of messages, found {_kind(cell)}")
    if not cell:
        raise RowFault("empty_prompt", "the chat has no messages")
    return [_message(message, number) for number, message in enumerate(cell, start=1)]


def merge_system(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat without its leading system messages, which begin its first user message instead.

    A blank line lies between. Without a user message the chat stays as it is.
    """
    chat = [dict(message) for message in chat]
    num_system = 0
    while num_system < len(chat) and chat[num_system]["role"] == "system":
        num_system += 1
    rest = chat[num_system:]
    user = next((message for message in rest if message["role"] == "user"), None)
    if user is None:
        return chat
    texts = [message["content"] for message in (*chat[:num_system], user)]
    user["content"] = "\n\n".join(text for text in texts if text)
    return rest


def _from_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        _refuse(f"the chat is text but not JSON{place}")


def _message(message: object, number: int) -> dict[str, object]:
    if message is None:
        raise RowFault("null_prompt", f"message {number} is null")
    if not isinstance(message, dict):
        _refuse(f"message {number}: expected role and content, found {_kind(message)}")
    if message.get("role") is None:
        _refuse(f"message {number} has no role")
    if message.get("content") is None:
        raise RowFault("null_prompt", f"the content of message {number} is null")
    for key in _REQUIRED:
        if not isinstance(message[key], str):
            _refuse(f"{key} of message {number}: expected text, found {_kind(message[key])}")
    return {key: value for key, value in message.items() if value is not None}


def _refuse(reason: str) -> NoReturn:
    raise RowFault("bad_type", reason)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "another type")
