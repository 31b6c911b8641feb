"""Loss of supervised fine-tuning on given rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorClass, TensorDictBase
from torch.nn.functional import logsigmoid
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.functional import AGGREGATIONS
from torchrl_rloo.functional.kl import k3
from torchrl_rloo.functional.policy_loss import Aggregation, aggregate
from torchrl_rloo.functional.statistics import masked_mean
from torchrl_rloo.modules.policies import ScoredActions, TransformersWrapper
from torchrl_rloo.modules.reference import Scorer
from torchrl_rloo.objectives.step import (
    RECORDED,
    LossOutput,
    Normalizers,
    check_actor,
    check_coefficient,
    check_reference,
    mean_over_tokens,
    multiplicity,
    reference_log_probs,
    row_normalizers,
    row_weights,
    zero_loss,
)
from torchrl_rloo.runtime.lookup import resolve


class SFTLossOutput(LossOutput, TensorClass["nocast"]):
    """Loss of :class:`SFTLoss`, and metrics over action tokens (without gradient)."""

    loss_sft: torch.Tensor  # scalar to minimize
    loss_kl: torch.Tensor | None  # scalar to minimize, coefficient times kl. None without a coefficient
    nll: torch.Tensor  # mean negative log-prob per action token, in nats, for every aggregation and sample weight
    entropy: torch.Tensor  # mean entropy of the model's distribution per action token, in nats
    kl: torch.Tensor | None  # mean KL estimate to the reference per action token, in nats. None without a reference
    num_action_tokens: torch.Tensor  # number of action tokens that the means cover

    def is_empty(self) -> bool:
        """Return whether the output is of no action tokens."""
        return not bool(self.num_action_tokens)

    @classmethod
    def merge(cls, outputs: Sequence[SFTLossOutput], num_updates: int) -> dict[str, float]:
        """Return ``nll``, ``entropy`` and, with a reference, ``kl`` over all action tokens."""
        names = ("nll", "entropy") + (() if outputs[0].kl is None else ("kl",))
        return {name: mean_over_tokens(outputs, name) for name in names}


class SFTLoss(LossModule):
    """Negative log-likelihood of the rows' action tokens, optionally with a reference.

    With the default ``"token_mean"``, and ``k3`` the KL estimate of a token::

        L = 1 / sum_i |y_i| * sum_i sum_t (-log pi(y_it | x_i, y_i,<t) + kl_to_ref_coeff * k3_it)

    ``loss_function="minor_sft"`` (Xie et al. 2024, arXiv 2408.10642) stops at what the model already does better than
    the reference. With ``h_i`` the log-ratio of row ``i``, a mean over its tokens or a sum::

        L = -1 / N * sum_i log sigmoid(beta * h_i)

    The loss reads ``TOKENS`` and ``ACTION_MASK``. ``sample_weight`` and ``multiplicity``, if present, multiply the loss
    of a row. Returns an :class:`SFTLossOutput`.

    TorchRL's ``SFTLoss`` takes a ``History`` instead of rows. Its ``normalize_by_seq_length=True`` is
    ``aggregation="sequence_mean"`` here, ``False`` is ``"sequence_sum"``. Its KL is divided by all tokens, prompts
    included; here by action tokens, whose ``beta`` and coefficient mean the same for any prompt.

    Args:
        actor_network: policy that scores rows with :meth:`TransformersWrapper.score`.
        aggregation: choice from :data:`~torchrl_rloo.functional.AGGREGATIONS`, or a function of the same signature.
            None is ``"token_mean"``, and ``"sequence_mean"`` for ``"minor_sft"``, which also takes ``"sequence_sum"``.
        loss_function: ``"sft"`` or ``"minor_sft"``.
        beta: scale of the log-ratio in ``"minor_sft"``.
        kl_to_ref_coeff: coefficient of the KL to the reference, for ``"sft"``. 0 disables it.
        reference: scorer such as ``frozen_reference(policy)`` or ``AdapterReference``. ``"recorded"`` reads
            ``keys.REF_LOG_PROBS`` of the rows. Required by a KL and by ``"minor_sft"``, otherwise None.

    Raises:
        ValueError: if an argument is unknown or out of range, has no effect, or a reference is missing or unused.
        KeyError: at ``forward``, if ``"recorded"`` log-probs of the reference are missing.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_rloo.data import stack_rows
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> tokenizer = build_tokenizer()
        >>> model = build_model(tokenizer, seed=0).eval()
        >>> loss_fn = SFTLoss(TransformersWrapper(model, tokenizer=tokenizer, generate=False))
        >>> rows = stack_rows([TensorDict({
        ...     keys.TOKENS: torch.tensor([5, 6, 7]),
        ...     keys.ACTION_MASK: torch.tensor([False, True, True]),
        ... })])
        >>> out = loss_fn(rows)
        >>> torch.equal(out.loss, out.nll), int(out.num_action_tokens)
        (True, 2)
    """

    actor_network: TransformersWrapper

    def __init__(
        self,
        actor_network: TransformersWrapper,
        *,
        aggregation: str | Mapping[str, Any] | Aggregation | None = None,
        loss_function: Literal["sft", "minor_sft"] = "sft",
        beta: float = 0.1,
        kl_to_ref_coeff: float = 0.0,
        reference: Scorer | Literal["recorded"] | None = None,
    ):
        super().__init__()
        check_actor(actor_network)
        check_coefficient("kl_to_ref_coeff", kl_to_ref_coeff)
        self.minor = loss_function == "minor_sft"
        if loss_function not in ("sft", "minor_sft") or not 0 < beta < math.inf:
            raise ValueError(f"loss_function={loss_function!r} must be 'sft' or 'minor_sft', and beta={beta} above 0")
        if self.minor and (kl_to_ref_coeff or aggregation not in (None, "sequence_mean", "sequence_sum")):
            raise ValueError(
                f"loss_function='minor_sft' cannot be combined with aggregation={aggregation!r} and kl_to_ref_coeff="
                f"{kl_to_ref_coeff}; use 'sequence_mean' or 'sequence_sum', and 0, since it compares with the reference"
            )
        check_reference(actor_network, f"loss_function={loss_function!r}", reference, self.minor or kl_to_ref_coeff > 0)
        self.actor_network, self.beta, self.kl_to_ref_coeff = actor_network, beta, kl_to_ref_coeff
        self.__dict__["reference"] = reference  # not a submodule: its weights are not trained or saved
        default = "sequence_mean" if self.minor else "token_mean"
        self.mean = self.minor and aggregation != "sequence_sum"
        self.aggregation = resolve("aggregation", aggregation or default, AGGREGATIONS)
        self.in_keys = [keys.TOKENS, keys.ACTION_MASK]
        self.out_keys = list(SFTLossOutput.__annotations__)

    def normalizers(self, rows: TensorDictBase, process_group=None) -> Normalizers:
        """Compute the normalizers of an optimizer step from all its rows; see :meth:`RLOOLoss.normalizers`."""
        return row_normalizers(rows, process_group=process_group)

    def forward(self, tensordict: TensorDictBase, normalizers: Normalizers | None = None) -> SFTLossOutput:
        """Compute the loss of rows ``[B]`` as their part of a step; see :meth:`RLOOLoss.forward`."""
        # Without rows, return zero gradients, so that the optimizer step behaves as usual
        if not len(tensordict):
            zero = zero_loss(lambda rows: self._score(rows, idle=True)[0].log_probs)
            nan = zero.detach() + math.nan
            return SFTLossOutput(zero, None, nan, nan.clone(), None, zero.new_zeros(()))
        # Score the rows under the current weights, and weigh their tokens
        normalizers = self.normalizers(tensordict) if normalizers is None else normalizers
        scored, ref = self._score(tensordict)
        mask, log_probs = scored.actions.mask, scored.log_probs
        weights = row_weights(tensordict)[:, None].to(mask.device)
        totals = {"num_rows": normalizers.num_rows, "num_tokens": normalizers.num_tokens}
        loss_kl, kl = None, None if ref is None else k3(log_probs, ref)
        if self.minor:
            lengths = mask.sum(-1).clamp(min=1) if self.mean else 1
            ratios = torch.where(mask, log_probs - ref, 0.0).sum(-1) / lengths
            loss = -(logsigmoid(self.beta * ratios) * weights[:, 0]).sum() / max(normalizers.num_rows, 1e-12)
        else:
            loss = aggregate(-log_probs * weights, mask, self.aggregation, **totals)
        if self.kl_to_ref_coeff:
            loss_kl = self.kl_to_ref_coeff * aggregate(kl * weights, mask, "token_mean", **totals)
        # In metrics, count a merged row once for each row that it stands for
        with torch.no_grad():
            tokens = mask * multiplicity(tensordict)[:, None].to(mask.device)
        return SFTLossOutput(
            loss_sft=loss,
            loss_kl=loss_kl,
            nll=masked_mean(-log_probs.detach(), tokens),
            entropy=masked_mean(scored.entropy.detach(), tokens),
            kl=None if kl is None else masked_mean(kl.detach(), tokens),
            num_action_tokens=tokens.sum(),
        )

    def _score(self, rows: TensorDictBase, idle: bool = False) -> tuple[ScoredActions, torch.Tensor | None]:
        """Return the scores under the current weights, and the reference's log-probs; ``idle`` rows have none."""
        scored = self.actor_network.score(rows)
        if self.reference is None or (idle and self.reference == RECORDED):
            return scored, None
        return scored, reference_log_probs(self.reference, rows, scored)
