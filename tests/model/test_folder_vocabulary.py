"""Tokenizers of folders without a tokenizer.json, beside the same ones with it."""

import base64
import itertools
import json
import pathlib
import struct

import pytest
import tiny
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxpaged.errors import CheckpointError
from jaxpaged.model.byte_characters import BYTES
from jaxpaged.model.checkpoint import byte_level, open_checkpoint, sentencepiece_file, tiktoken_file
from jaxpaged.model.tokenizer import Tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog; 12345 dogs don't care.",
    "They're here, aren't they? I'll say: naïve café, 漢字 and 🦙🦙.",
    "  indented\n\n\tand tabbed  text   with   spaces \n",
    "the rain in Spain stays mainly in the plain, the rain the rain",
]
TEXTS = [*LINES, "", " ", "a", " the", "the  the", "2024-11-30", "don'T DON'T", "x\r\ny", "ß🦙 漢"]


def write_model(folder: pathlib.Path, vocab_size: int = 600, **settings) -> pathlib.Path:
    """A tiny model with no tokenizer but for its settings."""
    tiny.write_tiny_llama(folder, vocab_size=vocab_size)
    (folder / "tokenizer.json").unlink()
    tiny.write_json(folder / "tokenizer_config.json", settings)
    return folder


def opened(folder: pathlib.Path) -> Tokenizer:
    return open_checkpoint(folder).tokenizer()


def trained(pre_tokenizer: object, normalizer: object = None) -> tokenizers.Tokenizer:
    """A byte-level BPE trained on the lines."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(LINES * 3, trainer)
    return made


def cutter(steps: dict) -> pre_tokenizers.PreTokenizer:
    """The library's object for the JSON of a pre-tokenizer."""
    blank = json.loads(tokenizers.Tokenizer(models.BPE()).to_str()) | {"pre_tokenizer": steps}
    return tokenizers.Tokenizer.from_str(json.dumps(blank)).pre_tokenizer


# --- vocab.json and merges.txt


@pytest.mark.parametrize(
    ("kind", "steps", "normalizer"),
    [
        ("GPT2Tokenizer", byte_level.GPT2, None),
        ("GPT2TokenizerFast", byte_level.GPT2, None),
        ("Qwen2Tokenizer", byte_level.QWEN2, normalizers.NFC()),
    ],
)
def test_vocab_and_merges_give_the_tokens_of_the_tokenizer_they_are_from(
    tmp_path, kind, steps, normalizer
):
    known = trained(cutter(steps), normalizer)
    folder = write_model(tmp_path / "m", tokenizer_class=kind, eos_token="<|end|>")
    known.model.save(str(folder))
    end = len(known.get_vocab())
    tiny.write_json(folder / "added_tokens.json", {"<|end|>": end})

    found = opened(folder)

    for text in [*TEXTS, "cafe\u0301"]:
        assert found.encode(text) == known.encode(text).ids, text
        assert found.decode(found.encode(text)) == known.decode(known.encode(text).ids)
    assert found.encode("a<|end|>b")[1] == end
    assert found.eos_ids >= {end}
    assert found.special_tokens == {"<|end|>": end}
    assert not found.adds_bos


def test_added_tokens_keep_the_flags_they_are_listed_with(tmp_path):
    known = trained(cutter(byte_level.QWEN2))
    end = len(known.get_vocab())
    tokens = {
        str(end): {"content": "<|im_end|>", "special": True},
        str(end + 1): {"content": "<think>", "special": False, "lstrip": False},
    }
    folder = write_model(
        tmp_path / "m", tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=tokens
    )
    known.model.save(str(folder))

    found = opened(folder)

    assert found.special_tokens == {"<|im_end|>": end}
    assert found.encode("a<think>b<|im_end|>")[1::2] == [end + 1, end]
    assert found.decode([end + 1, end]) == "<think>"


