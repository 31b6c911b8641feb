"""Mathematics of the package: pure functions on plain tensors that import only torch."""

from torchrl_rloo.functional.advantages import (
    ESTIMATORS,
    NORMALIZATIONS,
    Estimator,
    EstimatorSpec,
    RewardStd,
    Whiten,
    estimator_option,
    leave_one_out,
    normalize_then_sum,
    whiten,
)
from torchrl_rloo.functional.aggregation import AGGREGATIONS, Aggregation, ConstantLength, aggregate
from torchrl_rloo.functional.choices import resolve
from torchrl_rloo.functional.gae import gae
from torchrl_rloo.functional.importance import (
    CORRECTIONS,
    TIS,
    Correction,
    IcePop,
    SeqMaskTIS,
    SequenceMask,
    SequenceTruncate,
    off_policy_mask,
)
from torchrl_rloo.functional.kl import (
    KL_ESTIMATORS,
    adapt_coefficient,
    k1,
    k2,
    k3,
    kl_loss_terms,
    kl_penalized_reward,
)
from torchrl_rloo.functional.log_probs import TokenLogProbs, token_log_probs
from torchrl_rloo.functional.policy_loss import CISPO, DPPO, SAPO, SURROGATES, VESPO, Clip, Surrogate, Unclipped
from torchrl_rloo.functional.preference import PREFERENCE_OBJECTIVES
from torchrl_rloo.functional.ratios import RATIOS, Ratio, exp_log_ratio, sequence_log_ratio, split_among_tokens
from torchrl_rloo.functional.returns import rewards_to_go, spread_turns, turn_index, turn_rewards
from torchrl_rloo.functional.reward_model import batch_sum_to_zero, bradley_terry, centering
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.functional.sampling import SamplingDistribution, Support, kept_tokens, process_logits, sample_tokens
from torchrl_rloo.functional.statistics import effective_sample_size, masked_mean, nanstd
from torchrl_rloo.functional.value_loss import clipped_value_loss, explained_variance

__all__ = [
    "AGGREGATIONS",
    "CISPO",
    "CORRECTIONS",
    "DPPO",
    "ESTIMATORS",
    "KL_ESTIMATORS",
    "NORMALIZATIONS",
    "PREFERENCE_OBJECTIVES",
    "RATIOS",
    "SAPO",
    "RewardStd",
    "SURROGATES",
    "TIS",
    "VESPO",
    "Aggregation",
    "Clip",
    "ConstantLength",
    "Correction",
    "Estimator",
    "EstimatorSpec",
    "IcePop",
    "Ratio",
    "SamplingDistribution",
    "SeqMaskTIS",
    "SequenceMask",
    "SequenceTruncate",
    "Support",
    "Surrogate",
    "TokenLogProbs",
    "Unclipped",
    "Whiten",
    "adapt_coefficient",
    "aggregate",
    "batch_sum_to_zero",
    "bradley_terry",
    "centering",
    "clipped_value_loss",
    "combine_rewards",
    "effective_sample_size",
    "estimator_option",
    "explained_variance",
    "gae",
    "k1",
    "k2",
    "k3",
    "kept_tokens",
    "kl_loss_terms",
    "kl_penalized_reward",
    "leave_one_out",
    "masked_mean",
    "nanstd",
    "normalize_then_sum",
    "off_policy_mask",
    "process_logits",
    "exp_log_ratio",
    "resolve",
    "rewards_to_go",
    "sample_tokens",
    "sequence_log_ratio",
    "split_among_tokens",
    "spread_turns",
    "token_log_probs",
    "turn_index",
    "turn_rewards",
    "whiten",
]
