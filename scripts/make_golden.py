"""Makes the golden fixtures of tests/golden: what others compute with the packaged model.

transformers reads the packaged `.gguf` through its own loader, float32 on the CPU, and so shares
nothing with this package's loader, tokenizer or model. Needs PyTorch, which no test needs:

    pip install torch transformers accelerate gguf pyarrow ml_dtypes safetensors
    python scripts/make_golden.py MODEL.gguf --out tests/golden

Writes greedy.parquet, logits.npz, tokenizer_ids.json and chat_templates.json; beams.json and
logprobs.json by `golden_generation`, for tiny random models too. Prints their SHA-256 for
tests/golden/README.md. Takes about ten minutes on two cores.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import re
import tempfile

import golden_generation
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers

NUM_TOKENS = 32
NUM_TOP = 32

# A smaller gap between the two best logits could be decided by the order of summation.
MIN_GAP = 2e-3

LONG_TEXT = (
    "The lighthouse keeper wrote in his log every evening. On the first day of March the wind "
    "came from the north and the sea was grey; two fishing boats passed before noon, and a third, "
    "the Anna, anchored behind the point to wait for calmer water. On the second day there was "
    "fog, so thick that the lamp burned from dawn on, and the horn sounded every ninety seconds. "
    "On the third day the fog lifted, and the keeper counted seventeen ships on the horizon, more "
    "than he had seen since the summer. He wrote down their flags: six Norwegian, five British, "
    "four Dutch, one Danish, and one that he could not make out. On the fourth day the supply "
    "boat brought flour, lamp oil, three letters and a cat. The cat was black, with one white "
    "paw, and it slept beside the stove until the evening, when it caught its first mouse. The "
    "keeper named it Log, since it had arrived on a day with little else to write about. On the "
    "fifth day a storm broke two panes of the lantern room, and he spent the night holding a "
    "board against the wind while the lamp went on turning behind him. On the sixth day he slept. "
    "On the seventh day he repaired the panes, swept up the glass, fed the cat, answered the "
    "three letters, and wrote: all is well, the light has not failed."
)

RAW_PROMPTS = {
    "one_token": "The",
    "sentence": "The capital of France is",
    "story": "Once upon a time, in a village between two rivers, there lived a",
    "code_python": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "code_c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "json": '{"name": "Alice", "age": 31, "languages": ["French", "German"], "married": ',
    "digits": "1 2 3 4 5 6 7 8 9 10 11 12 13",
    "sum": "12345 + 67890 = ",
    "french": "Il était une fois une princesse qui vivait dans un château près de la forêt. Elle",
    "cjk_emoji": "東京は日本の首都です。🦙 The llama says:",
    "cyrillic": "Москва — столица",
    "spaces": "a  b   c    d\n\n\n\te\n",
    "markdown": "# Shopping list\n\n- apples\n- bread\n- ",
    "long": LONG_TEXT + "\n\nSummary:",
}

CHAT_PROMPTS = {
    "chat_fact": [("user", "What is the capital of Italy?")],
    "chat_sum": [("user", "What is 7 plus 5? Answer with the number only.")],
    "chat_system": [
        ("system", "You are a pirate. Answer in one sentence."),
        ("user", "How is the weather?"),
    ],
    "chat_turns": [
        ("user", "Name a colour."),
        ("assistant", "Blue."),
        ("user", "Name another one."),
    ],
    "chat_long": [("user", "Summarize this in one sentence.\n\n" + LONG_TEXT)],
    "chat_unicode": [("user", "Translate to English: « Où est la bibliothèque ? » 📚")],
}

TOKENIZER_TEXTS = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "double  spaces   and    more",
    "tabs\tand\nnewlines\r\n\n\nmany",
    "It's we're they'll I'd you've I'm don't",
    "IT'S WE'RE THEY'LL",
    "0 1 12 123 1234 3.14159 1,000,000 2026-11-29",
    # No other numerals: SmolLM splits all of them from their space, which transformers' loader of
    # GGUF tokenizers leaves out. It shows where vocabulary entries join the two, as for " ½".
    "x² + y³ = z²",
    "snake_case camelCase kebab-case __init__ a.b.c",
    "if (a != b && c <= d) { return !x ? y++ : --z; }",
    "naïve café Straße Ærøskøbing œuvre",
    "e\u0301 combining, \u00e9 composed",
    "漢字とかなカナ 한국어 中文",
    "שלום עולם مرحبا بالعالم",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 🦙",
    "zero\u200bwidth\u00a0no-break\u2003em\ufeff",
    "control \x00 \x07 \x1b[0m \x7f",
    "https://example.org/path?query=1&other=%20#anchor",
    "<html><body class='a'>&amp;</body></html>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "<|im_end|><|im_end|> <|im_end|>",
    "a<|im_end|>b <repo_name>c<file_sep>",
    "<|im_start> <im_start|> <|im_end| >",
    "\ufdd0\ufdd1\uffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "=" * 100,
    "\n" * 20,
    LONG_TEXT,
]

# Each uses other parts of the template language; written for this file.
TEMPLATES = {
    "whitespace": (
        "{% for message in messages %}\n"
        "  {% if message.role == 'user' %}\n"
        "[{{ message.content }}]\n"
        "  {% else %}\n"
        "({{ message.content | trim }})\n"
        "  {% endif %}\n"
        "{% endfor %}\n"
    ),
    "namespace_and_loop_controls": (
        "{%- set ns = namespace(count=0) -%}\n"
        "{%- for message in messages -%}\n"
        "{%- if message['role'] == 'skip' %}{% continue %}{% endif -%}\n"
        "{%- if ns.count == 3 %}{% break %}{% endif -%}\n"
        "{%- set ns.count = ns.count + 1 -%}\n"
        "{{ ns.count }}:{{ message['content'] }};\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt %}>{% endif %}"
    ),
    "json": (
        "{{ bos_token }}{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
        "{{ messages[0].content | tojson(ensure_ascii=True) }}{{ eos_token }}"
    ),
    "system_in_front": (
        "{% if messages[0]['role'] == 'system' %}"
        "{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
        "{% else %}{% set system = 'none' %}{% set turns = messages %}{% endif %}"
        "{{ bos_token }}<<{{ system }}>>"
        "{% for m in turns %}{{ loop.index0 }}/{{ loop.length }} {{ m['role'] | upper }} "
        "{{ m['content'] }}{{ '' if loop.last else eos_token }}{% endfor %}"
    ),
    "macro_and_tests": (
        "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% if m.name is defined %}({{ m.name }}){% endif %}"
        "{% if 'b' in m.content %}!{% endif %}{% endfor %}"
        "{% if tools is not none %}tools{% endif %}{{ messages | length }}{{ undefined_name }}"
    ),
    "generation_marks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
}

CONVERSATIONS = [
    [("user", "hello")],
    [("system", " be kind "), ("user", "a <b> & 'c' \"d\" é 🦙\n"), ("assistant", " ok ")],
    [
        ("user", "1"),
        ("skip", "2"),
        ("user", "b3"),
        ("assistant", "4"),
        ("user", "5"),
        ("user", "6"),
    ],
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """What the model computes for one prompt.

    Attributes:
        tokens: The greedy tokens.
        prompt_logits: Logits behind every prompt position.
        min_gap: The smallest gap between the two best logits of a step.
    """

    tokens: list[int]
    prompt_logits: np.ndarray
    min_gap: float


@torch.inference_mode()
def generate(model: transformers.PreTrainedModel, prompt_ids: list[int]) -> Golden:
    """Greedy tokens, end-of-sequence tokens not being an end.

    They are computed by the library's own loop, with a cache, and must be the ones that one pass
    over prompt and completion without a cache finds.
    """
    generated = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
    )
    tokens = generated[0, len(prompt_ids) :].tolist()
    logits = model(torch.tensor([prompt_ids + tokens[:-1]]), use_cache=False).logits[0]
    decisive = logits[len(prompt_ids) - 1 :]
    if len(tokens) != NUM_TOKENS or decisive.argmax(-1).tolist() != tokens:
        raise SystemExit("tokens with and without cache differ")
    best = decisive.topk(2).values
    return Golden(
        tokens=tokens,
        prompt_logits=logits[: len(prompt_ids)].numpy(),
        min_gap=float((best[:, 0] - best[:, 1]).min()),
    )


def prompts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[tuple[str, str, list[int]]]:
    """Name, text and ids of every prompt."""
    texts = dict(RAW_PROMPTS)
    for name, turns in CHAT_PROMPTS.items():
        texts[name] = tokenizer.apply_chat_template(
            as_messages(turns), add_generation_prompt=True, tokenize=False
        )
    return [
        (name, text, tokenizer(text, add_special_tokens=False).input_ids)
        for name, text in texts.items()
    ]


def as_messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Role and content pairs as messages."""
    return [{"role": role, "content": content} for role, content in turns]


