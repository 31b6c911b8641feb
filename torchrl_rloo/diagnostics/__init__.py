"""Plans, metrics, evaluation and reports of a run."""

from torchrl_rloo.diagnostics.calibration import Calibration, calibrate, plot_calibration, write_calibration
from torchrl_rloo.diagnostics.comparison import Comparison, compare, plot_comparison
from torchrl_rloo.diagnostics.evaluation import Evaluation, completion_table, name_scorers
from torchrl_rloo.diagnostics.evaluation_result import EvaluatedSample, EvaluationResult, EvaluationSettings
from torchrl_rloo.diagnostics.health import make_health
from torchrl_rloo.diagnostics.memory import MemoryPlan, MemorySettings, plan_memory, read_shape
from torchrl_rloo.diagnostics.metrics import DEFINITIONS, completion_metrics, staleness_metrics
from torchrl_rloo.diagnostics.parity import ParityProbe, ParityReport, advice, parity_metrics
from torchrl_rloo.diagnostics.plan import TrainingPlan
from torchrl_rloo.diagnostics.preflight import check_engine, check_parity
from torchrl_rloo.diagnostics.replay import ReplayedRows, replay_groups
from torchrl_rloo.diagnostics.report import write_report
from torchrl_rloo.diagnostics.report_curves import plot_curves
from torchrl_rloo.diagnostics.report_facts import write_launch
from torchrl_rloo.diagnostics.rescore import Rescorer, rescore
from torchrl_rloo.diagnostics.rescore_table import RewardComparison, compare_rewards
from torchrl_rloo.diagnostics.self_test import self_test
from torchrl_rloo.diagnostics.timeline import choose_step, plot_timeline
from torchrl_rloo.diagnostics.transcripts import write_evaluation_transcripts, write_transcripts
from torchrl_rloo.diagnostics.waiting import (
    WaitRow,
    WaitSummary,
    join_entries,
    limiting_sentence,
    summarize_waits,
    waiting_rows,
    waiting_table,
)
from torchrl_rloo.diagnostics.watch import LiveServer
from torchrl_rloo.diagnostics.watch_page import write_live_page
from torchrl_rloo.rewards.matching import final_answer

__all__ = [
    "Calibration",
    "Comparison",
    "DEFINITIONS",
    "EvaluatedSample",
    "Evaluation",
    "EvaluationResult",
    "EvaluationSettings",
    "MemoryPlan",
    "MemorySettings",
    "ParityProbe",
    "ParityReport",
    "ReplayedRows",
    "Rescorer",
    "RewardComparison",
    "TrainingPlan",
    "WaitRow",
    "WaitSummary",
    "advice",
    "LiveServer",
    "calibrate",
    "check_engine",
    "check_parity",
    "choose_step",
    "compare",
    "compare_rewards",
    "completion_metrics",
    "completion_table",
    "final_answer",
    "join_entries",
    "limiting_sentence",
    "make_health",
    "name_scorers",
    "parity_metrics",
    "plan_memory",
    "plot_calibration",
    "plot_comparison",
    "plot_curves",
    "read_shape",
    "replay_groups",
    "rescore",
    "plot_timeline",
    "self_test",
    "summarize_waits",
    "staleness_metrics",
    "waiting_rows",
    "waiting_table",
    "write_calibration",
    "write_evaluation_transcripts",
    "write_launch",
    "write_live_page",
    "write_report",
    "write_transcripts",
]
