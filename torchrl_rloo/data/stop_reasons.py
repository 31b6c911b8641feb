"""Stop reasons: one for every trajectory, which also decides between terminated and truncated."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import entry_of, set_entries

# The index of a reason is its id in buffers and checkpoints: append only.
STOP_REASONS = {
    "running": "the trajectory has not ended",
    "answered": "the policy ended its turn and received no feedback",
    "ended": "the environment ended the trajectory",
    "turn_tokens": "a turn reached its token limit",
    "total_tokens": "the trajectory reached its token limit, or feedback left no room for another turn",
    "turns": "the trajectory reached its limit of policy turns",
    "tool_calls": "the trajectory reached its limit of tool calls",
    "time": "the trajectory reached its limit of wall-clock time",
    "failed": "an engine or the environment failed; the log has the error",
    "cancelled": "the trajectory was cancelled from outside its environment",
}
TERMINATED = frozenset({"answered", "ended"})
ABSTAINING = frozenset({"failed", "cancelled"})
_IDS = {reason: torch.tensor(i) for i, reason in enumerate(STOP_REASONS)}
_FLAGS = {r: torch.tensor([r != "running", r in TERMINATED, r != "running" and r not in TERMINATED]) for r in _IDS}
_NAMES = tuple(STOP_REASONS)


def abstains(reason: str) -> bool:
    """Return whether a trajectory that ended for this reason abstains, since the policy is not at fault.

    Args:
        reason: name in :data:`STOP_REASONS`.

    Raises:
        KeyError: if the reason is unknown.
    """
    if reason not in STOP_REASONS:
        raise KeyError(f"reason={reason!r} must be one of {list(STOP_REASONS)}")
    return reason in ABSTAINING


def end_row(row: TensorDictBase, reason: str) -> TensorDictBase:
    """Mark a row as terminated or truncated for a reason, in place."""
    return set_entries(set_done(row, reason), {keys.STOP_REASON[1]: _IDS[reason]})


def is_done(row: TensorDictBase) -> bool:
    """Return whether a row, or the ``"next"`` of a step, has ended."""
    return bool(entry_of(row, "done"))


def set_done(row: TensorDictBase, reason: str) -> TensorDictBase:
    """Set ``done``, ``terminated`` and ``truncated`` of a row in place, but not its stop reason."""
    done, terminated, truncated = _FLAGS[reason].clone().split(1)
    return set_entries(row, {"done": done, "terminated": terminated, "truncated": truncated})


def name_end(row: TensorDictBase) -> None:
    """Give a row that a transform ended without a reason one, in place, such as TorchRL's ``StepCounter``."""
    if is_done(row) and stop_reason(row) == "running":
        end_row(row, "turns" if row["truncated"].any() else "ended")


def stop_reason(row: TensorDictBase) -> str:
    """Return the name of the reason for which a row ended.

    Args:
        row: a finished trajectory, or one row of the ``"next"`` entry of a step.
    """
    value = entry_of(row, keys.STOP_REASON)
    return _NAMES[int(entry_of(row, keys.STOP_REASON[1]) if value is None else value)]
