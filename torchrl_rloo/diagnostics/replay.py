"""Stored rows scored again by a model: old and new log-prob of each token, with advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import concatenate, stack_rows, unbind_rows
from torchrl_rloo.diagnostics.token_texts import TokenTexts
from torchrl_rloo.modules.reference import Scorer, record_log_probs
from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.rollouts import RolloutFiles


@dataclass(frozen=True)
class TokenChange:
    """Largest change of a log-prob in a row.

    Attributes:
        place: index of the token in the row.
        text: its text.
        old: log-prob of the policy that sampled it.
        new: log-prob of the model.
    """

    place: int
    text: str
    old: float
    new: float


@dataclass(frozen=True)
class ReplayedRows:
    """Rows with the log-probs of a model.

    Attributes:
        rows: ``[B]`` rows with ``PROXIMAL_LOG_PROBS`` (those of the model) and ``ADVANTAGE``.
        changes: largest change of each row; None for a row without action tokens.
    """

    rows: TensorDictBase
    changes: list[TokenChange | None]

    def table(self, limit: int | None = None) -> str:
        """Return a line per row.

        Args:
            limit: largest number of lines; None prints all.
        """
        lines = [f"{'group':>8}{'reward':>9}{'advantage':>11}{'tokens':>8}{'mean change':>13}  largest change"]
        for row, change in list(zip(unbind_rows(self.rows), self.changes, strict=True))[:limit]:
            mask = row[keys.ACTION_MASK]
            difference = (row[keys.PROXIMAL_LOG_PROBS] - row[keys.LOG_PROBS])[mask]
            mean = float(difference.abs().mean()) if len(difference) else 0.0
            reward, advantage = (float(row[key].float().mean()) for key in (keys.REWARD, keys.ADVANTAGE))
            largest = "-"
            if change is not None:
                largest = f"token {change.place} {change.text!r}: {change.old:.4f} -> {change.new:.4f}"
            lines.append(
                f"{int(row[keys.GROUP_ID]):>8}{reward:>9.3f}{advantage:>+11.3f}{int(mask.sum()):>8}{mean:>13.5f}  "
                f"{largest}"
            )
        if limit is not None and len(self.rows) > limit:
            lines.append(f"and {len(self.rows) - limit} more rows")
        return "\n".join(lines)


def replay_groups(
    files: RolloutFiles,
    scorer: Scorer,
    *,
    groups: Sequence[int] | None = None,
    step: int | None = None,
    estimator: str = "rloo",
    micro_batch_size: int | None = 16,
) -> ReplayedRows:
    """Score stored groups with a model.

    Args:
        files: the stored rows.
        scorer: scorer with the sampling distribution of the rows, such as ``TransformersWrapper(generate=False)``.
        groups: ids of the groups; None takes all groups of ``step``, or the first group.
        step: training step of the rows; None takes any.
        estimator: advantage estimator.
        micro_batch_size: rows per forward pass.

    Raises:
        ValueError: if a group is not stored.

    Example::

        scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
        print(replay_groups(RolloutFiles("rollouts"), scorer, groups=[17]).table())
    """
    found: dict[int, TensorDictBase] = {}
    for group, rows in files.groups(step=step):
        if groups is None or group.group_id in groups:
            found[group.group_id] = rows
        if groups is None and step is None:
            break
    where = f"folder={files.folder}" + ("" if step is None else f", step {step},")
    if missing := sorted(set(groups or ()) - set(found)):
        raise ValueError(f"{where} has no group {missing[0]}; choose another")
    if not found:
        raise ValueError(f"{where} has no rows")
    # Copy the rows, whose tensors are views of the file's
    rows = stack_rows([row.copy() for row in concatenate(list(found.values())).unbind(0)])
    record_on_cpu(scorer, rows, micro_batch_size=micro_batch_size)
    rows = MCAdvantage(estimator=estimator).inv(rows)
    texts = TokenTexts(scorer.tokenizer)
    return ReplayedRows(rows, [_largest_change(row, texts) for row in unbind_rows(rows)])


def record_on_cpu(scorer: Scorer, rows: TensorDictBase, entropy: NestedKey | None = None, **limits: int | None) -> None:
    """Score rows in place, and keep the scores in CPU memory, where stored rows are.

    Args:
        scorer: scorer of the rows, on any device.
        rows: ``[B]`` rows.
        entropy: key of the entropies; None records none.
        **limits: limits of :func:`~torchrl_rloo.modules.record_log_probs` on a pass.
    """
    record_log_probs(scorer, rows, entropy=entropy, **limits)
    for row in unbind_rows(rows):
        for key in (keys.PROXIMAL_LOG_PROBS, entropy):
            if key is not None:
                row.set(key, row[key].cpu())


def _largest_change(row: TensorDictBase, texts: TokenTexts) -> TokenChange | None:
    mask = row[keys.ACTION_MASK]
    if not bool(mask.any()):
        return None
    old, new = row[keys.LOG_PROBS], row[keys.PROXIMAL_LOG_PROBS]
    place = int(torch.where(mask, (new - old).abs(), -1.0).argmax())
    return TokenChange(place, texts.token_text(int(row[keys.TOKENS][place])), float(old[place]), float(new[place]))
