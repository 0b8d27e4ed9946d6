"""What the kills of `chaos_job` cost in tokens, and whether they may.

A row that finished longer than the journal's interval before a kill may never reach the engine
again; one that finished later may, and one that had not finished is begun anew.
"""

# The tests' own modules are found at run time.
# pyright: reportMissingImports=false

import dataclasses
from collections.abc import Mapping

from chaos_ledger import Finish, Life
from outside_reader import Violation


@dataclasses.dataclass(slots=True, kw_only=True)
class Cost:
    """Tokens of commands that came to their end.

    Attributes:
        generated_tokens: Sampled in whole steps.
        needed_tokens: Sampled by a job that nobody kills.
        regenerated_tokens: Sampled once more for rows that had finished before a kill.
        unfinished_tokens: Sampled for rows that a kill met before they finished.
        regenerated_rows: Rows that had finished and were begun anew, each time counted.
        resumed_rows: Rows that came from the journal, each time counted.
        oldest_seconds: The longest that one of the regenerated rows had been finished when the
            kill came, less the journal's interval.
    """

    generated_tokens: int = 0
    needed_tokens: int = 0
    regenerated_tokens: int = 0
    unfinished_tokens: int = 0
    regenerated_rows: int = 0
    resumed_rows: int = 0
    oldest_seconds: float | None = None

    def add(self, other: "Cost") -> None:
        """Adds the cost of another command."""
        ages = [age for age in (self.oldest_seconds, other.oldest_seconds) if age is not None]
        for field in dataclasses.fields(self):
            if field.name != "oldest_seconds":
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.oldest_seconds = max(ages, default=None)


class Account:
    """The cost of one command, from its first child to the one that ends it.

    Args:
        tokens: By the number of each row that the command completes, the tokens it takes.
    """

    def __init__(self, tokens: Mapping[int, int]) -> None:
        self._tokens = tokens
        # The latest time that each row finished, and the age it had when its child ended.
        self._finished: dict[int, tuple[Finish, float]] = {}
        self.cost = Cost(needed_tokens=sum(tokens.values()))

    def add(self, life: Life, ended: float, interval: float) -> None:
        """Takes in a child.

        Args:
            life: What it did.
            ended: The moment of the kill, or of its end.
            interval: The journal's, in seconds.

        Raises:
            Violation: It completed a row that it should have found completed.
        """
        for row in life.added_rows:
            self._begin(row)
        finishes = life.finishes(interval)
        for row, finish in finishes.items():
            if finish.tokens != self._tokens.get(row):
                raise Violation(
                    f"row {row} took {finish.tokens} tokens, not {self._tokens.get(row)}"
                )
            if row in self._finished:
                self.cost.regenerated_tokens += finish.tokens
            self._finished[row] = (finish, ended - finish.time - interval)
        self.cost.generated_tokens += life.sampled_tokens
        self.cost.unfinished_tokens += life.sampled_tokens - sum(
            f.tokens for f in finishes.values()
        )
        self.cost.resumed_rows += life.resumed_rows

    def close(self) -> Cost:
        """The cost, once the command came to its end.

        Raises:
            Violation: A row was never completed, or the sums do not add up.
        """
        if missing := self._tokens.keys() - self._finished.keys():
            raise Violation(f"nobody completed row {min(missing)}, yet it is in the output")
        cost = self.cost
        if (
            cost.generated_tokens
            != cost.needed_tokens + cost.regenerated_tokens + cost.unfinished_tokens
        ):
            raise Violation(f"the tokens do not add up: {cost}")
        return cost

    def _begin(self, row: int) -> None:
        if row not in self._tokens:
            raise Violation(f"row {row} is completed, which this command should leave alone")
        if row not in self._finished:
            return
        finish, age = self._finished[row]
        if finish.is_safe:
            raise Violation(
                f"row {row} is completed again; when the kill came it had been finished for the "
                f"journal's interval and {age:.3f} s"
            )
        self.cost.regenerated_rows += 1
        self.cost.oldest_seconds = max(age, self.cost.oldest_seconds or age)
