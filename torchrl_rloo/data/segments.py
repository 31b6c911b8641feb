"""Trajectories of several samples, which arise when the chat template rewrites the conversation.

``ChatEnv(on_rewrite="split")`` continues from the conversation as the template renders it again. Later turns then have
a different context from earlier ones. The trajectory stays one row with one reward in one group. ``TOKENS`` and all
other token entries belong to the last sample, and ``PREVIOUS_SEGMENTS`` concatenates those of the earlier samples.
Once the row has an advantage, :func:`split_segments` makes one row per sample for the loss::

    buffer.extend(tensor_rows(rows))  # MCAdvantage sees whole groups
    loss = loss_module(split_segments(buffer.sample()))

The weight of a trajectory of ``K`` samples depends on the loss's aggregation:

- ``"token_mean"``: each token still counts once.
- ``"sequence_sum"`` and ``"constant"``: the relative weights of trajectories stay the same. The loss is multiplied by
  the number of trajectories over the number of rows.
- ``"sequence_mean"``: the trajectory has ``K`` times the weight of a trajectory of one sample.

A sequence-level ratio is that of one sample, not the product over all samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import copy_row, make_tensorclass_like, stack_rows

# Entries about samples, which a step copies from the row to its "next"
SAMPLE_KEYS = (keys.PREVIOUS_SEGMENTS, keys.ACTION_VERSIONS, keys.SUPPORT_IDS[0])
_TOKEN_ENTRIES = {"tokens": keys.PROMPT_TOKENS, "mask": keys.ACTION_MASK, "log_probs": keys.LOG_PROBS}
_ACTION_ENTRIES = {
    "versions": keys.ACTION_VERSIONS,
    "support_sizes": keys.SUPPORT_SIZES,
    "support_ids": keys.SUPPORT_IDS,
}
# Entries of one value per token, which earlier samples do not have
LAST_SAMPLE_KEYS: tuple[NestedKey, ...] = (
    keys.TOKEN_REWARDS,
    keys.REF_LOG_PROBS,
    keys.PROXIMAL_LOG_PROBS,
    keys.PROXIMAL_ENTROPY,
    keys.STATE_VALUE,
    keys.VALUE_TARGET,
)


def stash_segment(row: TensorDictBase) -> None:
    """Append a row's current sample to its previous ones, in place; the caller then sets the next context.

    ``PREVIOUS_SEGMENTS`` concatenates over the previous samples: ``tokens``, ``mask`` and ``log_probs`` (``[E]``),
    ``sizes`` (int64, tokens of each sample) and, if the row has them, ``versions``, ``support_sizes`` (``[A]``) and
    ``support_ids`` (``[K]``).

    Args:
        row: one row of the ``"next"`` entry of a step.
    """
    previous = row.get(keys.PREVIOUS_SEGMENTS, None)
    current = {name: row[key] for name, key in _TOKEN_ENTRIES.items()}
    current["sizes"] = torch.tensor([len(current["tokens"])])
    for name, key in _ACTION_ENTRIES.items():
        if (value := row.get(key, None)) is not None:
            current[name] = value
    if previous is not None:
        current = {name: torch.cat([previous[name], value]) for name, value in current.items()}
    drop_samples(row).set(keys.PREVIOUS_SEGMENTS, TensorDict(current, batch_size=[]))


def drop_samples(row: TensorDictBase) -> TensorDictBase:
    """Drop a row's previous samples and the per-action entries of the current one, in place."""
    row.pop(keys.PREVIOUS_SEGMENTS, None)
    if keys.ACTION_VERSIONS in row.keys():
        row.set(keys.ACTION_VERSIONS, row[keys.ACTION_VERSIONS][:0])
    if keys.SUPPORT_IDS[0] in row.keys():
        row.set(keys.SUPPORT_IDS[0], row[keys.SUPPORT_IDS[0]].apply(lambda value: value[:0]))
    return row


def split_segments(rows: TensorDictBase) -> TensorDictBase:
    """Split trajectories into one row per sample, in order, each with the advantage of its trajectory.

    Samples without action tokens are dropped, unless a trajectory has no others. The module docstring describes the
    weights of the samples.

    Args:
        rows: batch of size ``[B]`` with advantages; not changed.

    Returns:
        At least ``B`` rows without ``PREVIOUS_SEGMENTS``, or ``rows`` itself if no row has it. ``POLICY_VERSION`` is
        the oldest version of the sample's action tokens if these are known. All other entries that are not per token
        are those of the trajectory.

    Raises:
        ValueError: if a row of several samples has an entry with one value per token, which earlier samples lack.
    """
    if not any(keys.PREVIOUS_SEGMENTS in row.keys() for row in rows.unbind(0)):
        return rows
    return stack_rows([sample for row in rows.unbind(0) for sample in _samples(row)])


def select_samples(row: TensorDictBase, indices: Sequence[int]) -> TensorDictBase:
    """Return a copy of a finished row with only some of its samples.

    Args:
        row: a row; not changed.
        indices: positions of the samples among all of the row, in order. The last one becomes the row's ``TOKENS``.
            Without any, the row keeps the prompt of the first sample, without action tokens.

    Raises:
        ValueError: if the row has an entry with one value per token of the last sample.
    """
    _refuse_last_sample_keys(row)
    parts = [*_previous_parts(row), _last_part(row)]
    chosen = copy_row(row)
    chosen.pop(keys.PREVIOUS_SEGMENTS, None)
    if not indices:
        first, prompt = parts[0], slice(0, _first_action(parts[0]["mask"]))
        return drop_samples(_sample(chosen, {name: first[name][prompt] for name in _TOKEN_ENTRIES}))
    *earlier, last = [parts[i] for i in indices]
    if earlier:
        joined = {name: torch.cat([part[name] for part in earlier]) for name in last}
        joined["sizes"] = torch.tensor([len(part["tokens"]) for part in earlier])
        chosen.set(keys.PREVIOUS_SEGMENTS, TensorDict(joined, batch_size=[]))
    return _sample(chosen, last)


