"""Reward for completions that follow verifiable instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.rewards.instruction_checks import CHECKS
from torchrl_rloo.rewards.protocol import final_text


class InstructionFollowing:
    """Reward of 1.0 where a completion follows all instructions of its row, else 0.0. ``partial`` scores their share.

    This is IFEval's strict accuracy: the text is judged unchanged, by its published definitions. An empty text follows
    no instruction. Checks of languages and of letter case require py3langid, from the extra ``rewards``.

    Source: Zhou et al. 2023, arXiv 2311.07911.

    Args:
        partial: True scores the share of followed instructions (IFEval's instruction level), False 1.0 for all and 0.0
            otherwise (prompt level).
        ids_column: dataset column of lists of instruction ids in
            :data:`~torchrl_rloo.rewards.instruction_checks.CHECKS`, or None, which abstains.
        arguments_column: dataset column of lists of arguments, a mapping per instruction. None values are dropped.

    Example:
        >>> follow = InstructionFollowing(partial=True)
        >>> ids = ["punctuation:no_comma", "length_constraints:number_words"]
        >>> arguments = [{}, {"num_words": 3, "relation": "at least"}]
        >>> columns = {"instruction_id_list": [ids] * 2, "kwargs": [arguments] * 2}
        >>> follow(["?"] * 2, ["no, never", "one two three"], [[1]] * 2, **columns)
        [0.0, 1.0]
    """

    __name__ = "instruction_following"

    def __init__(
        self, *, partial: bool = False, ids_column: str = "instruction_id_list", arguments_column: str = "kwargs"
    ):
        self.partial, self.ids_column, self.arguments_column = partial, ids_column, arguments_column

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return ``B`` scores in [0, 1], None where a row has no instructions.

        Raises:
            KeyError: if a column is missing.
            ValueError: if an instruction is unknown or lacks an argument.
        """
        for column in (self.ids_column, self.arguments_column):
            if column not in columns:
                raise KeyError(f"{self.__name__} requires column {column!r}; the rows have {sorted(columns)}")
        rows = zip(completions, columns[self.ids_column], columns[self.arguments_column], strict=True)
        return [self._score(final_text(c), ids, arguments) if ids else None for c, ids, arguments in rows]

    def _score(self, text: str, ids: Sequence[str], arguments: Sequence[Mapping[str, Any] | None]) -> float:
        if len(ids) != len(arguments):
            raise ValueError(
                f"{len(ids)} instructions {ids} must have as many {self.arguments_column}, got {len(arguments)}"
            )
        followed = [_follows(text, name, given or {}) for name, given in zip(ids, arguments, strict=True)]
        return sum(followed) / len(followed) if self.partial else float(all(followed))


def _follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    if name not in CHECKS:
        raise ValueError(f"unknown instruction {name!r}; valid: {sorted(CHECKS)}")
    given = {k: v for k, v in arguments.items() if v is not None}
    try:
        return bool(text.strip()) and CHECKS[name](text, **given)
    except TypeError as error:
        raise ValueError(f"instruction {name!r} with {given}: {error}") from error
