"""Simulated work: distributions of lengths and latencies, and the turns of each conversation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

_Z99 = 2.3263478740408408  # 99 % quantile of the normal distribution
_MAX_RATIO = math.exp(_Z99**2 / 2)  # largest p99 / mean of a lognormal distribution


@dataclass(frozen=True)
class Distribution:
    """Distribution of a positive quantity: constant, lognormal, or drawn from measured values.

    Args:
        mean: mean of a constant or lognormal quantity. Ignored with ``values``.
        p99: 99 % quantile of a lognormal quantity; None makes it constant.
        values: measured values, of which one is drawn at a time. None takes ``mean`` and ``p99``.
        maximum: value at which larger ones are cut; None cuts none.

    Raises:
        ValueError: if a value is negative, or no lognormal distribution has this mean and quantile.

    Example:
        >>> Distribution(100.0).sample(Random(0)), Distribution(100.0, p99=1000.0, maximum=50.0).average() <= 50
        (100.0, True)
    """

    mean: float = 0.0
    p99: float | None = None
    values: tuple[float, ...] | None = None
    maximum: float | None = None

    def __post_init__(self):
        if self.mean < 0 or (self.values is not None and (not self.values or min(self.values) < 0)):
            raise ValueError(f"mean={self.mean} and values={self.values} must be at least 0, with one value or more")
        if self.p99 is not None and not (self.mean > 0 and 1 <= self.p99 / self.mean <= _MAX_RATIO):
            raise ValueError(
                f"p99={self.p99} must be 1 to {_MAX_RATIO:.1f} times mean={self.mean}, as for any lognormal "
                "distribution; pass measured values for heavier tails"
            )
        if self.p99 is not None:  # p99 / mean = exp(z s - s^2 / 2)
            sigma = _Z99 - math.sqrt(max(0.0, _Z99**2 - 2 * math.log(self.p99 / self.mean)))
            object.__setattr__(self, "_parameters", (math.log(self.mean) - sigma**2 / 2, sigma))

    def sample(self, random: Random) -> float:
        """Draw a value."""
        if self.values is not None:
            value = self.values[int(random.random() * len(self.values))]
        else:
            value = self.mean if self.p99 is None else random.lognormvariate(*self._parameters)
        return value if self.maximum is None else min(value, self.maximum)

    def average(self, samples: int = 4096) -> float:
        """Return the mean of the values, after the cut at ``maximum``."""
        if self.p99 is None and self.values is None:
            return self.sample(Random(0))
        random = Random(0)
        return sum(self.sample(random) for _ in range(samples)) / samples


def read_values(file: str | Path, name: str = "completions/mean_length") -> tuple[float, ...]:
    """Read measured values: a number a line, or JSON objects a line, such as the ``metrics.jsonl`` of a run.

    Args:
        file: the file.
        name: entry of the objects. Objects without it are skipped.

    Raises:
        ValueError: if the file has no value.
    """
    values = []
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        if line.strip():
            record = json.loads(line)
            record = record.get(name) if isinstance(record, dict) else record
            values += [] if record is None else [float(record)]
    if not values:
        raise ValueError(f"{file} has no value of {name}; name an entry of its lines")
    return tuple(values)


class Turn(NamedTuple):
    """One turn of a simulated conversation.

    Attributes:
        prefill: tokens that the engine reads before it samples.
        context: tokens before the sampled ones, which the cache holds.
        tokens: tokens to sample.
        tool_seconds: time of the environment's answer after it.
    """

    prefill: float
    context: float
    tokens: float
    tool_seconds: float


@dataclass(frozen=True)
class Load:
    """Conversations of a run.

    Args:
        tokens: sampled tokens of a turn.
        prompt: tokens of a prompt.
        turns: turns of a conversation.
        tool_seconds: latency of a tool, between two turns.
        feedback: tokens of a tool's answer.
        prefix_cache: whether the members of a group read their prompt once, and later turns only the feedback.
        seed: seed of all draws. A conversation's turns depend on it and on the conversation alone.
    """

    tokens: Distribution
    prompt: Distribution = Distribution(512.0)
    turns: Distribution = Distribution(1.0)
    tool_seconds: Distribution = Distribution(0.0)
    feedback: Distribution = Distribution(0.0)
    prefix_cache: bool = True
    seed: int = 0

    def conversation(self, group_id: int, member: int) -> list[Turn]:
        """Return the turns of a conversation."""
        random, prompt = (
            Random(f"{self.seed} {group_id} {member}"),
            self.prompt.sample(Random(f"{self.seed} {group_id}")),
        )
        count = max(1, round(self.turns.sample(random)))
        prefill = prompt if member == 0 or not self.prefix_cache else 0.0
        turns, context = [], prompt
        for number in range(count):
            tokens = max(1.0, round(self.tokens.sample(random)))
            last = number == count - 1
            turns.append(Turn(prefill, context, tokens, 0.0 if last else self.tool_seconds.sample(random)))
            feedback = 0.0 if last else round(self.feedback.sample(random))
            context += tokens + feedback
            prefill = feedback if self.prefix_cache else context
        return turns

    def averages(self, samples: int = 512) -> Averages:
        """Return means over conversations."""
        conversations: Sequence[list[Turn]] = [self.conversation(i, 1) for i in range(samples)]
        turns = [turn for turns in conversations for turn in turns]
        sampled = sum(turn.tokens for turn in turns)
        held = sum(turn.tokens * (turn.context + turn.tokens / 2) for turn in turns)
        rows = sum(turns[-1].context + turns[-1].tokens for turns in conversations)
        first = [turn for i in range(samples) for turn in self.conversation(i, 0)]
        reads = [sum(turn.prefill for turn in some) / samples for some in (first, turns)]
        return Averages(len(turns) / samples, sampled / samples, rows / samples, held / sampled, *reads)


class Averages(NamedTuple):
    """Means over conversations.

    Attributes:
        turns: turns of a conversation.
        sampled: sampled tokens of a conversation.
        row: tokens of a finished row, prompt included.
        context: tokens in the cache of a running request, over its time.
        first_read: tokens that an engine reads for the first member of a group.
        other_read: tokens that an engine reads for another member.
    """

    turns: float
    sampled: float
    row: float
    context: float
    first_read: float
    other_read: float
