"""Which chat template a job's chats go through, with which variables, and how they end."""

import json
import pathlib

import pytest
from job_output import rows
from tiny import BOS_ID, CHAT_TEMPLATE, EOS_ID, write_json, write_tiny_llama

from jaxpaged.errors import ConfigError, IdentityError
from jaxpaged.job.prompt.prompts import PromptBuilder
from jaxpaged.job.prompt.row_fault import RowFault
from jaxpaged.job.runner import run_job
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.tokenizer import Tokenizer

USER = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "The answer is "}

# A turn ends in </s>; a switch decides about thinking, as in Qwen 3.
THINKER = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


@pytest.fixture
def model_with(tmp_path):
    """A model's folder, with further files in it."""

    def write(template: object = CHAT_TEMPLATE, **files: str) -> pathlib.Path:
        folder = write_tiny_llama(tmp_path / "model", chat_template=None)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        write_json(folder / "tokenizer_config.json", settings | {"chat_template": template})
        for name, text in files.items():
            path = folder / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".jinja").write_text(text)
        return folder

    return write


@pytest.fixture
def built(make_spec, tokenizer):
    """The prompt of one chat, and its text."""

    def build(chat: object, tokenizer: Tokenizer = tokenizer, **section):
        spec = make_spec(input={"messages_column": "c", **section})
        builder = PromptBuilder(spec, tokenizer, ["c"])
        prompt = builder.build({"c": chat})
        return prompt, builder.text(prompt)

    return build


# --- which template


def test_a_named_template_is_chosen_by_its_name(model_with, built):
    named = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    tokenizer = open_checkpoint(model_with(named)).tokenizer()

    assert built([USER], tokenizer)[1] == "D"
    assert built([USER], tokenizer, chat_template="rag")[1] == "R"
    with pytest.raises(ConfigError, match=r"no chat template 'nope'; .* 'default', 'rag'"):
        built([USER], tokenizer, chat_template="nope")


def test_with_tools_the_template_for_tools_is_taken_as_in_transformers(model_with, built):
    named = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    tokenizer = open_checkpoint(model_with(named)).tokenizer()
    tools = [{"type": "function", "function": {"name": "f"}}]

    assert built([USER], tokenizer)[1] == "D"
    assert built([USER], tokenizer, template_kwargs={"tools": tools})[1] == json.dumps(tools)
    with pytest.raises(ConfigError, match=r"template_kwargs\.tools: the chat template does not"):
        built([USER], tokenizer, chat_template="default", template_kwargs={"tools": tools})


def test_files_of_their_own_count_instead_of_the_settings(model_with, built):
    folder = model_with("S", chat_template="J", additional_chat_templates__rag="R")
    tokenizer = open_checkpoint(folder).tokenizer()

    assert tokenizer.chat_templates.sources == {"default": "J", "rag": "R"}
    assert built([USER], tokenizer)[1] == "J"
    assert built([USER], tokenizer, chat_template="rag")[1] == "R"


def test_a_model_without_a_default_wants_a_name(model_with, built):
    tokenizer = open_checkpoint(model_with([{"name": "rag", "template": "R"}])).tokenizer()

    assert built([USER], tokenizer, chat_template="rag")[1] == "R"
    with pytest.raises(ConfigError, match=r"no chat template called 'default'; .*'rag'"):
        built([USER], tokenizer)


def test_a_template_outside_the_model_folder_is_refused(model_with, tmp_path):
    folder = model_with("S", additional_chat_templates__rag="R")
    (tmp_path / "elsewhere.jinja").write_text("E")
    (folder / "additional_chat_templates" / "e.jinja").symlink_to(tmp_path / "elsewhere.jinja")

    with pytest.raises(Exception, match=r"e\.jinja is a link to .*, outside the model folder"):
        open_checkpoint(folder).tokenizer()


def test_a_template_of_the_user_s_own_is_a_path(make_tokenizer, built, tmp_path):
    tokenizer = make_tokenizer(chat_template=None)
    mine = tmp_path / "mine.jinja"
    mine.write_text("{{ bos_token }}[{{ messages[0].content }}]</s>")

    prompt, text = built([USER], tokenizer, chat_template=str(mine))

    assert text == "<s>[Q]</s>"
    assert (prompt.ids[0], prompt.ids[-1]) == (BOS_ID, EOS_ID)
    mine.write_text("{{ messages[0].content ")
    with pytest.raises(ConfigError, match=r"^input\.chat_template: the chat template is malformed"):
        built([USER], tokenizer, chat_template=str(mine))
    mine.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text"):
        built([USER], tokenizer, chat_template=str(mine))
    with pytest.raises(ConfigError, match=r"none\.jinja cannot be read: No such file"):
        built([USER], tokenizer, chat_template=str(tmp_path / "none.jinja"))