def sampled_versions(row: TensorDictBase) -> torch.Tensor | None:
    """Return the policy versions of all action tokens of a trajectory, over all its samples.

    Args:
        row: a row, or one row of the ``"next"`` entry of a step.

    Returns:
        ``[A]`` int64, or None if the versions are unknown.
    """
    versions, previous = row.get(keys.ACTION_VERSIONS, None), row.get(keys.PREVIOUS_SEGMENTS, None)
    return versions if versions is None or previous is None else torch.cat([previous["versions"], versions])


def action_ids(row: TensorDictBase) -> torch.Tensor:
    """Return the action tokens of a trajectory, over all its samples.

    Args:
        row: one row of the ``"next"`` entry of a step.

    Returns:
        ``[A]`` int64.
    """
    ids, previous = row[keys.PROMPT_TOKENS][row[keys.ACTION_MASK]], row.get(keys.PREVIOUS_SEGMENTS, None)
    return ids if previous is None else torch.cat([previous["tokens"][previous["mask"]], ids])


def refuse_segments(row: TensorDictBase, caller: str) -> None:
    """Raise if a row has several samples, for callers that read the tokens of whole trajectories.

    Args:
        row: a row, or one row of the ``"next"`` entry of a step.
        caller: name of the caller in the message.

    Raises:
        ValueError: if the row has previous samples.
    """
    if keys.PREVIOUS_SEGMENTS in row.keys():
        raise ValueError(
            f"{caller} requires all tokens of a trajectory in one sample, but this row has "
            f"{len(row[keys.PREVIOUS_SEGMENTS]['sizes'])} more samples under {keys.PREVIOUS_SEGMENTS!r}; "
            f"use ChatEnv(on_rewrite='keep'), or remove {caller}"
        )


def _samples(row: TensorDictBase) -> Iterator[TensorDictBase]:
    if keys.PREVIOUS_SEGMENTS not in row.keys():
        yield row
        return
    _refuse_last_sample_keys(row)
    if (advantage := row.get(keys.ADVANTAGE, None)) is not None and advantage.numel() != 1:
        raise ValueError("a row of several samples has one advantage per token; use credit='trajectory'")

    # Yield samples with action tokens; the last one has none if the trajectory was cancelled before its turn
    rest = row.exclude(keys.PREVIOUS_SEGMENTS)
    sampled = [part for part in _previous_parts(row) if part["mask"].any()]
    for part in sampled:
        yield _sample(rest.copy(), part)
    if rest[keys.ACTION_MASK].any() or not sampled:
        yield _with_version(rest)


def _refuse_last_sample_keys(row: TensorDictBase) -> None:
    for key in LAST_SAMPLE_KEYS:
        if row.get(key, None) is not None:
            raise ValueError(f"a row of several samples has {key!r} of its last sample only; write it after the split")


def _previous_parts(row: TensorDictBase) -> list[dict[str, torch.Tensor]]:
    """Cut the concatenated entries of the previous samples back into samples."""
    if (previous := row.get(keys.PREVIOUS_SEGMENTS, None)) is None:
        return []
    sizes = previous["sizes"].tolist()
    parts = {name: previous[name].split(sizes) for name in _TOKEN_ENTRIES}
    actions = [int(mask.sum()) for mask in parts["mask"]]
    for name in ("versions", "support_sizes"):
        if name in previous.keys():
            parts[name] = previous[name].split(actions)
    if "support_ids" in previous.keys():
        parts["support_ids"] = previous["support_ids"].split([int(n.sum()) for n in parts["support_sizes"]])
    return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]


def _last_part(row: TensorDictBase) -> dict[str, torch.Tensor]:
    """Return the entries of a finished row's last sample."""
    named = _TOKEN_ENTRIES | {"tokens": keys.TOKENS} | _ACTION_ENTRIES
    return {name: value for name, key in named.items() if (value := row.get(key, None)) is not None}


def _first_action(mask: torch.Tensor) -> int:
    return int(mask.int().argmax()) if mask.any() else len(mask)


def _sample(row: TensorDictBase, part: dict[str, torch.Tensor]) -> TensorDictBase:
    """Set the token entries of a sample on a row, in place."""
    tokens, mask = part["tokens"], part["mask"]
    entries = {
        "tokens": {"full": tokens, "prompt": tokens[: _first_action(mask)]},
        "masks": {"all_attention_mask": torch.ones_like(mask), "all_assistant_mask": mask},
        "log_probs": {"full": part["log_probs"]},
    }
    for name, tensors in entries.items():
        row.set(name, make_tensorclass_like(row.get(name), **tensors))
    if "versions" in part:
        row.set(keys.ACTION_VERSIONS, part["versions"])
    if "support_ids" in part:
        support = {"ids": part["support_ids"], "sizes": part["support_sizes"]}
        row.set(keys.SUPPORT_IDS[0], TensorDict(support, batch_size=[]))
    return _with_version(row)


def _with_version(row: TensorDictBase) -> TensorDictBase:
    versions = sampled_versions(row)
    return row if versions is None or not len(versions) else row.set(keys.POLICY_VERSION, versions.min())
