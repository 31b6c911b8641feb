"""Why a conversation ended: one reason for every trajectory, which also says whether it was terminated or truncated."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import put

STOP_REASONS = {
    "running": "it has not ended",
    "answered": "the policy ended its turn, and nothing answers it",
    "ended": "the environment ended it",
    "turn_tokens": "a turn reached its limit of tokens",
    "total_tokens": "the trajectory reached its limit of tokens, or feedback left no room for another turn",
    "turns": "the limit of the policy's turns",
    "tool_calls": "the limit of tool calls",
    "time": "the limit of wall-clock time",
    "failed": "an engine or the environment failed; the log has the error",
    "cancelled": "it was given up from outside",
}  # ids are the places: append only, since buffers and checkpoints hold them
TERMINATED = frozenset({"answered", "ended"})
_IDS = {reason: torch.tensor(i) for i, reason in enumerate(STOP_REASONS)}
_FLAGS = {r: torch.tensor([r != "running", r in TERMINATED, r != "running" and r not in TERMINATED]) for r in _IDS}
_NAMES = tuple(STOP_REASONS)


def end_row(row: TensorDictBase, reason: str) -> TensorDictBase:
    """Marks a stepped row as ended, in place: terminated or truncated as the reason says.

    Args:
        row: one row of the ``"next"`` entry of a step.
        reason: a name in :data:`STOP_REASONS`; ``"running"`` takes an end back.
    """
    return put(set_done(row, reason), {keys.STOP_REASON[1]: _IDS[reason]})


def set_done(row: TensorDictBase, reason: str) -> TensorDictBase:
    """Set ``done``, ``terminated`` and ``truncated`` of a row, in place, and leave its stop reason alone."""
    done, terminated, truncated = _FLAGS[reason].clone().split(1)
    return put(row, {"done": done, "terminated": terminated, "truncated": truncated})


def stop_reason(row: TensorDictBase) -> str:
    """The reason for which a row ended.

    Args:
        row: a finished trajectory, or one row of the ``"next"`` entry of a step.
    """
    value = row.get(keys.STOP_REASON, None)
    return _NAMES[int(row[keys.STOP_REASON[1]] if value is None else value)]
