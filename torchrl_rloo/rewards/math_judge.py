"""Comparison of mathematical answers by math-verify, with limits of time and memory for any input."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

from torchrl_rloo.rewards.boxed import find_last_box
from torchrl_rloo.rewards.matching import write_repeating
from torchrl_rloo.rewards.process_judge import ProcessJudge

MAX_ANSWER_CHARS = 500  # of a box; longer answers are wrong, unread
MAX_TEXT_CHARS = 4_000  # read at the end of a text, or before the end of its last box


class MathJudge(ProcessJudge):
    """Judge that compares answers with math-verify in worker processes, see :class:`ProcessJudge`.

    The time limits of math-verify are disabled: they need the main thread and do not interrupt arithmetic with very
    large numbers. A worker starts in about a second.

    A box of more than 500 characters is a wrong answer, which is not read. Of other texts, the last 4,000 characters
    up to the last box are read, or the last 4,000 without a box.

    Args:
        timeout: seconds of CPU time per comparison.
        workers: maximum number of workers of :meth:`judge_rows`; None uses one per CPU, and at most 8.

    Raises:
        ValueError: if ``timeout`` is not positive and finite, or ``workers`` is less than 1.
        ImportError: if math-verify is not installed.

    Example::

        judge = MathJudge(timeout=5.0)
        judge("1/2", r"The answer is \\boxed{0.5}.")  # True
    """

    def __init__(self, timeout: float = 5.0, *, workers: int | None = None):
        super().__init__("math_worker", timeout, workers=workers)
        if find_spec("math_verify") is None:
            raise ImportError('MathJudge requires math-verify: pip install "torchrl_rloo[rewards]"')

    def __call__(self, gold: str, text: str) -> bool | None:
        """Return whether ``text`` gives the answer ``gold``.

        Returns:
            True or False, also False if parsing or comparing ``text`` exceeds a limit. None if ``gold`` cannot be
            parsed, or exceeds a limit.
        """
        return self.judge(write_repeating(gold), _shorten(text))

    def judge_rows(self, rows: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Judge pairs of gold and text, see :meth:`ProcessJudge.judge_rows`."""
        return super().judge_rows([(write_repeating(gold), _shorten(text)) for gold, text in rows])

    def form(self, text: str, limit: float | None = None) -> str | None:
        """Return the canonical form of the answer in ``text``: equal for answers that this judge takes for equal.

        Args:
            text: text.
            limit: seconds of CPU time; None means ``timeout``.

        Returns:
            The form, or None if the text has no answer, or exceeds a limit.
        """
        shortened = _shorten(text)
        return (self._ask(self.timeout if limit is None else limit, None, shortened)[0] or None) if shortened else None

    def forms(self, texts: Sequence[str]) -> dict[str, str | None]:
        """Return the canonical form by text, as :meth:`form` does, within the time of :meth:`judge_rows`."""
        distinct = [*dict.fromkeys(texts)]
        return dict(zip(distinct, self._ask_all(self.form, [(text,) for text in distinct]), strict=True))


@cache
def shared_judge() -> MathJudge:
    """Return the judge that the votes of this process share."""
    return MathJudge()


def _shorten(text: str) -> str:
    """Return the part of a text that may hold its answer, blank if the answer is too long."""
    if (span := find_last_box(text)) is None:
        return write_repeating(text[-MAX_TEXT_CHARS:])
    start, end = span
    if end - start > MAX_ANSWER_CHARS:
        return ""
    before = text[max(0, end - MAX_TEXT_CHARS) : start].removesuffix("{").rstrip()  # math-verify requires braces
    return write_repeating(f"{before}{{{text[start:end]}}}")