def test_the_template_s_text_is_part_of_the_job_and_its_path_is_not(
    write_rows, make_spec, engine, tmp_path
):
    write_rows(c=[json.dumps([USER])])
    mine, other = tmp_path / "mine.jinja", tmp_path / "other.jinja"
    mine.write_text("[{{ messages[0].content }}]")
    source = {"messages_column": "c", "chat_template": str(mine)}
    run_job(make_spec(input=source), engine=engine())

    mine.rename(other)
    again = make_spec(input=source | {"chat_template": str(other)})
    assert run_job(again, engine=engine()).state == "already finished"
    other.write_text("({{ messages[0].content }})")
    with pytest.raises(IdentityError, match=r"the model's chat_template: '\w+' -> '\w+'"):
        run_job(again, engine=engine())


def test_a_relative_path_is_relative_to_the_job_file(tmp_path, make_spec):
    spec = make_spec(input={"messages_column": "c", "chat_template": "./t/x.jinja"})
    assert pathlib.Path(spec.input.chat_template).is_absolute()
    assert (
        make_spec(input={"messages_column": "c", "chat_template": "rag"}).input.chat_template
        == "rag"
    )


# --- with which variables


def test_a_switch_of_the_template_is_set_by_the_job(make_tokenizer, built):
    tokenizer = make_tokenizer(chat_template=THINKER)

    assert built([USER], tokenizer)[1].endswith("<assistant>")
    off = built([USER], tokenizer, template_kwargs={"enable_thinking": False})[1]
    assert off.endswith("<assistant><think>\n\n</think>\n\n")
    on = built([USER], tokenizer, template_kwargs={"enable_thinking": True})[1]
    assert on == built([USER], tokenizer)[1]


def test_a_switch_that_the_template_does_not_know_is_an_error_with_those_it_knows(
    make_tokenizer, built
):
    tokenizer = make_tokenizer(chat_template=THINKER + "{{ documents }}")
    with pytest.raises(
        ConfigError,
        match=r"^input\.template_kwargs\.thinking: .* reads are documents, enable_thinking$",
    ):
        built([USER], tokenizer, template_kwargs={"thinking": False})
    with pytest.raises(ConfigError, match=r"unk_token is a special token of the model"):
        built([USER], tokenizer, template_kwargs={"unk_token": "x"})


@pytest.mark.parametrize(
    "name", ["messages", "add_generation_prompt", "bos_token", "strftime_now", "range"]
)
def test_names_with_a_meaning_of_their_own_cannot_be_set(make_spec, name):
    with pytest.raises(ConfigError, match=rf"template_kwargs: {name} cannot be set"):
        make_spec(input={"messages_column": "c", "template_kwargs": {name: 1}})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, [b"x"]])
def test_values_are_those_that_json_has(make_spec, value):
    with pytest.raises(ConfigError, match=r"template_kwargs: expected"):
        make_spec(input={"messages_column": "c", "template_kwargs": {"a": value}})


def test_values_reach_the_template_as_they_are(make_tokenizer, built):
    tokenizer = make_tokenizer(chat_template="{{ a | tojson }}{{ b == 'low' }}{{ c is none }}")
    values = {"a": {"x": [1, 2.5, True, None, "é"]}, "b": "low", "c": None}

    text = built([USER], tokenizer, template_kwargs=values)[1]

    assert text == '<s>{"x": [1, 2.5, true, null, "é"]}TrueTrue'.removeprefix("<s>")


@pytest.mark.parametrize("source", ["prompt", "prompt_column"])
@pytest.mark.parametrize(
    "key", [{"chat_template": "x"}, {"template_kwargs": {}}, {"continue_final_message": True}]
)
def test_keys_of_chats_are_refused_without_chats(make_spec, source, key):
    with pytest.raises(ConfigError, match=rf"{next(iter(key))} is for chats"):
        make_spec(input={source: "q", **key})


# --- how chats end (S12)


