r"""Rewards for correct mathematical answers, judged by math-verify.

They require the extra ``rewards``: ``pip install "torchrl_rloo[rewards]"``. A completion is plain text or a list of
messages, of which the last assistant message is judged. They follow TRL's functions, which judge the first message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.rewards.process_judge import MathJudge
from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction, check_column, final_text, take_columns
from torchrl_rloo.rewards.wrapping import RewardWrapper, Scores


class MathAccuracy:
    r"""Reward of 1.0 where the answer of a completion equals the gold answer mathematically, else 0.0.

    The completion must give its answer in LaTeX. The last ``\boxed{}`` counts, else a math environment after words
    such as "the answer is"; a bare ``$7$`` is not an answer. The gold answer may be LaTeX with or without dollar signs,
    a plain expression, or a number with a unit. It may also be a whole solution, of which the last box counts, or else
    the last expression. Decimals are compared to six digits and units are dropped. Golds in words abstain unless they
    are in ``\text{}``; use :class:`~torchrl_rloo.rewards.matching.ExactMatch` for them.

    Difference from TRL: formulas without dollar signs, such as the answers of MATH and DeepMath, are parsed. TRL
    abstains on them (``\dfrac{3}{4}``, ``(1,2)``) or takes a number in them (2 for ``2^{10}``). Repeating decimals
    (``0.\overline{3}``, ``0.(3)``) and boxes without braces (``\boxed 7``) are read. Numbers of different bases
    (``11_2``, ``11_3``) are different, and an equation between different numbers (``6 = 5``) is wrong.

    Four limits are the same as in math-verify and TRL:

    - Boxes less than 70 characters apart, with a comma, a line break or similar between them, form a set.
      ``\boxed{5} no, \boxed{7}`` is {5, 7} and wrong for 7.
    - A percentage in a completion (``50\%``) equals only a gold that is a percentage, neither 0.5 nor 50.
    - A number without a base equals one with the same digits in any base: ``413`` is right for ``413_5``. Two bases
      must agree. Numbers are not converted, since ``11_2`` does not answer how 3 is written in base 2.
    - The case of variables (``n``, ``N``) and repeated answers (``5, 5``) do not count.

    Worker processes parse and compare, so any thread may call this reward, and rows of a batch are judged side by side.
    A row that exceeds ``timeout`` scores 0.0, or abstains if parsing the gold hangs. Time-outs are counted in
    ``judge.timeouts``, and a warning is logged if they take most of the time. After 8 time-outs in a batch the limit is
    a tenth. A box of more than 500 characters scores 0.0, unread.

    Args:
        column: dataset column of gold answers, strings or None.
        timeout: seconds of CPU time per row.

    Raises:
        ValueError: if ``column`` is empty, or ``timeout`` is not positive and finite.
        ImportError: if math-verify is not installed.

    Example:
        >>> accuracy = MathAccuracy(column="answer")
        >>> accuracy(["?"] * 2, [r"\boxed{0.5}", r"\boxed{2}"], [[1], [2]], answer=["1/2", "1/2"])
        [1.0, 0.0]
    """

    __name__ = "math_accuracy"

    def __init__(self, *, column: str = "solution", timeout: float = 5.0):
        self.column, self.judge = check_column(column), MathJudge(timeout)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Score ``B`` completions.

        Returns:
            ``B`` scores: 1.0, 0.0, or None where the gold is None or cannot be parsed.

        Raises:
            KeyError: if the dataset does not have ``column``.
            TypeError: if a gold is neither a string nor None.
        """
        (golds,) = take_columns(self.__name__, [self.column], columns)
        for gold in golds:
            if not isinstance(gold, str | None):
                raise TypeError(f"{self.column}={gold!r} ({type(gold).__name__}) must be a string or None; use str()")
        texts = [self._judged_text(final_text(completion)) for completion in completions]
        # A text without an answer scores 0 whatever its gold; the judge takes the others together
        rows = [i for i, text in enumerate(texts) if text is not None and golds[i] is not None]
        scores = [0.0 if text is None else None for text in texts]
        for i, verdict in zip(rows, self.judge.judge_rows([(golds[i], texts[i]) for i in rows]), strict=True):
            scores[i] = None if verdict is None else float(verdict)
        return scores

    def describe(self, golds: Sequence[str | None], texts: Sequence[str]) -> list[tuple[str, str]]:
        """Return the canonical forms of each gold and text's answer, or in brackets why there is none."""
        boxed = [rf"\boxed{{{gold}}}" for gold in golds]
        judged = [self._judged_text(text) for text in texts]
        forms = self.judge.forms([*boxed, *(text for text in judged if text is not None)])

        def describe(gold: str | None, box: str, text: str | None) -> tuple[str, str]:
            if text is None:
                return ("[incomplete reasoning]",) * 2
            parsed = None if gold is None else forms[box]
            return (parsed, forms[text] or "[unparseable]") if parsed else ("[unparseable]", "[skipped]")

        return [describe(*row) for row in zip(golds, boxed, judged, strict=True)]

    def _judged_text(self, text: str) -> str | None:
        return text


