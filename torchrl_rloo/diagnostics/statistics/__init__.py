"""Statistics of evaluations as pure functions of tensors: intervals, paired tests, calibration, log-prob gaps."""

from torchrl_rloo.diagnostics.statistics.calibration import fit_temperature
from torchrl_rloo.diagnostics.statistics.evaluation import Interval, best_at_k, maj_at_k, mean_interval, pass_at_k
from torchrl_rloo.diagnostics.statistics.paired import PairedTest, paired_test
from torchrl_rloo.diagnostics.statistics.parity import LogProbGap, log_prob_gap

__all__ = [
    "Interval",
    "LogProbGap",
    "PairedTest",
    "best_at_k",
    "fit_temperature",
    "log_prob_gap",
    "maj_at_k",
    "mean_interval",
    "paired_test",
    "pass_at_k",
]