def write_greedy(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    out: pathlib.Path,
) -> None:
    """greedy.parquet and logits.npz."""
    rows = []
    full = {}
    for name, text, prompt_ids in prompts(tokenizer):
        golden = generate(model, prompt_ids)
        print(f"{name:14} {len(prompt_ids):4} tokens, gap {golden.min_gap:.4f}")
        if golden.min_gap < MIN_GAP:
            raise SystemExit(f"{name}: a gap of {golden.min_gap} is too small for an exact fixture")
        last = golden.prompt_logits[-1]
        top = np.argsort(-last, kind="stable")[:NUM_TOP]
        rows.append(
            {
                "name": name,
                "prompt": text,
                "prompt_ids": prompt_ids,
                "tokens": golden.tokens,
                "text": tokenizer.decode(golden.tokens, clean_up_tokenization_spaces=False),
                "top_ids": top.tolist(),
                "top_logits": last[top].tolist(),
                "min_gap": golden.min_gap,
            }
        )
        if name in ("code_python", "chat_fact"):
            middle = len(prompt_ids) // 2
            full[f"{name}.positions"] = np.array([middle, len(prompt_ids) - 1], np.int32)
            full[f"{name}.logits"] = golden.prompt_logits[full[f"{name}.positions"]]
    schema = pa.schema(
        [
            ("name", pa.string()),
            ("prompt", pa.string()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("tokens", pa.list_(pa.int32())),
            ("text", pa.string()),
            ("top_ids", pa.list_(pa.int32())),
            ("top_logits", pa.list_(pa.float32())),
            ("min_gap", pa.float32()),
        ]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), out / "greedy.parquet", compression="zstd")
    np.savez_compressed(out / "logits.npz", **full)


