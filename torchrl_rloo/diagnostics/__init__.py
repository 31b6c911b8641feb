"""What a run does and how it goes: plans, metrics, evaluation, reports."""

from torchrl_rloo.diagnostics.evaluation import Evaluation, completion_table
from torchrl_rloo.diagnostics.metrics import DEFINITIONS, completion_metrics
from torchrl_rloo.diagnostics.parity import ParityProbe, ParityReport, advice, parity_metrics
from torchrl_rloo.diagnostics.plan import TrainingPlan
from torchrl_rloo.diagnostics.report import plot_curves, write_report

__all__ = [
    "DEFINITIONS",
    "Evaluation",
    "ParityProbe",
    "ParityReport",
    "TrainingPlan",
    "advice",
    "completion_metrics",
    "completion_table",
    "parity_metrics",
    "plot_curves",
    "write_report",
]
