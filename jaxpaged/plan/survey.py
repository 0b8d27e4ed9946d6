"""What the rows of a job ask for: lengths, faults, repetitions. Knows nothing of an engine.

Everything is counted as the rows pass by; of a row only its lengths and digests are kept.
"""

import array
import collections
import dataclasses
import typing
from typing import Any

from jaxpaged.job.prompt.prompt_limit import PromptLimit
from jaxpaged.job.prompt.prompts import Prompt
from jaxpaged.job.prompt.row_fault import RowFault, RowSkipped
from jaxpaged.job.sections import OnTooLong

MAX_EXAMPLES = 3
"""Rows that are named of those at fault with a code."""


@dataclasses.dataclass(slots=True)
class PolicyEffect:
    """What a policy for prompts that are too long would do.

    Attributes:
        rows: Rows it bears on.
        tokens_cut: Prompt tokens that it would take out of them.
    """

    rows: int = 0
    tokens_cut: int = 0


def place(count: int, percent: int) -> int:
    """Where in ordered values that one stands which so many in 100 are not above."""
    return max(0, -(-count * percent // 100) - 1)


class Lens:
    """Lengths of many texts, in tokens."""

    def __init__(self) -> None:
        self._values: array.array[int] = array.array("I")

    def add(self, num_tokens: int) -> None:
        """Takes one more."""
        self._values.append(num_tokens)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self._values)

    def quantiles(self) -> dict[str, int]:
        """The shortest, the median, the 9th decile, the 99th percentile and the longest."""
        if not self._values:
            return {}
        ordered = sorted(self._values)
        shares = {"min": 0, "median": 50, "p90": 90, "p99": 99, "max": 100}
        return {name: ordered[place(len(ordered), share)] for name, share in shares.items()}

    def summary(self) -> dict[str, Any]:
        """Count, sum, quantiles and histogram, in JSON's types."""
        bins = [{"first": first, "last": last, "rows": n} for first, last, n in self.histogram()]
        return {"rows": len(self), "total": self.total, **self.quantiles(), "histogram": bins}

    def histogram(self) -> list[tuple[int, int, int]]:
        """Bins that are not empty: first and last length, and how many; each twice the one before.

        1, 2, 3 to 4, 5 to 8, and so on.
        """
        counts = collections.Counter(max(0, value - 1).bit_length() for value in self._values)
        return [
            ((1 << at >> 1) + 1 if at else 1, 1 << at, counts[at]) for at in sorted(counts.keys())
        ]


class Survey:
    """The rows that were looked at.

    Args:
        max_model_len: Most tokens of prompt and completion together.
        block_size: Tokens per block: what prompts share is counted in whole blocks.
        bos_id: The token that stays at the beginning of a prompt that is cut.

    Attributes:
        rows: Rows looked at.
        prompt_lens: Of whole prompts, before anything is cut.
        new_lens: Most tokens that a row may generate, of rows whose prompts leave room for any.
        faults: Rows at fault by code, with the addresses of the first ones.
        skipped: Rows that are passed over, by code.
        too_long: Rows that leave no room for a completion.
        effects: What each policy would do with those.
        duplicates: Rows whose prompt another row before them has, too.
        shared_tokens: Prompt tokens in whole blocks that a prompt before theirs begins with, too.
        special_texts: Rows with text that reads like a special token.
        answered: Chats that end in a message of the assistant, which is taken as finished.
    """

    def __init__(self, *, max_model_len: int, block_size: int, bos_id: int | None) -> None:
        self.rows = 0
        self.prompt_lens = Lens()
        self.new_lens = Lens()
        self.faults: dict[str, list[str]] = {}
        self.fault_counts: collections.Counter[str] = collections.Counter()
        self.skipped: collections.Counter[str] = collections.Counter()
        self.too_long = 0
        self.effects = {policy: PolicyEffect() for policy in typing.get_args(OnTooLong)}
        self.duplicates = 0
        self.shared_tokens = 0
        self.special_texts = 0
        self.answered = 0
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._limits = {
            policy: PromptLimit(max_model_len, policy, bos_id=bos_id)
            for policy in self.effects
            if policy.startswith("truncate")
        }
        self._prompts: set[int] = set()
        self._beginnings: set[int] = set()

    def fault(self, place: str, fault: RowFault) -> None:
        """A row has no valid prompt or parameters."""
        self.rows += 1
        self.add_faults(fault.code, [place], 1)

    def add_faults(self, code: str, places: list[str], count: int) -> None:
        """Rows that were counted already turn out to be at fault; some of their addresses."""
        self.fault_counts[code] += count
        examples = self.faults.setdefault(code, [])
        examples.extend(places[: MAX_EXAMPLES - len(examples)])

    def skip(self, skip: RowSkipped) -> None:
        """A row is passed over."""
        self.rows += 1
        self.skipped[skip.code] += 1

    def add(self, prompt: Prompt) -> None:
        """A row has a prompt."""
        ids = prompt.whole_ids
        self.rows += 1
        self.prompt_lens.add(len(ids))
        self.special_texts += prompt.has_special_text
        self.answered += prompt.ends_in_answer
        if len(ids) >= self._max_model_len:
            self._add_too_long(prompt)
        self._add_repetitions(prompt)

    def _add_too_long(self, prompt: Prompt) -> None:
        self.too_long += 1
        for policy, effect in self.effects.items():
            effect.rows += 1
            if policy in self._limits:
                cut = self._limits[policy].apply(
                    prompt.whole_ids, max_tokens=prompt.params.max_tokens
                )
                effect.tokens_cut += len(prompt.whole_ids) - len(cut)

    def _add_repetitions(self, prompt: Prompt) -> None:
        # Prompts of different adapters have no keys and values in common.
        ids, whole = prompt.whole_ids, hash((prompt.adapter, prompt.whole_ids))
        self.duplicates += whole in self._prompts
        self._prompts.add(whole)
        # Each beginning of whole blocks is known by the hash of the one before and of its last
        # block; the last token of a prompt is always computed.
        size, beginning, is_known = self._block_size, hash(prompt.adapter), True
        for first in range(0, (len(ids) - 1) // size * size, size):
            beginning = hash((beginning, ids[first : first + size]))
            is_known = is_known and beginning in self._beginnings
            self.shared_tokens += size * is_known
            self._beginnings.add(beginning)
