"""Text, control tokens and the beginning of a sequence."""

import json
import pathlib

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.tokenizer import Tokenizer, TokenizerError

BOS, EOS = tiny.BOS_ID, tiny.EOS_ID

# The digit of one, a sign of both, part of the other, whole ones, and the mark itself.
PIECES = [
    "<s>",
    "</s>",
    "<unk>",
    "<",
    "s",
    ">",
    "/",
    "</",
    "s>",
    " ",
    "\n",
    "é",
    "🦙",
    "▁",
    "\ufdd0",
]

# A shared machine may be slow at any example.
unhurried = settings(deadline=None, max_examples=80)

awkward_text = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)


def with_settings(folder: pathlib.Path, **changes) -> Tokenizer:
    """The folder's tokenizer after changes to tokenizer_config.json; None removes a key."""
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text()) | changes
    tiny.write_json(path, {k: v for k, v in content.items() if v is not None})
    return open_checkpoint(folder).tokenizer()


def edit_definition(folder: pathlib.Path, **changes) -> None:
    path = folder / "tokenizer.json"
    tiny.write_json(path, json.loads(path.read_text()) | changes)


def leading(token_id: object) -> dict[str, object]:
    """A post-processor that puts a token in front."""
    return {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [token_id], "tokens": ["<s>"]}},
    }


