"""Rows of trajectories and their parts: keys, prompt datasets, chat templates, ragged batches."""

from torchrl_rloo.data import keys
from torchrl_rloo.data.dtypes import parse_dtype
from torchrl_rloo.data.feedback_ids import answer_turn, encode_feedback
from torchrl_rloo.data.merging import merge_identical
from torchrl_rloo.data.metadata import metadata_of
from torchrl_rloo.data.outcomes import SeparateScores, WeightedScores, final_return
from torchrl_rloo.data.own_rows import OwnRows
from torchrl_rloo.data.packed import PackedRows, pack_rows, unpack_rows
from torchrl_rloo.data.pass_rates import PassRatePool
from torchrl_rloo.data.preferences import (
    PreferenceDataset,
    encode_demonstrations,
    encode_preferences,
    load_preference_splits,
    load_preferences,
)
from torchrl_rloo.data.prompts import PromptCounts, PromptDataset, load_prompts, longest_prompt, split_prompts
from torchrl_rloo.data.rerolls import DeferredRerolls
from torchrl_rloo.data.roles import Role, split_roles
from torchrl_rloo.data.rows import (
    ActionTokens,
    action_tokens,
    concatenate,
    gather_actions,
    micro_batches,
    pad,
    ragged,
    stack_rows,
    tensor_rows,
    unpad,
)
from torchrl_rloo.data.sampling import MixtureSampler, PromptSampler
from torchrl_rloo.data.segments import refuse_segments, split_segments
from torchrl_rloo.data.stop_reasons import STOP_REASONS, abstains, end_row, stop_reason
from torchrl_rloo.data.templates import (
    decode_response,
    encode_conversation,
    encode_messages,
    encode_prompt,
    encode_prompts,
    from_history,
    render,
    to_history,
)

__all__ = [
    "parse_dtype",
    "SeparateScores",
    "WeightedScores",
    "final_return",
    "PassRatePool",
    "DeferredRerolls",
    "ActionTokens",
    "MixtureSampler",
    "OwnRows",
    "PackedRows",
    "PreferenceDataset",
    "PromptCounts",
    "PromptDataset",
    "PromptSampler",
    "Role",
    "STOP_REASONS",
    "abstains",
    "action_tokens",
    "answer_turn",
    "concatenate",
    "decode_response",
    "encode_conversation",
    "encode_demonstrations",
    "encode_feedback",
    "encode_messages",
    "encode_preferences",
    "encode_prompt",
    "encode_prompts",
    "end_row",
    "from_history",
    "gather_actions",
    "keys",
    "load_preference_splits",
    "load_preferences",
    "load_prompts",
    "longest_prompt",
    "merge_identical",
    "metadata_of",
    "micro_batches",
    "pack_rows",
    "pad",
    "ragged",
    "refuse_segments",
    "render",
    "split_prompts",
    "split_roles",
    "split_segments",
    "stack_rows",
    "stop_reason",
    "tensor_rows",
    "to_history",
    "unpack_rows",
    "unpad",
]
