"""Policies that generate and score under TorchRL's LLM wrapper contract, references, critics and reward models."""

from torchrl_rloo.modules.loading import (
    add_adapter,
    count_trained,
    load_engine,
    load_model,
    load_tokenizer,
    save_model,
)
from torchrl_rloo.modules.merging import save_merged
from torchrl_rloo.modules.packing import action_hidden, supports_packing
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.modules.recording import Scorer, record_log_probs
from torchrl_rloo.modules.reference import AdapterReference, MovingReference, frozen_copy, frozen_reference
from torchrl_rloo.modules.reward_model import RewardModel, encode_pairs, load_reward_model
from torchrl_rloo.modules.role_adapters import RoleAdapters
from torchrl_rloo.modules.scoring import ScoredActions
from torchrl_rloo.modules.sharded_files import load_shards
from torchrl_rloo.modules.turns import TurnPolicy
from torchrl_rloo.modules.value import ValueHead
from torchrl_rloo.modules.vllm_policy import vLLMWrapper
from torchrl_rloo.rotary import context_length, set_context_length

__all__ = [
    "AdapterReference",
    "MovingReference",
    "RewardModel",
    "RoleAdapters",
    "ScoredActions",
    "Scorer",
    "TransformersWrapper",
    "TurnPolicy",
    "ValueHead",
    "action_hidden",
    "add_adapter",
    "context_length",
    "count_trained",
    "encode_pairs",
    "frozen_copy",
    "frozen_reference",
    "load_engine",
    "load_model",
    "load_reward_model",
    "load_shards",
    "load_tokenizer",
    "record_log_probs",
    "save_merged",
    "save_model",
    "set_context_length",
    "supports_packing",
    "vLLMWrapper",
]
