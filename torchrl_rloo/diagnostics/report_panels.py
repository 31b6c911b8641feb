"""Panels of curves: which metrics share axes, and how they are drawn."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

ENDS = ("low", "high")  # suffixes of the metrics that bound an interval
_DETAILS = ("_length", "_clipped_ratio", "sampled_entropy", "sampled_kl", "sampled_distinct")
_DETAILS += ("sampled_distinct_answers", "sampled_ngram_overlap", "/failed", "/abstained")
EVAL_DETAILS = tuple(f"eval/*{end}" for end in _DETAILS)  # held-out metrics that are no scores
_LINES = 8  # colors of a chart


@dataclass(frozen=True)
class Panel:
    """Curves that share axes: metrics that match any of ``patterns``, except those that match ``!pattern``."""

    title: str
    unit: str
    patterns: tuple[str, ...]
    points: bool = False  # mark every value of a metric that is rarely measured
    smoothed: bool = False
    share: bool = False  # show the whole range 0..1 if the values lie in it
    least: int = 1  # smallest number of metrics; with fewer, omit the panel
    constant: bool = False  # keep metrics that never change, as that is news


_DEFAULT_PANELS = (
    Panel("Mean reward of the batch", "reward", ("reward",), smoothed=True, constant=True),
    Panel(
        "Held-out evaluation",
        "score",
        ("eval/greedy", "eval/*", *(f"!{name}" for name in EVAL_DETAILS), "!eval/tasks/*", "!eval/*/tasks/*"),
        points=True,
        share=True,
        constant=True,
    ),
    Panel("Mean score of each reward function", "score", ("rewards/*/mean",), least=2),
    Panel("Mean reward of each task", "reward", ("tasks/*/reward",)),
    Panel("Mean reward of each role", "reward", ("roles/*/reward",)),
    Panel("Held-out entropy and KL", "nats per token", ("eval/*sampled_entropy", "eval/*sampled_kl"), points=True),
    Panel(
        "Held-out diversity of a prompt's samples",
        "share",
        ("eval/*sampled_distinct*", "eval/*sampled_ngram_overlap"),
        points=True,
        share=True,
    ),
    Panel("Held-out evaluation of each task", "score", ("eval/tasks/*/greedy",), points=True, share=True),
    Panel("Groups with equal rewards", "share of groups", ("frac_reward_zero_std",), share=True),
    Panel("Policy entropy", "nats per token", ("entropy",)),
    Panel("Mean completion length", "tokens", ("completions/mean_length", "eval/*_length")),
    Panel("Truncated completions", "share of rows", ("completions/clipped_ratio", "eval/*_clipped_ratio"), share=True),
    Panel("Gradient norm before clipping", "L2 norm", ("grad_norm",)),
    Panel("Clipped rows or tokens", "share of rows or tokens", ("clip_ratio/region_mean", "clip_ratio/*")),
    Panel("Log-prob gap of sampler and trainer", "nats per token", ("parity/mean", "parity/max"), points=True),
    Panel("KL to the reference policy", "nats", ("kl", "kl/*")),
    Panel("Staleness of the rows", "policy versions", ("staleness",)),
    Panel("Time of a step", "seconds", ("time/step", "time/collect", "time/train", "time/sync", "time/eval")),
    Panel("Sampled tokens", "tokens per second", ("tokens_per_second",)),
)


def choose_panels(
    names: Sequence[str], panels: Sequence[Sequence[str]] | None, constant: Collection[str] = ()
) -> list[Panel]:
    """Return the panels to draw.

    Args:
        names: metrics with a finite value.
        panels: metrics of each panel, by name or pattern. None takes the usual panels, without metrics that never
            change, or one panel per metric if there is none.
        constant: metrics that never change.

    Raises:
        ValueError: if there is no metric, or none for one of ``panels``.

    Example:
        >>> [panel.title for panel in choose_panels(["reward", "entropy", "grad_norm"], None, constant=["entropy"])]
        ['Mean reward of the batch', 'Gradient norm before clipping']
    """
    if not names:
        raise ValueError("history has no metric with a finite value; pass at least one")
    if panels is None:
        moving = [name for name in names if name not in constant]
        usual = [p for p in _DEFAULT_PANELS if len(panel_names(names, p, constant)) >= p.least]
        return usual or [Panel(name, "", (name,)) for name in match_names(moving or names, ("*",))]
    for patterns in panels:
        if not match_names(names, patterns):
            raise ValueError(f"panels requires {list(patterns)}, but the history has only {list(names)}")
    return [Panel(", ".join(patterns), "", tuple(patterns), constant=True) for patterns in panels]


def panel_names(names: Sequence[str], panel: Panel, constant: Collection[str] = (), runs: int = 1) -> list[str]:
    """Return the metrics that a panel draws as lines, in the order of its patterns.

    Args:
        names: metrics with a finite value.
        panel: the panel.
        constant: metrics that never change.
        runs: number of runs that share the panel. With several, it draws the metrics of its first pattern that has any,
            at most as many as there are colors.
    """
    found = match_names(names, panel.patterns)
    found = found if panel.constant else [name for name in found if name not in constant]
    place = {name: next(i for i, p in enumerate(panel.patterns) if fnmatchcase(name, p)) for name in found}
    found.sort(key=place.get)
    return found if runs == 1 else [n for n in found if place[n] == place[found[0]]][: max(1, _LINES // runs)]


def match_names(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the metrics to draw as lines; interval bounds are drawn as a band instead."""
    bounds = interval_bounds(names)
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    return [
        name
        for name in names
        if name not in bounds
        and any(fnmatchcase(name, pattern) for pattern in wanted)
        and not any(fnmatchcase(name, pattern) for pattern in unwanted)
    ]


def interval_bounds(names: Iterable[str]) -> set[str]:
    """Return the names among ``names`` that bound the interval of another one."""
    names = set(names)
    return {bound for name in names for end in ENDS if (bound := f"{name}_{end}") in names}


def select_definitions(names: Collection[str], definitions: Mapping[str, str]) -> dict[str, str]:
    """Return the definitions of the metrics in ``names``, by name as defined, such as ``stop/<reason>``."""
    found = ((k, text, re.compile(_pattern(k))) for k, text in definitions.items())
    return {k: text for k, text, pattern in found if any(pattern.fullmatch(name) for name in names)}


def define(names: Iterable[str], definitions: Mapping[str, str]) -> dict[str, str]:
    """Return the definition of each metric by its own name, for those that have one."""
    patterns = [(re.compile(_pattern(k)), text) for k, text in definitions.items()]
    found = ((name, next((text for p, text in patterns if p.fullmatch(name)), None)) for name in names)
    return {name: text for name, text in found if text is not None}


def _pattern(name: str) -> str:
    parts = re.split(r"(<[^<>]*>)", name)
    return "".join(
        f"({p[1:-1]})" if p.startswith("<") and "|" in p else "[^/]+" if p.startswith("<") else re.escape(p)
        for p in parts
    )
