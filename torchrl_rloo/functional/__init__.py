"""The mathematics: pure functions on plain tensors; torch is the only import."""

from torchrl_rloo.functional.advantages import ESTIMATORS, Estimator, leave_one_out
from torchrl_rloo.functional.kl import k1, k3, kl_penalised_reward
from torchrl_rloo.functional.log_probs import token_log_probs
from torchrl_rloo.functional.policy_loss import (
    clip_masks,
    clipped_objective,
    reinforce_objective,
    sequence_log_ratio,
)
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.functional.sampling import SamplingDistribution, kept_tokens, process_logits, sample_tokens
from torchrl_rloo.functional.statistics import effective_sample_size, masked_mean, nanstd

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "SamplingDistribution",
    "clip_masks",
    "clipped_objective",
    "combine_rewards",
    "effective_sample_size",
    "k1",
    "k3",
    "kept_tokens",
    "kl_penalised_reward",
    "leave_one_out",
    "masked_mean",
    "nanstd",
    "process_logits",
    "reinforce_objective",
    "sample_tokens",
    "sequence_log_ratio",
    "token_log_probs",
]
