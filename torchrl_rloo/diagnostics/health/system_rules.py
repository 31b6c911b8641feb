"""Rules about what surrounds the policy: staleness, engines, weight updates, tools, conversations, time."""

from __future__ import annotations

import statistics

from torchrl_rloo.diagnostics.health.conditions import above, counted, growth
from torchrl_rloo.diagnostics.health.history import WINDOW, History
from torchrl_rloo.diagnostics.health.rule import Condition, Evidence, Rule


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


SYSTEM_RULES = (
    Rule(
        "staleness",
        above("staleness", 8.0),
        ("staleness",),
        "Rows are more than eight policy versions old.",
        "Lower collector.max_staleness, or add engines.",
        "at most 4",
        "https://arxiv.org/abs/2505.24298 (AReaL: quality falls beyond a staleness of 4 to 8)",
        patience=3,
    ),
    Rule(
        "failed_pushes",
        failed_pushes,
        ("count/weights/failed_pushes",),
        "Weight updates fail, so sampling continues with old weights.",
        "Read the log of the engine; three failures in a row stop the run.",
        "0",
        "the package's own rule",
    ),
    Rule(
        "missing_engines",
        missing_engines,
        ("pool/ready", "pool/members"),
        "Engines of the pool are not ready.",
        "Read count/pool/deaths and the log; the supervisor restarts them, up to its limit.",
        "all ready",
        "the package's own rule",
        patience=5,
    ),
    Rule(
        "tool_failures",
        counted("count/tools/*/[fit]*", 0.2, "count/tools/*/calls"),
        ("count/tools/*/calls", "count/tools/*"),
        "More than 20 % of the tool calls fail, time out or have invalid arguments.",
        "Read transcripts; check the tool, its time limit, and the schema that the policy sees.",
        "below 0.2, and falling as the policy learns the format",
        "https://arxiv.org/abs/2504.11536 (ReTool: failed calls fall in training)",
        patience=5,
    ),
    Rule(
        "failed_conversations",
        above("stop/failed", 0.05),
        ("stop/failed",),
        "More than 5 % of the conversations failed through no fault of the policy, and abstain.",
        "Read the log: environment, tools, engine or reward raised.",
        "0, or rare",
        "the package's own rule",
        patience=2,
    ),
    Rule(
        "slower",
        slower,
        ("tokens_per_second",),
        "Sampling is half as fast as before.",
        "Look at completions/mean_length, pool/ready and the load of the machine.",
        "steady",
        "the package's own rule",
        "info",
        patience=5,
        clock=True,
    ),
    Rule(
        "time_in_evaluation",
        time_share("eval", 0.3),
        ("time/step", "time/eval"),
        "Evaluation takes more than 30 % of the time.",
        "Raise eval.every, or lower data.eval_size or eval.num_samples.",
        "below 0.1",
        "the package's own rule",
        "info",
        clock=True,
    ),
    Rule(
        "time_in_sync",
        time_share("sync", 0.2),
        ("time/step", "time/sync"),
        "Weight updates take more than 20 % of the time.",
        "Raise sampler.sync_every, send only an adapter (lora), or use a faster updater.",
        "below 0.1",
        "the package's own rule",
        "info",
        clock=True,
    ),
    Rule(
        "time_in_sampling",
        time_share("collect", 0.9),
        ("time/step", "time/collect"),
        "Sampling takes more than 90 % of the time, and the trainer waits.",
        "Add engines, sample ahead (rloo_async), or cut the longest completions.",
        "below 0.9",
        "https://arxiv.org/abs/2505.24298 (AReaL: the longest completions hold up a batch)",
        "info",
        clock=True,
    ),
)
