"""Conditions of rules: limits, comparisons with the start, growth of counters, and those of single rules."""

from __future__ import annotations

import math
import statistics

from torchrl_rloo.diagnostics.health.rule import RECENT, WINDOW, Condition, Evidence, History


def above(name: str, limit: float, n: int = RECENT) -> Condition:
    """Return the condition that the median of the latest ``n`` values is above a limit.

    Example:
        >>> history = History(["kl"])
        >>> for step in range(5):
        ...     history.append(step, {"kl": 3.0})
        >>> above("kl", 2.0)(history), below("kl", 2.0)(history)
        ({'kl': 3.0}, None)
    """

    def condition(history: History) -> Evidence | None:
        recent = history.recent(name, n)
        return {name: recent} if recent is not None and recent > limit else None

    return condition


def below(name: str, limit: float, n: int = RECENT) -> Condition:
    """Return the condition that the median of the latest ``n`` values is below a limit."""

    def condition(history: History) -> Evidence | None:
        recent = history.recent(name, n)
        return {name: recent} if recent is not None and recent < limit else None

    return condition


def grown(name: str, factor: float, plus: float = 0.0) -> Condition:
    """Return the condition that a metric is above ``factor`` times its start, and above its start by ``plus``."""

    def condition(history: History) -> Evidence | None:
        start, recent = history.start(name), history.recent(name)
        if start is None or recent is None or recent <= factor * start or recent <= start + plus:
            return None
        return compared(name, start, recent)

    return condition


def shrunk(name: str, factor: float) -> Condition:
    """Return the condition that a metric is below ``factor`` times its start."""

    def condition(history: History) -> Evidence | None:
        start, recent = history.start(name), history.recent(name)
        if start is None or recent is None or recent >= factor * start:
            return None
        return compared(name, start, recent)

    return condition


def both(first: Condition, second: Condition) -> Condition:
    """Return the condition that two conditions hold, with the evidence of both."""

    def condition(history: History) -> Evidence | None:
        found = first(history)
        other = None if found is None else second(history)
        return None if other is None else {**found, **other}

    return condition


def not_finite(*names: str) -> Condition:
    """Return the condition that one of several metrics is NaN or infinite at the current step."""

    def condition(history: History) -> Evidence | None:
        values = {name: history.now(name) for name in names}
        return {name: v for name, v in values.items() if v is not None and not math.isfinite(v)} or None

    return condition


def counted(pattern: str, limit: float, per: str, n: int = 10) -> Condition:
    """Return the condition that counters grew by more than a share of another counter over the latest ``n`` steps.

    Args:
        pattern: names of the counters, with ``*`` for any text; their growth is added.
        limit: share of the growth of ``per``, above which the condition holds.
        per: name or pattern of the counters to divide by.
        n: number of steps.
    """

    def condition(history: History) -> Evidence | None:
        total = sum(growth(history, name, n) for name in history.matching(per))
        failed = sum(growth(history, name, n) for name in history.matching(pattern))
        if total <= 0 or failed / total <= limit:
            return None
        return {pattern: failed, per: total}

    return condition


def growth(history: History, name: str, n: int = 10) -> float:
    """Return by how much a counter grew over the latest ``n`` steps; one that is new began at 0."""
    values = history.window(name, n + 1)
    if not values:
        return 0.0
    return values[-1] - (values[0] if history.count(name) > len(values) or len(values) > n else 0.0)


def compared(name: str, start: float, recent: float) -> Evidence:
    """Return the evidence of a metric that departed from its start."""
    return {name: recent, f"{name} at the start": start}


# Policy


_SPIKE = 10.0  # gradient norm over the median of the window
_MOST_UNSOLVED = 0.25  # smallest share of unsolved rows for which exploration matters


def entropy_collapse(history: History) -> Evidence | None:
    """Hold if completions of unsolved prompts have lost their entropy: a solved prompt needs none."""
    name, share = "outcome/unsolved/entropy", "outcome/unsolved/share"
    start, recent, unsolved = history.start(name), history.recent(name), history.recent(share)
    if start is None or unsolved is None or unsolved < _MOST_UNSOLVED or recent >= 0.1 * start:
        return None
    return compared(name, start, recent) | {share: unsolved}