def split_at(expression: str) -> dict[str, object]:
    """A pre-tokenizer that cuts where an expression fits."""
    return {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    """A tokenizer of either kind that puts a BOS in front."""
    folder = tiny.write_tiny_llama(
        tmp_path_factory.mktemp("tokenizer") / "m", tokenizer=request.param
    )
    return open_checkpoint(folder).tokenizer()


def read_back(tokenizer: Tokenizer, text: str) -> str:
    """What a lossless round trip gives.

    Sentencepiece-like tokenizers know no difference between a space and their sign for it, and
    one space at the very beginning is not there for them.
    """
    if tokenizer.token_text(259) != "▁":
        return text
    return text.replace("▁", " ").removeprefix(" ")


def plain(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of everything behind the BOS."""
    assert ids[0] == BOS
    return tokenizer.decode(ids[1:], skip_special_tokens=False)


def test_facts_of_the_tiny_tokenizers(tokenizer):
    assert tokenizer.bos_id == BOS
    assert tokenizer.eos_ids == {EOS}
    assert tokenizer.adds_bos
    assert tokenizer.vocab_size == 272
    assert tokenizer.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert tokenizer.token_text(BOS) == "<s>"
    assert tokenizer.token_text(10_000) is None


@given(text=st.text(max_size=40))
@unhurried
def test_every_text_survives(tokenizer, text):
    ids = tokenizer.encode(tokenizer.protect(text))
    assert tokenizer.decode(ids) == read_back(tokenizer, text)


# --- the beginning of a sequence


def test_one_bos_in_front_of_a_raw_prompt(tokenizer):
    assert tokenizer.encode("the").count(BOS) == 1
    assert tokenizer.encode("the")[0] == BOS
    assert tokenizer.encode("") == [BOS]


def test_one_bos_when_the_template_writes_it(tokenizer):
    text = tokenizer.chat_template.render([{"role": "user", "content": "the"}])
    assert text.startswith("<s>")
    ids = tokenizer.encode(text)
    assert (ids[0], ids.count(BOS)) == (BOS, 1)


def test_one_bos_when_the_template_does_not_write_it(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", chat_template="{{ messages[0].content }}")
    tokenizer = open_checkpoint(folder).tokenizer()
    ids = tokenizer.encode(tokenizer.chat_template.render([{"role": "user", "content": "the"}]))
    assert ids == tokenizer.encode("the")
    assert (ids[0], ids.count(BOS)) == (BOS, 1)


def test_raw_prompt_that_begins_with_the_bos_text_keeps_one(tokenizer):
    assert tokenizer.encode("<s>the").count(BOS) == 1


def test_no_bos_where_the_model_wants_none(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", add_bos=False)
    tokenizer = open_checkpoint(folder).tokenizer()
    assert not tokenizer.adds_bos
    assert tokenizer.encode("the") == open_checkpoint(folder).tokenizer().encode("the")
    assert BOS not in tokenizer.encode("the")
    assert tokenizer.encode("<s>the")[0] == BOS


@pytest.mark.parametrize(
    ("post_processor", "flag", "expected"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_explicit_setting_wins_over_the_post_processor(tmp_path, post_processor, flag, expected):
    folder = tiny.write_tiny_llama(tmp_path / "m", add_bos=post_processor)
    tokenizer = with_settings(folder, add_bos_token=flag)
    assert tokenizer.adds_bos is expected
    assert tokenizer.encode("the").count(BOS) == int(expected)


def test_bos_comes_from_the_post_processor_when_nothing_names_it(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = open_checkpoint(folder).tokenizer()
    assert tokenizer.bos_id == BOS
    assert tokenizer.encode("a")[0] == BOS


def test_post_processor_in_a_sequence_counts(folder):
    step = json.loads((folder / "tokenizer.json").read_text())["post_processor"]
    levels = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    edit_definition(folder, post_processor={"type": "Sequence", "processors": [levels, step]})
    assert open_checkpoint(folder).tokenizer().encode("a")[0] == BOS


def test_contradicting_bos_is_refused(folder):
    with pytest.raises(CheckpointError, match=r"puts token 1 in front, but bos_token .* has id 2"):
        with_settings(folder, bos_token="</s>")


# --- the end of a sequence


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [
        (2, [5, 7], {2, 5, 7}),
        ([2, 9], 5, {2, 5, 9}),
        (None, None, {2}),
        (8, None, {2, 8}),
    ],
)
def test_every_configured_eos_counts(tmp_path, config_eos, generation_eos, expected):
    folder = tiny.write_tiny_llama(tmp_path / "m", more_config={"eos_token_id": config_eos})
    tiny.write_json(folder / "generation_config.json", {"eos_token_id": generation_eos})
    tokenizer = open_checkpoint(folder).tokenizer()
    assert tokenizer.eos_ids == expected
    # Ordinary tokens that end a sequence remain what text is made of.
    assert tokenizer.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}


def test_eos_without_generation_config(folder):
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).tokenizer().eos_ids == {EOS}


@pytest.mark.parametrize("value", [272, -1, "2", [2, None], True])
def test_eos_that_is_no_token_is_named(folder, value):
    tiny.write_json(folder / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is"):
        open_checkpoint(folder).tokenizer()


def test_eos_listed_as_an_ordinary_added_token_becomes_a_control_token(folder):
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit_definition(folder, added_tokens=[{**token, "special": False} for token in added])
    tokenizer = open_checkpoint(folder).tokenizer()
    assert tokenizer.special_tokens["</s>"] == EOS
    assert EOS not in tokenizer.encode(tokenizer.protect("a</s>"))


def test_eos_only_in_the_vocabulary_becomes_a_control_token(folder):
    edit_definition(folder, added_tokens=[])
    tokenizer = open_checkpoint(folder).tokenizer()
    assert tokenizer.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert tokenizer.encode("a</s>")[-1] == EOS


# --- text that looks like control tokens


@pytest.mark.parametrize("text", ["a</s>b", "<s>", "</s></s>", "<s></s>", "x <unk> y", "<<s>>"])
def test_special_text_of_a_row_stays_text(tokenizer, text):
    assert tokenizer.has_special_text(text)
    ids = tokenizer.encode(tokenizer.protect(text))
    assert not set(ids[1:]) & set(tokenizer.special_tokens.values())
    assert plain(tokenizer, ids) == text


def test_special_text_of_a_template_is_control(tokenizer):
    content = tokenizer.protect("a</s>b")
    ids = tokenizer.encode(f"<s>{content}</s>{content}</s>")
    assert ids.count(EOS) == 2
    assert ids.count(BOS) == 1
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<s>a</s>b</s>a</s>b</s>"
    assert tokenizer.decode(ids) == "a</s>ba</s>b"


def test_unprotected_special_text_is_control(tokenizer):
    assert tokenizer.encode("a</s>b").count(EOS) == 1


def test_text_without_special_text_is_not_touched(tokenizer):
    for text in ("", "the rain", "a < b", "x > y", "1/2", "\n\n"):
        assert tokenizer.protect(text) == text
        assert not tokenizer.has_special_text(text)


@pytest.mark.parametrize(
    "parts",
    [
        ("row <", "row s>"),
        ("row </", "row s>"),
        ("row <s", "template >"),
        ("template <", "row s>"),
        ("template <", "row s", "template >"),
        ("row a<", "row s", "row >b"),
    ],
)
def test_special_text_put_together_from_rows_stays_text(tokenizer, parts):
    pieces = [part.split(" ") for part in parts]
    rendered = "".join(
        tokenizer.protect(text) if origin == "row" else text for origin, text in pieces
    )
    ids = tokenizer.encode(rendered)
    assert not set(ids[1:]) & set(tokenizer.special_tokens.values())
    assert plain(tokenizer, ids) == "".join(text for _, text in pieces)


@given(text=awkward_text)
@unhurried
def test_no_row_text_makes_a_control_token(tokenizer, text):
    ids = tokenizer.encode(tokenizer.protect(text))
    assert ids[0] == BOS
    assert not set(ids[1:]) & set(tokenizer.special_tokens.values())
    assert plain(tokenizer, ids) == read_back(tokenizer, text)


@given(left=awkward_text, right=awkward_text)
@unhurried
def test_no_two_row_texts_make_a_control_token_together(tokenizer, left, right):
    ids = tokenizer.encode(tokenizer.protect(left) + tokenizer.protect(right))
    assert not set(ids[1:]) & set(tokenizer.special_tokens.values())


@given(text=awkward_text)
@unhurried
def test_protection_can_be_taken_off_again(tokenizer, text):
    assert tokenizer.unprotect(tokenizer.protect(text)) == text


@given(text=awkward_text)
@unhurried
def test_protection_does_not_change_how_text_is_split(tokenizer, text):
    """The marked path gives the ids of the library's own path where both apply."""
    if tokenizer.has_special_text(text) or "\ufdd0" in text:
        return
    assert tokenizer.encode(tokenizer.protect(text)) == tokenizer.encode(text)
    marked = tokenizer.encode(f"<s>{text}</s>" + tokenizer.protect("<s>"))
    bare = tokenizer.encode(f"<s>{text}</s>")
    assert marked[: len(bare)] == bare


@pytest.mark.parametrize("text", ["a</s> ", " </s>", "\n</s>\n", "<s", " <"])
def test_template_may_strip_protected_text(tokenizer, text):
    """No mark is left behind that would turn the template's own tokens into text."""
    ids = tokenizer.encode(f"<s>{tokenizer.protect(text).strip()}</s>")
    assert ids[-1] == EOS
    assert tokenizer.decode(ids) == text.strip()


def test_text_cut_behind_a_mark_is_still_encoded(tokenizer):
    cut = tokenizer.protect("</s>")[:1]
    assert tokenizer.encode(cut) == [BOS]


# --- decoding


def test_continuation_keeps_its_leading_space(tokenizer):
    prompt, completion = "in the", " the: 'rain ...  end"
    ids = tokenizer.encode(prompt + completion)
    count = len(tokenizer.encode(prompt))
    assert tokenizer.decode(ids[:count]) == prompt
    continued = tokenizer.decode(ids)[len(prompt) :]
    assert continued == completion
    window = ids[count - 2 :]
    assert tokenizer.decode(window)[len(tokenizer.decode(window[:2])) :] == completion


@pytest.mark.parametrize("text", ["': 'search", " ... ", "do n't .", "a , b ! c ?", "  two  "])
def test_spaces_are_not_cleaned_up(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode("x" + text)) == "x" + text


def test_bytes_of_a_character_are_joined(tokenizer):
    ids = [tiny.byte_id(byte) for byte in "🦙깰".encode()]
    assert tokenizer.decode(ids) == "🦙깰"
    assert "\ufffd" in tokenizer.decode(ids[:3])


def test_special_tokens_are_skipped_or_shown(tokenizer):
    ids = [*tokenizer.encode("<s>a"), EOS]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>"
    assert tokenizer.decode([]) == ""


# --- files


def test_truncation_and_padding_of_the_file_are_switched_off(folder):
    edit_definition(
        folder,
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<unk>",
        },
    )
    assert len(open_checkpoint(folder).tokenizer().encode("abcdefghij")) == 11


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "config"),
        ({"chat_template.json": json.dumps({"chat_template": "json"})}, "json"),
        ({"chat_template.json": "{}"}, "config"),
        ({"chat_template.jinja": "jinja", "chat_template.json": "{}"}, "jinja"),
    ],
)
def test_chat_template_files_by_precedence(tmp_path, files, expected):
    folder = tiny.write_tiny_llama(tmp_path / "m", chat_template="config")
    for name, content in files.items():
        (folder / name).write_text(content)
    assert open_checkpoint(folder).tokenizer().chat_template.source == expected


