"""A tokenizer as files of a folder in Hugging Face layout, for models that have it otherwise."""

import json

from jaxpaged.model import tokenizer_json
from jaxpaged.model.tokenizer import Tokenizer


def contents(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Name to content of the files that `folder_tokenizer` reads to an equal tokenizer."""
    settings: dict[str, object] = {"add_bos_token": tokenizer.adds_bos}
    literals = {
        token_id: text for text, token_id in tokenizer_json.vocabulary(tokenizer.definition).items()
    }
    if tokenizer.bos_id is not None:
        settings["bos_token"] = literals[tokenizer.bos_id]
    generation: dict[str, object] = {"eos_token_id": sorted(tokenizer.eos_ids)}
    files: dict[str, object] = {
        "tokenizer.json": tokenizer.definition,
        "tokenizer_config.json": settings,
        "generation_config.json": generation,
    }
    texts: dict[str, str] = {}
    if tokenizer.chat_template is not None:
        settings |= {k: v for k, v in tokenizer.chat_template.variables.items() if v}
        texts["chat_template.jinja"] = tokenizer.chat_template.source
    texts |= {name: json.dumps(value, ensure_ascii=False) for name, value in files.items()}
    return {name: text.encode("utf-8", errors="surrogatepass") for name, text in texts.items()}


def differences(one: Tokenizer, other: Tokenizer) -> list[str]:
    """In what two tokenizers differ."""
    template, its = one.chat_template, other.chat_template
    pairs: dict[str, tuple[object, object]] = {
        "beginning-of-sequence token": (one.bos_id, other.bos_id),
        "end-of-sequence tokens": (one.eos_ids, other.eos_ids),
        "token in front": (one.adds_bos, other.adds_bos),
        "control tokens": (one.special_tokens, other.special_tokens),
        "definition": (one.definition, other.definition),
        "chat template": (template and template.source, its and its.source),
        "names in the chat template": (template and template.variables, its and its.variables),
    }
    return [name for name, (left, right) in pairs.items() if left != right]