def mode_collapse(history: History) -> Evidence | None:
    """Hold if the completions of a group are nearly all the same although most are wrong."""
    name, share = "diversity/distinct", "outcome/unsolved/share"
    start, recent, unsolved = history.start(name), history.recent(name), history.recent(share)
    if None in (start, recent, unsolved) or unsolved < _MOST_UNSOLVED or recent >= min(0.1, 0.5 * start):
        return None
    return compared(name, start, recent) | {share: unsolved}


def gradient_spikes(history: History) -> Evidence | None:
    """Hold if three of the latest 20 gradient norms are ten times the median."""
    norms = history.window("grad_norm")
    if len(norms) < 20:
        return None
    limit = _SPIKE * statistics.median(norms)
    spikes = [norm for norm in norms[-20:] if norm > limit > 0]
    return {"grad_norm": max(spikes), "spikes": len(spikes), "limit": limit} if len(spikes) >= 3 else None


def sampler_not_updated(history: History) -> Evidence | None:
    """Hold if the sampler stays exactly the reference although gradients are taken."""
    window = history.window("kl", 20)
    norm = history.recent("grad_norm")
    if len(window) < 20 or norm is None or norm == 0 or any(abs(value) > 1e-7 for value in window):
        return None
    return {"kl": window[-1], "grad_norm": norm}


def value_divergence(history: History) -> Evidence | None:
    """Hold if the values are worse than a constant: for 20 steps, or lately with a loss that has tripled."""
    name, loss = "explained_variance", grown("loss_critic", 3.0)(history)
    recent, long = history.recent(name), history.recent(name, 20)
    if recent is None or recent >= 0 or (loss is None and (long is None or long >= 0)):
        return None
    return {name: recent} | dict(loss or {})


def kl_controller_at_work(history: History) -> Evidence | None:
    """Hold if the controller has raised the KL coefficient fivefold."""
    first, now = history.first("kl_coeff"), history.now("kl_coeff")
    if not first or now is None or now < 5 * first:
        return None
    return compared("kl_coeff", first, now)


# Rewards


_HELD_OUT = ("eval/sampled", "eval/greedy")  # sampled as in training, else greedy
_SIGNAL = "frac_reward_zero_std"


def reward_drop(history: History) -> Evidence | None:
    """Hold if the reward has lost half of what it had gained, by more than its noise.

    The highest of many medians is itself some deviations above a steady reward, so the limit is twice the usual three.
    """
    start, recent, best = history.start("reward"), history.recent("reward"), history.highest("reward")
    spread = history.recent("reward_std")
    if start is None or spread is None:
        return None
    gain, loss = best - start, best - recent
    if loss <= 0.5 * gain or loss <= 6 * noise(history):
        return None
    return {"reward": recent, "highest reward": best, "reward at the start": start}


def noise(history: History) -> float:
    """Return the standard deviation of the median reward of five steps, from the differences of successive steps."""
    values = history.window("reward")
    differences = [b - a for a, b in zip(values, values[1:], strict=False)]
    if not differences:
        return 0.0
    step = statistics.median(map(abs, differences)) / 0.954  # of a normal distribution: 0.6745 * sqrt(2)
    return step * 1.25 / 5**0.5  # the median's deviation is 1.25 times the mean's


def proxy_gap(history: History) -> Evidence | None:
    """Hold if the training reward has risen clearly while held-out scores have not risen at two evaluations."""
    start, recent, spread = history.start("reward"), history.recent("reward"), history.start("reward_std")
    name = next((name for name in _HELD_OUT if history.count(name)), None)
    if start is None or name is None or history.count(name) < 3:
        return None
    first, high = history.first(name), history.first(f"{name}_high")
    scores = history.window(name)[-2:]
    rise = recent - start
    if (
        high is None
        or rise <= max(0.5 * (spread or 0.0), 6 * noise(history))
        or max(scores) > first + 0.25 * (high - first)
    ):
        return None
    return compared("reward", start, recent) | {name: scores[-1], f"{name} at the start": first}


