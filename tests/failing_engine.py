"""A scripted engine that remembers what it finished, and breaks at a step of the test's choice."""

from scripted_engine import ScriptedEngine

from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion


class FailingEngine(ScriptedEngine):
    """Completes requests until it breaks.

    Args:
        tokenizer: The job's.
        fails_at: The step that raises, counted from 1; None for none.
        max_num_seqs: Requests that run at once.

    Attributes:
        finished: The rows that it completed.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, fails_at: int | None = None, max_num_seqs: int = 8
    ) -> None:
        super().__init__(tokenizer, max_num_seqs=max_num_seqs)
        self.finished: set[int] = set()
        self._fails_at = fails_at

    @property
    def begun(self) -> set[int]:
        """The rows that it was given."""
        return {request.request_id for request in self.requests}

    def step(self) -> list[Completion]:
        if self.stats.steps + 1 == self._fails_at:
            raise RuntimeError("the device is gone")
        done = super().step()
        self.finished |= {completion.request_id for completion in done}
        return done