def test_s12_a_final_message_of_the_assistant_is_finished_unless_the_job_says_otherwise(
    make_tokenizer, built
):
    tokenizer = make_tokenizer(chat_template=THINKER, add_bos=False)

    closed, closed_text = built([USER, ANSWER], tokenizer)
    opened, opened_text = built([USER, ANSWER], tokenizer, continue_final_message=True)

    assert closed_text == "<user>Q</s>\n<assistant>The answer is</s>\n<assistant>"
    # No new header, no end of the turn, and the space that the template would have dropped.
    assert opened_text == "<user>Q</s>\n<assistant>The answer is "
    assert (closed.ids.count(EOS_ID), opened.ids.count(EOS_ID)) == (2, 1)
    assert (closed.ends_in_answer, opened.ends_in_answer) == (True, False)
    assert not built([USER], tokenizer)[0].ends_in_answer


@pytest.mark.parametrize(
    "content", ["", " ", "x \n\n ", "\n x", "</s> <s>", "🦙", "\ufdd20\ufdd2", "\ufdd0", "a\\"]
)
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, THINKER.replace(" | trim", "")])
def test_s12_the_final_message_stays_as_it_is(make_tokenizer, built, template, content):
    tokenizer = make_tokenizer(chat_template=template, add_bos=False)
    chat = [USER, {"role": "assistant", "content": content}]

    prompt, text = built(chat, tokenizer, continue_final_message=True)

    front = built([USER], tokenizer)[1]
    assert text == front + content
    # What the row says is text, in the open message too.
    assert EOS_ID not in prompt.ids[len(tokenizer.encode(front)) :]


def test_s12_a_final_message_of_another_role_is_a_row_error(make_tokenizer, built, make_spec):
    tokenizer = make_tokenizer(chat_template=THINKER)
    with pytest.raises(RowFault, match=r"template_error: .* the last one's is 'user'"):
        built([ANSWER, USER], tokenizer, continue_final_message=True)
    # Where the job itself says the roles, it is the job that is wrong.
    with pytest.raises(ConfigError, match=r"the last of messages has role 'user'"):
        make_spec(input={"messages": [USER], "continue_final_message": True})


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}", "{{ messages[-1].content * 2 }}"]
)
def test_s12_a_template_that_drops_or_repeats_the_message_is_a_row_error(
    make_tokenizer, built, template
):
    tokenizer = make_tokenizer(chat_template=template)
    with pytest.raises(RowFault, match=r"the final message cannot be continued: the template wri"):
        built([USER, ANSWER], tokenizer, continue_final_message=True)


def test_s12_the_report_counts_chats_that_end_in_an_answer(write_rows, make_spec, engine, out):
    write_rows(c=[json.dumps(chat) for chat in ([USER], [USER, ANSWER], [USER, ANSWER])])
    source = {"messages_column": "c"}

    report = run_job(make_spec(input=source), engine=engine())

    assert report.run.rows_ending_in_answer == 2
    told = [text for text in report.warnings if "end in a message of the assistant" in text]
    assert told == [
        "2 chats end in a message of the assistant; it was taken as finished, and another one "
        "follows (input.continue_final_message: true continues it)"
    ]
    assert len(rows(out)) == 3


def test_s12_a_continued_chat_is_not_told_of(write_rows, make_spec, engine):
    write_rows(c=[json.dumps([USER, ANSWER])])
    source = {"messages_column": "c", "continue_final_message": True}

    report = run_job(make_spec(input=source), engine=engine())

    assert report.run.rows_ending_in_answer == 0
    assert not any("assistant" in text for text in report.warnings)


# --- the bug cases of prompts: B31, B32, B35


@pytest.mark.parametrize("adds_bos", [True, False])
def test_b31_one_bos_whoever_puts_it_there(make_spec, make_tokenizer, adds_bos):
    with_bos = make_tokenizer(
        add_bos=adds_bos, chat_template="{{ bos_token }}{{ messages[0].content }}"
    )
    without = make_tokenizer(add_bos=adds_bos, chat_template="{{ messages[0].content }}")
    chat = {"c": [USER]}

    def ids(tokenizer: Tokenizer, cells: dict, **section) -> tuple[int, ...]:
        return PromptBuilder(make_spec(input=section), tokenizer, list(cells)).build(cells).ids

    cases = [
        ids(with_bos, chat, messages_column="c"),
        ids(without, chat, messages_column="c"),
        ids(with_bos, {"q": "Q"}, prompt_column="q"),
        ids(with_bos, {"q": "Q"}, prompt="<s>{{ q }}"),
    ]

    # The fix that takes it away altogether would be as wrong.
    wanted = [1, int(adds_bos), int(adds_bos), 1]
    assert [case.count(BOS_ID) for case in cases] == wanted
    assert all(case[0] == BOS_ID for case, count in zip(cases, wanted, strict=True) if count)


