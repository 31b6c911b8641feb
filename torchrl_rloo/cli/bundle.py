"""Commands ``torchrl-rloo bundle`` and ``verify``; importing it imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchrl_rloo.cli.rescore import parse_rewards, rows_folder

BUNDLE_EXAMPLES = """
  torchrl-rloo bundle outputs/mine --step 40
  torchrl-rloo bundle outputs/mine --step 40 --weights --output step40.bundle"""
VERIFY_EXAMPLES = """
  torchrl-rloo verify outputs/mine/bundles/step_000040.bundle
  torchrl-rloo verify step40.bundle --model step40_model --rewards my_rewards.graded"""


def add_bundle_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bundle``."""
    parser.add_argument("path", help="directory of a run that keeps its rows (rollouts.path)")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="training step")
    parser.add_argument("--output", metavar="FILE", help="file to write; default: bundles/step_N.bundle of the run")
    parser.add_argument("--weights", action="store_true", help="also save the weights before the step, for verify")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``verify``."""
    parser.add_argument("file", help="bundle")
    parser.add_argument("--model", metavar="PATH", help="local directory or hub id with the weights before the step")
    parser.add_argument("--device", default="cpu", help="device of the model; default: cpu")
    parser.add_argument("--rewards", help="reward functions of the step, as for rescore; default: safe built-in ones")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of a log-prob; default: 1e-4")


def bundle(path: str, step: int, output: str | None, weights: bool) -> None:
    """Write the bundle of a step: that of the run itself, or a new one after training up to the step on stored rows.

    Args:
        path: directory of the run.
        step: training step.
        output: file to write; None takes the run's directory.
        weights: whether to save the weights before the step.
    """
    directory = Path(path)
    kept = directory / "bundles" / f"step_{step:06d}.bundle"
    target = kept if output is None else Path(output)
    models = [file.with_name(f"{file.stem}_model") for file in (kept, target)]
    if not kept.is_file() or (weights and not models[0].is_dir()):
        with tempfile.TemporaryDirectory(prefix="torchrl_rloo_bundle_") as work:
            written = _train_until(directory, step, Path(work) / "run", weights)
            _copy(written, target)
            if weights:
                _copy(written.with_name(f"{written.stem}_model"), models[1])
    elif target != kept:
        _copy(kept, target)
        if weights:
            _copy(*models)
    from torchrl_rloo.diagnostics.bundle import file_digest

    print(f"bundle of step {step}: {target} (SHA-256 {file_digest(target)})")
    if weights:
        print(f"weights before the step: {models[1]}")


def verify(file: str, model: str | None, device: str, rewards: str | None, tolerance: float) -> None:
    """Compute the numbers of a bundle again; exit with status 1 if one differs.

    Args:
        file: the bundle.
        model: model with the weights before the step.
        device: device of the model.
        rewards: reward functions.
        tolerance: largest difference of a log-prob.
    """
    from torchrl_rloo.diagnostics.bundle import file_digest, read_bundle
    from torchrl_rloo.diagnostics.bundle_verify import verify_bundle

    found = read_bundle(file)
    content = found.content
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    print(f"step {content['step']} of {content['model']}, {len(found.rows)} rows, written with {versions}")
    print(f"SHA-256 {file_digest(file)}")
    if rewards is not None:
        sys.path.insert(0, str(Path.cwd()))  # functions in the working directory
    loaded = tokenizer = None
    if model is not None:
        from torchrl_rloo.modules import load_model

        loaded, tokenizer = load_model(model, device=device)
    result = verify_bundle(
        found,
        model=loaded,
        tokenizer=tokenizer,
        rewards=None if rewards is None else parse_rewards(rewards),
        tolerance=tolerance,
    )
    print(result.report())
    if not result.ok:
        raise SystemExit(1)


def _train_until(directory: Path, step: int, work: Path, weights: bool) -> Path:
    """Train on a run's stored rows from its last checkpoint before a step, and return the bundle of the step."""
    settings = _settings_of(directory)
    rows = rows_folder(directory)
    from torchrl_rloo.cli.main import recipe_file
    from torchrl_rloo.cli.recipe import import_recipe, parse_args
    from torchrl_rloo.cli.stored_run import checkpoint_for_stored, settings_for_stored

    # Settings of the run, with the stored rows in place of its sampler
    file = work.with_name("run.yaml")
    content = settings_for_stored(settings, rows, step, work, weights)
    file.write_text(json.dumps({"defaults": ["schema", "_self_"], **content}), encoding="utf-8")
    recipe = import_recipe(recipe_file("rloo"), "recipe_of_bundle")
    cfg = parse_args(recipe.Config, recipe_file("rloo"), None, ["--traceback", "--config", str(file)])
    start = checkpoint_for_stored(directory, rows, step, work, cfg)
    print(f"training on the rows of steps {start + 1} to {step}", flush=True)
    recipe.main(cfg)
    _compare_with_run(_metrics_of(directory, step), _metrics_of(work, step))
    return work / "bundles" / f"step_{step:06d}.bundle"


def _metrics_of(directory: Path, step: int) -> dict[str, float]:
    """Return the logged metrics of a step; empty if there are none."""
    file = directory / "metrics.jsonl"
    lines = file.read_text("utf-8").split("\n") if file.is_file() else []
    return next((found for line in lines[:-1] if (found := json.loads(line))["step"] == step), {})


def _compare_with_run(logged: dict[str, float], trained: dict[str, float]) -> None:
    """Warn if the step trained otherwise than in the run, as other ranks, precisions or machines do."""
    for name in ("reward", "loss", "grad_norm"):
        old, new = logged.get(name), trained.get(name)
        if old is not None and new is not None and abs(old - new) > 1e-4 * (1 + abs(old)):
            print(f"warning: the run logged {name}={old:.6g}, training on its rows gives {new:.6g}", file=sys.stderr)


def _settings_of(directory: Path) -> dict[str, Any]:
    """Return the settings of a run of the recipe rloo.

    Raises:
        FileNotFoundError: if the directory has none.
        ValueError: if they are of another recipe.
    """
    file = directory / "settings.json"
    if not file.is_file():
        raise FileNotFoundError(f"{directory} has no settings.json; name the directory of a run with a checkpoint")
    settings = json.loads(file.read_text("utf-8"))
    if not isinstance(settings, dict) or "rollouts" not in settings or "ray" in settings:
        raise ValueError(f"{directory} is no run of rloo; only these keep rows for a bundle")
    return settings


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)
