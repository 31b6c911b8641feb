"""Limits of ChatEnv's conversations: their values, the room that they leave a turn, and the stop reason of a turn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.envs.abstaining import ON_TIME_LIMIT

if TYPE_CHECKING:
    from torchrl_rloo.envs.chat import ChatEnv


def check_limits(
    *,
    max_tokens: int | None,
    max_turn_tokens: int | None,
    max_turns: int | None,
    max_seconds: float | None,
    on_time_limit: str,
) -> None:
    """Check the limits of an environment; they are its arguments of the same names.

    Raises:
        ValueError: if a limit is too small, or ``on_time_limit`` is unknown or lacks its limit.
    """
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens} must be at least 2, to hold a prompt and an action")
    for name, value in (("max_turn_tokens", max_turn_tokens), ("max_turns", max_turns)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1, or None for no limit")
    if max_seconds is not None and not max_seconds > 0:
        raise ValueError(f"max_seconds={max_seconds} must be above 0, or None for no limit")
    if on_time_limit not in ON_TIME_LIMIT:
        raise ValueError(f"on_time_limit={on_time_limit!r} must be one of {ON_TIME_LIMIT}")
    if on_time_limit == "abstain" and max_seconds is None:
        raise ValueError("on_time_limit='abstain' requires max_seconds; set it")


def long_prompt_error(env: ChatEnv, length: int) -> ValueError:
    """Return the error for a prompt of ``length`` tokens that leaves the policy no token."""
    shown = {"max_tokens": env.max_tokens, "context_length": env.context_length}
    name = min((name for name, limit in shown.items() if limit is not None), key=lambda name: shown[name])
    return ValueError(
        f"a prompt of {length} tokens leaves the policy none of {name}={shown[name]}; drop long prompts with "
        f"load_prompts(max_prompt_length=...), or raise {name}"
    )


def turn_room(env: ChatEnv, row: TensorDictBase, length: int) -> int | None:
    """Return the maximum number of tokens of the next turn of a row with ``length`` tokens, or None for no limit."""
    own = row.get(keys.INITIAL_MAX_NEW_TOKENS, None)
    limits = [env.max_tokens, env.max_turn_tokens, None if own is None else int(own)]
    if not any(limit is not None for limit in limits):
        return None  # the policy itself keeps to its context
    if env.token_limit is not None:
        limits[0] = max(1, env.token_limit - length)
    return min(limit for limit in limits if limit is not None)


def turn_stop_reason(env: ChatEnv, row: TensorDictBase, length: int, turn_length: int) -> str:
    """Return the stop reason of a turn that nothing answers.

    Args:
        env: environment with the limits.
        row: row with the policy's turn.
        length: tokens of the row after the turn.
        turn_length: tokens of the turn.
    """
    over_total = -math.inf if env.token_limit is None else length - env.token_limit
    over_turn = -math.inf if env.max_turn_tokens is None else turn_length - env.max_turn_tokens
    # A turn as long as a limit counts as cut off, unless the policy reports that it stopped on its last token
    reported = row.get(keys.RESPONSE_TRUNCATED, None)
    if reported is None:
        cut_off = max(over_total, over_turn) >= 0
    else:
        cut_off = bool(reported.any()) or max(over_total, over_turn) > 0
    if not cut_off:
        return "answered"
    return "total_tokens" if over_total >= 0 else "turn_tokens"
