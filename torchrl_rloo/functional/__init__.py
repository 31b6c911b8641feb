"""Mathematics of the package: pure functions on plain tensors that import only torch."""

from torchrl_rloo.functional.advantages import ESTIMATORS, EstimatorSpec, leave_one_out, normalize_then_sum, whiten
from torchrl_rloo.functional.kl import KL_ESTIMATORS, k1, k2, k3
from torchrl_rloo.functional.log_probs import token_log_probs
from torchrl_rloo.functional.policy_loss import AGGREGATIONS, CISPO, SURROGATES, Clip
from torchrl_rloo.functional.preference import PREFERENCE_OBJECTIVES
from torchrl_rloo.functional.ratios import CORRECTIONS, RATIOS, Ratio, RatioSpec, exp_log_ratio
from torchrl_rloo.functional.returns import explained_variance, gae
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.functional.statistics import effective_sample_size

__all__ = [
    "AGGREGATIONS",
    "CISPO",
    "CORRECTIONS",
    "ESTIMATORS",
    "KL_ESTIMATORS",
    "PREFERENCE_OBJECTIVES",
    "RATIOS",
    "SURROGATES",
    "Clip",
    "EstimatorSpec",
    "Ratio",
    "RatioSpec",
    "SamplingDistribution",
    "effective_sample_size",
    "explained_variance",
    "gae",
    "k1",
    "k2",
    "k3",
    "leave_one_out",
    "normalize_then_sum",
    "exp_log_ratio",
    "token_log_probs",
    "whiten",
]
