"""Specs of ChatEnv: the entries of its rows, with shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrl.data import Binary, Composite, NonTensor, Unbounded
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_rloo.data import keys


def make_specs(
    shape: Sequence[int], input_mode: str, *, limits_tokens: bool, limits_time: bool
) -> dict[str, Composite]:
    """Return the specs of an environment by the names of their attributes.

    Args:
        shape: batch size ``[B]`` of the environment.
        input_mode: what the policy reads in addition to the ids; one of ``keys.INPUT_MODES``.
        limits_tokens: True if rows have ``"max_new_tokens"``.
        limits_time: True if rows have the time at which they started.
    """
    ragged = {"shape": (*shape, -1)}
    tokens = Unbounded(**ragged, dtype=torch.int64)
    state = {
        "tokens": Composite(prompt=tokens, shape=shape, data_cls=Tokens),
        "masks": Composite(all_assistant_mask=Binary(**ragged, dtype=torch.bool), shape=shape, data_cls=Masks),
        "log_probs": Composite(full=Unbounded(**ragged), shape=shape, data_cls=LogProbs),
        keys.NUM_TURNS: Unbounded(shape=shape, dtype=torch.int64),
        keys.TRAJECTORY_ID: Unbounded(shape=shape, dtype=torch.int64),
        keys.STOP_REASON[1]: Unbounded(shape=shape, dtype=torch.int64),
        keys.COMPLETION: NonTensor(shape=shape, example_data=[]),
    }
    if limits_tokens:
        state[keys.MAX_NEW_TOKENS] = Unbounded(shape=shape, dtype=torch.int64)
    if limits_time:
        state[keys.STARTED] = Unbounded(shape=shape, dtype=torch.float64)
    # The action is the policy's turn, in the form that it reads
    views = {"text": Text, "history": ChatHistory}
    if input_mode in views:
        state[input_mode] = _without_optional(views[input_mode].default_spec(shape, ["prompt"]))
        action = _without_optional(views[input_mode].default_spec(shape, ["full"]))
    else:
        action = Composite(full=tokens, shape=shape, data_cls=Tokens)
    done = {k: Binary(n=1, shape=(*shape, 1), dtype=torch.bool) for k in ("done", "terminated", "truncated")}
    return {
        "full_observation_spec": Composite(state, shape=shape),
        "full_action_spec": Composite({input_mode: action}, shape=shape),
        "full_reward_spec": Composite(reward=Unbounded(shape=(*shape, 1, 1)), shape=shape),
        "full_done_spec": Composite(done, shape=shape),
        "full_state_spec": Composite({keys.QUERY: NonTensor(shape=shape, example_data="a question")}, shape=shape),
    }


def _without_optional(spec: Composite) -> Composite:
    """Remove from a text or history spec the message fields that plain chats leave unset."""
    for messages in (v for v in spec.values() if isinstance(v, Composite)):
        for field in ("tool_calls", "tool_responses"):
            del messages[field]
    return spec
