"""Checks before the first step: a table of pure functions from the facts of a run to findings in words."""

from torchrl_rloo.diagnostics.checks.base import Check, Facts, Finding, Probe, Sample, run_checks, summarize
from torchrl_rloo.diagnostics.checks.probes import probe_rewards
from torchrl_rloo.diagnostics.checks.table import CHECKS, signal_probability

__all__ = [
    "CHECKS",
    "Check",
    "Facts",
    "Finding",
    "Probe",
    "Sample",
    "probe_rewards",
    "run_checks",
    "signal_probability",
    "summarize",
]
