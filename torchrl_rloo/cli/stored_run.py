"""Start of a run on the stored rows of another, at one of that run's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchrl_rloo.cli.sampling_config import CollectorConfig, InferenceConfig
from torchrl_rloo.replay.rollouts import RolloutFiles
from torchrl_rloo.run.checkpoint import Checkpointer, saved_steps
from torchrl_rloo.run.settings import write_settings
from torchrl_rloo.runtime.masking import MASK


def settings_for_stored(
    settings: Mapping[str, Any], rows: Path, step: int, output: Path, weights: bool
) -> dict[str, Any]:
    """Return the settings of a run that trains on stored rows up to a step, and writes its bundle.

    Args:
        settings: settings of the run that stored the rows.
        rows: folder of the rows.
        step: last step.
        output: directory of the new run.
        weights: whether to save the weights before the step.
    """
    collector = asdict(CollectorConfig())
    for name in ("max_staleness", "on_stale"):
        collector[name] = settings["collector"][name]
    if collector["on_stale"] not in ("mask", "baseline"):  # no stored token is too old
        collector["on_stale"] = "mask"
    rollouts = {"path": None, "max_gb": None, "train": True, "source": str(rows)}
    train = {"parallel": "none", "shard_size": None, "load_shards": False, "tensor_parallel": 1, "context_parallel": 1}
    train |= {"reduce": "last_pass", "offload": []}
    # Written settings hold masks instead of tokens, which variables such as HF_TOKEN replace
    kwargs = {name: value for name, value in settings["model"]["kwargs"].items() if value != MASK}
    changes: dict[str, Any] = {
        "model": {"kwargs": kwargs},
        "collector": collector,
        "inference": asdict(InferenceConfig()),
        "curriculum": {"pass_rate": None, "rerolls": None},
        "sampler": {"offload": False},
        "train": train,
        "reward": {"shaping": []},
        "rollouts": rollouts | {"bundles": [step], "bundle_weights": weights},
        "eval": {"every": 0, "sets": {}},
        "checkpoint": {"every": 0, "asynchronous": False},
        "log": {"loggers": [], "samples": 0, "transcripts": False},
    }
    merged = dict(settings)
    for name, changed in changes.items():
        merged[name] = {**settings[name], **changed}
    return merged | {"output_dir": str(output), "resume": "auto", "stop_after": step}


def checkpoint_for_stored(directory: Path, rows: Path, step: int, output: Path, cfg: Any) -> int:
    """Put the last checkpoint before a step into a new run, as if that run had trained on the stored rows.

    Args:
        directory: directory of the run that stored the rows.
        rows: folder of the rows.
        step: step to reach.
        output: directory of the new run.
        cfg: its settings.

    Returns:
        Step of the checkpoint; 0 if there is none, so that the new run begins with the initial model.

    Raises:
        ValueError: if the rows of a step that is needed are not stored, or the step is not one of the run.
    """
    files = RolloutFiles(rows).files()
    found = {file.step for file in files}
    if not 1 <= step <= cfg.plan.steps or step not in found:
        raise ValueError(f"--step {step} has no stored rows; stored: {_ranges(found)}")
    saved = [one for one in saved_steps(directory / "checkpoints") if one < step]
    saved = [one for one in saved if (directory / "checkpoints" / f"step_{one:08d}.pt").is_file()]
    start = max(saved, default=0)
    if missing := set(range(start + 1, step + 1)) - found:
        raise ValueError(f"--step {step} needs the rows of step {min(missing)}, which are not stored")
    if not start:
        return 0
    state = Checkpointer(directory / "checkpoints").load(start)
    source = state["parts"]["source"]
    taken = sorted({group.group_id for file in files if file.step <= start for group in file.groups})
    source["collector"] = {
        "policy_version": source["collector"]["versions"][0],
        "totals": source["collector"]["totals"],
        "counts": {},
        "taken": torch.tensor(taken, dtype=torch.int64),
    }
    state["settings"] = asdict(cfg)
    state["parts"]["logger"] = dict.fromkeys(state["parts"]["logger"], 0)
    Checkpointer(output / "checkpoints").save(start, state)
    write_settings(output, state["settings"])
    return start


def _ranges(steps: set[int | None]) -> str:
    known = sorted(step for step in steps if step is not None)
    return f"steps {known[0]} to {known[-1]}" if known else "none"
