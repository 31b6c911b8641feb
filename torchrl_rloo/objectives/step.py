"""One optimizer step of any loss: normalizers, weights of rows, output, and checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsFloat

import torch
from tensordict import NestedKey, TensorDictBase
from torch import distributed

from torchrl_rloo.data import keys
from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.data.outcomes import final_return
from torchrl_rloo.data.rows import entry_of, gather_actions, placeholder_rows, ragged, unbind_rows
from torchrl_rloo.functional.covariance import Limits
from torchrl_rloo.modules.policies import ScoredActions, TransformersWrapper


class LossOutput:
    """Base class of loss outputs: terms of the loss (``loss_*``, with gradient) and metrics (without)."""

    @classmethod
    def loss_terms(cls) -> list[str]:
        """Return the names of the terms of the loss."""
        return [name for name in cls.__annotations__ if name.startswith("loss_")]

    @property
    def loss(self) -> torch.Tensor:
        """Scalar to minimize: sum of the terms."""
        return sum(term for name in self.loss_terms() if (term := getattr(self, name)) is not None)

    def mean(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: a mean would mix the loss with its metrics."""
        raise TypeError(f"{type(self).__name__}.mean would average the loss with its metrics; use .loss")

    def __str__(self) -> str:
        """Return the loss and all scalars as text."""
        fields = {"loss": self.loss} | {name: getattr(self, name) for name in self.__annotations__}
        shown = (f"{k}={float(v.detach()):.6g}" for k, v in fields.items() if v is not None and v.numel() == 1)
        return f"{type(self).__name__}({', '.join(shown)})"

    def is_empty(self) -> bool:
        """Return whether the output is of no rows."""
        raise NotImplementedError

    @classmethod
    def merge(cls, outputs: Sequence[Any], num_updates: int) -> dict[str, float]:
        """Return the metrics of several non-empty micro-batches, without the losses."""
        raise NotImplementedError


def merge_outputs(outputs: Sequence[LossOutput], *, num_updates: int = 1) -> dict[str, float]:
    """Merge the outputs of micro-batches into the metrics of the whole batch.

    Args:
        outputs: outputs of one loss, one per micro-batch, computed with the normalizers of its optimizer step.
        num_updates: optimizer steps that the micro-batches belong to. Losses and clip fractions are means over them.

    Returns:
        ``loss``, its other terms in use, and the metrics of the output class, named as in
        ``torchrl_rloo.diagnostics.DEFINITIONS``. Empty without rows.

    Raises:
        TypeError: if the outputs are of different losses.
    """
    outputs = [o.detach() for o in outputs if not o.is_empty()]
    if not outputs:
        return {}
    kind = type(outputs[0])
    if others := {type(o).__name__ for o in outputs} - {kind.__name__}:
        raise TypeError(f"outputs are of {kind.__name__} and of {sorted(others)}; merge each loss separately")
    merged = {"loss": sum_field(outputs, "loss") / num_updates}
    for name in kind.loss_terms()[1:]:
        if any(getattr(o, name) is not None for o in outputs):
            merged[name] = sum_field(outputs, name) / num_updates
    return merged | kind.merge(outputs, num_updates)


def sum_field(outputs: Sequence[LossOutput], name: str) -> float:
    """Return the sum of a scalar over the outputs; None counts as 0."""
    return sum(float(value) for o in outputs if (value := getattr(o, name)) is not None)


def mean_over_tokens(outputs: Sequence[LossOutput], name: str) -> float:
    """Return the mean of a metric over all action tokens."""
    tokens = torch.stack([o.num_action_tokens for o in outputs]).double().cpu()
    values = torch.stack([getattr(o, name) for o in outputs]).double().cpu()
    return float((values * tokens).sum() / tokens.sum().clamp(min=1))


def concatenate_field(outputs: Sequence[LossOutput], name: str) -> torch.Tensor:
    """Return the values of a metric ``[n]`` over all outputs, in float64."""
    return torch.cat([getattr(o, name) for o in outputs]).double()


@dataclass(frozen=True)
class Normalizers:
    """Numbers shared by all micro-batches of an optimizer step, computed once from all its rows.

    Attributes:
        num_rows: rows of the step (pairs for paired losses), including rows without a gradient.
        num_tokens: action tokens of the step that the loss covers.
        entropy_threshold: smallest entropy, in nats, of a token with a policy gradient. None sets no threshold.
        covariance: limits of the tokens that ``RLOOLoss(covariance=)`` chooses. None chooses none.
        reference_point: KTO's ``z_0`` in nats. None for other losses.
        mean_reward: weighted mean score of all completions. None if no term needs it.
    """

    num_rows: float
    num_tokens: float = 0.0
    entropy_threshold: float | None = None
    reference_point: float | None = None
    mean_reward: float | None = None
    covariance: Limits | None = None


