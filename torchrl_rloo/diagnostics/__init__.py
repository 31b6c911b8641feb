"""Plans, checks, metrics, health and reports of a run."""

from torchrl_rloo.diagnostics.memory import MemorySettings, plan_memory, read_shape
from torchrl_rloo.diagnostics.metrics import DEFINITIONS, completion_metrics, staleness_metrics
from torchrl_rloo.diagnostics.parity import check_engine, check_parity, parity_metrics
from torchrl_rloo.diagnostics.plan import TrainingPlan
from torchrl_rloo.diagnostics.report import write_report
from torchrl_rloo.diagnostics.run_report import RunReport
from torchrl_rloo.diagnostics.self_test import self_test
from torchrl_rloo.diagnostics.stored_rows import Rescorer, rescore
from torchrl_rloo.diagnostics.transcripts import write_transcripts
from torchrl_rloo.diagnostics.waiting import waiting_table
from torchrl_rloo.rewards.matching import final_answer

__all__ = [
    "DEFINITIONS",
    "MemorySettings",
    "Rescorer",
    "RunReport",
    "TrainingPlan",
    "check_engine",
    "check_parity",
    "completion_metrics",
    "final_answer",
    "parity_metrics",
    "plan_memory",
    "read_shape",
    "rescore",
    "self_test",
    "staleness_metrics",
    "waiting_table",
    "write_report",
    "write_transcripts",
]