def test_added_tokens_with_a_gap_before_them_are_refused(tmp_path):
    folder = write_model(tmp_path / "m", tokenizer_class="GPT2Tokenizer")
    trained(cutter(byte_level.GPT2)).model.save(str(folder))
    tiny.write_json(folder / "added_tokens.json", {"<|end|>": 590})
    with pytest.raises(CheckpointError, match=r"token '<\|end\|>' has id 590, .* would give it"):
        opened(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_class": "CodeGenTokenizer"}, "tokenizer_class 'CodeGenTokenizer' is not read"),
        ({}, "tokenizer_class 'None' is not read without tokenizer.json; read are GPT2Tokenizer"),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "add_prefix_space"),
    ],
)
def test_other_kinds_of_vocab_and_merges_are_refused_by_name(tmp_path, settings, message):
    folder = write_model(tmp_path / "m", **settings)
    trained(cutter(byte_level.GPT2)).model.save(str(folder))
    with pytest.raises(CheckpointError, match=message):
        opened(folder)


def test_damaged_merges_are_named(tmp_path):
    folder = write_model(tmp_path / "m", tokenizer_class="GPT2Tokenizer")
    trained(cutter(byte_level.GPT2)).model.save(str(folder))
    first = (folder / "merges.txt").read_text().splitlines()[1]
    (folder / "merges.txt").write_text(f"#version: 0.2\n{first}\nq x\n")
    with pytest.raises(CheckpointError, match=r"merges\.txt: line 3 is not a pair of tokens"):
        opened(folder)


# --- sentencepiece


def varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def field(number: int, value: bytes | int | float) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece(pieces: list[tuple[str, float, int]], *, model: int = 2, **changes) -> bytes:
    """A sentencepiece model as its library writes it."""
    parts = [
        field(1, field(1, text.encode()) + field(2, score) + field(3, kind))
        for text, score, kind in pieces
    ]
    settings = {3: 1, 4: 0} | changes.pop("normalizer", {})
    normalizer = b"".join(field(number, value) for number, value in settings.items())
    trainer = field(3, model) + field(35, 1)
    return b"".join([*parts, field(2, trainer), field(3, field(1, b"identity") + normalizer)])


def llama_pieces() -> list[tuple[str, float, int]]:
    """Pieces as of Llama 2: control tokens, bytes, then words by falling score."""
    words = ["▁t", "he", "▁the", "in", "ra", "rain", "▁rain", "▁a", "▁s", "▁▁", "st", "ay"]
    letters = ["▁", *"etaoinshrdlucmpywgfbvk,.?!'"]
    scored = [(text, -float(rank), 1) for rank, text in enumerate([*words, *letters])]
    special = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    return [*special, *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)), *scored]


def joined(text: str, pieces: list[tuple[str, float, int]], prefix: str = "▁") -> list[int]:
    """Sentencepiece's BPE, the dull way: the best union of neighbours first, leftmost of equals."""
    ids = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    parts = list(prefix + text.replace(" ", "▁")) if text else []
    while True:
        unions = [
            (-pieces[ids[a + b]][1], at)
            for at, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ids and pieces[ids[a + b]][2] == 1
        ]
        if not unions:
            break
        _, at = min(unions)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [
        index
        for part in parts
        for index in (
            [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        )
    ]


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "LlamaTokenizer", "legacy": False}])
def test_a_sentencepiece_model_gives_sentencepiece_s_tokens(tmp_path, settings):
    folder = write_model(tmp_path / "m", **settings)
    pieces = llama_pieces()
    (folder / "tokenizer.model").write_bytes(sentencepiece(pieces))

    found = opened(folder)

    for text in [*TEXTS, "the rain stays in the rain", "▁the"]:
        # As in transformers, a text that begins with a space gets no other one.
        prefix = "" if settings and text[:1] in (" ", "▁") else "▁"
        assert found.encode(text) == [1, *joined(text, pieces, prefix)], text
    assert found.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert (found.bos_id, found.adds_bos) == (1, True)
    assert found.decode(found.encode("the rain 🦙")) == "the rain 🦙"


def test_legacy_decides_about_the_space_behind_a_special_token(tmp_path):
    expected = {True: "▁the", False: "t"}
    for legacy, first in expected.items():
        folder = write_model(tmp_path / str(legacy), legacy=legacy)
        (folder / "tokenizer.model").write_bytes(sentencepiece(llama_pieces()))
        found = opened(folder)
        assert found.token_text(found.encode("a</s>the")[3]) == first