def multiplicity(rows: TensorDictBase) -> torch.Tensor:
    """Return how many identical rows each row stands for, ``[B]`` float32."""
    if not len(rows):
        return torch.zeros(0)
    counts = rows.get(keys.MULTIPLICITY, None)
    return torch.ones(len(rows)) if counts is None else counts.reshape(-1).float()


def row_weights(rows: TensorDictBase) -> torch.Tensor:
    """Return the factor of each row's loss, ``sample_weight`` times ``multiplicity``, ``[B]`` float32."""
    factors = rows.get(keys.SAMPLE_WEIGHT, None) if len(rows) else None
    return multiplicity(rows) if factors is None else multiplicity(rows) * factors.reshape(-1).float()


def zero_loss(score: Callable[[TensorDictBase], torch.Tensor]) -> torch.Tensor:
    """Return a loss of 0 with zero gradients for a step, or a rank, without rows.

    It runs a row of two tokens, so that a rank without rows takes part in every call of DDP and FSDP.
    """
    return score(placeholder_rows()).sum() * 0.0


def _is_counted(row: TensorDictBase, mask_truncated_completions: bool) -> bool:
    return not mask_truncated_completions or not bool(row[keys.TRUNCATED])


def row_normalizers(
    rows: TensorDictBase, *, mask_truncated_completions: bool = False, process_group=None
) -> Normalizers:
    """Count the rows and action tokens of a step."""
    weights = multiplicity(rows).double().cpu()
    lengths = [
        float(entry_of(row, keys.ACTION_MASK).sum()) * _is_counted(row, mask_truncated_completions)
        for row in unbind_rows(rows)
    ]
    totals = torch.stack([weights.sum(), (weights * weights.new_tensor(lengths)).sum()])
    normalizers = Normalizers(*mean_over_ranks(totals, process_group).tolist())
    notify_without_tokens(rows, normalizers.num_tokens)
    return normalizers


def entropy_threshold(rows: TensorDictBase, fraction: float, **counted: Any) -> float:
    """Return the entropy that ``fraction`` of the action tokens of a step reach."""
    if len(rows) and keys.PROXIMAL_ENTROPY not in rows.keys(True):
        raise KeyError(f"rows require {keys.PROXIMAL_ENTROPY}; record it with record_log_probs(entropy=...)")
    values = step_tokens(rows, lambda row: row[keys.PROXIMAL_ENTROPY][row[keys.ACTION_MASK]], **counted)
    return float(values.topk(max(1, round(fraction * len(values)))).values[-1]) if len(values) else 0.0


def step_tokens(
    rows: TensorDictBase,
    read: Callable[[TensorDictBase], torch.Tensor],
    *,
    mask_truncated_completions: bool = False,
    process_group=None,
) -> torch.Tensor:
    """Return the values ``[n, ...]`` that ``read`` gives for each action token of a step, of all ranks."""
    # Repeat the values of a merged row for each row that it stands for
    times = multiplicity(rows).long().tolist()
    values = [
        value
        for row, n in zip(unbind_rows(rows), times, strict=True)
        if _is_counted(row, mask_truncated_completions)
        for value in [read(row).cpu()] * n
    ]
    # Gather those of all ranks, so every rank finds the same threshold
    if process_group is not None:
        gathered = [None] * torch.distributed.get_world_size(process_group)
        torch.distributed.all_gather_object(gathered, values, group=process_group)
        values = [value for part in gathered for value in part]
    return torch.cat(values) if values else torch.zeros(0)


def reduce_over_ranks(
    value: torch.Tensor, process_group: distributed.ProcessGroup | None, op: str = "sum"
) -> torch.Tensor:
    """Reduce a tensor over the ranks of a group, on the device of the tensor."""
    if process_group is None:
        return value
    device = "cuda" if "nccl" in distributed.get_backend(process_group) else "cpu"  # NCCL rejects CPU tensors
    reduced = value.to(device, copy=True)
    distributed.all_reduce(reduced, getattr(distributed.ReduceOp, op.upper()), process_group)
    return reduced.to(value.device)


def mean_over_ranks(value: torch.Tensor, process_group: distributed.ProcessGroup | None) -> torch.Tensor:
    """Return the mean of a tensor over the ranks, as DDP and FSDP do with gradients."""
    ranks = 1 if process_group is None else distributed.get_world_size(process_group)
    return reduce_over_ranks(value, process_group) / ranks


def make_reducer(process_group: distributed.ProcessGroup | None) -> Callable[[torch.Tensor, str], torch.Tensor]:
    """Return a function ``(value, op) -> value`` that reduces over ranks, as an argument of pure functions."""
    return lambda value, op: reduce_over_ranks(value, process_group, op)


def notify_without_tokens(rows: TensorDictBase, num_tokens: float) -> None:
    """Say once that a step has rows, but no action token that its loss covers."""
    if len(rows) and not num_tokens:
        notify_once(
            f"the loss covers no action token of a step, which trains nothing: check {keys.ACTION_MASK} of the rows, "
            "and what masks tokens, such as mask_truncated_completions and max_staleness"
        )