def test_named_templates_offer_the_default(folder):
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    assert with_settings(folder, chat_template=named).chat_template.source == "d"


def test_model_without_template(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", chat_template=None)
    assert open_checkpoint(folder).tokenizer().chat_template is None


def test_tokens_written_as_objects_are_understood(folder):
    bos = {"__type": "AddedToken", "content": "<s>", "lstrip": False}
    assert with_settings(folder, bos_token=bos).bos_id == BOS


def test_special_tokens_map_fills_gaps(folder):
    tiny.write_json(folder / "special_tokens_map.json", {"eos_token": "</s>", "bos_token": "nope"})
    (folder / "generation_config.json").unlink()
    assert with_settings(folder, eos_token=None).eos_ids == {EOS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token": "<end>"}, "'<end>' is missing, which .* names as eos_token"),
        ({"chat_template": "{% if %}"}, r"tokenizer_config\.json: the chat template is malformed"),
        ({"chat_template": 7}, r"tokenizer_config\.json: chat_template is not text"),
        ({"chat_template": [{"name": [], "template": ""}]}, "chat_template is not text"),
        (
            {"added_tokens_decoder": {"1": {"content": []}}},
            "is missing, which added_tokens_decoder",
        ),
        (
            {"added_tokens_decoder": {"300": {"content": "<new>"}}},
            "token '<new>' with id 300 is missing",
        ),
    ],
)
def test_settings_that_contradict_the_tokenizer_are_named(folder, changes, message):
    with pytest.raises(CheckpointError, match=message):
        with_settings(folder, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "not a tokenizer.json"),
        ({"model": {"type": "Quantum", "vocab": {}}}, "not a usable tokenizer"),
        ({"added_tokens": [{"id": "x"}]}, "added_tokens is malformed"),
        ({"added_tokens": 3}, "added_tokens is malformed"),
        ({"post_processor": {"processors": [3]}}, "post_processor is malformed"),
        ({"post_processor": leading(99999)}, "puts token 99999 in front, which there is not"),
        ({"post_processor": leading([])}, r"puts token \[\] in front, which there is not"),
        ({"model": {"type": "BPE", "vocab": {"a": []}}}, "vocab of model is malformed"),
        ({"model": {"type": "Unigram", "vocab": [["a"]]}}, "vocab of model is malformed"),
    ],
)
def test_malformed_definition_is_one_clear_error(folder, changes, message):
    edit_definition(folder, **changes)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*{message}"):
        open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize("value", [5, [["a"]], {"a": 1}])
