"""Commands ``torchrl-rloo rescore`` and ``replay``, on stored rows; importing it imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESCORE_EXAMPLES = """
  torchrl-rloo rescore outputs/mine --rewards my_rewards.stricter
  torchrl-rloo rescore rows --rewards boxed_accuracy,think_format --weights 1 0.2 --json new.json
  torchrl-rloo rescore rows --rewards my_rewards.slow --executor process --workers 4 --output rows_stricter
  torchrl-rloo run rloo rollouts.source=rows_stricter reward.functions=[my_rewards.stricter]"""
REPLAY_EXAMPLES = """
  torchrl-rloo replay outputs/mine --model outputs/mine/model --group 17
  torchrl-rloo replay rows --model my/model --step 40 --output step40.html"""
MAX_PRINTED = 16  # rows in the table of a replay


def add_rescore_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rescore``."""
    _add_place(parser)
    parser.add_argument(
        "--rewards",
        required=True,
        help="names or dotted paths, separated by commas; or a YAML list of these and of {_target_: name, key: value}",
    )
    parser.add_argument(
        "--weights", type=float, nargs="+", metavar="W", help="weight of each function; default: 1 each"
    )
    parser.add_argument(
        "--clip", type=float, nargs=2, metavar=("LOW", "HIGH"), help="bounds of the weighted sum; default: none"
    )
    parser.add_argument("--estimator", default="rloo", help="advantage estimator; default: rloo")
    parser.add_argument("--executor", default="inline", help="inline, thread or process; default: inline")
    parser.add_argument("--workers", type=int, metavar="N", help="threads or processes; default: those of the executor")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds per sample; default: those of the executor")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--output", metavar="FOLDER", help="write the rows with their new rewards to a new folder")


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``replay``."""
    _add_place(parser)
    parser.add_argument("--model", required=True, help="local directory or hub id of the model that scores the rows")
    parser.add_argument("--group", type=int, action="append", metavar="ID", help="group to score; default: the first")
    parser.add_argument("--estimator", default="rloo", help="advantage estimator; default: rloo")
    parser.add_argument("--device", default="cpu", help="device of the model; default: cpu")
    parser.add_argument("--dtype", default="float32", help="data type of the weights; default: float32")
    parser.add_argument("--output", default="replay.html", metavar="FILE", help="page to write; default: replay.html")


def rescore(
    path: str,
    step: int | None,
    rewards: str,
    weights: list[float] | None,
    clip: list[float] | None,
    estimator: str,
    executor: str,
    workers: int | None,
    timeout: float | None,
    json: str | None,
    output: str | None,
) -> None:
    """Print what other rewards of stored rows would have changed."""
    files = _open(path)  # before the functions, which may be slow to import
    from torchrl_rloo.diagnostics.stored_rows import Rescorer
    from torchrl_rloo.diagnostics.stored_rows import rescore as compare
    from torchrl_rloo.rewards import make_executor
    from torchrl_rloo.runtime.files import write_text

    sys.path.insert(0, str(Path.cwd()))  # functions in the working directory
    rescorer = Rescorer(
        parse_rewards(rewards),
        weights=weights,
        clip_range=clip,
        executor=make_executor(executor, workers=workers, timeout=timeout),
    )
    try:
        result = compare(files, rescorer, estimator=estimator, step=step, output=output)
    finally:
        rescorer.close()
    print(result.table())
    if output is not None:
        print(f"rows with the new rewards: {output}")
    if json is not None:
        write_text(Path(json), _dump(result.to_json()))


def replay(
    path: str,
    step: int | None,
    model: str,
    group: list[int] | None,
    estimator: str,
    device: str,
    dtype: str,
    output: str,
) -> None:
    """Score stored rows with a model, print how their log-probs changed, and write the tokens as a page."""
    files = _open(path)
    from torchrl_rloo.diagnostics.stored_rows import image_folder, replay_groups
    from torchrl_rloo.diagnostics.transcripts import write_transcripts
    from torchrl_rloo.modules import TransformersWrapper, load_model

    loaded, tokenizer = load_model(model, device=device, dtype=dtype, images=image_folder(files, step))
    policy = TransformersWrapper(
        loaded, tokenizer=tokenizer, generate=False, generate_kwargs=files.notes().get("generate")
    )
    replayed = replay_groups(files, policy, groups=group, step=step, estimator=estimator)
    print(replayed.table(MAX_PRINTED))
    names, shown = files.notes().get("rewards", ()), {"model": model, "rows": str(files.folder), "estimator": estimator}
    page = write_transcripts(
        output, replayed.rows, tokenizer, title="Replayed rows", settings=shown, reward_names=names
    )
    print(f"page: {page.resolve()}")


def parse_rewards(text: str) -> list[Any]:
    """Return reward specifications from a command line.

    Raises:
        ValueError: if a YAML list is malformed.

    Example:
        >>> parse_rewards("boxed_accuracy,mine.graded"), parse_rewards("[{_target_: length, low: 3}]")
        (['boxed_accuracy', 'mine.graded'], [{'_target_': 'length', 'low': 3}])
    """
    if not text.lstrip().startswith("["):
        return [name.strip() for name in text.split(",")]
    import yaml

    try:
        return list(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(f"--rewards {text} is not a YAML list: {error}") from error


def rows_folder(path: str | Path) -> Path:
    """Return the folder of stored rows at a path: itself, or the one that a run's directory names."""
    path = Path(path)
    if (path / "manifest.json").is_file():
        return path
    settings = path / "settings.json"
    found = json.loads(settings.read_text("utf-8")).get("rollouts") if settings.is_file() else None
    kept = found.get("path") if isinstance(found, dict) else None
    for folder in () if kept is None else (Path(kept), path / Path(kept).name):  # a run that was moved
        if (folder / "manifest.json").is_file():
            return folder
    raise FileNotFoundError(
        f"{path} has no stored rows; name a folder of rollouts.path, or the directory of a run that kept its rows"
    )


def _open(path: str) -> Any:
    folder = rows_folder(path)
    from torchrl_rloo.replay import RolloutFiles  # imports torch

    return RolloutFiles(folder)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="folder of stored rows, or directory of a run with rollouts.path")
    parser.add_argument("--step", type=int, metavar="N", help="only rows of this training step; default: all")


def _dump(content: Any) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"
