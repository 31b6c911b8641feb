"""Whether a completion follows the instructions of its prompt, where a program can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.rewards.instruction_checks import CHECKS
from torchrl_rloo.rewards.protocol import final_text


class InstructionFollowing:
    """The share of a row's instructions that its completion follows, or whether it follows all.

    Of IFEval's two readings this is the strict one: the text is judged as it stands. An empty text follows none.

    Source: Zhou et al. 2023, arXiv 2311.07911.

    Args:
        partial: the share of the instructions (IFEval's instruction level) instead of 1.0 for all, else 0.0 (its prompt
            level).
        ids_column: the dataset's column of lists of instruction ids, names in
            :data:`~torchrl_rloo.rewards.instruction_checks.CHECKS`, or None, which abstains.
        arguments_column: the column of lists of their arguments, one mapping each, in which None means not given.

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
        """``B`` scores in [0, 1], or None where a row has no instructions.

        Raises:
            KeyError: if the rows lack one of the columns.
            ValueError: for an instruction that is unknown, or lacks an argument.
        """
        for column in (self.ids_column, self.arguments_column):
            if column not in columns:
                raise KeyError(f"the rows have no column {column!r}; they have {sorted(columns)}")
        rows = zip(completions, columns[self.ids_column], columns[self.arguments_column], strict=True)
        return [self._score(final_text(c), ids, arguments) if ids else None for c, ids, arguments in rows]

    def _score(self, text: str, ids: Sequence[str], arguments: Sequence[Mapping[str, Any] | None]) -> float:
        if len(ids) != len(arguments):
            raise ValueError(
                f"{len(ids)} instructions {ids} with {len(arguments)} {self.arguments_column}: one for each"
            )
        followed = [_follows(text, name, given or {}) for name, given in zip(ids, arguments, strict=True)]
        return sum(followed) / len(followed) if self.partial else float(all(followed))


def _follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    if name not in CHECKS:
        raise ValueError(f"instruction {name!r} is unknown; known are {sorted(CHECKS)}")
    given = {k: v for k, v in arguments.items() if v is not None}
    try:
        return bool(text.strip()) and CHECKS[name](text, **given)
    except TypeError as error:
        raise ValueError(f"instruction {name!r} with {given}: {error}") from error
