"""When completions end and what their text is: stop strings, stop tokens, limits, UTF-8."""

import collections.abc
import dataclasses

import pytest
from tiny import EOS_ID, byte_id, write_tiny_llama

from jaxpaged.engine import stopping
from jaxpaged.engine.detokenizer import Detokenizer
from jaxpaged.engine.generation import Generation
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion, Request, SamplingParams
from jaxpaged.sequence import Sequence


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    write_tiny_llama(folder, tokenizer=request.param, vocab_size=320, eos_token_id=[2, 5, 7])
    return open_checkpoint(folder).tokenizer()


def continuation_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens that spell `text` behind other text."""
    front = tokenizer.encode("x")
    ids = tokenizer.encode("x" + text)
    assert ids[: len(front)] == front
    return ids[len(front) :]


def byte_ids(data: bytes) -> list[int]:
    return [byte_id(byte) for byte in data]


def generate(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams | None = None, max_tokens=100
) -> Completion:
    """Feeds the tokens until the completion ends."""
    params = params or SamplingParams()
    request = Request(request_id=3, prompt_ids=tuple(tokenizer.encode("x")), params=params)
    rule = stopping.stop_rule(params, tokenizer)
    sequence = Sequence(request=request, max_tokens=params.max_tokens or max_tokens)
    generation = Generation(sequence, rule, tokenizer, seed=0)
    for token in ids:
        completion = generation.take(token)
        if completion is not None:
            return completion
    raise AssertionError("the tokens did not end the completion")


def spell(tokenizer: Tokenizer, text: str, **params) -> Completion:
    """The completion for a model that says `text`, then the end-of-sequence token."""
    ids = [*continuation_ids(tokenizer, text), EOS_ID]
    return generate(tokenizer, ids, SamplingParams(**params))


def test_text_up_to_the_end_of_sequence(tokenizer) -> None:
    completion = spell(tokenizer, " the end of it")
    assert completion.text == " the end of it"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "2")
    assert completion.token_ids[-1] == EOS_ID
    assert completion.completion_tokens == len(completion.token_ids)


@pytest.mark.parametrize("eos", [2, 5, 7])
def test_every_end_of_sequence_token_of_tokenizer_and_generation_config_stops(
    tokenizer, eos: int
) -> None:
    completion = generate(tokenizer, [byte_id(65), eos])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", str(eos))


def test_ignore_eos_runs_to_the_limit(tokenizer) -> None:
    params = SamplingParams(ignore_eos=True, max_tokens=3)
    completion = generate(tokenizer, [2, 5, byte_id(65)], params)
    assert (completion.finish_reason, completion.stop_reason) == ("length", "max_tokens")
    assert completion.text.endswith("A")


def test_stop_string_across_tokens(tokenizer) -> None:
    completion = spell(tokenizer, "abcXYd", stop=("XY",))
    assert completion.text == "abc"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "XY")
    # Token ids keep what was sampled, up to the token that completed the match.
    assert len(completion.token_ids) == 5
    assert spell(tokenizer, "abcXYd", stop=("XY",), include_stop=True).text == "abcXY"


def test_stop_string_inside_a_token_cuts_the_text_there(tokenizer) -> None:
    completion = spell(tokenizer, "and then", stop=("d t",))
    assert completion.text == "an"


def test_stop_strings_of_different_length_keep_the_space_in_front(tokenizer) -> None:
    stop = ("a very long text that never comes", "ionized")
    completion = spell(tokenizer, "are highly ionized gases", stop=stop)
    assert completion.text == "are highly "
    assert completion.stop_reason == "ionized"


def test_of_two_stop_strings_the_earlier_wins_and_of_two_at_one_place_the_longer(
    tokenizer,
) -> None:
    assert spell(tokenizer, "one two", stop=("two", "e")).text == "on"
    completion = spell(tokenizer, "abcd", stop=("bc", "bcd", "b"))
    assert (completion.text, completion.stop_reason) == ("a", "b")


def test_stop_string_that_is_a_special_token_stops_by_the_token(tokenizer) -> None:
    ids = [byte_id(65), tokenizer.special_tokens["<s>"], byte_id(66)]
    completion = generate(tokenizer, ids, SamplingParams(stop=("<s>",)))
    assert (completion.text, completion.stop_reason) == ("A", "<s>")
    included = generate(tokenizer, ids, SamplingParams(stop=("<s>",), include_stop=True))
    assert included.text == "A<s>"


def test_stop_string_completed_by_the_last_allowed_token_counts_as_stop(tokenizer) -> None:
    completion = spell(tokenizer, "abcXYd", stop=("XY",), max_tokens=5)
    assert completion.finish_reason == "stop"


def test_min_tokens_delays_stop_strings(tokenizer) -> None:
    completion = spell(tokenizer, "qXqXq", stop=("X",), min_tokens=3)
    assert completion.text == "qXq"
    # The token that completes the match is the last of the first two.
    assert spell(tokenizer, "qXqXq", stop=("X",), min_tokens=2).text == "qXq"
    assert spell(tokenizer, "qXqXq", stop=("X",), min_tokens=1).text == "q"


def test_a_stop_string_that_reads_like_a_limit_is_not_added_at_the_limit(tokenizer) -> None:
    params = SamplingParams(stop=("max_tokens",), include_stop=True, max_tokens=1)
    completion = generate(tokenizer, [byte_id(65)], params)
    assert (completion.text, completion.stop_reason) == ("A", "max_tokens")


def test_stop_token_ids_stop(tokenizer) -> None:
    ids = [byte_id(65), byte_id(66)]
    completion = generate(tokenizer, ids, SamplingParams(stop_token_ids=(byte_id(66),)))
    assert completion.stop_reason == str(byte_id(66))


@pytest.mark.parametrize("text", ["🦙", "깰", "naïve ☕ 漢字", "a🦙b", "e\u0301"])
def test_b33_characters_split_over_tokens_come_out_whole(tokenizer, text: str) -> None:
    ids = [byte_id(byte) for byte in text.encode()]
    completion = generate(tokenizer, [*ids, EOS_ID])
    assert completion.text == text
    assert not completion.ends_in_partial_character


def test_b33_a_limit_inside_a_character_leaves_one_replacement_and_a_flag(tokenizer) -> None:
    ids = [byte_id(byte) for byte in "ab🦙".encode()]
    completion = generate(tokenizer, ids[:-1], SamplingParams(max_tokens=5))
    assert completion.text == "ab\ufffd"
    assert completion.ends_in_partial_character
    assert completion.text.encode()  # valid UTF-8


def test_b33_stop_string_behind_a_split_character(tokenizer) -> None:
    ids = [byte_id(byte) for byte in "ab🦙STOPx".encode()]
    completion = generate(tokenizer, ids, SamplingParams(stop=("🦙S",)))
    assert completion.text == "ab"


@pytest.mark.parametrize("text", [" the", " ...", ": 'search", "  two  spaces ", "\n\nline", "x ?"])
def test_b34_spaces_of_the_continuation_survive(tokenizer, text: str) -> None:
    assert spell(tokenizer, text).text == text


def test_detokenizer_says_what_is_new(tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, tuple(tokenizer.encode("x")))
    pieces = [detokenizer.append(token) for token in continuation_ids(tokenizer, " the 🦙 at")]
    assert "".join(pieces) == detokenizer.text == " the 🦙 at"
    assert detokenizer.finish() == ""


def test_b34_the_space_in_front_survives_behind_a_prompt_that_ends_in_special_tokens(
    tokenizer,
) -> None:
    """The known text in front needs more than the last token of the prompt."""
    prompt_ids = (*tokenizer.encode("x"), EOS_ID, EOS_ID)
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    for token in continuation_ids(tokenizer, " the"):
        detokenizer.append(token)
    assert detokenizer.text == " the"


@pytest.mark.parametrize("prompt", ["x깰깰", "q🦙깰", "x🦙🦙", "a\ufffd", "\ufffd\ufffd\ufffd"])
def test_a_prompt_of_split_characters_leaves_the_completion_alone(tokenizer, prompt: str) -> None:
    detokenizer = Detokenizer(tokenizer, tuple(tokenizer.encode(prompt)))
    for token in [*byte_ids("깰".encode()), *continuation_ids(tokenizer, " the")]:
        detokenizer.append(token)
    assert detokenizer.text == "깰 the"


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
@pytest.mark.parametrize("prompt", ["x", "x깰깰"])
def test_a_character_that_the_prompt_began_is_completed(
    tokenizer, prompt: str, num_bytes: int
) -> None:
    llama = byte_ids("🦙".encode())
    prompt_ids = (*tokenizer.encode(prompt), *llama[:num_bytes])
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    for token in [*llama[num_bytes:], *continuation_ids(tokenizer, "ok")]:
        detokenizer.append(token)
    assert detokenizer.text == "🦙ok"


@pytest.mark.parametrize("data", [b"\xff" * 10, b"\xf0\x9f\xff", "a\ufffd\ufffd".encode()])
def test_invalid_bytes_and_replacement_characters_stay_as_the_tokenizer_decodes_them(
    tokenizer, data: bytes
) -> None:
    completion = generate(tokenizer, [*byte_ids(data), EOS_ID])
    assert completion.text == tokenizer.decode(byte_ids(data))
    assert completion.text.count("\ufffd") >= 2
    assert not completion.ends_in_partial_character


def test_invalid_bytes_spoil_neither_what_was_there_nor_what_follows(tokenizer) -> None:
    ids = [*byte_ids("깰".encode() + b"\xff"), *continuation_ids(tokenizer, " the"), EOS_ID]
    assert generate(tokenizer, ids).text == "깰\ufffd the"


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_stop_token_inside_a_character_leaves_one_replacement_and_a_flag(
    tokenizer, num_bytes: int
) -> None:
    ids = byte_ids(b"a" + "🦙".encode()[:num_bytes])
    completion = generate(tokenizer, [*ids, EOS_ID])
    assert (completion.text, completion.stop_reason) == ("a\ufffd", "2")
    assert completion.ends_in_partial_character


@pytest.mark.parametrize("end", [[EOS_ID], []])
def test_b33_stop_string_completed_by_the_incomplete_character(tokenizer, end: list[int]) -> None:
    ids = byte_ids(b"abc\xf0\x9f")
    params = SamplingParams(stop=("c\ufffd",), max_tokens=len(ids) + len(end))
    completion = generate(tokenizer, [*ids, *end], params)
    assert completion.text == "ab"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "c\ufffd")
    assert not completion.ends_in_partial_character


def test_tokens_without_text_change_nothing(tokenizer) -> None:
    """Special tokens among the others: inside a character, and before a space."""
    llama = byte_ids("🦙".encode())
    ids = [*llama[:2], *[EOS_ID] * 30, *llama[2:], EOS_ID, *continuation_ids(tokenizer, " the")]
    completion = generate(tokenizer, ids, SamplingParams(ignore_eos=True, max_tokens=len(ids)))
    assert completion.text == "🦙 the"


@dataclasses.dataclass(frozen=True)
class CountingDecoder:
    """A tokenizer that notes how many ids each decoding took."""

    tokenizer: Tokenizer
    decoded: list[int] = dataclasses.field(default_factory=list)

    def decode(self, ids: collections.abc.Sequence[int], /) -> str:
        self.decoded.append(len(ids))
        return self.tokenizer.decode(ids)

    def token_text(self, token_id: int, /) -> str | None:
        return self.tokenizer.token_text(token_id)


@pytest.mark.parametrize(
    "token", [byte_id(97), EOS_ID, 319, byte_id(0xFF), byte_id(0xF0), byte_id(0x80)]
)
def test_decoding_costs_the_same_for_every_token(tokenizer, token: int) -> None:
    """The window of ids decoded per token stays short, however long the completion."""
    counting = CountingDecoder(tokenizer)
    detokenizer = Detokenizer(counting, tuple(tokenizer.encode("x")))
    for _ in range(500):
        detokenizer.append(token)
    assert max(counting.decoded) <= 6
    assert len(counting.decoded) <= 500 * 5


def test_a_stop_string_spelled_like_a_token_id_is_not_added_for_that_token(tokenizer) -> None:
    params = SamplingParams(stop=(str(EOS_ID),), include_stop=True)
    completion = generate(tokenizer, [byte_id(65), EOS_ID], params)
    assert (completion.text, completion.stop_reason) == ("A", str(EOS_ID))