class ReasoningAccuracy(MathAccuracy):
    r"""Reward like :class:`MathAccuracy` that judges only the text after the reasoning.

    A completion without a delimiter scores 0.0, even if its gold is None or cannot be parsed. Otherwise the text after
    the last occurrence of the delimiter is judged. With several delimiters, the first in the list that occurs in the
    text is used. TRL's code does the same, although its documentation names the last one in the text.

    Args:
        reasoning_delimiters: strings that end the reasoning.
        column: dataset column of gold answers, strings or None.
        timeout: seconds of CPU time per row.

    Raises:
        ValueError: if ``reasoning_delimiters`` is a string, is empty, or holds anything but non-empty strings.

    Example:
        >>> accuracy = ReasoningAccuracy(column="answer")
        >>> accuracy(["?"] * 2, [r"<think>2?</think>\boxed{4}", r"\boxed{4}"], [[1], [2]], answer=["4", "4"])
        [1.0, 0.0]
    """

    __name__ = "reasoning_accuracy"

    def __init__(
        self, reasoning_delimiters: Sequence[str] = ("</think>",), *, column: str = "solution", timeout: float = 5.0
    ):
        super().__init__(column=column, timeout=timeout)
        delimiters = () if isinstance(reasoning_delimiters, str) else tuple(reasoning_delimiters)
        if not delimiters or not all(isinstance(d, str) and d for d in delimiters):
            raise ValueError(
                f"reasoning_delimiters={reasoning_delimiters!r} must be a list of strings, such as ['</think>']"
            )
        self.reasoning_delimiters = delimiters

    def _judged_text(self, text: str) -> str | None:
        for delimiter in self.reasoning_delimiters:
            if delimiter in text:
                return text.rpartition(delimiter)[2]
        return None


class CosineScaled(RewardWrapper):
    """Reward for correctness scaled by length: short correct answers score highest, short wrong ones lowest.

    With ``t = min(length / max_len, 1)`` and ``length`` sampled tokens, the reward is
    ``b + (a - b) (1 + cos(pi t)) / 2``. It goes from ``a`` at length 0 to ``b`` at ``max_len`` and stays there.
    ``(a, b)`` is ``(max_value_correct, min_value_correct)`` for a correct completion and
    ``(min_value_wrong, max_value_wrong)`` for a wrong one. The paper's separate penalty for exceeding the length is
    not included.

    Source: Yeo et al. 2025, arXiv 2502.03373, appendix C.1; names and defaults of TRL.

    Args:
        max_len: length in tokens at which the schedule ends.
        min_value_wrong: reward of a wrong completion of length 0.
        max_value_wrong: reward of a wrong completion of ``max_len`` tokens or more.
        min_value_correct: reward of a correct completion of ``max_len`` tokens or more.
        max_value_correct: reward of a correct completion of length 0.
        correctness: reward function that decides what is correct, or its name, dotted path or mapping
            (:mod:`torchrl_rloo.rewards.registry`). 0 is wrong, other numbers are correct, and None abstains. Default:
            :class:`MathAccuracy` with its defaults.

    Raises:
        ValueError: if ``max_len`` is not positive, or values are not finite with min <= max.
        ImportError: if ``correctness`` is None and math-verify is not installed.

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

    def transform_scores(self, scores: Scores, batch: RewardBatch) -> Scores:
        """Return the scaled rewards, None where ``correctness`` abstains."""

        def scale(score: float, length: int) -> float:
            start, end = self.correct if score else self.wrong
            return end + (start - end) * (1 + math.cos(math.pi * min(length / self.max_len, 1.0))) / 2

        rows = zip(scores, map(len, batch.completion_ids), strict=True)
        return [score if score is None or not math.isfinite(score) else scale(score, n) for score, n in rows]