def write_tokenizer_ids(tokenizer: transformers.PreTrainedTokenizerBase, out: pathlib.Path) -> None:
    """tokenizer_ids.json."""
    cases = [
        {"text": text, "ids": tokenizer(text, add_special_tokens=False).input_ids}
        for text in TOKENIZER_TEXTS
    ]
    write_json(out / "tokenizer_ids.json", cases)


def write_chat_templates(
    tokenizer: transformers.PreTrainedTokenizerBase, out: pathlib.Path
) -> None:
    """chat_templates.json."""
    cases = [
        {
            "name": name,
            "template": template,
            "messages": as_messages(turns),
            "add_generation_prompt": bool(number % 2),
            "text": tokenizer.apply_chat_template(
                as_messages(turns),
                chat_template=template,
                add_generation_prompt=bool(number % 2),
                tokenize=False,
            ),
        }
        for name, template in {**TEMPLATES, "packaged": tokenizer.chat_template}.items()
        for number, turns in enumerate(CONVERSATIONS)
    ]
    write_json(out / "chat_templates.json", cases)


def write_json(path: pathlib.Path, cases: list[dict]) -> None:
    """The cases as JSON that is plain ASCII, one indented object each, token ids on one line."""
    text = json.dumps(cases, indent=1)
    flat = re.sub(r"\[\s+((?:\d+,?\s+)+)\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(flat + "\n")


def main() -> None:
    """Parses the arguments and writes all files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path, help="the packaged .gguf")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="tests/golden")
    options = parser.parse_args()
    # Tiny models gain nothing by more.
    torch.set_num_threads(1)
    folder, name = str(options.model.parent), options.model.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    named = {name: prompt_ids for name, _, prompt_ids in prompts(tokenizer)}
    with tempfile.TemporaryDirectory() as scratch:
        golden_generation.write_generations(model, named, options.out, pathlib.Path(scratch))
    # From here on end-of-sequence tokens end nothing.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    write_tokenizer_ids(tokenizer, options.out)
    write_chat_templates(tokenizer, options.out)
    write_greedy(model, tokenizer, options.out)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for path in sorted(options.out.iterdir()):
        if path.name != "README.md":
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            print(f"{path.name:22} {path.stat().st_size:8} {digest}")


if __name__ == "__main__":
    main()
