"""Policies that generate and score, over TorchRL's LLM wrapper contract."""

from torchrl_rloo.modules.generation import Generated, GenerationConfig, end_of_sequence_ids, generate
from torchrl_rloo.modules.head import Head, find_head, score_positions
from torchrl_rloo.modules.loading import context_length, load_model, parse_dtype
from torchrl_rloo.modules.policies import ScoredActions, TransformersWrapper

__all__ = [
    "Generated",
    "GenerationConfig",
    "Head",
    "ScoredActions",
    "TransformersWrapper",
    "context_length",
    "end_of_sequence_ids",
    "find_head",
    "generate",
    "load_model",
    "parse_dtype",
    "score_positions",
]