def held_out_drop(history: History) -> Evidence | None:
    """Hold if a held-out score is below its best by more than both confidence intervals."""
    for name in _HELD_OUT:
        low, now = history.window(f"{name}_low"), history.now(name)
        high = history.now(f"{name}_high")
        if now is not None and high is not None and low and high < max(low):
            return {name: now, f"{name}_high": high, f"best {name}_low": max(low)}
    return None


def length_hacking(history: History) -> Evidence | None:
    """Hold if completions are much longer than at the start, and the longer ones of a group earn more."""
    name, correlation = "completions/mean_length", "group/length_correlation"
    start, recent, found = history.start(name), history.recent(name), history.recent(correlation)
    if start is None or found is None or recent <= 1.5 * start or found <= 0.3:
        return None
    return compared(name, start, recent) | {correlation: found}


def exploited_reward(history: History) -> Evidence | None:
    """Hold if the mean reward is above every reward of the start: a scale that a bounded task reward cannot leave."""
    highest, recent = history.window("reward_max"), history.recent("reward")
    first, spread = history.start("reward_max"), history.start("reward_std")
    if first is None or recent is None or spread is None or recent <= first + 2 * spread:
        return None
    return {"reward": recent, "reward_max": highest[-1], "reward_max at the start": first}


def no_progress(history: History) -> Evidence | None:
    """Hold if the reward of the window is not above the start by more than its noise."""
    start, values = history.start("reward"), history.window("reward")
    if start is None or len(values) < WINDOW or history.count("reward") < 2 * WINDOW:
        return None
    mean, best = statistics.fmean(values), history.highest("reward")
    if mean > start + 3 * noise(history) or best > start + 6 * noise(history):
        return None
    return compared("reward", start, mean)


def task_without_signal(history: History) -> Evidence | None:
    """Hold if a task of a mixture has had no signal for ten steps, although it has a share of the rows."""
    found = {}
    for name in history.matching("tasks/*/frac_reward_zero_std"):
        share = history.recent(name.replace(_SIGNAL, "share"))
        recent = history.recent(name, 10)
        if share is not None and recent is not None and share >= 0.1 and recent > 0.95:
            found[name] = recent
    return found or None


def failed_evaluation(history: History) -> Evidence | None:
    """Hold if a scorer failed in the current evaluation."""
    failed = history.now("eval/failed")
    return {"eval/failed": failed} if failed else None


def failing_rewards(history: History) -> Evidence | None:
    """Hold if reward functions failed on more than 5 % of the rows of the latest ten steps."""
    kinds = ("raised", "malformed", "timed_out", "worker_died", "not_finite")
    names = [name for kind in kinds for name in history.matching(f"count/rewards/*/{kind}")]
    failed, rows = sum(growth(history, name) for name in names), growth(history, "count/advantage/rows")
    return {"failed scores": failed, "rows": rows} if rows > 0 and failed > 0.05 * rows else None


# System


def missing_engines(history: History) -> Evidence | None:
    """Hold if engines of the pool are not ready."""
    ready, members = history.now("pool/ready"), history.now("pool/members")
    return {"pool/ready": ready, "pool/members": members} if None not in (ready, members) and ready < members else None


def failed_pushes(history: History) -> Evidence | None:
    """Hold if a weight update failed in the latest five steps."""
    failed = growth(history, "count/weights/failed_pushes", 5)
    return {"failed pushes in 5 steps": failed} if failed > 0 else None


def slower(history: History) -> Evidence | None:
    """Hold if sampling is half as fast as in the window."""
    speeds = history.window("tokens_per_second")
    if len(speeds) < WINDOW:
        return None
    usual, recent = statistics.median(speeds), history.recent("tokens_per_second", 10)
    return {"tokens_per_second": recent, "median of 50 steps": usual} if recent < 0.5 * usual else None


def time_share(phase: str, limit: float) -> Condition:
    """Return the condition that a phase takes more than a share of the time, also one that is not part of each step."""

    def condition(history: History) -> Evidence | None:
        steps, parts = history.count("time/step"), history.window(f"time/{phase}")
        if steps < 20 or not parts:
            return None
        part = statistics.fmean(parts) * history.count(f"time/{phase}") / steps
        share = part / statistics.fmean(history.window("time/step"))
        return {f"share of time/{phase}": share} if share > limit else None

    return condition
