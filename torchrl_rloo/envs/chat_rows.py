"""Entries of ChatEnv's rows: those of a step, those of a whole conversation, and the row after a turn."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import make_non_tensor, non_tensor_value
from torchrl_rloo.data.segments import SAMPLE_KEYS
from torchrl_rloo.data.templates import is_conversation

STEP_KEYS = ("_reset", "next", "done", "terminated", "truncated")
CONVERSATION_KEYS = (*STEP_KEYS, keys.COMPLETION, *SAMPLE_KEYS)
CONVERSATION_KEYS += (keys.TOOLS_SEEN, "tokens", "masks", "log_probs", "text", "history")
_CARRIED_KEYS = (keys.STARTED, keys.TOOLS, keys.TOOLS_SEEN, keys.INITIAL_MAX_NEW_TOKENS, *SAMPLE_KEYS)


def make_stepped_row(row: TensorDictBase, reply: str) -> TensorDict:
    """Build the row after a turn, with the entries that last for the whole conversation; it has no context yet.

    Args:
        row: row with the policy's turn.
        reply: text of the turn, which extends the completion.
    """
    query, completion = non_tensor_value(row, keys.QUERY), non_tensor_value(row, keys.COMPLETION)
    extended = [*completion, {"role": "assistant", "content": reply}] if is_conversation(query) else completion + reply
    step = {
        keys.QUERY: make_non_tensor(query),
        keys.COMPLETION: make_non_tensor(extended),
        keys.NUM_TURNS: row.get(keys.NUM_TURNS) + 1,
        keys.TRAJECTORY_ID: row.get(keys.TRAJECTORY_ID),
        "reward": torch.zeros(1, 1),
    }
    step |= {key: value for key, value in row.items() if key in _CARRIED_KEYS}
    return TensorDict._new_unsafe(step, batch_size=torch.Size([]))


def dataset_columns(row: TensorDictBase) -> dict[str, Any]:
    """Return the dataset's columns of a row, its query included, with lists in place of tensors."""
    names = [name for name in row.keys() if name == keys.QUERY or name not in keys.RESERVED]
    return {name: v.tolist() if isinstance(v := row[name], torch.Tensor) else v for name in names}


def record_tools(row: TensorDictBase) -> None:
    """Note the tools that the policy's context shows, in place; the row may get others before its next turn."""
    if keys.TOOLS in row.keys():
        row.set(keys.TOOLS_SEEN, row.get(keys.TOOLS))
