"""S14: stop strings that count only behind a marker, such as the end of a thought."""

import pytest
from tiny import EOS_ID, byte_id, write_tiny_llama

from jaxpaged.engine import stopping
from jaxpaged.engine.generation import Generation
from jaxpaged.errors import ConfigError
from jaxpaged.job import scores
from jaxpaged.job.spec import JobSpec
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion, Request, SamplingParams
from jaxpaged.sequence import Sequence

THOUGHT = "<think>a\n\nb</think>c\n\nd"


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    write_tiny_llama(folder, tokenizer=request.param, vocab_size=320)
    return open_checkpoint(folder).tokenizer()


def say(tokenizer: Tokenizer, text: str | list[int], prompt: str = "x", **params) -> Completion:
    """The completion for a model that says `text` byte by byte, then the end of the sequence."""
    ids = [byte_id(byte) for byte in text.encode()] if isinstance(text, str) else text
    wanted = SamplingParams(**params)
    request = Request(request_id=0, prompt_ids=tuple(tokenizer.encode(prompt)), params=wanted)
    sequence = Sequence(request=request, max_tokens=wanted.max_tokens or 200)
    rule = stopping.stop_rule(wanted, tokenizer)
    generation = Generation(sequence, rule, tokenizer, seed=0)
    for token in [*ids, EOS_ID]:
        completion = generation.take(token)
        if completion is not None:
            return completion
    raise AssertionError("the tokens did not end the completion")


def test_s14_a_stop_string_inside_the_thought_does_not_stop(tokenizer):
    without = say(tokenizer, THOUGHT, stop=("\n\n",))
    found = say(tokenizer, THOUGHT, stop=("\n\n",), stop_after="</think>")

    assert without.text == "<think>a"
    assert found.text == "<think>a\n\nb</think>c"
    assert (found.finish_reason, found.stop_reason) == ("stop", "\n\n")
    assert scores.answer(found.text, "</think>") == "c"
    kept = say(tokenizer, THOUGHT, stop=("\n\n",), stop_after="</think>", include_stop=True)
    assert kept.text == "<think>a\n\nb</think>c\n\n"


def test_s14_a_marker_that_never_comes_leaves_stop_strings_out(tokenizer):
    found = say(tokenizer, "a\n\nb</thin", stop=("\n\n",), stop_after="</think>")
    assert (found.text, found.stop_reason) == ("a\n\nb</thin", str(EOS_ID))

    cut = say(tokenizer, "a\n\nb", stop=("\n\n",), stop_after="</think>", max_tokens=4)
    assert (cut.finish_reason, cut.stop_reason) == ("length", "max_tokens")


def test_s14_a_stop_string_begins_behind_the_marker(tokenizer):
    # The marker's own end is no beginning of a stop string.
    found = say(tokenizer, "k>\nx\n>\ny", stop=(">\n",), stop_after="k>")
    assert found.text == "k>\nx\n"
    # One that begins right behind it counts.
    assert say(tokenizer, "k>\nx", stop=("\n",), stop_after="k>").text == "k>"
    # Text that only looks like the marker's beginning is none.
    assert say(tokenizer, "kk>\nx", stop=("\n",), stop_after="k>").text == "kk>"


def test_s14_marker_and_stop_string_may_come_with_one_token(tokenizer):
    pair = next(
        token
        for token in range(tokenizer.vocab_size)
        if tokenizer.decode([byte_id(65), token]) == "Ahe"
    )
    found = say(tokenizer, [byte_id(65), pair, pair], stop=("e",), stop_after="h")
    assert (found.text, found.stop_reason) == ("Ah", "e")


@pytest.mark.parametrize("behind", ["", "\n", "\n\n", "  "])
def test_s14_a_prompt_that_ends_with_the_marker_opens_the_answer(tokenizer, behind):
    prompt = "q<think>\n\n</think>" + behind
    found = say(tokenizer, "c\n\nd", prompt, stop=("\n\n",), stop_after="</think>")
    assert found.text == "c"


def test_s14_a_marker_further_up_in_the_prompt_does_not_count(tokenizer):
    prompt = "<think>old</think>answer\nnext question"
    found = say(tokenizer, THOUGHT, prompt, stop=("\n\n",), stop_after="</think>")
    assert found.text == "<think>a\n\nb</think>c"


def test_s14_a_marker_that_is_a_special_token_counts_by_its_token(tokenizer):
    ids = [*(byte_id(byte) for byte in b"a;b"), 1, *(byte_id(byte) for byte in b"c;d")]
    found = say(tokenizer, ids, stop=(";",), stop_after="<s>")
    assert found.text == "a;bc"
    # A text that reads like it is as good.
    assert say(tokenizer, "a;<s>b;c", stop=(";",), stop_after="<s>").text == "a;<s>b"


def test_s14_a_stop_string_that_is_a_special_token_waits_as_well(tokenizer):
    ids = [byte_id(65), 0, byte_id(66), byte_id(59), byte_id(67), 0, byte_id(68)]
    params = {"stop": ("<unk>",), "stop_after": ";"}
    found = say(tokenizer, ids, **params)
    assert (found.text, found.stop_reason) == ("AB;C", "<unk>")
    # Tokens that end a completion by themselves wait for nothing.
    assert say(tokenizer, ids, **params, stop_token_ids=(0,)).text == "A"


def test_s14_min_tokens_and_the_marker_are_both_waited_for(tokenizer):
    found = say(tokenizer, "k>a;b;c", stop=(";",), stop_after="k>", min_tokens=4)
    assert found.text == "k>a;b"


def test_s14_the_end_inside_a_character_opens_nothing(tokenizer):
    llama = [byte_id(byte) for byte in "k>🦙".encode()]
    found = say(tokenizer, llama[:-1], stop=("\ufffd",), stop_after="k>")
    assert (found.text, found.stop_reason) == ("k>", "\ufffd")


def test_what_stop_after_may_be():
    with pytest.raises(ConfigError, match="stop_after must be a non-empty text"):
        SamplingParams(stop_after="")
    with pytest.raises(ConfigError, match="beam_width and stop_after exclude each other"):
        SamplingParams(stop_after="x", beam_width=2)
    job = {"model": "m", "input": {"path": "a", "prompt": "b"}, "output": {"path": "c"}}
    with pytest.raises(ConfigError, match="beam_width 2 and stop_after exclude each other"):
        JobSpec.from_dict(job | {"sampling": {"beam_width": 2, "stop_after": "x"}})
    assert JobSpec.from_dict(job | {"sampling": {"stop_after": "x"}}).sampling_params() == (
        SamplingParams(stop_after="x")
    )


@pytest.mark.parametrize(
    ("text", "answer"), [("a<k>b", "b"), ("<k>a<k> b", " b"), ("ab", "ab"), ("ab<k>", "")]
)
def test_the_answer_is_what_stands_behind_the_last_marker(text, answer):
    assert scores.answer(text, "<k>") == answer
    assert scores.answer(text, None) == text
