"""Report of a run as Markdown, for a pull request or a model card."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from torchrl_rloo.diagnostics.report_health import HealthEvent
from torchrl_rloo.diagnostics.report_verdict import Change
from torchrl_rloo.diagnostics.statistics.evaluation import Interval

_LINKS = 5


def markdown_report(
    title: str,
    facts: Mapping[str, str],
    sentences: Sequence[str],
    changes: Sequence[Change],
    events: Sequence[HealthEvent] = (),
    links: Sequence[Sequence[str]] = (),
) -> str:
    """Return the verdict, the held-out evaluation, facts and health events of a run as Markdown.

    Args:
        title: heading.
        facts: facts by name, see :func:`run_facts`.
        sentences: verdict.
        changes: first and last held-out evaluation.
        events: events of health rules.
        links: label and address of transcripts.

    Example:
        >>> print(markdown_report("rloo on addition", {"Steps": "40"}, ["Learned."], []).strip())
        ## rloo on addition
        <BLANKLINE>
        Learned.
        <BLANKLINE>
        | | |
        | --- | --- |
        | Steps | 40 |
    """
    parts = [f"## {escape_markdown(title)}", "\n".join(map(escape_markdown, sentences))]
    if changes:
        rows = [
            [c.name, _measured(c.first, c.steps[0]), _measured(c.last, c.steps[1]), _text(c.difference)]
            for c in changes
        ]
        parts.append(_table(["Held out", "first", "last", "difference"], rows))
    parts.append(_table(["", ""], [[name, value] for name, value in facts.items()]))
    if events:
        rows = [[event.severity, event.rule, _period(event), event.sentence] for event in events]
        parts.append(_table(["Health", "rule", "steps", ""], rows))
    if links:
        shown = (f"[{escape_markdown(label)}]({quote(address)})" for label, address in links[:_LINKS])
        parts.append("Transcripts: " + ", ".join(shown))
    return "\n\n".join(part for part in parts if part) + "\n"


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows as it is, in one line.

    Example:
        >>> escape_markdown("a|b <i> [x](y) clip_ratio/low")
        'a\\\\|b &lt;i\\\\> \\\\[x\\\\](y) clip\\\\_ratio/low'
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return re.sub(r"([\\`*_\[\]|>#~$!@])", r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([escape_markdown(str(cell)) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |").replace("|  |", "| |")


def _period(event: HealthEvent) -> str:
    return f"{event.step}-{'' if event.cleared is None else event.cleared}"


def _measured(values: Interval, step: int) -> str:
    return f"{_text(values)} at step {step:,}"


def _text(values: Interval) -> str:
    bounds = "" if math.isnan(values.low + values.high) else f" ({values.low:.3g} to {values.high:.3g})"
    return f"{values.mean:.3g}{bounds}"
