"""Rows of trajectories and their parts: keys, prompt datasets, chat templates, ragged batches."""

from torchrl_rloo.data import keys
from torchrl_rloo.data.packed import PackedRows, pack_rows, unpack_rows
from torchrl_rloo.data.preferences import (
    encode_demonstrations,
    encode_preferences,
    load_preference_splits,
    load_preferences,
)
from torchrl_rloo.data.prompts import PromptDataset, load_prompts, longest_prompt, show_examples, split_prompts
from torchrl_rloo.data.rows import (
    action_tokens,
    concatenate,
    gather_actions,
    merge_identical,
    pad,
    ragged,
    stack_rows,
    tensor_rows,
)
from torchrl_rloo.data.sampling import DeferredRerolls, MixtureSampler, PassRatePool, PromptSampler
from torchrl_rloo.data.segments import Role, split_segments
from torchrl_rloo.data.stop_reasons import STOP_REASONS, abstains, stop_reason
from torchrl_rloo.data.templates import encode_prompt

__all__ = [
    "PassRatePool",
    "DeferredRerolls",
    "MixtureSampler",
    "PackedRows",
    "PromptDataset",
    "PromptSampler",
    "Role",
    "STOP_REASONS",
    "abstains",
    "action_tokens",
    "concatenate",
    "encode_demonstrations",
    "encode_preferences",
    "encode_prompt",
    "gather_actions",
    "keys",
    "load_preference_splits",
    "load_preferences",
    "load_prompts",
    "longest_prompt",
    "merge_identical",
    "pack_rows",
    "pad",
    "ragged",
    "show_examples",
    "split_prompts",
    "split_segments",
    "stack_rows",
    "stop_reason",
    "tensor_rows",
    "unpack_rows",
]
