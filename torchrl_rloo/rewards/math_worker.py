"""Judges mathematical answers in a process of its own, run as a script by :mod:`torchrl_rloo.rewards.math_judge`.

It imports nothing of the toolkit, so that starting it takes about a second and some 60 MB. Requests and replies are
lines of JSON. A request is ``[gold, text]``; the first reply says whether the gold could be parsed, the second, if it
could, whether the text gives the same answer. Whatever takes longer than the limit ends the process: short texts such
as ``9^{9^{9}}`` keep SymPy busy for ever inside one long multiplication, where no signal or exception reaches it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script: its files are no top-level modules

import faulthandler
import json
import logging
import os
import re
import signal
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_NO_FORMULA = re.compile(  # delimiters, several lines, GSM8K's marker; what only the reader of plain expressions knows
    r"(?<!\\)\$|\\[(\[]|\\boxed|\n|####|[\u00a3\u20ac\u00a5\u20b9\u221a]|\*\*|[0-9]\s+[0-9]"
)


def as_formula(gold: str) -> str | None:
    """A gold that is nothing but LaTeX, though no dollar sign or box says so, between dollar signs; None for others.

    math-verify looks for LaTeX between delimiters only, and would take the 2 or the 10 of ``2^{10}`` for the gold.

    >>> as_formula("1.5e3"), as_formula("2^{10}"), as_formula("42 apples")
    ('$1.5\\\\times 10^{3}$', '$2^{10}$', None)
    """
    gold = re.sub(r"(?<=[0-9])[eE]([-+]?[0-9]+)", r"\\times 10^{\1}", gold)
    gold = re.sub(r"\b([0-9]+)\s+([0-9]+)/([0-9]+)\b", r"\1\\frac{\2}{\3}", gold)
    if _NO_FORMULA.search(gold) or re.search(r"[^\W\d_]{2}", _COMMAND.sub(" ", gold)):
        return None
    return "$" + re.sub(r"(?<!\\)%", r"\%", gold) + "$"


def make_parsers() -> tuple[Callable[[str], list[Any]], Callable[[str], list[Any]], Callable[..., bool]]:
    """How a gold is parsed, how a completion is parsed, and how their parses are compared, without time limits."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )

    @lru_cache(maxsize=64)  # the rows of a group share their gold
    def parse_gold(gold: str) -> list[Any]:
        plain = parse(gold, parsing_timeout=None)
        if (latex := as_formula(gold)) is None:
            return plain
        formula = parse(latex, parsing_timeout=None)
        return plain + formula if "%" in gold else formula or plain  # 5% is 0.05 plain, and 5 as math-verify reads 5\%

    def parse_answer(text: str) -> list[Any]:
        return parse(text, extraction_config=[config], extraction_mode="first_match", parsing_timeout=None)

    def equal(gold: list[Any], answer: list[Any]) -> bool:
        return verify(gold, answer, timeout_seconds=None)

    return parse_gold, parse_answer, equal


def main(limit: float) -> None:
    """Answers requests from standard input until it closes.

    Args:
        limit: seconds one request may take.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process, which may finish its step
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the replies
    parse_gold, parse_answer, equal = make_parsers()
    logging.disable(logging.WARNING)  # math-verify warns that its own time limits are off

    def reply(value: Any) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    with open(os.devnull, "w") as nowhere:
        reply("ready")
        for line in sys.stdin:
            faulthandler.dump_traceback_later(limit, exit=True, file=nowhere)  # needs neither the GIL nor the caller
            gold, text = json.loads(line)
            parsed = parse_gold(gold)
            reply(bool(parsed))
            if parsed:
                reply(bool(equal(parsed, parse_answer(text))))
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(float(sys.argv[1]))
