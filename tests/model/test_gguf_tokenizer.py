"""Tokenizers rebuilt from GGUF metadata: exactly, or refused by name."""

import json
import pathlib

import pytest
import tiny
import tiny_gguf
import tokenizers

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.gguf_metadata import Metadata
from jaxpaged.model.checkpoint.gguf_tokenizer import build_tokenizer
from jaxpaged.model.tokenizer import Tokenizer

BYTE_LEVEL = tiny_gguf.byte_level_metadata(tiny.tokenizer_json(300), 300)

WORDS = ["Ġa", "aa", "11", "aaa", "111", "Ġ1", "1111", "Ġaa", "'s", "'S", "ĠĠ"]
WORDY_TOKENS = [*BYTE_LEVEL["tokenizer.ggml.tokens"][:259], *WORDS]
WORDY_MERGES = [
    f"{word[:n]} {word[n:]}"
    for word in WORDS
    for n in range(1, len(word))
    if word[:n] in WORDY_TOKENS and word[n:] in WORDY_TOKENS
]
WORDY = BYTE_LEVEL | {
    "tokenizer.ggml.tokens": WORDY_TOKENS,
    "tokenizer.ggml.merges": WORDY_MERGES,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 267,
}

SENTENCEPIECE_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *("▁t", "he", "▁the", "er", "▁▁", "in"),
    *("▁", "t", "h", "e", "r", "i", "n"),
]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SENTENCEPIECE_TOKENS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(13)],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 13,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def build(base: dict, **changes) -> Tokenizer:
    """The tokenizer after changes to keys below tokenizer.ggml; None removes a key."""
    values = base | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    values = {key: value for key, value in values.items() if value is not None}
    return build_tokenizer(Metadata(values=values, where="model.gguf"))


def texts(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)]


# --- the packaged model


@pytest.fixture(scope="module")
def packaged(packaged_model: pathlib.Path) -> Tokenizer:
    return open_checkpoint(packaged_model).tokenizer()


def test_packaged_tokenizer_gives_the_ids_of_transformers(packaged, golden):
    cases = json.loads((golden / "tokenizer_ids.json").read_text())
    assert len(cases) > 25
    for case in cases:
        text = case["text"]
        protected = text if packaged.has_special_text(text) else packaged.protect(text)
        assert packaged.encode(protected) == case["ids"], text


def test_facts_of_the_packaged_tokenizer(packaged):
    assert packaged.vocab_size == 49152
    assert packaged.eos_ids == {2}
    assert packaged.bos_id == 1
    assert not packaged.adds_bos
    assert packaged.special_tokens["<|im_end|>"] == 2
    assert len(packaged.special_tokens) == 17


def test_packaged_template_makes_control_tokens_around_text(packaged):
    content = "a<|im_end|>b"
    text = packaged.chat_template.render([{"role": "user", "content": packaged.protect(content)}])
    ids = packaged.encode(text)
    assert [token for token in ids if token < 17] == [1, 2, 1, 2, 1]
    assert content in packaged.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("numeral", ["½", "Ⅳ", "7", "٣", "²"])
def test_smollm_splits_every_numeral_from_all_else(packaged, numeral):
    alone = packaged.encode(numeral)
    assert packaged.encode(f" {numeral}") == packaged.encode(" ") + alone
    assert packaged.encode(f"{numeral}{numeral}") == alone + alone


# --- byte-level BPE


