"""Rows between two turns of a conversation, and finished rows of the schema."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import make_tensorclass
from torchrl_rloo.data.segments import SAMPLE_KEYS, sampled_versions

# Entries of a stepped row that belong to one turn
_TURN_KEYS = ("tokens", "masks", "log_probs", "text", "history", "next", keys.RESPONSE_TRUNCATED)
# Entries of the last turn's "next" that the finished row keeps there
_OUTCOME_KEYS = ("done", "terminated", "truncated", "stop_reason", "rewards", "raw_rewards")
_OUTCOME_KEYS += ("ref_log_probs", "token_rewards", "log_extra", keys.ROLE_RECORD[1])
# Entries that only the environment reads
_DROPPED_KEYS = (keys.MAX_NEW_TOKENS, keys.INITIAL_MAX_NEW_TOKENS, keys.STARTED, keys.TOOLS_SEEN)
# Entries of "next" that are not part of the state before the next turn
_SCORE_KEYS = ("reward", "rewards", "raw_rewards", "ref_log_probs")


def next_turn(row: TensorDictBase) -> TensorDictBase:
    """Return the state before the next turn: the step's ``"next"`` and the keys of the whole conversation.

    Args:
        row: one stepped row, without batch dimensions, that is not done.
    """
    return row.exclude(*_TURN_KEYS).update(row["next"].exclude(*_SCORE_KEYS))


def finish_row(row: TensorDictBase, reward: torch.Tensor, version: int) -> TensorDictBase:
    """Return a finished conversation as a row of the schema.

    Args:
        row: one row, without batch dimensions, whose ``"next"`` is done.
        reward: ``[1, 1]`` sum of the rewards of all turns.
        version: policy version at the first turn. If the policy reports versions of tokens, the oldest replaces it.
    """
    # Take outcome and tokens from the last step, whose prompt for a next turn is the whole trajectory
    end = row["next"]
    tokens, mask, log_probs = (end.get(key) for key in (keys.PROMPT_TOKENS, keys.ACTION_MASK, keys.LOG_PROBS))
    first_action = int(mask.int().argmax()) if mask.any() else len(mask)
    entries = dict(end.items())
    outcome = {k: entries[k] for k in _OUTCOME_KEYS if k in entries} | {"reward": reward}
    # Take everything else from the conversation
    out = {k: v for k, v in row.items() if k not in _TURN_KEYS and k not in outcome and k not in _DROPPED_KEYS}
    out |= {k: entries[k] for k in (keys.COMPLETION, keys.NUM_TURNS, *SAMPLE_KEYS) if k in entries}
    # Add the version, and the tokens with their masks and log-probs
    versions = sampled_versions(out)
    sampled = versions is not None and len(versions)
    out |= {
        keys.POLICY_VERSION: versions.min() if sampled else torch.tensor(version),
        "tokens": make_tensorclass(Tokens, full=tokens, prompt=tokens[:first_action]),
        "masks": make_tensorclass(Masks, all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask),
        "log_probs": make_tensorclass(LogProbs, full=log_probs),
        "next": TensorDict._new_unsafe(outcome, batch_size=torch.Size([])),
    }
    return TensorDict._new_unsafe(out, batch_size=torch.Size([]))
