"""Checks before the first step: a table of pure functions from the facts of a run to findings in words."""

from torchrl_rloo.diagnostics.checks.base import Check, Facts, Finding, Probe, Sample, run_checks, summarize
from torchrl_rloo.diagnostics.checks.probes import find_form_hints, probe_rewards, required_columns, scripted_texts
from torchrl_rloo.diagnostics.checks.samples import signal_probability
from torchrl_rloo.diagnostics.checks.start import StartSamples, sample_start
from torchrl_rloo.diagnostics.checks.table import CHECKS

__all__ = [
    "CHECKS",
    "Check",
    "Facts",
    "Finding",
    "Probe",
    "Sample",
    "StartSamples",
    "find_form_hints",
    "probe_rewards",
    "required_columns",
    "run_checks",
    "sample_start",
    "scripted_texts",
    "signal_probability",
    "summarize",
]
