"""Held-out evaluation, its statistics, and comparison of checkpoints."""

from torchrl_rloo.evaluation.calibration import Calibration, calibrate, write_calibration
from torchrl_rloo.evaluation.comparison import Comparison, compare
from torchrl_rloo.evaluation.evaluation import Evaluation, completion_table, write_evaluation_transcripts
from torchrl_rloo.evaluation.result import EvaluationResult
from torchrl_rloo.evaluation.start import sample_start

__all__ = [
    "Calibration",
    "Comparison",
    "Evaluation",
    "EvaluationResult",
    "calibrate",
    "compare",
    "completion_table",
    "sample_start",
    "write_calibration",
    "write_evaluation_transcripts",
]
