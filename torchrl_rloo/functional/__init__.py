"""The mathematics: pure functions on plain tensors; torch is the only import."""

from torchrl_rloo.functional.advantages import (
    ESTIMATORS,
    Estimator,
    EstimatorRecipe,
    leave_one_out,
    normalize_then_sum,
    whiten,
)
from torchrl_rloo.functional.aggregation import AGGREGATIONS, Aggregation, aggregate
from torchrl_rloo.functional.calibration import fit_temperature
from torchrl_rloo.functional.dtypes import parse_dtype
from torchrl_rloo.functional.evaluation import Interval, best_at_k, maj_at_k, mean_interval, pass_at_k
from torchrl_rloo.functional.gae import gae
from torchrl_rloo.functional.importance import CORRECTIONS, Correction, off_policy_mask
from torchrl_rloo.functional.kl import (
    KL_ESTIMATORS,
    adapted_coefficient,
    k1,
    k2,
    k3,
    kl_loss_terms,
    kl_penalised_reward,
)
from torchrl_rloo.functional.log_probs import TokenLogProbs, token_log_probs
from torchrl_rloo.functional.paired import PairedTest, paired_test
from torchrl_rloo.functional.policy_loss import SURROGATES, Surrogate, settings_of
from torchrl_rloo.functional.preference import PREFERENCE_OBJECTIVES
from torchrl_rloo.functional.ratios import RATIOS, Ratio, ratio_of, sequence_log_ratio, share_out
from torchrl_rloo.functional.returns import rewards_to_go, spread_turns, turn_index, turn_rewards
from torchrl_rloo.functional.reward_model import batch_sum_to_zero, bradley_terry, centering
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.functional.sampling import SamplingDistribution, Support, kept_tokens, process_logits, sample_tokens
from torchrl_rloo.functional.statistics import effective_sample_size, masked_mean, nanstd
from torchrl_rloo.functional.value_loss import clipped_value_loss, explained_variance

__all__ = [
    "parse_dtype",
    "AGGREGATIONS",
    "CORRECTIONS",
    "ESTIMATORS",
    "KL_ESTIMATORS",
    "PREFERENCE_OBJECTIVES",
    "RATIOS",
    "SURROGATES",
    "Aggregation",
    "Correction",
    "Estimator",
    "EstimatorRecipe",
    "Interval",
    "PairedTest",
    "Ratio",
    "SamplingDistribution",
    "Support",
    "Surrogate",
    "TokenLogProbs",
    "adapted_coefficient",
    "aggregate",
    "batch_sum_to_zero",
    "best_at_k",
    "bradley_terry",
    "centering",
    "clipped_value_loss",
    "combine_rewards",
    "effective_sample_size",
    "explained_variance",
    "fit_temperature",
    "gae",
    "k1",
    "k2",
    "k3",
    "kept_tokens",
    "kl_loss_terms",
    "kl_penalised_reward",
    "leave_one_out",
    "maj_at_k",
    "masked_mean",
    "mean_interval",
    "nanstd",
    "normalize_then_sum",
    "off_policy_mask",
    "paired_test",
    "pass_at_k",
    "process_logits",
    "ratio_of",
    "rewards_to_go",
    "sample_tokens",
    "sequence_log_ratio",
    "settings_of",
    "share_out",
    "spread_turns",
    "token_log_probs",
    "turn_index",
    "turn_rewards",
    "whiten",
]