def test_no_space_in_front_where_none_is_wanted(tmp_path):
    folder = write_model(tmp_path / "m", add_prefix_space=False)
    (folder / "tokenizer.model").write_bytes(sentencepiece(llama_pieces()))
    assert opened(folder).token_text(opened(folder).encode("the")[1]) == "t"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (sentencepiece(llama_pieces(), model=1), "model_type 'unigram' is not read"),
        (sentencepiece(llama_pieces(), normalizer={4: 1}), "remove_extra_whitespaces"),
        (sentencepiece(llama_pieces(), normalizer={2: b"x"}), "precompiled_charsmap"),
        (sentencepiece([*llama_pieces(), ("<mask>", 0.0, 4)]), "user-defined"),
        (sentencepiece([*llama_pieces(), ("the", 0.0, 1), ("the", 0.0, 1)]), "twice"),
        (sentencepiece([*llama_pieces(), ("a" * 2000, 0.0, 1)]), "at most 1024 characters"),
        (sentencepiece(llama_pieces())[:-3], "not a sentencepiece model"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "longer than the file"),
        (b"\xff" * 20, "a number that does not end"),
        (b"\x0a\x04\x0a\x02\xff\xfe", "not UTF-8"),
        (b"\x0b", "wire type 3"),
        (b"", "no pieces"),
    ],
)
def test_other_and_damaged_sentencepiece_models_are_refused_by_name(tmp_path, content, message):
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        opened(folder)


def test_every_cut_of_a_sentencepiece_model_is_an_error_or_a_model():
    content = sentencepiece(llama_pieces()[:270])
    for end in range(0, len(content), 7):
        assert _read_or_refused(content[:end])


def _read_or_refused(content: bytes) -> bool:
    try:
        return bool(sentencepiece_file.read(content, "f").pieces)
    except CheckpointError as error:
        return str(error).startswith("f: not a sentencepiece model")


# --- tiktoken


def tiktoken_lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def llama3(tmp_path: pathlib.Path) -> tuple[pathlib.Path, dict[bytes, int]]:
    """A folder as of Llama 3 with a small vocabulary, and that vocabulary."""
    known = trained(cutter(byte_level.LLAMA3))
    ordered = sorted(known.get_vocab().items(), key=lambda item: item[1])
    ranks = {bytes(BYTES[c] for c in token): rank for rank, (token, _) in enumerate(ordered)}
    tokens = {
        str(len(ranks)): {"content": "<|begin_of_text|>", "special": True},
        str(len(ranks) + 1): {"content": "<|eot_id|>", "special": True},
    }
    folder = write_model(
        tmp_path / "m",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        added_tokens_decoder=tokens,
    )
    (folder / "tokenizer.model").write_bytes(tiktoken_lines(ranks))
    return folder, ranks


def lowest_first(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's BPE, the dull way: the union of neighbours with the lowest rank first."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        unions = [
            (ranks[a + b], at)
            for at, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ranks
        ]
        if not unions:
            return [ranks[part] for part in parts]
        _, at = min(unions)
        parts[at : at + 2] = [b"".join(parts[at : at + 2])]


def test_a_tiktoken_file_gives_tiktoken_s_tokens(tmp_path):
    folder, ranks = llama3(tmp_path)

    found = opened(folder)

    cut = cutter(byte_level.LLAMA3)
    for text in TEXTS:
        pieces = [bytes(BYTES[c] for c in piece) for piece, _ in cut.pre_tokenize_str(text)]
        expected = [token for piece in pieces for token in lowest_first(piece, ranks)]
        assert found.encode(text) == [found.bos_id, *expected], text
        assert found.decode(found.encode(text)) == text
    assert found.adds_bos
    assert found.eos_ids >= {len(ranks) + 1}


