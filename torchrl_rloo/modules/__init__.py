"""Policies that generate and score under TorchRL's LLM wrapper contract, references, critics and reward models."""

from torchrl_rloo.modules.gguf import local_model
from torchrl_rloo.modules.heads import RewardModel, ValueHead, encode_pairs, load_reward_model
from torchrl_rloo.modules.loading import add_adapter, count_trained, load_engine, load_model, load_tokenizer
from torchrl_rloo.modules.model_files import load_shards, save_merged, save_model
from torchrl_rloo.modules.packing import action_hidden, supports_packing
from torchrl_rloo.modules.policies import RoleAdapters, TransformersWrapper
from torchrl_rloo.modules.reference import (
    AdapterReference,
    MovingReference,
    Scorer,
    frozen_copy,
    frozen_reference,
    record_log_probs,
)
from torchrl_rloo.modules.teacher import EngineScorer, Teacher
from torchrl_rloo.modules.turns import ScoredActions, TurnPolicy
from torchrl_rloo.modules.vllm_policy import vLLMWrapper
from torchrl_rloo.weight_update.rotary import context_length

__all__ = [
    "AdapterReference",
    "EngineScorer",
    "MovingReference",
    "RewardModel",
    "RoleAdapters",
    "ScoredActions",
    "Scorer",
    "Teacher",
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
    "local_model",
    "record_log_probs",
    "save_merged",
    "save_model",
    "supports_packing",
    "vLLMWrapper",
]
