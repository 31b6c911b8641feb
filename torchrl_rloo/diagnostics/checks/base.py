"""Checks before a run: their input, their result, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.diagnostics.plan import TrainingPlan, count

LEVELS = ("ok", "warn", "error")


@dataclass(frozen=True)
class Finding:
    """Result of a check: a sentence with the values found, and the change that helps.

    Attributes:
        level: ``"ok"``, ``"warn"`` (the run may learn less than it could) or ``"error"`` (it would learn nothing, or
            something else).
        sentence: result in words, with the values found.
        remedy: change that helps; empty for ``"ok"``.
        check: name of the check; :func:`run_checks` sets it.

    Raises:
        ValueError: if the level is unknown.
    """

    level: Literal["ok", "warn", "error"]
    sentence: str
    remedy: str = ""
    check: str = ""

    def __post_init__(self):
        if self.level not in LEVELS:
            raise ValueError(f"level={self.level!r} must be one of {LEVELS}")

    def __str__(self) -> str:
        """Return the finding as one line."""
        return f"{self.level:<5} {self.check}: {self.sentence}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Sample:
    """Completion of a training prompt by the start model."""

    prompt_id: int  # index of the prompt among those sampled
    completion: str
    value: float | None  # return, without any KL; None if the trajectory abstains
    truncated: bool = False  # whether a token, turn or time limit ended it
    tokens: int = 0  # number of sampled tokens


@dataclass(frozen=True)
class Probe:
    """Scores of a constructed completion, by :func:`~torchrl_rloo.diagnostics.checks.probe_rewards`."""

    prompt_id: int  # index of the prompt among those probed
    kind: str  # "right" or "wrong" (in one of several formats), "empty", or a hostile kind
    value: float | None  # weighted sum of the scores; None if all functions abstain or fail
    failures: Mapping[str, str] = field(default_factory=dict)  # message by name of each function that failed


@dataclass(frozen=True)
class Facts:
    """Input of all checks: plain values of a run that has not begun. Checks skip what is None or empty."""

    plan: TrainingPlan  # sizes of the run
    train: PromptDataset  # training prompts
    held_out: PromptDataset  # prompts of the evaluation
    tokenizer: Any  # tokenizer of the model
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of the chat template
    # Nats a token of a plain text without and with the beginning-of-text token; None if the prompts begin with it
    beginning_losses: tuple[float, float] | None = None
    stop_ids: Sequence[int] = ()  # ids that end a turn
    stop_strings: Sequence[str] = ()  # texts that end a turn
    answer_columns: Sequence[str] = ()  # columns of the dataset that the rewards require
    functions: Sequence[str] = ()  # names of the reward functions
    learned_reward: bool = False  # True if a reward function is a model
    probes: Sequence[Probe] = ()  # scores of constructed completions
    # Advice by reward function that expects the other form of completions, text or messages
    form_hints: Mapping[str, str] = field(default_factory=dict)
    samples: Sequence[Sample] = ()  # completions of the start model
    # Message by reward function of a failed sample of the start model, with the number of failures
    failures: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    reward_seconds: float | None = None  # seconds in which the rewards score the completions of a step
    sample_seconds: float | None = None  # seconds in which the start model samples them
    temperature: float = 1.0  # temperature of sampling
    loss: Mapping[str, Any] = field(default_factory=dict)  # arguments of the loss
    kl_coeff: float = 0.0  # coefficient of the KL to the initial model; 0 without one
    kl_target: float | None = None  # KL that the coefficient adapts to; None if it is constant
    normalized: bool = False  # True if rewards or advantages are clipped or scaled
    staleness: int = 0  # weight updates between sampling and training, at most
    in_flight: str | None = None  # treatment of running turns at a weight update of the engine; None without an engine
    sync_every: int = 1  # steps between weight updates of the sampler; 0 if it is never updated
    eval_every: int = 0  # steps between evaluations; 0 evaluates only before and after the run
    stop_rules: Sequence[str] | None = None  # rules that end a run early; None if the run has no such setting
    checkpoint_bytes: int | None = None  # size of a checkpoint, about
    checkpoints: int = 1  # checkpoints on the disk at once
    free_bytes: int | None = None  # free space on the disk of the output directory
    peak_bytes: int | None = None  # largest memory of a rank by the memory plan
    device_bytes: int | None = None  # memory of the device


Check = Callable[[Facts], "Finding | Iterable[Finding] | None"]


def run_checks(facts: Facts, checks: Mapping[str, Check]) -> list[Finding]:
    """Run checks and return their findings, in the order of the table.

    Args:
        facts: input of all checks.
        checks: functions by name, each from the facts to a finding, several, or None if it does not apply.

    Returns:
        The findings. A check that raises gives a warning, so that one of a user's own never ends a run.

    Example:
        >>> tokens = lambda facts: Finding("warn", "8 new tokens are few", "raise generate.max_new_tokens")
        >>> print(*run_checks(None, {"tokens": tokens}))
        warn  tokens: 8 new tokens are few; raise generate.max_new_tokens
    """
    found = []
    for name, check in checks.items():
        try:
            result = check(facts)
            results = [result] if isinstance(result, Finding) else list(result or ())
        except Exception as error:
            reason = f"the check itself failed, {type(error).__name__}: {error}"
            results = [Finding("warn", " ".join(reason.split()), "correct the check, or remove it")]
        found += [replace(result, check=name) for result in results]
    return found


def summarize(findings: Sequence[Finding]) -> str:
    """Return the numbers of findings by level as one line.

    Example:
        >>> summarize([Finding("ok", "fine"), Finding("warn", "few prompts")])
        '1 check passed, 1 warning, 0 errors'
    """
    passed, warnings, errors = (sum(finding.level == level for finding in findings) for level in LEVELS)
    return f"{count(passed, 'check')} passed, {count(warnings, 'warning')}, {count(errors, 'error')}"
