"""Limit of a run, from shares of wall-clock time, in one sentence with a remedy."""

from __future__ import annotations

from collections.abc import Mapping

_MUCH = 0.25  # share of the time from which something is worth a remark

# What conversations mostly wait for while the trainer waits for rows: cause and remedy
_CAUSES = {
    "engine": ("conversations spent {share} of their time on engines", "add engines, or shorten completions"),
    "tools": (
        "conversations spent {share} of their time on tools",
        "make tools faster",
    ),
    "environment": (
        "conversations spent {share} of their time on the environment",
        "make its functions faster, or add workers",
    ),
    "rewards": (
        "conversations spent {share} of their time on rewards",
        "make reward functions faster, or raise collector.reward_threads",
    ),
    "group": (
        "conversations spent {share} of their time on the wait for the rest of their group",
        "set collector.min_members, or limit lengths",
    ),
    "place": ("conversations spent {share} of their time on the wait for a place", "raise collector.max_in_flight"),
}

_OTHERS = {
    "sync": "Weight updates limit: they took {share} of the time; raise sampler.sync_every, or use another transport.",
    "eval": "Evaluation limits: it took {share} of the time; raise eval.every, or evaluate on fewer prompts.",
    "checkpoint": "Checkpoints limit: they took {share} of the time; raise checkpoint.every.",
    "collect": "Taking rows limits: fetching and scoring them took {share} of the time; add ranks.",
}


def name_limit(trainer: Mapping[str, float], worker: Mapping[str, float], engine: Mapping[str, float]) -> str:
    """Return what limits a run.

    Args:
        trainer: share of the trainer's time by phase: ``rows_wait``, ``collect``, ``train``, ``sync``, ``eval``,
            ``checkpoint``, ``other`` and others.
        worker: share of a worker's time by state: those of :data:`~torchrl_rloo.envs.activity.STATES`, and ``idle``.
            Empty if it was not measured.
        engine: ``busy``, share of the time with a request in an engine. Empty if it was not measured.

    Returns:
        One or two sentences.

    Example:
        >>> name_limit({"rows_wait": 0.3, "train": 0.7}, {}, {})
        'Training limits: it took 70 % of the time; add ranks, or enlarge passes.'
    """
    limit = max(trainer, key=trainer.get)
    share = _percent(trainer[limit])
    if limit == "rows_wait":
        sentence = f"Sampling limits: the trainer waited {share} of the time{_cause(worker, engine)}."
        return sentence + _overlap(trainer, worker)
    if limit == "train":
        busy = f", and engines were busy {_percent(engine['busy'])}" if engine else ""
        sentence = f"Training limits: it took {share} of the time{busy}; add ranks, or enlarge passes."
        return sentence + _overlap(trainer, worker)
    if limit in _OTHERS:
        return _OTHERS[limit].format(share=share)
    return f"The phase {limit!r} limits: it took {share} of the time."


def _cause(worker: Mapping[str, float], engine: Mapping[str, float]) -> str:
    """Return why rows came late, and a remedy."""
    active = {state: worker[state] for state in _CAUSES if worker.get(state)}
    if not active:
        return "; add engines or workers"
    state = max(active, key=active.get)
    cause, remedy = _CAUSES[state]
    # Compare with the time in which there were conversations at all
    begun = sum(active.values())
    if state == "engine" and engine and (busy := min(1.0, engine["busy"] / begun)) < 2 * _MUCH:
        cause += f", though engines were busy only {_percent(busy)} of that"
        remedy = "look for pauses, restarts, and requests on their way"
    return f", and {cause.format(share=_percent(active[state] / begun))}; {remedy}"


def _overlap(trainer: Mapping[str, float], worker: Mapping[str, float]) -> str:
    """Return the advice to sample while the trainer trains, if both wait for each other much of the time."""
    if min(trainer.get("rows_wait", 0.0), trainer.get("train", 0.0), worker.get("idle", 0.0)) < _MUCH:
        return ""
    return f" Workers were idle {_percent(worker['idle'])}; collector.max_staleness=1 samples while the trainer trains."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
