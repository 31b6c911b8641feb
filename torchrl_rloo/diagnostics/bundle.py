"""Bundle of a training step: its rows, settings and expected numbers in one file, to compute the step again elsewhere.

A bundle is a file of rows (:mod:`torchrl_rloo.replay.row_format`) without pickle. Its index has the settings, the
checksums of the weights before the step, and the expected numbers. Loss and gradient are those of all rows as one
batch, under the weights before the step, so they do not depend on minibatches.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.packed import pack_rows, unpack_rows
from torchrl_rloo.data.rows import ragged, stack_rows, unbind_rows
from torchrl_rloo.diagnostics.replay import record_on_cpu
from torchrl_rloo.functional.kl import KL_ESTIMATORS, kl_penalized_reward
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.objectives.rloo import RLOOLoss
from torchrl_rloo.objectives.step import merge_outputs
from torchrl_rloo.replay.rollouts import read_regular
from torchrl_rloo.replay.row_format import decode_index, decode_rows, encode_rows
from torchrl_rloo.runtime.files import atomic_write, make_folder
from torchrl_rloo.training.accumulate import accumulate
from torchrl_rloo.training.optimizer import gradient_norm
from torchrl_rloo.weight_update.checksums import xxh3

VERSION = 1
_PARTS = {  # entries of a bundle's content and their types
    "step": int,
    "model": str,
    "versions": dict,
    "weights": dict,
    "settings": dict,
    "notes": dict,
    "expected": dict,
    "other_rewards": list,
}


class BundleError(ValueError):
    """Error about a file that is no bundle, or a damaged or hostile one."""


class Bundle(NamedTuple):
    """Bundle of a step.

    Attributes:
        rows: ``[B]`` rows with text, ``ADVANTAGE``, and the log-probs and entropies of the weights before the step
            (``PROXIMAL_LOG_PROBS``, ``PROXIMAL_ENTROPY``).
        content: ``step``, ``model``, ``versions`` of software, ``weights`` (checksum of each tensor), ``settings``,
            ``notes`` (reward functions, weights, sampling), ``expected`` numbers, and ``other_rewards``: the part of
            each return that is neither of the reward functions nor of the KL, None where the row abstains.
    """

    rows: TensorDictBase
    content: dict[str, Any]


def make_bundle(
    rows: TensorDictBase,
    loss_fn: RLOOLoss,
    *,
    step: int,
    model: str,
    settings: Mapping[str, Any],
    notes: Mapping[str, Any],
    texts: Sequence[TensorDictBase | None] = (),
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
) -> Bundle:
    """Make a bundle before the optimizer steps on the rows. The model and its gradients stay as they are.

    Args:
        rows: ``[B]`` rows with advantages, of whole groups.
        loss_fn: loss of the training model.
        step: number of the step.
        model: name of the model.
        settings: arguments of the step, of which :func:`to_plain` makes JSON values: ``loss``, ``advantage``, ``kl``
            and ``scoring``.
        notes: reward functions, their weights and clip range, and the sampling distribution.
        texts: batches with the text of rows, found by ``trajectory_id``.
        micro_batch_size: rows per pass.
        max_tokens: tokens per pass.

    Raises:
        ValueError: if rows have several samples, or lack an entry that is needed.
    """
    limits = {"micro_batch_size": micro_batch_size, "max_tokens": max_tokens}
    rows = _with_text(rows, texts)
    actor = loss_fn.actor_network
    record_on_cpu(actor, rows, keys.PROXIMAL_ENTROPY, **limits)
    trained = getattr(actor, "model", actor)
    differences = [abs_change.max() for row in unbind_rows(rows) if len(abs_change := log_prob_changes(row))]
    content = {
        "step": step,
        "model": model,
        "versions": {name: version(name) for name in ("torch", "transformers", "tensordict")}
        | {"python": platform.python_version()},
        "weights": {name: xxh3([tensor]) for name, tensor in trained.state_dict().items()},
        "settings": to_plain(settings),
        "notes": to_plain(notes),
        "expected": step_numbers(loss_fn, rows, trained.parameters(), **limits)
        | {"parity_max": float(max(differences, default=0.0))},
    }
    other = (_returns(rows) - expected_returns(rows, content)).tolist()
    content["other_rewards"] = [None if math.isnan(value) else value for value in other]
    return Bundle(rows, content)


def step_numbers(
    loss_fn: RLOOLoss,
    rows: TensorDictBase,
    parameters: Iterable[torch.nn.Parameter],
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Return ``loss`` and ``grad_norm`` of rows as one batch, and restore the gradients.

    Args:
        loss_fn: the loss.
        rows: ``[B]`` rows with advantages.
        parameters: parameters whose gradient is measured.
        micro_batch_size: rows per pass.
        max_tokens: tokens per pass.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        outputs = accumulate(loss_fn, rows, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
        loss = merge_outputs(outputs).get("loss", 0.0)
        return {"loss": loss, "grad_norm": float(gradient_norm(parameters))}
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def log_prob_changes(row: TensorDictBase) -> torch.Tensor:
    """Return the absolute difference of the trainer's and the sampler's log-prob of each action token, ``[A]``."""
    return (row[keys.PROXIMAL_LOG_PROBS] - row[keys.LOG_PROBS])[row[keys.ACTION_MASK]].abs()


def expected_returns(rows: TensorDictBase, content: Mapping[str, Any]) -> torch.Tensor:
    """Return the returns ``[B]`` that follow from the rows' scores and KL, without the environment's own rewards.

    Args:
        rows: rows of a bundle.
        content: content of a bundle; ``notes`` and ``settings`` are read.
    """
    notes, kl = content["notes"], content["settings"].get("kl")
    total = torch.zeros(len(rows))
    if notes.get("weights"):
        clip = notes.get("clip_range")
        scores = torch.stack(ragged(rows, keys.REWARDS))
        total = combine_rewards(scores, notes["weights"], None if clip is None else tuple(clip))
    if not kl or kl.get("where") != "reward" or keys.REF_LOG_PROBS not in rows[0].keys(True):
        return total
    omits = content["settings"].get("loss", {}).get("mask_truncated_completions", False)
    for i, row in enumerate(rows.unbind(0)):
        if not (omits and bool(row[keys.TRUNCATED].any())):
            sampled, reference = (row[key][row[keys.ACTION_MASK]][None] for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS))
            each = KL_ESTIMATORS[kl["estimator"]](sampled, reference)
            total[i] = kl_penalized_reward(total[i : i + 1], each, float(kl["coeff"]))[0]
    return total


def write_bundle(path: str | os.PathLike, bundle: Bundle) -> str:
    """Write a bundle, and return the SHA-256 of the file.

    Raises:
        ValueError: if a column of the rows cannot be stored.
        OSError: if the file cannot be written.
    """
    index = {"bundle": VERSION, "content": bundle.content, "sha256": _digest(bundle.content)}
    written, path = encode_rows(pack_rows(bundle.rows), index), Path(path)
    make_folder(path.parent)
    with atomic_write(path) as file:
        file.write(written)
    return hashlib.sha256(written).hexdigest()


def file_digest(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file, to compare with that of its sender."""
    return hashlib.sha256(read_regular(Path(path))).hexdigest()