def test_a_tiktoken_file_without_special_tokens_is_refused(tmp_path):
    folder, _ = llama3(tmp_path)
    tiny.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizer"})
    with pytest.raises(CheckpointError, match=r"vocabulary of tiktoken without special tokens; it"):
        opened(folder)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"AA== 0\nnothing\n", "line 2 is not a token"),
        (b"AA== 0\nAQ== 2\n", "line 2: expected another token"),
        (b"AA== 0\nAA== 1\n", "line 2: expected another token"),
        (b"AA== 0\nA 1\n", "line 2 is not base64"),
        (b"AA== 0\n", "no token for byte 1"),
        (base64.b64encode(b"a" * 2000) + b" 0\n", "at most 1024"),
    ],
)
def test_damaged_tiktoken_files_are_named(lines, message):
    assert tiktoken_file.is_tiktoken(lines) or b"a" * 9 not in lines
    with pytest.raises(CheckpointError, match=message):
        tiktoken_file.read(lines, "f")


# --- whatever else


@pytest.mark.parametrize(
    "name", ["tekken.json", "vocab.txt", "spiece.model", "qwen.tiktoken", "tokenizer.model.v3"]
)
def test_other_files_are_named(tmp_path, name):
    folder = write_model(tmp_path / "m")
    (folder / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"only {name}, which is not read.*save_pretrained"):
        opened(folder)


def test_a_vocabulary_of_another_model_is_refused(tmp_path):
    folder = write_model(tmp_path / "m", vocab_size=272)
    (folder / "tokenizer.model").write_bytes(sentencepiece(llama_pieces()))
    with pytest.raises(CheckpointError, match=r"belong to different models"):
        opened(folder)


def test_tokenizer_json_counts_before_all_others(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m")
    expected = opened(folder).encode("the rain")
    (folder / "tokenizer.model").write_bytes(b"no model at all")
    (folder / "vocab.json").write_text("{")
    assert opened(folder).encode("the rain") == expected


def test_the_fingerprint_is_of_the_files_that_are_read(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.model").write_bytes(sentencepiece(llama_pieces()))
    before = open_checkpoint(folder).fingerprint()
    (folder / "vocab.json").write_text("{}")
    assert open_checkpoint(folder).fingerprint() == before
    (folder / "tokenizer.model").write_bytes(sentencepiece(llama_pieces()[:-1]))
    after = open_checkpoint(folder).fingerprint()
    assert {key for key in before if before[key] != after[key]} == {"tokenizer"}


# --- what the settings say beside the vocabulary


def test_special_tokens_without_a_part_are_control_tokens(tmp_path, caplog):
    folder = tiny.write_tiny_llama(tmp_path / "m", vocab_size=280)
    definition = json.loads((folder / "tokenizer.json").read_text())
    plain = {**definition["added_tokens"][2], "special": False}
    definition["added_tokens"] += [
        plain | {"id": 272, "content": "<tool>"},
        plain | {"id": 273, "content": "<img>"},
    ]
    tiny.write_json(folder / "tokenizer.json", definition)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    listed = settings | {
        "additional_special_tokens": ["<tool>", {"content": "<gone>"}],
        "extra_special_tokens": {"image_token": "<img>"},
    }
    assert opened(folder).special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}

    tiny.write_json(folder / "tokenizer_config.json", listed)
    found = opened(folder)

    assert found.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2, "<tool>": 272, "<img>": 273}
    assert "names '<gone>', which is no token and stays text" in caplog.text
    assert found.chat_templates.compiled("{{ image_token }}").render([]) == "<img>"


def test_a_length_that_somebody_changed_is_told_once(tmp_path, caplog):
    folder = tiny.write_tiny_llama(tmp_path / "m", max_position_embeddings=256)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for limit, is_told in ((256, False), (10**30, False), (300, False), (128, True)):
        caplog.clear()
        tiny.write_json(folder / "tokenizer_config.json", settings | {"model_max_length": limit})
        opened(folder)
        assert caplog.text.count("model_max_length is 128, max_position_embeddings") == is_told


def test_prompts_get_no_end_of_sequence_token(tmp_path, caplog):
    folder = tiny.write_tiny_llama(tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    expected = opened(folder).encode("the")
    tiny.write_json(folder / "tokenizer_config.json", settings | {"add_eos_token": True})
    assert opened(folder).encode("the") == expected
    assert "add_eos_token is true; prompts stay open" in caplog.text
