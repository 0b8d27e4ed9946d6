"""What becomes of a prompt that leaves no room for a completion; knows token ids only."""

from jaxpaged.job.prompt.row_fault import RowSkipped
from jaxpaged.job.sections import OnTooLong


class PromptLimit:
    """Cuts prompts that are too long, each by its own length.

    A prompt is too long if not even one more token fits behind it.

    Args:
        max_model_len: Most tokens of prompt and completion together.
        policy: The job's `input.on_too_long`. With "error" prompts stay as they are: the engine
            makes the row error.
        bos_id: The token that stays at the beginning of a prompt that begins with it.
    """

    def __init__(self, max_model_len: int, policy: OnTooLong, *, bos_id: int | None) -> None:
        self._max_model_len = max_model_len
        self._policy = policy
        self._bos_id = bos_id

    def apply(self, ids: tuple[int, ...], *, max_tokens: int | None) -> tuple[int, ...]:
        """The ids to complete.

        A cut prompt leaves room for the row's `max_tokens`, or for a quarter of the model's
        length if it has none, and keeps at least one token.

        Raises:
            RowSkipped: The prompt is too long, and such rows are to be passed over.
        """
        most = self._max_model_len - 1
        if self._policy == "error" or len(ids) <= most:
            return ids
        if self._policy == "skip":
            raise RowSkipped(
                "prompt_too_long",
                f"the prompt has {len(ids):,} tokens; with room for one more at most {most:,} fit "
                f"max_model_len {self._max_model_len:,}",
            )
        room = max_tokens if max_tokens is not None else self._max_model_len // 4
        return self._cut(ids, min(max(self._max_model_len - room, 1), most))

    def _cut(self, ids: tuple[int, ...], num: int) -> tuple[int, ...]:
        first = ids[:1] if ids[0] == self._bos_id else ()
        rest, num = ids[len(first) :], num - len(first)
        if self._policy == "truncate_left":
            begin = 0
        elif self._policy == "truncate_right":
            begin = num
        else:
            begin = num - num // 2
        # From the end's index, as the last 0 ids are not `rest[-0:]`.
        return first + rest[:begin] + rest[len(rest) - (num - begin) :]
