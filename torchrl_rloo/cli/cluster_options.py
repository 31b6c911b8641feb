"""Settings ``cluster.*`` of ``torchrl-rloo plan --cluster``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torchrl_rloo.runtime.lookup import did_you_mean

PREFIX = "cluster."
MODES = ("sync", "one-step-off", "async", "partial")


@dataclass(frozen=True)
class ClusterOptions:
    """Cluster to plan, apart from the settings of the recipe.

    Raises:
        ValueError: if a value is out of range.
    """

    gpus: int = 8
    gpu: str = "H100"
    mode: str = "partial"
    max_staleness: int = 4
    engines: int | None = None
    engine_gpus: int | None = None
    scale: str = ""
    mean_tokens: float | None = None
    p99_tokens: float | None = None
    lengths: str | None = None
    turns: float | None = None
    feedback_tokens: float = 128.0
    tool_seconds: float = 0.0
    tool_p99: float | None = None
    max_in_flight: int | None = None
    rate: str = ""
    mfu: float = 0.35
    bandwidth_use: float = 0.7
    flops_use: float = 0.5
    active_parameters: float | None = None
    push_gigabytes: float = 10.0
    load_gigabytes: float = 20.0
    background_push: bool = False
    workers: int | None = None
    turn_ms: float = 1.0
    group_ms: float = 5.0
    steps: int = 4

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"cluster.mode={self.mode} is unknown{did_you_mean(self.mode, MODES)}; valid: {MODES}")
        positive = ("mfu", "bandwidth_use", "flops_use", "push_gigabytes", "load_gigabytes", "steps")
        positive += ("engine_gpus", "mean_tokens", "turns", "active_parameters", "workers", "max_in_flight", "engines")
        for name in positive:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"cluster.{name}={value} must be above 0")
        for name in ("max_staleness", "feedback_tokens", "tool_seconds", "turn_ms", "group_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"cluster.{name}={getattr(self, name)} must be at least 0")
        _ = self.sizes, self.rates  # parse them before anything is simulated
        if self.gpus < 2:
            raise ValueError(f"cluster.gpus={self.gpus} must be at least 2: one for an engine, one for the trainer")

    @property
    def sizes(self) -> list[int]:
        """Numbers of GPUs of the table ``cluster.scale``."""
        return _numbers(self.scale, "scale", "8,64,512", int)

    @property
    def rates(self) -> list[tuple[float, float]]:
        """Measured pairs of running requests and tokens per second."""
        pairs = [pair.partition(":") for pair in self.rate.split(",") if pair]
        try:
            return [(float(n), float(rate)) for n, _, rate in pairs]
        except ValueError as error:
            raise ValueError(f"cluster.rate={self.rate} must be like 1:60,64:1800") from error


HELP = {
    "gpus": "GPUs of the cluster, for engines and trainer together",
    "gpu": "kind of GPU, by its data sheet: A100, H100, H200, B200, L40S, L4, MI300X",
    "mode": "mode whose split is searched: sync, one-step-off, async or partial (rollouts continue under new weights)",
    "max_staleness": "bound on the staleness in the modes async and partial",
    "engines": "number of engines; default: the best split is searched",
    "engine_gpus": "GPUs of an engine; default: that of the recipe's engine, else the fewest that hold the model",
    "scale": "other numbers of GPUs to plan, e.g. 8,64,512",
    "mean_tokens": "mean sampled tokens of a turn; default: a quarter of generate.max_new_tokens",
    "p99_tokens": "99 %% quantile of them; default: generate.max_new_tokens, where longer turns are cut",
    "lengths": "file of measured lengths instead: a number a line, or a run's metrics.jsonl",
    "turns": "turns of a conversation; default: environment.max_turns, else the task's",
    "feedback_tokens": "tokens of a tool's answer",
    "tool_seconds": "mean latency of a tool",
    "tool_p99": "99 %% quantile of it; default: constant",
    "max_in_flight": "conversations at a time; default: as many as the mode admits",
    "rate": "measured tokens/s of an engine by running requests, e.g. 1:60,64:1800; default: from the data sheet",
    "mfu": "share of the GPU's operations that training uses",
    "bandwidth_use": "share of the memory bandwidth that decoding uses",
    "flops_use": "share of the operations that reading prompts uses",
    "active_parameters": "parameters that a token uses, in billions; required for a mixture of experts",
    "push_gigabytes": "GB/s at which new weights travel to the engines",
    "load_gigabytes": "GB/s at which each GPU of an engine loads them while it stands still",
    "background_push": "whether the trainer continues while engines receive weights",
    "workers": "rollout workers; default: one per engine",
    "turn_ms": "CPU ms of a worker for each turn",
    "group_ms": "CPU ms of the driver for each group",
    "steps": "simulated steps of each cluster, after the warm-up",
}


def parse_cluster(settings: Sequence[str]) -> tuple[ClusterOptions, list[str]]:
    """Split settings into those of the cluster and the others.

    Returns:
        The cluster's, and the settings of the recipe.

    Raises:
        ValueError: if a setting of the cluster is unknown or its value is wrong.

    Example:
        >>> options, rest = parse_cluster(["cluster.gpus=64", "plan.steps=3"])
        >>> options.gpus, rest
        (64, ['plan.steps=3'])
    """
    mine = [setting for setting in settings if setting.startswith(PREFIX)]
    types = {field.name: str(field.type) for field in fields(ClusterOptions)}
    values: dict[str, Any] = {}
    for setting in mine:
        name, _, text = setting.removeprefix(PREFIX).partition("=")
        if name not in types:
            names = ", ".join(types)
            raise ValueError(f"unknown setting cluster.{name}{did_you_mean(name, types)}; valid: {names}")
        values[name] = _value(name, text, types[name])
    return ClusterOptions(**values), [setting for setting in settings if setting not in mine]


def _value(name: str, text: str, kind: str) -> Any:
    if "None" in kind and text in ("null", "None"):
        return None
    kind = kind.split(" ")[0]
    try:
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        return {"int": int, "float": float, "str": str}[kind](text)
    except (KeyError, ValueError) as error:
        raise ValueError(f"cluster.{name}={text} must be of type {kind}") from error


def _numbers(text: str, name: str, example: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part]
    except ValueError as error:
        raise ValueError(f"cluster.{name}={text} must be like {example}") from error


def describe_options() -> str:
    """Return the settings with defaults and meanings, for ``--help``."""
    lines = []
    for field in fields(ClusterOptions):
        default = (
            ""
            if field.default in (None, "")
            else f"={str(field.default).lower() if field.type == 'bool' else field.default}"
        )
        lines.append(f"  {PREFIX}{field.name}{default}".ljust(34) + " " + HELP[field.name].replace("%%", "%"))
    return "\n".join(lines)
