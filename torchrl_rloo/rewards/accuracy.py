r"""Whether a completion gives the right mathematical answer, by math-verify, and rewards built on it.

They need the extra ``rewards``: ``pip install "torchrl_rloo[rewards]"``. A completion is plain text or a list of
messages, of which the last assistant message is judged (TRL, whose functions these follow: the first message).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.rewards.math_judge import MathJudge
from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction, final_text
from torchrl_rloo.rewards.wrapping import RewardWrapper, Scores


class MathAccuracy:
    r"""1.0 where the answer of a completion equals the gold mathematically, else 0.0.

    The completion must give LaTeX: in ``\boxed{}``, else in a maths environment that words such as "the answer is"
    announce; a bare ``$7$`` counts for nothing. The gold may be LaTeX, with or without dollar signs, a plain
    expression, a number with its unit, or a whole solution, of which the last box counts or, without one, what stands
    last. Decimals are equal to six digits, units are dropped. Golds that are words abstain unless in ``\text{}``; for
    them there is :class:`~torchrl_rloo.rewards.matching.ExactMatch`.

    A bug of TRL is fixed: there a formula without dollar signs, such as the answers of MATH and DeepMath, abstains
    (``\dfrac{3}{4}``, ``(1,2)``) or is taken for a number in it (for ``2^{10}`` it rewards 2, and not 1024).

    Of several boxes the last counts. Edges kept as in math-verify and TRL: boxes fewer than 70 characters apart, with a
    comma, a line break or the like between them, are one set: ``\boxed{5} no, \boxed{7}`` is {5, 7}, wrong for 7; a
    percentage in a completion (``50\%``) equals neither 0.5 nor 50, only a gold that is a percentage too.

    Parsing and comparing run in a worker process (:class:`~torchrl_rloo.rewards.math_judge.MathJudge`), so any thread
    may call this. A row that takes longer than ``timeout`` scores 0.0, or abstains if parsing the gold is what hangs.
    It is logged, counted in ``judge.timeouts``, and costs its time-out and about a second for a new worker.

    Args:
        column: the dataset's column of gold answers, strings or None.
        timeout: seconds one row may take.

    Raises:
        ValueError: for an empty ``column`` or a ``timeout`` that is not positive and finite.
        ImportError: if math-verify is not installed.

    Example:
        >>> accuracy = MathAccuracy(column="answer")
        >>> accuracy(["?"] * 2, [r"\boxed{0.5}", r"\boxed{2}"], [[1], [2]], answer=["1/2", "1/2"])
        [1.0, 0.0]
    """

    __name__ = "math_accuracy"

    def __init__(self, *, column: str = "solution", timeout: float = 10.0):
        if not column or not isinstance(column, str):
            raise ValueError(f"column={column!r} must be the name of the dataset's column of gold answers")
        self.column, self.judge = column, MathJudge(timeout)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """``B`` scores.

        Returns:
            1.0, 0.0, or None where the gold is None or cannot be parsed.

        Raises:
            KeyError: if the rows have no column of golds.
            TypeError: if a gold is neither a string nor None.
        """
        if self.column not in columns:
            raise KeyError(f"{self.__name__} needs the column {self.column!r}; the rows have {sorted(columns)}")
        pairs = zip(completions, columns[self.column], strict=True)
        return [self._score(final_text(completion), gold) for completion, gold in pairs]

    def _score(self, text: str, gold: str | None) -> float | None:
        if gold is None:
            return None
        if not isinstance(gold, str):
            raise TypeError(f"{self.column} must hold strings or None, got {gold!r} ({type(gold).__name__}): use str()")
        equal = self.judge(gold, text)
        return None if equal is None else float(equal)


class ReasoningAccuracy(MathAccuracy):
    """As :class:`MathAccuracy`, judging only what follows the reasoning.

    A completion whose reasoning never ends scores 0.0, whatever the gold, even one that cannot be parsed. Otherwise the
    text after the last occurrence of the delimiter counts. Of several delimiters the first in the order given that
    occurs at all decides, not the one that stands last in the text: so does TRL, other than its documentation says.

    Args:
        reasoning_delimiters: strings that end the reasoning.
        column, timeout: see :class:`MathAccuracy`.

    Raises:
        ValueError: if ``reasoning_delimiters`` is a string, is empty, or holds anything but non-empty strings.
    """

    __name__ = "reasoning_accuracy"

    def __init__(
        self,
        reasoning_delimiters: Sequence[str] = ("</think>",),
        *,
        column: str = "solution",
        timeout: float = 10.0,
    ):
        super().__init__(column=column, timeout=timeout)
        delimiters = () if isinstance(reasoning_delimiters, str) else tuple(reasoning_delimiters)
        if not delimiters or not all(isinstance(d, str) and d for d in delimiters):
            raise ValueError(
                f"reasoning_delimiters={reasoning_delimiters!r} must be a list of strings, such as ['</think>']"
            )
        self.reasoning_delimiters = delimiters

    def _score(self, text: str, gold: str | None) -> float | None:
        for delimiter in self.reasoning_delimiters:
            if delimiter in text:
                return super()._score(text.rpartition(delimiter)[2], gold)
        return 0.0


class CosineScaled(RewardWrapper):
    """Correctness scaled by length: short correct answers earn most, short wrong ones lose most.

    With ``t = min(length / max_len, 1)`` and ``length`` the tokens sampled in the row, the reward goes from ``a`` to
    ``b`` as ``b + (a - b) (1 + cos(pi t)) / 2``, where ``(a, b)`` is ``(max_value_correct, min_value_correct)`` for a
    correct completion and ``(min_value_wrong, max_value_wrong)`` for a wrong one. From ``max_len`` on it stays at
    ``b``; the paper's separate penalty for exceeding the length is not part of it.

    Source: Yeo et al. 2025, arXiv 2502.03373, appendix C.1; names and defaults of TRL.

    Args:
        max_len: tokens at which the schedule ends.
        min_value_wrong: reward of a wrong completion of length 0.
        max_value_wrong: reward of a wrong completion of ``max_len`` tokens or more.
        min_value_correct: reward of a correct completion of ``max_len`` tokens or more.
        max_value_correct: reward of a correct completion of length 0.
        correctness: reward function that says what is correct, or its name, dotted path or mapping
            (:mod:`torchrl_rloo.rewards.registry`): 0 is wrong, other numbers are correct, and where it abstains so
            does this. Default: :class:`MathAccuracy` with its defaults.

    Raises:
        ValueError: if ``max_len`` is not positive, or values are not finite with min <= max.
        ImportError: if ``correctness`` is not given and math-verify is not installed.

    Example:
        >>> reward = CosineScaled(max_len=100, correctness="boxed_accuracy")
        >>> reward(["?"] * 2, ["\\\\boxed{7}", "8"], [[1] * 50, [1] * 50], answer=["7", "7"])
        [0.75, -0.75]
    """

    def __init__(
        self,
        max_len: int,
        min_value_wrong: float = -1.0,
        max_value_wrong: float = -0.5,
        min_value_correct: float = 0.5,
        max_value_correct: float = 1.0,
        *,
        correctness: RewardFunction | str | Mapping[str, Any] | None = None,
    ):
        if not max_len > 0:
            raise ValueError(f"max_len={max_len} must be a positive number of tokens")
        for kind, low, high in (
            ("wrong", min_value_wrong, max_value_wrong),
            ("correct", min_value_correct, max_value_correct),
        ):
            if not -math.inf < low <= high < math.inf:
                raise ValueError(f"min_value_{kind}={low} and max_value_{kind}={high} must be finite with min <= max")
        super().__init__(MathAccuracy() if correctness is None else correctness, "cosine_scaled")
        self.max_len = max_len
        self.wrong, self.correct = (min_value_wrong, max_value_wrong), (max_value_correct, min_value_correct)

    def change(self, scores: Scores, batch: RewardBatch) -> Scores:
        """The rewards instead of the verdicts; None where ``correctness`` abstains."""
        return [
            score if score is None or not math.isfinite(score) else self._scaled(bool(score), len(ids))
            for score, ids in zip(scores, batch.completion_ids, strict=True)
        ]

    def _scaled(self, correct: bool, length: int) -> float:
        start, end = self.correct if correct else self.wrong
        return end + (start - end) * (1 + math.cos(math.pi * min(length / self.max_len, 1.0))) / 2
