"""Worker process that judges mathematical answers; a script started by :mod:`torchrl_rloo.rewards.math_judge`.

It does not import the toolkit, so it starts in about a second and needs about 60 MB. Requests and replies are lines of
JSON. A request is ``[gold, text]``. The first reply tells whether the gold was parsed. If so, a second reply tells
whether the text gives the same answer. A request that exceeds the time limit ends the process. Short texts such as
``9^{9^{9}}`` keep SymPy in one endless multiplication, which no signal or exception can interrupt.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose files are not top-level modules

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
# Delimiters, several lines, GSM8K's marker, and notations that only the parser of plain expressions reads
_NO_FORMULA = re.compile(r"(?<!\\)\$|\\[(\[]|\\boxed|\n|####|[\u00a3\u20ac\u00a5\u20b9\u221a]|\*\*|[0-9]\s+[0-9]")


def wrap_formula(gold: str) -> str | None:
    """Wrap a gold that is bare LaTeX in dollar signs; return None for other golds.

    math-verify reads LaTeX only between delimiters. Without them it would take the 2 or the 10 of ``2^{10}``.

    >>> wrap_formula("1.5e3"), wrap_formula("2^{10}"), wrap_formula("42 apples")
    ('$1.5\\\\times 10^{3}$', '$2^{10}$', None)
    """
    gold = re.sub(r"(?<=[0-9])[eE]([-+]?[0-9]+)", r"\\times 10^{\1}", gold)
    gold = re.sub(r"\b([0-9]+)\s+([0-9]+)/([0-9]+)\b", r"\1\\frac{\2}{\3}", gold)
    if _NO_FORMULA.search(gold) or re.search(r"[^\W\d_]{2}", _COMMAND.sub(" ", gold)):
        return None
    return "$" + re.sub(r"(?<!\\)%", r"\%", gold) + "$"


def make_parsers() -> tuple[Callable[[str], list[Any]], Callable[[str], list[Any]], Callable[..., bool]]:
    """Return functions that parse a gold, parse a completion and compare both, without time limits."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )

    @lru_cache(maxsize=64)  # the rows of a group share a gold
    def parse_gold(gold: str) -> list[Any]:
        plain = parse(gold, parsing_timeout=None)
        if (latex := wrap_formula(gold)) is None:
            return plain
        formula = parse(latex, parsing_timeout=None)
        # Accept both readings of a percentage: 5% is 0.05 as plain text, and math-verify reads 5\% as 5
        return plain + formula if "%" in gold else formula or plain

    def parse_answer(text: str) -> list[Any]:
        return parse(text, extraction_config=[config], extraction_mode="first_match", parsing_timeout=None)

    def equal(gold: list[Any], answer: list[Any]) -> bool:
        return verify(gold, answer, timeout_seconds=None)

    return parse_gold, parse_answer, equal


def main(limit: float) -> None:
    """Answer requests from standard input until it closes.

    Args:
        limit: seconds per request.
    """
    # Leave Ctrl-C to the training process, and keep the output of libraries out of the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parse_gold, parse_answer, equal = make_parsers()
    logging.disable(logging.WARNING)  # math-verify warns that its time limits are disabled

    def reply(value: Any) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    with open(os.devnull, "w") as devnull:
        reply("ready")
        for line in sys.stdin:
            # Exit at the time limit; this timer needs neither the GIL nor the caller
            faulthandler.dump_traceback_later(limit, exit=True, file=devnull)
            gold, text = json.loads(line)
            parsed = parse_gold(gold)
            reply(bool(parsed))
            if parsed:
                reply(bool(equal(parsed, parse_answer(text))))
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(float(sys.argv[1]))
