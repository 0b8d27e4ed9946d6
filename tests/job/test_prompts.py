import dataclasses
import hashlib
import json
import struct

import pytest
from tiny import BOS_ID, EOS_ID, byte_id

from jaxpaged.errors import ConfigError
from jaxpaged.job.prompt import messages
from jaxpaged.job.prompt.prompts import Prompt, PromptBuilder
from jaxpaged.job.prompt.row_fault import RowFault, RowSkipped
from jaxpaged.model.tokenizer import TokenizerError
from jaxpaged.request import SamplingParams

LONG = "abcdefghijklmnopqrstuvwxyz0123456789ABC"

CHATML = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A prompt and what its builder says about it."""

    ids: tuple[int, ...]
    params: SamplingParams
    sha256: str
    has_special_text: bool
    text: str
    preview: str
    truncated: int


@pytest.fixture
def build(make_spec, tokenizer):
    """Builds one prompt: the job's sections by name, the row's cells in `cells`."""

    def run(cells, tokenizer=tokenizer, max_model_len=None, **sections):
        spec = make_spec(**sections)
        builder = PromptBuilder(spec, tokenizer, list(cells), max_model_len=max_model_len)
        prompt = builder.build(cells)
        return Built(
            ids=prompt.ids,
            params=prompt.params,
            sha256=prompt.sha256,
            has_special_text=prompt.has_special_text,
            text=builder.text(prompt),
            preview=builder.preview(prompt),
            truncated=prompt.truncated,
        )

    return run


def ids_of(text: str) -> list[int]:
    return [byte_id(byte) for byte in text.encode()]


def test_a_text_prompt_is_encoded_as_it_is(build):
    prompt = build({"q": " hé\n"}, input={"prompt_column": "q"})

    assert list(prompt.ids) == [BOS_ID, *ids_of(" hé\n")]
    assert prompt.text == " hé\n"
    assert prompt.params == SamplingParams()
    assert not prompt.has_special_text


def test_the_digest_is_of_the_token_ids(build):
    prompt = build({"q": "a"}, input={"prompt_column": "q"})

    data = struct.pack("<2i", BOS_ID, byte_id(ord("a")))
    assert prompt.sha256 == hashlib.sha256(data).hexdigest()


def test_every_spelling_of_a_chat_gives_the_same_prompt(build):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with_nulls = [message | {"name": None} for message in chat]
    spellings = [chat, with_nulls, json.dumps(chat), json.dumps(chat, indent=2)]

    found = {build({"c": c}, input={"messages_column": "c"}).ids for c in spellings}

    assert len(found) == 1
    spec = {
        "messages": [{"role": "user", "content": "{{ x }}"}, {"role": "assistant", "content": "b"}]
    }
    assert build({"x": "a"}, input=spec).ids in found
    assert build({"c": chat}, input={"messages_column": "c"}).preview == "b"


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    "template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"]
)
def test_there_is_one_bos_at_most(build, make_tokenizer, adds_bos, template):
    tokenizer = make_tokenizer(add_bos=adds_bos, chat_template=template)

    chat = build(
        {"c": '[{"role": "user", "content": "a"}]'}, tokenizer, input={"messages_column": "c"}
    )
    raw = build({"q": "a"}, tokenizer, input={"prompt_column": "q"})
    with_bos = build({"q": "a"}, tokenizer, input={"prompt": "<s>{{ q }}"})

    assert chat.ids.count(BOS_ID) == (1 if adds_bos or "bos_token" in template else 0)
    assert raw.ids.count(BOS_ID) == (1 if adds_bos else 0)
    assert with_bos.ids.count(BOS_ID) == 1


def test_special_tokens_in_row_text_stay_text(build):
    cells = {"q": "a</s>b<s>", "c": [{"role": "user", "content": "a</s>b"}]}

    for source in ({"prompt_column": "q"}, {"prompt": "{{ q }}"}, {"messages_column": "c"}):
        prompt = build(cells, input=source)
        assert EOS_ID not in prompt.ids
        assert prompt.ids.count(BOS_ID) == 1
        assert "a</s>b" in prompt.text
        assert prompt.has_special_text


def test_templates_compare_text_that_is_part_of_a_special_token(build):
    source = "{% if kind == 's' %}{{ kind|length }}{% else %}no{% endif %}"

    assert build({"kind": "s"}, input={"prompt": source}).text == "1"


def test_roles_are_compared_as_they_are(build, make_tokenizer):
    template = (
        "{% for m in messages %}{% if m.role == 's' %}S{% else %}other{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer = make_tokenizer(chat_template=template)
    chat = [{"role": "s", "content": "a</s>"}]

    prompt = build({"c": chat}, tokenizer, input={"messages_column": "c"})

    assert list(prompt.ids) == [BOS_ID, *ids_of("Sa</s>")]


@pytest.mark.parametrize("allowed", [False, True])
def test_a_role_is_no_special_token(build, make_tokenizer, allowed):
    tokenizer = make_tokenizer(chat_template="{{ messages[0].role }}")
    source = {"messages_column": "c", "allow_special_tokens": allowed}
    chat = [{"role": "</s>", "content": "a"}]

    if allowed:
        assert build({"c": chat}, tokenizer, input=source).ids == (BOS_ID, EOS_ID)
        return
    with pytest.raises(RowFault, match="bad_type: the role of a message holds a special token"):
        build({"c": chat}, tokenizer, input=source)


def test_a_role_that_is_no_word_cannot_become_part_of_a_special_token(build, make_tokenizer):
    tokenizer = make_tokenizer(chat_template="<{{ messages[0].role }}")
    chat = [{"role": "/s>", "content": "a"}]

    prompt = build({"c": chat}, tokenizer, input={"messages_column": "c"})

    assert list(prompt.ids) == [BOS_ID, *ids_of("</s>")]


def test_the_limit_on_bytes_counts_the_text_alone(build):
    source = {"prompt_column": "q", "max_prompt_bytes": 8}

    assert build({"q": "</s></s>"}, input=source).text == "</s></s>"
    with pytest.raises(RowFault, match="prompt_too_long: the prompt has 9 bytes"):
        build({"q": "</s></s>a"}, input=source)


def test_special_tokens_cannot_be_put_together_from_two_cells(build):
    prompt = build({"a": "x<", "b": "/s>y"}, input={"prompt": "{{ a }}{{ b }}"})

    assert EOS_ID not in prompt.ids
    assert prompt.text == "x</s>y"


def test_special_tokens_in_row_text_count_when_they_are_allowed(build):
    prompt = build({"q": "a</s>b"}, input={"prompt_column": "q", "allow_special_tokens": True})

    assert list(prompt.ids) == [BOS_ID, *ids_of("a"), EOS_ID, *ids_of("b")]
    assert prompt.has_special_text


def test_special_tokens_of_the_job_file_count(build):
    prompt = build({"q": "a"}, input={"prompt": "{{ q }}</s>"})

    assert prompt.ids[-1] == EOS_ID
    assert not prompt.has_special_text


def test_given_ids_are_taken_as_they_are(build):
    prompt = build({"ids": [5, 6, EOS_ID]}, input={"prompt_ids_column": "ids"})

    assert prompt.ids == (5, 6, EOS_ID)
    assert prompt.text.endswith("</s>")


@pytest.mark.parametrize(
    ("source", "cell", "fault"),
    [
        ({"prompt_column": "x"}, None, "null_prompt: column 'x' is null"),
        ({"prompt": "{{ x }}"}, None, "null_prompt"),
        ({"messages": [{"role": "user", "content": "{{ x }}"}]}, None, "null_prompt"),
        ({"messages_column": "x"}, None, "null_prompt"),
        ({"messages_column": "x"}, "null", "null_prompt"),
        ({"messages_column": "x"}, [None], "null_prompt: message 1 is null"),
        ({"messages_column": "x"}, [{"role": "user", "content": None}], "null_prompt: the content"),
        ({"messages_column": "x"}, '[{"role": "user"}]', "null_prompt: the content of message 1"),
        ({"messages_column": "x"}, [{"role": None, "content": "a"}], "bad_type: message 1 has no"),
        ({"messages_column": "x"}, '[{"content": "a"}]', "bad_type: message 1 has no role"),
        ({"messages_column": "x"}, "hello", "bad_type: the chat is text but not JSON at char"),
        ({"messages_column": "x"}, "[" * 100_000, "bad_type: the chat is text but not JSON"),
        ({"messages_column": "x"}, '{"role": "user"}', "bad_type: expected a list of messages"),
        ({"messages_column": "x"}, '["a"]', "bad_type: message 1: expected role and content"),
        ({"messages_column": "x"}, '[{"role": "u", "content": [1]}]', "bad_type: content of"),
        ({"messages_column": "x"}, '[{"role": 1, "content": "a"}]', "bad_type: role of message 1"),
        ({"messages_column": "x"}, [], "empty_prompt: the chat has no messages"),
        ({"messages_column": "x"}, r'[{"role": "u", "content": "\ud800"}]', "invalid_utf8"),
        ({"prompt_ids_column": "x"}, None, "null_prompt"),
        ({"prompt_ids_column": "x"}, [1, None], "null_prompt: column 'x' has a null among"),
        ({"prompt_ids_column": "x"}, [272], "bad_type: .*token id 272 is not in the vocabulary"),
        ({"prompt_ids_column": "x"}, [-1], "bad_type: .*token id -1 is not in the vocabulary"),
        ({"prompt_ids_column": "x"}, [], "empty_prompt"),
        (
            {"prompt_column": "x", "max_prompt_bytes": 9},
            "é" * 5,
            "prompt_too_long: the prompt has 10",
        ),
    ],
)
def test_a_row_at_fault_has_its_code(build, source, cell, fault):
    with pytest.raises(RowFault, match=fault):
        build({"x": cell}, input=source)


def test_an_empty_prompt_runs_on_its_bos_alone(build, make_tokenizer):
    assert build({"q": ""}, input={"prompt_column": "q"}).ids == (BOS_ID,)
    without = make_tokenizer(add_bos=False)
    with pytest.raises(RowFault, match="empty_prompt: the prompt has no tokens"):
        build({"q": ""}, without, input={"prompt_column": "q"})
    assert list(build({"q": "   "}, without, input={"prompt_column": "q"}).ids) == ids_of("   ")


def test_a_text_that_the_tokenizer_fails_on_is_a_row_error(build, make_tokenizer, monkeypatch):
    tokenizer = make_tokenizer()

    def fail(text: str) -> list[int]:
        raise TokenizerError("the model's tokenizer fails on this text: retry-limit")

    monkeypatch.setattr(tokenizer, "encode", fail)
    with pytest.raises(RowFault, match=r"tokenizer_error: .*fails on this text: retry-limit"):
        build({"q": "aaa"}, tokenizer, input={"prompt_column": "q"})


def test_a_template_that_refuses_the_messages_is_quoted(build, make_tokenizer):
    tokenizer = make_tokenizer(chat_template=CHATML)
    good = [{"role": "user", "content": "a"}]
    refused = [{"role": "system", "content": "secret"}, *good]

    assert build({"c": good}, tokenizer, input={"messages_column": "c"}).ids
    with pytest.raises(RowFault, match=r"template_error: .*System role not supported") as caught:
        build({"c": refused}, tokenizer, input={"messages_column": "c"})
    assert "secret" not in caught.value.reason


def test_a_chat_needs_a_chat_template(build, make_tokenizer):
    tokenizer = make_tokenizer(chat_template=None)

    with pytest.raises(ConfigError, match=r"input.messages_column: the model has no chat template"):
        build({"c": "[]"}, tokenizer, input={"messages_column": "c"})


def test_rows_set_their_own_parameters(build):
    sections = {
        "input": {"prompt_column": "q"},
        "sampling": {
            "max_tokens": 9,
            "temperature": 0.5,
            "columns": {"max_tokens": "m", "temperature": "t", "seed": "s"},
        },
    }

    own = build({"q": "a", "m": 3, "t": 1.5, "s": 7}, **sections).params
    default = build({"q": "a", "m": None, "t": None, "s": None}, **sections).params

    assert own == SamplingParams(max_tokens=3, temperature=1.5, seed=7)
    assert default == SamplingParams(max_tokens=9, temperature=0.5)
    with pytest.raises(RowFault, match="bad_row_params: column 'm': max_tokens must be at least 1"):
        build({"q": "a", "m": 0, "t": 1.5, "s": 7}, **sections)


def params_text(params: SamplingParams) -> str:
    prompt = Prompt(
        ids=(1,), whole_ids=(1,), params=params, rendered=None, question=None,
        has_special_text=False,
    )  # fmt: skip
    return prompt.params_text


def test_the_text_of_parameters_tells_them_apart_and_is_short():
    assert params_text(SamplingParams()) == ""
    assert params_text(SamplingParams(max_tokens=3, seed=7)) == "max_tokens=3 seed=7"
    many = [SamplingParams(stop=tuple(f"{i}" for i in range(50)), seed=seed) for seed in range(2)]
    assert len({params_text(params) for params in many}) == 2
    assert all(len(params_text(params)) == 64 for params in many)


@pytest.mark.parametrize(
    ("source", "cell"),
    [
        ({"prompt_column": "x"}, None),
        ({"prompt": "{{ x }}"}, None),
        ({"messages": [{"role": "user", "content": "{{ x }}"}]}, None),
        ({"messages_column": "x"}, None),
        ({"messages_column": "x"}, [None]),
        ({"messages_column": "x"}, [{"role": "user", "content": None}]),
        ({"prompt_ids_column": "x"}, [1, None]),
    ],
)
def test_rows_with_nulls_are_passed_over_where_the_job_says_so(build, source, cell):
    with pytest.raises(RowSkipped, match="skipped, null_prompt: ") as caught:
        build({"x": cell}, input=source | {"on_null": "skip"})

    assert caught.value.code == "null_prompt"
    assert not isinstance(caught.value, RowFault)


def test_other_faults_stay_errors_where_nulls_are_passed_over(build):
    with pytest.raises(RowFault, match="bad_type"):
        build({"x": "no chat"}, input={"messages_column": "x", "on_null": "skip"})


# Three rows each, of 4, 40 and 4 tokens in every order: each is cut by its own length.
@pytest.mark.parametrize("lengths", [(3, 39, 3), (39, 3, 3), (3, 3, 39)])
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("truncate_left", LONG[-23:]),
        ("truncate_right", LONG[:23]),
        ("truncate_middle", LONG[:12] + LONG[-11:]),
    ],
)
def test_each_row_is_cut_by_its_own_length(build, lengths, policy, kept):
    source = {"prompt_column": "q", "on_too_long": policy}
    sampling = {"max_tokens": 8}

    for length in lengths:
        text = LONG[:length]
        prompt = build({"q": text}, input=source, sampling=sampling, max_model_len=32)
        expected = text if length == 3 else kept
        assert list(prompt.ids) == [BOS_ID, *ids_of(expected)]
        assert prompt.truncated == (0 if length == 3 else 16)
        assert prompt.text == text
        assert prompt.sha256 == build({"q": text}, input={"prompt_column": "q"}).sha256


def test_a_cut_leaves_room_for_the_row_s_own_max_tokens(build):
    source = {"prompt_ids_column": "ids", "on_too_long": "truncate_left"}
    sections = {"input": source, "sampling": {"columns": {"max_tokens": "m"}}}

    def kept(max_tokens: int | None) -> tuple[int, ...]:
        cells = {"ids": list(range(40)), "m": max_tokens}
        return build(cells, max_model_len=32, **sections).ids

    assert kept(8) == tuple(range(16, 40))
    assert kept(1) == tuple(range(9, 40))
    assert kept(31) == kept(32) == kept(1000) == (39,)
    assert kept(None) == tuple(range(16, 40))


def test_a_prompt_that_is_too_long_is_passed_over_or_left_to_the_engine(build):
    source = {"prompt_ids_column": "ids"}
    fits, too_long = {"ids": list(range(31))}, {"ids": list(range(32))}

    for policy in ("error", "skip", "truncate_left"):
        section = source | {"on_too_long": policy}
        assert len(build(fits, input=section, max_model_len=32).ids) == 31
    assert len(build(too_long, input=source, max_model_len=32).ids) == 32
    with pytest.raises(RowSkipped, match=r"prompt_too_long: the prompt has 32 tokens; .* 31 "):
        build(too_long, input=source | {"on_too_long": "skip"}, max_model_len=32)


def test_a_refused_system_message_can_be_merged(build, make_tokenizer):
    tokenizer = make_tokenizer(chat_template=CHATML)
    user = {"role": "user", "content": "a</s>"}
    system = {"role": "system", "content": "Be<|brief|>"}
    chats = [[user], [system, user], [user, user]]
    keep = {"messages_column": "c"}
    merge = keep | {"system_role": "merge"}

    plain, merged, double = (build({"c": chat}, tokenizer, input=merge) for chat in chats)

    assert plain.ids == build({"c": chats[0]}, tokenizer, input=keep).ids
    assert double.ids == build({"c": chats[2]}, tokenizer, input=keep).ids
    assert merged.text == "<|user|>Be<|brief|>\n\na</s></s><|assistant|>"
    assert merged.ids.count(EOS_ID) == 1
    assert merged.preview == "a</s>"
    with pytest.raises(RowFault, match=r"template_error: .*System role not supported"):
        build({"c": chats[1]}, tokenizer, input=keep)
    given = {
        "messages": [
            {"role": "system", "content": "{{ s }}"},
            {"role": "user", "content": "{{ u }}"},
        ],
        "system_role": "merge",
    }
    assert build({"s": "Be<|brief|>", "u": "a</s>"}, tokenizer, input=given).ids == merged.ids


@pytest.mark.parametrize(
    ("roles", "merged"),
    [
        ("su", [("user", "s0\n\nu1")]),
        ("ssu", [("user", "s0\n\ns1\n\nu2")]),
        ("sau", [("assistant", "a1"), ("user", "s0\n\nu2")]),
        ("us", [("user", "u0"), ("system", "s1")]),
        ("s", [("system", "s0")]),
        ("sa", [("system", "s0"), ("assistant", "a1")]),
        ("u", [("user", "u0")]),
    ],
)
def test_leading_system_messages_begin_the_first_user_message(roles, merged):
    names = {"s": "system", "u": "user", "a": "assistant"}
    chat = [{"role": names[role], "content": f"{role}{i}"} for i, role in enumerate(roles)]
    before = [dict(message) for message in chat]

    found = messages.merge_system(chat)

    assert [(message["role"], message["content"]) for message in found] == merged
    assert chat == before


def test_an_empty_system_message_adds_nothing():
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]

    assert messages.merge_system(chat) == [{"role": "user", "content": "a"}]


def test_reasons_are_bounded_and_printable():
    fault = RowFault("bad_type", "a\x1b[31m" + "x" * 1000)

    assert fault.reason.startswith("a [31mx")
    assert len(fault.reason) == 303