def read_bundle(path: str | os.PathLike) -> Bundle:
    """Read a bundle, which may come from a stranger: it has no pickle, and nothing in it is imported or run.

    Raises:
        BundleError: if the file is no bundle, damaged, of another version, or its rows cannot be those of a step.
        OSError: if it cannot be read, or is no regular file.
    """
    data = read_regular(Path(path))
    try:
        index = decode_index(data)
        if not isinstance(index, dict) or index.get("bundle") != VERSION:
            found = index.get("bundle") if isinstance(index, dict) else None
            raise ValueError(f"bundle={found!r:.40} must be version {VERSION}")
        content = index["content"]
        for name, kind in _PARTS.items():
            if type(content.get(name)) is not kind:
                raise ValueError(f"its entry {name} must be a {kind.__name__}")
        if index.get("sha256") != _digest(content):
            raise ValueError("the checksum of its settings and numbers does not match")
        rows = unpack_rows(decode_rows(data))
        check_rows(rows, content)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise BundleError(f"{os.fspath(path)} is not a bundle that can be verified: {error}") from error
    return Bundle(rows, content)


def check_rows(rows: TensorDictBase, content: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the rows of a bundle lack entries, or have other types or shapes."""
    floats = (keys.LOG_PROBS, keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY)
    for i, row in enumerate(rows.unbind(0)):
        length = len(_entry(row, i, keys.TOKENS, torch.int64))
        for key, dtype in ((keys.ACTION_MASK, torch.bool), *((key, torch.float32) for key in floats)):
            if tuple(_entry(row, i, key, dtype).shape) != (length,):
                raise ValueError(f"row {i}: key={key!r} must have the {length} values of its tokens")
        if length and int(row[keys.TOKENS].min()) < 0:
            raise ValueError(f"row {i}: token ids must be at least 0")
        for key, size in ((keys.REWARD, (1,)), (keys.ADVANTAGE, (1, length))):
            if _entry(row, i, key, torch.float32).numel() not in size:
                raise ValueError(f"row {i}: key={key!r} must have {' or '.join(map(str, size))} values")
        if _entry(row, i, keys.GROUP_ID, torch.int64).numel() != 1:
            raise ValueError(f"row {i}: group_id must be one number")
        if content["notes"].get("weights"):
            if _entry(row, i, keys.REWARDS, torch.float32).numel() != len(content["notes"]["weights"]):
                raise ValueError(f"row {i} must have a score of each of {len(content['notes']['weights'])} functions")
    if len(content["other_rewards"]) != len(rows):
        raise ValueError(f"other_rewards must have {len(rows)} values")


def to_plain(value: Any) -> Any:
    """Return settings as JSON values: dataclasses become mappings, coefficients numbers.

    Raises:
        ValueError: if a value has no JSON form, such as a function.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        fields = {name: getattr(value, name) for name in asdict(value)}
        return to_plain(fields)
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if hasattr(value, "__float__"):
        return float(value)
    raise ValueError(f"a bundle cannot hold the setting {value!r:.80}; use a name or numbers")


def _with_text(rows: TensorDictBase, texts: Sequence[TensorDictBase | None]) -> TensorDictBase:
    """Return copies of rows with the entries that they lack and that a row of the same trajectory has."""
    sources = [row for batch in texts if batch is not None for row in unbind_rows(batch)]
    by_id = {int(row[keys.TRAJECTORY_ID]): row for row in sources if keys.TRAJECTORY_ID in row.keys()}
    copies = []
    for row in unbind_rows(rows):
        copy = row.copy()
        source = by_id.get(int(row[keys.TRAJECTORY_ID])) if keys.TRAJECTORY_ID in row.keys() else None
        for name, entry in () if source is None else source.items():
            if name not in copy.keys():
                copy.set(name, entry)
        copies.append(copy)
    return stack_rows(copies)


def _returns(rows: TensorDictBase) -> torch.Tensor:
    return torch.stack([reward.reshape(()) for reward in ragged(rows, keys.REWARD)])


def _entry(row: TensorDictBase, i: int, key: Any, dtype: torch.dtype) -> torch.Tensor:
    value = row.get(key, None)
    if not isinstance(value, torch.Tensor) or value.dtype != dtype:
        raise ValueError(f"row {i}: key={key!r} must be a tensor of {dtype}")
    return value


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