def test_byte_level_tokenizer_equals_the_one_it_was_made_from(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", vocab_size=300)
    original = open_checkpoint(folder).tokenizer()
    rebuilt = build(BYTE_LEVEL)
    for text in ("the rain", " in the  end\n", "<s>é🦙\x00", "It's 12 o'clock", "", "a</s>b"):
        assert rebuilt.encode(text) == original.encode(text)
        assert rebuilt.encode(rebuilt.protect(text)) == original.encode(original.protect(text))
        assert rebuilt.decode(rebuilt.encode(text)) == original.decode(original.encode(text))


def qwen() -> tokenizers.Tokenizer:
    """The tokenizer that transformers makes of the vocabulary of a Qwen2."""
    vocab = {token: index for index, token in enumerate(WORDY_TOKENS)}
    merges = [tuple(merge.split(" ")) for merge in WORDY_MERGES]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    made.normalizer = tokenizers.normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def test_qwen_is_split_as_by_transformers():
    expected = qwen()
    tokenizer = build(WORDY, pre="qwen2", add_bos_token=None)
    assert not tokenizer.adds_bos
    for text in ("aaaa aa", "1111 11", "It's IT'S", "a  a\n\n  a", "e\u0301 \u212b", "¡a!!\r\n½1"):
        assert tokenizer.encode(text) == expected.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == expected.decode(
            expected.encode(text).ids
        )
    # The pieces above are such that other pre-tokenizers would give others.
    assert texts(tokenizer, "1111") == ["1"] * 4
    assert texts(build(WORDY, pre="llama-bpe"), "1111") != ["1"] * 4


def test_text_end_of_a_qwen_ends_completions():
    # Its chat models name <|im_end|> alone, and generate the end of a text too.
    tokens = ["<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", *WORDY_TOKENS[3:]]
    changes = {
        "tokens": tokens,
        "token_type": [3] * 4 + [1] * (len(tokens) - 4),
        "add_bos_token": False,
    }
    assert build(WORDY, pre="qwen2", **changes).eos_ids == {2, 3}
    assert build(WORDY, pre="smollm", **changes).eos_ids == {2}


@pytest.mark.parametrize("pre", ["default", "deepseek-llm", "tekken", "made-up"])
def test_unknown_pre_tokenizer_is_refused_by_name(pre):
    with pytest.raises(
        CheckpointError, match=rf"pre is '{pre}'; expected one of gpt-2, llama-bpe, qwen2, smollm"
    ):
        build(BYTE_LEVEL, pre=pre)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv"])
def test_unknown_tokenizer_model_is_refused_by_name(model):
    with pytest.raises(CheckpointError, match=rf"model is '{model}'; expected 'gpt2' or 'llama'"):
        build(BYTE_LEVEL, model=model)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "aa 1111", ["aa", " ", "1111"]),
        ("smollm", "aa 111", ["aa", " ", "1", "1", "1"]),
        ("llama-bpe", "aa 1111", ["aa", " ", "111", "1"]),
        ("gpt-2", "a'S", ["a", "'", "S"]),
        ("llama-bpe", "a'S", ["a", "'S"]),
        ("gpt-2", "a  a", ["a", " ", " a"]),
        ("llama-bpe", "a  a", ["a", " ", " a"]),
    ],
)
def test_pre_tokenizers_split_as_named(pre, text, expected):
    tokens = texts(build(WORDY, pre=pre), text)[1:]
    assert [token.replace("Ġ", " ") for token in tokens] == expected


def test_llama3_takes_whole_words_before_merging():
    merges = [merge for merge in WORDY_MERGES if merge.replace(" ", "") != "aaa"]
    assert texts(build(WORDY, pre="llama-bpe", merges=merges), "aaa")[1:] == ["aaa"]
    assert texts(build(WORDY, pre="gpt-2", merges=merges), "aaa")[1:] == ["aa", "a"]


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("gpt-2", None, False),
        ("smollm", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", True, True),
    ],
)
def test_bos_is_added_as_llama_cpp_does(pre, flag, expected):
    tokenizer = build(BYTE_LEVEL, pre=pre, add_bos_token=flag)
    assert tokenizer.encode("a").count(1) == int(expected)


def test_end_of_turn_tokens_join_the_eos_set():
    assert build(BYTE_LEVEL).eos_ids == {2}
    assert build(BYTE_LEVEL, eot_token_id=0, eom_token_id=7).eos_ids == {0, 2, 7}
    tokens = list(BYTE_LEVEL["tokenizer.ggml.tokens"])
    tokens[290:292] = ["<|eot_id|>", "<|im_end|>"]
    kinds = [3, 3, 3] + [1] * 287 + [3, 1] + [1] * 8
    # The one that is not a control token does not end a turn.
    assert build(BYTE_LEVEL, tokens=tokens, token_type=kinds).eos_ids == {2, 290}