def notify_without_advantage(rows: TensorDictBase, advantage: NestedKey, *, other_terms: bool) -> None:
    """Say once that no row of a step has an advantage, and why."""
    values = rows.get(advantage, None, as_list=True) if len(rows) else None
    if values is None or any(bool(value.nan_to_num(0.0).any()) for value in values):
        return
    trained = "only terms without one train, such as a KL" if other_terms else "it trains nothing"
    notify_once(
        f"no row of a step has an advantage, so {trained}: {_cause(rows)}. Other such steps are not logged; the metric "
        "frac_reward_zero_std has the share of such groups"
    )


def _cause(rows: TensorDictBase) -> str:
    """Return why rows have no advantage, and what to do."""
    if keys.REWARD in rows.keys(True):
        returns = final_return(rows)
        if bool(returns.isnan().all()):
            return "all rows abstain. Read the log of the reward functions, the policy and the tools"
        if not bool(returns.nan_to_num(0.0).any()):
            return "all rewards are 0. Pass rewards= to the environment, or read completions that should earn some"
    sizes = rows.get(keys.GROUP_SIZE, None)
    if sizes is not None and bool((sizes == 1).all()):
        return (
            "each row is alone in its group. Set num_generations=2 or more in the environment, or compare no rows: "
            "MCAdvantage(estimator='reinforce') or a RunningBaseline"
        )
    return "the rows of each group earn the same. Read the completions of a group, and use rewards that differ"


def check_actor(actor_network: Any) -> None:
    """Raise if the network cannot score rows, is set to generate, or samples greedily."""
    if not callable(getattr(actor_network, "score", None)):
        raise ValueError(f"actor_network={type(actor_network).__name__} must have a score(rows) method")
    if getattr(actor_network, "generate", False):
        raise ValueError("actor_network generates text; pass actor_network.get_new_version(generate=False)")
    if getattr(getattr(actor_network, "distribution", None), "temperature", 1) == 0:
        raise ValueError("temperature=0 must be above 0: greedy sampling has no log-probs to train on")


RECORDED = "recorded"


def check_reference(actor_network: Any, user: str, reference: Any, needed: bool, *, recorded: bool = True) -> None:
    """Raise if the reference of ``user`` is missing, unused, or not comparable with the policy."""
    wanted = "a scorer such as frozen_reference(policy)" + (" or 'recorded'" if recorded else "")
    if (reference is None) == needed:
        must = f"requires a reference; set it to {wanted}" if reference is None else "ignores it; remove it"
        raise ValueError(f"reference={reference!r:.80}: {user} {must}")
    if reference is None or (reference == RECORDED and recorded):
        return
    # Checks of a reference that scores rows during training
    if isinstance(reference, str):
        raise ValueError(f"reference={reference!r}: {user} requires {wanted}")
    if not callable(getattr(reference, "score", None)) or getattr(reference, "generate", False):
        raise ValueError(f"reference={type(reference).__name__} must have a score(rows) method and not generate")
    if isinstance(reference, TransformersWrapper) and reference.model is getattr(actor_network, "model", None):
        raise ValueError(
            "reference scores with the model that is trained, so all log-ratios stay 0; pass a frozen copy"
        )
    ours, theirs = (getattr(scorer, "distribution", None) for scorer in (actor_network, reference))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(f"reference scores under {theirs}, actor_network under {ours}; give both the same")


@torch.no_grad()
def reference_log_probs(reference: Any, rows: TensorDictBase, scored: ScoredActions) -> torch.Tensor:
    """Return the reference's log-probs ``[B, A]`` of scored rows, computed now or recorded on the rows."""
    if reference != RECORDED:
        return reference.score(rows).log_probs.to(scored.log_probs.device)
    if keys.REF_LOG_PROBS in rows.keys(True):
        return gather_actions(ragged(rows, keys.REF_LOG_PROBS), scored.actions)
    raise KeyError(
        f"reference='recorded' requires {keys.REF_LOG_PROBS} on rows, or the sub-rows of pairs; write them with "
        "record_log_probs(reference, rows, log_probs=keys.REF_LOG_PROBS), or pass the reference"
    )


def is_on(coefficient: SupportsFloat) -> bool:
    """Return whether a coefficient is not 0 or may change."""
    return not isinstance(coefficient, int | float) or coefficient != 0


def check_coefficient(name: str, value: Any, *, negative: bool = False) -> None:
    """Raise if a coefficient is neither a finite number (of at least 0) nor an object with ``__float__``."""
    number = float(value) if hasattr(value, "__float__") else math.nan
    if not math.isfinite(number) or (number < 0 and not negative):
        least = "" if negative else " of at least 0"
        raise ValueError(f"{name}={value!r} must be a finite number{least}, or an object with __float__")
