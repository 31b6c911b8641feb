"""RLOOLoss: the RLOO objective over rows with advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import gather_actions, ragged
from torchrl_rloo.functional import (
    clip_masks,
    clipped_objective,
    effective_sample_size,
    k3,
    masked_mean,
    reinforce_objective,
    sequence_log_ratio,
)
from torchrl_rloo.modules.policies import TransformersWrapper

RATIOS = ("sequence", "none")


class RLOOLossOutput(TensorClass["nocast"]):
    """What :class:`RLOOLoss` returns: the loss, and metrics over action tokens alone (all without gradient).

    Attributes:
        loss_objective: scalar to minimise.
        entropy: mean entropy of the sampled distribution per action token, in nats.
        kl_approx: mean k3 divergence of the sampler's weights from the current ones per action token, in nats; 0
            on-policy.
        ESS: effective sample size of the rows' importance ratios, as a share of the rows; 1 on-policy.
        clip_fraction: share of the rows whose gradient the clip removes; the sum of the next two.
        clip_fraction_low: share of the rows clipped at ``1 - epsilon_low`` (negative advantage).
        clip_fraction_high: share of the rows clipped at ``1 + epsilon_high`` (positive advantage).
        log_ratio_max: largest absolute difference between a current and a behaviour token log-prob, in nats.
        log_ratio: ``[B]``, log importance ratio of each row.
        num_action_tokens: how many action tokens the means are over.
    """

    loss_objective: torch.Tensor
    entropy: torch.Tensor
    kl_approx: torch.Tensor
    ESS: torch.Tensor
    clip_fraction: torch.Tensor
    clip_fraction_low: torch.Tensor
    clip_fraction_high: torch.Tensor
    log_ratio_max: torch.Tensor
    log_ratio: torch.Tensor
    num_action_tokens: torch.Tensor


class RLOOLoss(LossModule):
    r"""REINFORCE leave-one-out, with or without a clipped importance ratio of whole sequences.

    .. math:: L = \frac{1}{N} \sum_i -\min(\rho_i A_i, \mathrm{clip}(\rho_i, 1 - \epsilon_l, 1 + \epsilon_h) A_i),
        \quad \rho_i = \exp \sum_t m_{it} (\log \pi_\theta(a_{it}) - \log \mu(a_{it}))

    over the rows ``i`` and their action tokens ``t``; :math:`\mu` are the behaviour log-probs that the rows carry
    (Ahmadian et al. 2024, arXiv 2402.14740, with PPO's clip for batches that are used more than once). With
    ``ratio="none"`` it is plain REINFORCE, :math:`-A_i \sum_t m_{it} \log \pi_\theta(a_{it})`.

    Args:
        actor_network: scores rows; :meth:`TransformersWrapper.score`.
        clip_epsilon: how far the ratio may leave 1: one number, or ``(low, high)``; None for no clip.
        ratio: ``"sequence"`` or ``"none"``.
        mask_truncated_completions: leave out the tokens of truncated rows. Such a row has ratio 1 and no gradient; it
            still counts in ``N``, and its reward in its siblings' baseline.

    ``forward(rows, num_rows=None)`` divides by ``num_rows``, by default the number of rows given. When a batch is split
    into micro-batches, pass the whole batch's number with each: the summed gradient is then that of the whole.

    Raises:
        ValueError: for a value out of range.
        KeyError: at ``forward`` for rows without advantages or log-probs.
    """

    actor_network: TransformersWrapper

    def __init__(
        self,
        actor_network: TransformersWrapper,
        *,
        clip_epsilon: float | tuple[float, float] | None = 0.2,
        ratio: Literal["sequence", "none"] = "sequence",
        mask_truncated_completions: bool = False,
    ):
        super().__init__()
        if not callable(getattr(actor_network, "score", None)):
            raise ValueError(f"actor_network must have a score(rows) method, {type(actor_network).__name__} has none")
        if getattr(actor_network, "generate", False):
            raise ValueError("actor_network generates; pass actor_network.get_new_version(generate=False)")
        if getattr(getattr(actor_network, "distribution", None), "temperature", 1) == 0:
            raise ValueError("temperature=0 samples the same completion of a prompt every time: nothing to compare")
        if ratio not in RATIOS:
            raise ValueError(f"ratio={ratio!r} must be one of {RATIOS}")
        bounds = (1.0, math.inf) if clip_epsilon is None else clip_epsilon
        bounds = tuple(bounds) if isinstance(bounds, tuple | list) else (bounds, bounds)
        if len(bounds) != 2 or not (0 < bounds[0] <= 1 and bounds[1] > 0):
            raise ValueError(f"clip_epsilon={clip_epsilon} must be one or two positive numbers, the lower at most 1")
        self.actor_network = actor_network
        self.epsilon_low, self.epsilon_high, self.ratio = float(bounds[0]), float(bounds[1]), ratio
        self.mask_truncated_completions = mask_truncated_completions
        self.in_keys = [keys.TOKENS, keys.ACTION_MASK, keys.LOG_PROBS, keys.ADVANTAGE]
        self.out_keys = list(RLOOLossOutput.__annotations__)

    def forward(self, tensordict: TensorDictBase, num_rows: int | None = None) -> RLOOLossOutput:
        """The loss of rows of batch size ``[B]``; see the class."""
        if not len(tensordict):
            return self._no_rows()
        if keys.ADVANTAGE not in tensordict.keys():
            raise KeyError(f"rows have no {keys.ADVANTAGE!r}: write them through a buffer with MCAdvantage first")
        scored = self.actor_network.score(tensordict)
        log_probs, mask = scored.log_probs, scored.actions.mask
        if self.mask_truncated_completions:
            mask = mask & ~tensordict[keys.TRUNCATED].to(mask.device)
        behaviour = gather_actions(ragged(tensordict, keys.LOG_PROBS), scored.actions)
        advantages = tensordict[keys.ADVANTAGE].reshape(-1).to(mask.device)
        log_ratio = sequence_log_ratio(log_probs, behaviour, mask)
        if self.ratio == "none":
            objective = reinforce_objective(log_probs, advantages, mask)
        else:
            objective = clipped_objective(log_ratio, advantages, self.epsilon_low, self.epsilon_high)
        loss = objective.sum() / (num_rows or len(advantages))
        with torch.no_grad():
            low, high = clip_masks(log_ratio, advantages, self.epsilon_low, self.epsilon_high)
            if self.ratio == "none":
                low, high = torch.zeros_like(low), torch.zeros_like(high)
            difference = torch.where(mask, log_probs - behaviour, 0.0)
            return RLOOLossOutput(
                loss_objective=loss,
                entropy=masked_mean(scored.entropy, mask),
                kl_approx=masked_mean(k3(behaviour, log_probs), mask),
                ESS=effective_sample_size(log_ratio),
                clip_fraction=(low | high).float().mean(),
                clip_fraction_low=low.float().mean(),
                clip_fraction_high=high.float().mean(),
                log_ratio_max=difference.abs().max() if difference.numel() else loss.new_zeros(()),
                log_ratio=log_ratio.detach(),
                num_action_tokens=mask.sum(),
            )

    def _no_rows(self) -> RLOOLossOutput:
        """The output for a batch of no rows: nothing to learn, and nothing to measure."""
        zero = sum((p.sum() * 0.0 for p in self.actor_network.parameters()), torch.zeros(()))
        fields = dict.fromkeys(RLOOLossOutput.__annotations__, zero.new_tensor(math.nan))
        fields |= {"loss_objective": zero, "log_ratio": zero.new_zeros(0), "num_action_tokens": zero.new_zeros(())}
        return RLOOLossOutput(**fields)


_CLIP_METRICS = {
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio/low_mean": "clip_fraction_low",
    "clip_ratio/high_mean": "clip_fraction_high",
}


def merge_outputs(
    outputs: Sequence[RLOOLossOutput], *, num_rows: int | None = None, num_updates: int = 1
) -> dict[str, float]:
    """Metrics of a whole batch from the outputs of its micro-batches, the same as if it had been one.

    Args:
        outputs: one for each micro-batch, computed with the ``num_rows`` of its optimizer step.
        num_rows: rows that the clip ratios are shares of, rows without advantage included; default those given.
        num_updates: optimizer steps that the micro-batches belong to; the loss is their mean.

    Returns:
        The scalars of :class:`RLOOLossOutput`, under the names of ``torchrl_rloo.diagnostics.DEFINITIONS``; empty for
        no rows.
    """
    outputs = [o for o in outputs if len(o.log_ratio)]
    if not outputs:
        return {}
    tokens = torch.stack([o.num_action_tokens for o in outputs]).double()
    rows = torch.tensor([float(len(o.log_ratio)) for o in outputs], dtype=torch.float64)

    def mean(name: str, weights: torch.Tensor) -> float:
        values = torch.stack([getattr(o, name) for o in outputs]).double()
        return float((values * weights.to(values.device)).sum() / weights.sum().clamp(min=1))

    merged = {"loss": float(sum(o.loss_objective.detach() for o in outputs)) / num_updates}
    merged |= {name: mean(name, tokens) for name in ("entropy", "kl_approx")}
    merged["ESS"] = float(effective_sample_size(torch.cat([o.log_ratio for o in outputs])))
    share = float(rows.sum()) / (num_rows or float(rows.sum()))
    merged |= {name: mean(field, rows) * share for name, field in _CLIP_METRICS.items()}
    return merged | {"log_ratio_max": max(float(o.log_ratio_max) for o in outputs)}
