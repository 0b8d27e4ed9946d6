import math

import numpy as np
import pytest

from jaxpaged.job import token_logprobs
from jaxpaged.job.token_logprobs import LOGPROBS_TYPE, TokenLogprobs
from jaxpaged.request import TokenLogprob

FIRST = TokenLogprob(token_id=3, logprob=None, rank=None)
LATER = TokenLogprob(token_id=4, logprob=-0.1, rank=2, top=((9, -0.05), (4, -0.1), (0, -math.inf)))
SURE = TokenLogprob(token_id=5, logprob=0.0, rank=1)


def pack(*tokens: TokenLogprob) -> TokenLogprobs:
    return TokenLogprobs.pack(tokens)


def narrow(value: float) -> float:
    return float(np.float32(value))


def test_a_column_has_an_entry_for_each_token():
    column = token_logprobs.to_arrow([pack(FIRST, LATER), None, pack(), pack(SURE)])

    column.validate(full=True)
    assert column.type == LOGPROBS_TYPE
    top = [(9, narrow(-0.05)), (4, narrow(-0.1)), (0, -math.inf)]
    assert column.to_pylist() == [
        [
            {"token_id": 3, "logprob": None, "rank": None, "top": []},
            {
                "token_id": 4,
                "logprob": narrow(-0.1),
                "rank": 2,
                "top": [{"token_id": token_id, "logprob": value} for token_id, value in top],
            },
        ],
        None,
        [],
        [{"token_id": 5, "logprob": 0.0, "rank": 1, "top": []}],
    ]


@pytest.mark.parametrize("rows", [[], [None], [None, None]])
def test_a_column_may_be_empty(rows):
    assert token_logprobs.to_arrow(rows).to_pylist() == rows


@pytest.mark.parametrize("tokens", [[], [FIRST], [FIRST, LATER, SURE], [LATER] * 100])
def test_json_gives_the_same_bits(tokens):
    packed = pack(*tokens)

    assert token_logprobs.from_json(packed.to_json()) == packed


def test_a_token_takes_few_bytes():
    assert pack(*[LATER] * 100).num_bytes == 100 * (4 * 4 + 3 * 8)
