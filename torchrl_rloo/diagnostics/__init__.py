"""Plans, metrics, evaluation and reports of a run."""

from torchrl_rloo.diagnostics.calibration import Calibration, calibrate, plot_calibration, write_calibration
from torchrl_rloo.diagnostics.comparison import Comparison, compare, plot_comparison
from torchrl_rloo.diagnostics.evaluation import Evaluation, completion_table
from torchrl_rloo.diagnostics.evaluation_result import EvaluatedSample, EvaluationResult, EvaluationSettings
from torchrl_rloo.diagnostics.metrics import DEFINITIONS, completion_metrics
from torchrl_rloo.diagnostics.parity import ParityProbe, ParityReport, advice, parity_metrics
from torchrl_rloo.diagnostics.plan import TrainingPlan
from torchrl_rloo.diagnostics.preflight import check_engine, check_parity
from torchrl_rloo.diagnostics.report import plot_curves, write_report
from torchrl_rloo.diagnostics.self_test import self_test
from torchrl_rloo.diagnostics.transcripts import write_evaluation_transcripts, write_transcripts
from torchrl_rloo.rewards.answers import final_answer

__all__ = [
    "self_test",
    "DEFINITIONS",
    "Calibration",
    "Comparison",
    "EvaluatedSample",
    "Evaluation",
    "EvaluationResult",
    "EvaluationSettings",
    "ParityProbe",
    "ParityReport",
    "TrainingPlan",
    "advice",
    "calibrate",
    "check_engine",
    "check_parity",
    "compare",
    "completion_metrics",
    "completion_table",
    "final_answer",
    "parity_metrics",
    "plot_calibration",
    "plot_comparison",
    "plot_curves",
    "write_calibration",
    "write_evaluation_transcripts",
    "write_report",
    "write_transcripts",
]
