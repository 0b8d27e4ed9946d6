"""Rows of the sampler's arrays as values of a completion."""

from jaxpaged.engine.sampling import Sampled
from jaxpaged.request import TokenLogprob


def entry(sampled: Sampled, row: int, *, token: int, num_top: int) -> TokenLogprob:
    """How likely the model found `token`, and the `num_top` likeliest tokens."""
    ids, logprobs = sampled.top_ids[row, :num_top], sampled.top_logprobs[row, :num_top]
    return TokenLogprob(
        token_id=token,
        logprob=float(sampled.logprobs[row]),
        rank=int(sampled.ranks[row]),
        top=tuple(zip(ids.tolist(), logprobs.tolist(), strict=True)),
    )
