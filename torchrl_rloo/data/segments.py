"""Trajectories of several samples: what becomes of a row when the chat template rewrites what the policy saw.

``ChatEnv(on_rewrite="split")`` continues from the conversation as the template renders it again, so later turns have
another past than those of earlier ones. The trajectory stays one row, with one reward in one group: ``TOKENS`` and
all other entries of tokens are the last sample's; those of earlier ones wait in ``PREVIOUS_SEGMENTS``, end to end. Once
the row has its advantage, :func:`split_segments` makes a row of each sample for the loss::

    buffer.extend(tensor_rows(rows))  # MCAdvantage sees whole groups
    loss = loss_module(split_segments(buffer.sample()))

What a trajectory of ``K`` samples then weighs depends on the loss's aggregation. With ``"token_mean"`` nothing changes:
each token counts once. With ``"sequence_sum"`` and ``"constant"`` trajectories weigh against each other what they did,
and the whole is smaller by the number of trajectories over that of rows. With ``"sequence_mean"`` a trajectory weighs
``K`` times as much as one of a single sample. Ratios of whole sequences are of each sample, not of their product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import collection_like, stack_rows

_OF_TOKENS = {"tokens": keys.PROMPT_TOKENS, "mask": keys.ACTION_MASK, "log_probs": keys.LOG_PROBS}
_OF_ACTIONS = {"versions": keys.ACTION_VERSIONS, "support_sizes": keys.SUPPORT_SIZES, "support_ids": keys.SUPPORT_IDS}
_OF_WHOLE_ROWS: tuple[NestedKey, ...] = (
    keys.TOKEN_REWARDS,
    keys.REF_LOG_PROBS,
    keys.PROXIMAL_LOG_PROBS,
    keys.PROXIMAL_ENTROPY,
    keys.STATE_VALUE,
    keys.VALUE_TARGET,
)  # entries of a value a token, which earlier samples do not have


def stash_segment(row: TensorDictBase) -> None:
    """Moves a row's present sample to its earlier ones, in place; whoever calls then sets the next one's context.

    Args:
        row: one row of the ``"next"`` entry of a step. Its ``PREVIOUS_SEGMENTS`` gets, each end to end over the earlier
            samples: ``tokens``, ``mask`` and ``log_probs`` ``[E]``, ``sizes`` (int64, tokens of each sample) and,
            where the row has them, ``versions``, ``support_sizes`` ``[A]`` and ``support_ids``.
    """
    earlier = row.get(keys.PREVIOUS_SEGMENTS, None)
    present = {name: row[key] for name, key in _OF_TOKENS.items()}
    present["sizes"] = torch.tensor([len(present["tokens"])])
    for name, key in _OF_ACTIONS.items():
        if (value := row.get(key, None)) is not None:
            present[name] = value
    if earlier is not None:
        present = {name: torch.cat([earlier[name], value]) for name, value in present.items()}
    forget_samples(row).set(keys.PREVIOUS_SEGMENTS, TensorDict(present, batch_size=[]))


def forget_samples(row: TensorDictBase) -> TensorDictBase:
    """Takes from a row, in place, its earlier samples and what the policy wrote for each action of the present one."""
    row.pop(keys.PREVIOUS_SEGMENTS, None)
    if keys.ACTION_VERSIONS in row.keys():
        row.set(keys.ACTION_VERSIONS, row[keys.ACTION_VERSIONS][:0])
    if keys.SUPPORT_IDS[0] in row.keys():
        row.set(keys.SUPPORT_IDS[0], row[keys.SUPPORT_IDS[0]].apply(lambda value: value[:0]))
    return row


def split_segments(rows: TensorDictBase) -> TensorDictBase:
    """One row per sample, in order, each with what its trajectory earned; see the top of this file for the weights.

    Samples in which the policy said nothing are left out, unless a trajectory has no others.

    Args:
        rows: batch size ``[B]``, with their advantages; not changed.

    Returns:
        At least ``B`` rows, without ``PREVIOUS_SEGMENTS``; ``rows`` themselves if none has one. ``POLICY_VERSION``
        is the oldest of a sample's own, where each token's is known; all entries that are not of tokens are the
        trajectory's.

    Raises:
        ValueError: if a row of several samples has an entry with a value for each token, which the earlier ones lack.
    """
    if not any(keys.PREVIOUS_SEGMENTS in row.keys() for row in rows.unbind(0)):
        return rows
    return stack_rows([sample for row in rows.unbind(0) for sample in _samples(row)])


def sampled_versions(row: TensorDictBase) -> torch.Tensor | None:
    """``[A]`` int64: policy versions of all action tokens of a trajectory, in all its samples; None if unknown.

    Args:
        row: a row, or one row of the ``"next"`` entry of a step.
    """
    versions, earlier = row.get(keys.ACTION_VERSIONS, None), row.get(keys.PREVIOUS_SEGMENTS, None)
    return versions if versions is None or earlier is None else torch.cat([earlier["versions"], versions])


def sampled_ids(row: TensorDictBase) -> torch.Tensor:
    """``[A]`` int64: all action tokens of a trajectory, in all its samples.

    Args:
        row: one row of the ``"next"`` entry of a step.
    """
    ids, earlier = row[keys.PROMPT_TOKENS][row[keys.ACTION_MASK]], row.get(keys.PREVIOUS_SEGMENTS, None)
    return ids if earlier is None else torch.cat([earlier["tokens"][earlier["mask"]], ids])


def refuse_segments(row: TensorDictBase, who: str) -> None:
    """Raises for a row of several samples, in the name of what reads the tokens of whole trajectories.

    Args:
        row: a row, or one row of the ``"next"`` entry of a step.
        who: reads it.

    Raises:
        ValueError: if the row has earlier samples.
    """
    if keys.PREVIOUS_SEGMENTS in row.keys():
        raise ValueError(
            f"{who} reads all tokens of a trajectory, but this row has "
            f"{len(row[keys.PREVIOUS_SEGMENTS]['sizes'])} more samples under "
            f"{keys.PREVIOUS_SEGMENTS!r}: use ChatEnv(on_rewrite='keep'), or leave {who} out"
        )


def _samples(row: TensorDictBase) -> Iterator[TensorDictBase]:
    if keys.PREVIOUS_SEGMENTS not in row.keys():
        yield row
        return
    for key in _OF_WHOLE_ROWS:
        if row.get(key, None) is not None:
            raise ValueError(
                f"a row of several samples has {key!r}, which is of its last one only: write it after the split"
            )
    if (advantage := row.get(keys.ADVANTAGE, None)) is not None and advantage.numel() != 1:
        raise ValueError("a row of several samples has an advantage for each token: use credit='trajectory'")
    earlier, rest = row[keys.PREVIOUS_SEGMENTS], row.exclude(keys.PREVIOUS_SEGMENTS)
    sizes = earlier["sizes"].tolist()
    parts = {name: earlier[name].split(sizes) for name in _OF_TOKENS}
    actions = [int(mask.sum()) for mask in parts["mask"]]
    for name in ("versions", "support_sizes"):
        if name in earlier.keys():
            parts[name] = earlier[name].split(actions)
    if "support_ids" in earlier.keys():
        parts["support_ids"] = earlier["support_ids"].split([int(n.sum()) for n in parts["support_sizes"]])
    sampled = [i for i, count in enumerate(actions) if count]  # in others the policy said nothing
    for i in sampled:
        yield _sample(rest.copy(), {name: part[i] for name, part in parts.items()})
    if rest[keys.ACTION_MASK].any() or not sampled:  # not if it was given up before the policy's turn
        yield _with_version(rest)


def _sample(row: TensorDictBase, part: dict[str, torch.Tensor]) -> TensorDictBase:
    """A trajectory's row with the tokens of one of its earlier samples."""
    tokens, mask = part["tokens"], part["mask"]
    entries = {
        "tokens": {"full": tokens, "prompt": tokens[: int(mask.int().argmax())]},
        "masks": {"all_attention_mask": torch.ones_like(mask), "all_assistant_mask": mask},
        "log_probs": {"full": part["log_probs"]},
    }
    for name, tensors in entries.items():
        row.set(name, collection_like(row.get(name), **tensors))
    if "versions" in part:
        row.set(keys.ACTION_VERSIONS, part["versions"])
    if "support_ids" in part:
        support = {"ids": part["support_ids"], "sizes": part["support_sizes"]}
        row.set(keys.SUPPORT_IDS[0], TensorDict(support, batch_size=[]))
    return _with_version(row)


def _with_version(row: TensorDictBase) -> TensorDictBase:
    versions = row.get(keys.ACTION_VERSIONS, None)
    return row if versions is None or not len(versions) else row.set(keys.POLICY_VERSION, versions.min())