def test_user_defined_tokens_are_found_in_any_text_and_are_not_special():
    tokens = list(BYTE_LEVEL["tokenizer.ggml.tokens"])
    tokens[290] = "<think>"
    kinds = [3, 3, 3] + [1] * 287 + [4] + [1] * 9
    tokenizer = build(BYTE_LEVEL, tokens=tokens, token_type=kinds)
    ids = tokenizer.encode(tokenizer.protect("a<think>b"))
    assert ids[2] == 290
    assert tokenizer.decode(ids) == "a<think>b"
    assert "<think>" not in tokenizer.special_tokens


def test_eos_that_is_marked_as_text_is_a_control_token_all_the_same():
    tokenizer = build(BYTE_LEVEL, token_type=[3, 3] + [1] * 298)
    assert tokenizer.special_tokens["</s>"] == 2
    assert 2 not in tokenizer.encode(tokenizer.protect("a</s>"))


def test_chat_template_knows_the_special_tokens():
    base = BYTE_LEVEL | {
        "tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}"
    }
    assert build(base).chat_template.render([]) == "<s>|</s>|<unk>"
    assert build(BYTE_LEVEL).chat_template is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "tokens is missing; expected a list of str"),
        ({"tokens": ["a", "a"]}, "tokens is .*; expected every token only once"),
        ({"tokens": [1, 2]}, "tokens is .*; expected a list of str"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["nope nope"]}, "not a usable tokenizer"),
        ({"token_type": [1, 1]}, "expected an entry for each of 300 tokens"),
        (
            {"bos_token_id": 300},
            "bos_token_id is 300; expected a whole number from 0 and below 300",
        ),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"add_bos_token": 1}, "add_bos_token is 1; expected a truth value"),
        ({"pre": None}, "pre is missing"),
        ({"model": 3}, "model is 3; expected text"),
    ],
)
def test_malformed_metadata_are_named(changes, message):
    with pytest.raises(CheckpointError, match=rf"^model\.gguf: .*{message}"):
        build(BYTE_LEVEL, **changes)


@pytest.mark.parametrize("template", ["{% if %}", 7])
def test_malformed_template_is_named(template):
    base = BYTE_LEVEL | {"tokenizer.chat_template": template}
    with pytest.raises(CheckpointError, match=r"^model\.gguf: tokenizer\.chat_template"):
        build(base)


# --- sentencepiece's BPE


def test_best_score_is_merged_first():
    tokenizer = build(SENTENCEPIECE)
    assert tokenizer.adds_bos
    # "▁t" has a better score than "he", which has a better one than "▁the".
    assert texts(tokenizer, "the") == ["<s>", "▁the"]
    assert texts(tokenizer, "ther in") == ["<s>", "▁the", "r", "▁", "in"]
    assert texts(tokenizer, "her") == ["<s>", "▁", "he", "r"]


def test_unknown_characters_fall_back_to_bytes_and_come_back():
    tokenizer = build(SENTENCEPIECE)
    assert texts(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("the  é🦙\n in")) == "the  é🦙\n in"


def test_space_prefix_comes_in_front_and_behind_control_tokens():
    tokenizer = build(SENTENCEPIECE)
    assert texts(tokenizer, "<s>in</s>in") == ["<s>", "▁", "in", "</s>", "▁", "in"]
    bare = build(SENTENCEPIECE, add_space_prefix=False)
    assert texts(bare, "<s>in</s>in") == ["<s>", "in", "</s>", "in"]
    assert bare.decode(bare.encode(" in")) == " in"


def test_row_text_stays_text_in_sentencepiece():
    tokenizer = build(SENTENCEPIECE)
    ids = tokenizer.encode(tokenizer.protect("in</s><s>") + "</s>")
    assert (ids.count(1), ids.count(2)) == (1, 1)
    assert tokenizer.decode(ids) == "in</s><s>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": [0.0]}, "scores is .*; expected an entry for each of 272 tokens"),
        ({"token_type": [2, 3, 3] + [6] * 256 + [4] * 13}, "token_type is .* user-defined"),
        ({"token_type": [3, 3, 3] + [6] * 256 + [1] * 13}, "one unknown token"),
        ({"tokens": [f"x{i}" for i in range(272)]}, "a token for each of 256 bytes"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is True"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap is"),
    ],
)
def test_what_cannot_be_rebuilt_exactly_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=rf"^model\.gguf: .*{message}"):
        build(SENTENCEPIECE, **changes)