def test_listed_tokens_that_are_none_change_nothing(folder, value):
    tokenizer = with_settings(folder, additional_special_tokens=value)
    assert tokenizer.special_tokens.keys() == {"<unk>", "<s>", "</s>"}


def test_panic_of_the_library_is_an_error_of_the_text(folder):
    edit_definition(folder, pre_tokenizer=split_at("(a|aa)+$"))
    tokenizer = open_checkpoint(folder).tokenizer()
    assert tokenizer.encode("ab")
    for encode in (tokenizer.encode, tokenizer.encode_text):
        with pytest.raises(TokenizerError, match=r"tokenizer fails on this text: .*retry-limit"):
            encode("a" * 40 + "b")


def test_merges_are_never_left_out_at_random(folder):
    definition = json.loads((folder / "tokenizer.json").read_text())
    edit_definition(folder, model=definition["model"] | {"dropout": 0.9})
    tokenizer = open_checkpoint(folder).tokenizer()
    assert len({tuple(tokenizer.encode("the cat on the mat")) for _ in range(20)}) == 1


@pytest.mark.parametrize(
    ("normalizer", "text"), [("Lowercase", "a</S>b"), ("NFKC", "a\uff1c/s\uff1eb")]
)
def test_text_that_a_normalizer_makes_special_stays_text(folder, normalizer, text):
    definition = json.loads((folder / "tokenizer.json").read_text())
    tokens = [token | {"normalized": True} for token in definition["added_tokens"]]
    edit_definition(folder, added_tokens=tokens, normalizer={"type": normalizer})
    tokenizer = open_checkpoint(folder).tokenizer()
    ids = tokenizer.encode(tokenizer.protect(text) + "</s>")
    assert ids.count(EOS) == 1
    assert ids[-1] == EOS
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>b</s>"


def test_missing_definition_is_named_with_the_remedy(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json is missing; make it with transformers"
    ):
        open_checkpoint(folder).tokenizer()


def test_added_token_without_embedding_stays_text(folder, caplog):
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    beyond = {**added[0], "id": 272, "content": "<pad>"}
    edit_definition(folder, added_tokens=[*added, beyond])
    tokenizer = open_checkpoint(folder).tokenizer()
    assert "<pad>" in caplog.text
    assert max(tokenizer.encode("a<pad>b")) < 272


def test_tokenizer_of_a_larger_model_is_refused(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", vocab_size=300)
    tiny.write_tokenizer(folder, 300)
    config = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", config | {"vocab_size": 260})
    with pytest.raises(CheckpointError, match="the model's vocabulary is 260; the files belong to"):
        open_checkpoint(folder).tokenizer()