def test_b31_a_row_that_begins_with_the_bos_text_keeps_one_and_is_told_of(
    write_rows, make_spec, engine, tokenizer
):
    spec = make_spec(input={"prompt_column": "q"})
    allowed = make_spec(input={"prompt_column": "q", "allow_special_tokens": True})
    row = {"q": "<s>the"}

    prompt = PromptBuilder(spec, tokenizer, ["q"]).build(row)
    taken = PromptBuilder(allowed, tokenizer, ["q"]).build(row)

    assert (prompt.ids.count(BOS_ID), taken.ids.count(BOS_ID)) == (1, 1)
    assert tokenizer.decode(prompt.ids[1:]) == "<s>the"
    write_rows(q=["<s>the"])
    report = run_job(spec, engine=engine())
    assert any("1 rows hold text that reads like a special token" in w for w in report.warnings)


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('No system role, please') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}</s>{% endfor %}"
)


def test_b32_a_template_that_refuses_a_role_is_a_row_error_in_its_own_words(
    write_rows, make_spec, tmp_path, engine, out, make_tokenizer
):
    system = {"role": "system", "content": "S"}
    write_rows(c=[json.dumps(chat) for chat in ([USER], [system, USER], [USER, USER])])
    template = tmp_path / "strict.jinja"
    template.write_text(STRICT)
    source = {"messages_column": "c", "chat_template": str(template)}

    run_job(make_spec(input=source), engine=engine())
    kept = rows(out)
    merged = make_spec(
        input=source | {"system_role": "merge"}, output={"path": str(tmp_path / "merged")}
    )
    run_job(merged, engine=engine())

    assert [row["error_code"] for row in kept] == [None, "template_error", "template_error"]
    assert "No system role, please" in kept[1]["error_message"]
    assert "Roles must alternate" in kept[2]["error_message"]
    found = rows(tmp_path / "merged")
    assert [row["error_code"] for row in found] == [None, None, "template_error"]


SPECIAL = "a</s>b<s>"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": SPECIAL},
        {"role": "user", "content": "x", "name": SPECIAL},
        {"role": "user", "content": "x", "tool_calls": [{"arguments": {"k": SPECIAL}}]},
        {"role": "user", "content": "x", "tool_calls": [{"arguments": {SPECIAL: "v"}}]},
        {"role": "user", "content": "x", SPECIAL: "v"},
    ],
    ids=["content", "name", "argument", "name of an argument", "key"],
)
@pytest.mark.parametrize("spelling", [list, json.dumps])
def test_b35_special_text_in_any_part_of_a_message_stays_text_and_is_counted(
    make_tokenizer, built, message, spelling
):
    tokenizer = make_tokenizer(chat_template="{{ messages[0] | tojson }}", add_bos=False)

    prompt, text = built(spelling([message]), tokenizer)

    assert not {BOS_ID, EOS_ID} & set(prompt.ids)
    assert text == json.dumps(message, ensure_ascii=False)
    assert prompt.has_special_text
    allowed, _ = built(spelling([message]), tokenizer, allow_special_tokens=True)
    assert {BOS_ID, EOS_ID} <= set(allowed.ids) or "content" not in message


def test_b35_special_text_that_json_spells_otherwise_is_counted(make_tokenizer, built):
    tokenizer = make_tokenizer(chat_template="{{ messages[0].content }}", add_bos=False)

    prompt, text = built(r'[{"role": "user", "content": "\u003c/s>"}]', tokenizer)

    assert text == "</s>"
    assert EOS_ID not in prompt.ids
    assert prompt.has_special_text


def test_b35_special_text_of_the_job_s_variables_is_text(make_tokenizer, built):
    tokenizer = make_tokenizer(chat_template="{{ a }}{{ b | tojson }}</s>", add_bos=False)
    values = {"a": SPECIAL, "b": {SPECIAL: [SPECIAL]}}

    prompt, text = built([USER], tokenizer, template_kwargs=values)
    allowed, _ = built([USER], tokenizer, template_kwargs=values, allow_special_tokens=True)

    assert prompt.ids.count(EOS_ID) == 1
    assert BOS_ID not in prompt.ids
    assert text == SPECIAL + json.dumps({SPECIAL: [SPECIAL]}) + "</s>"
    assert allowed.ids.count(EOS_ID) == 4
