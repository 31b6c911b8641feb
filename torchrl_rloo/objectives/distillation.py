"""Distillation loss over the whole vocabulary; that of sampled tokens is a KL per token, see :class:`KL`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorClass, TensorDictBase
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ActionTokens, action_tokens, place_actions, placeholder_rows, to_lazy_stack
from torchrl_rloo.functional.kl import generalized_jsd
from torchrl_rloo.functional.policy_loss import aggregate
from torchrl_rloo.functional.statistics import masked_mean
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.modules.teacher import Teacher, action_logits
from torchrl_rloo.objectives.step import (
    LossOutput,
    Normalizers,
    check_actor,
    mean_over_tokens,
    multiplicity,
    row_normalizers,
    row_weights,
    sum_field,
)


class DistillationLossOutput(LossOutput, TensorClass["nocast"]):
    """Loss of :class:`DistillationLoss`, and the mean divergence per action token in nats (without gradient)."""

    loss_distill: torch.Tensor
    kl_to_teacher: torch.Tensor
    num_action_tokens: torch.Tensor

    def is_empty(self) -> bool:
        """Return whether the output is of no action tokens."""
        return not self.num_action_tokens

    @classmethod
    def merge(cls, outputs: Sequence[DistillationLossOutput], num_updates: int) -> dict[str, float]:
        """Return ``loss_distill``, a mean over updates, and ``kl_to_teacher``, a mean over action tokens."""
        loss = sum_field(outputs, "loss_distill") / num_updates
        return {"loss_distill": loss, "kl_to_teacher": mean_over_tokens(outputs, "kl_to_teacher")}


class DistillationLoss(LossModule):
    """Divergence of a student from its teacher at each action token, averaged over the tokens of a step.

    See :func:`~torchrl_rloo.functional.kl.generalized_jsd` (GKD, arXiv 2306.13649). It compares whole distributions,
    so both models are in this process and have one vocabulary. TorchRL's class of this name compares the sampled tokens
    only, which is ``RLOOLoss`` with ``kl_to_ref_coeff``.

    Args:
        actor_network: student that scores rows, without truncation or a repetition penalty.
        teacher: teacher.
        beta: 1 for the reverse KL, which seeks modes; 0 for the forward KL, which covers them; between, a mixture.
        coeff: factor of the loss, above 0.

    Raises:
        ValueError: if a number is out of range, or the sampling distribution truncates or penalizes.

    Example::

        loss_fn = DistillationLoss(policy.get_new_version(generate=False), Teacher(scorer), beta=1.0)
        accumulate(loss_fn, rows, micro_batch_size=8)
    """

    actor_network: TransformersWrapper

    def __init__(self, actor_network: TransformersWrapper, teacher: Teacher, *, beta: float = 1.0, coeff: float = 1.0):
        super().__init__()
        check_actor(actor_network)
        if not 0 <= beta <= 1 or not 0 < coeff < math.inf:
            raise ValueError(f"beta={beta} must be in [0, 1], and coeff={coeff} a number above 0")
        sampled = actor_network.distribution
        if sampled.truncates or sampled.repetition_penalty != 1:
            raise ValueError(f"{sampled} cannot be compared over the vocabulary; set top_p=1, top_k=None, min_p=0")
        self.actor_network, self.beta, self.coeff = actor_network, beta, coeff
        self.__dict__["teacher"] = teacher  # not a submodule: it is not trained
        self.in_keys = [keys.TOKENS, keys.ACTION_MASK]
        self.out_keys = list(DistillationLossOutput.__annotations__)

    def normalizers(self, rows: TensorDictBase, process_group=None) -> Normalizers:
        """Compute the normalizers of an optimizer step from all its rows; see :meth:`RLOOLoss.normalizers`."""
        return row_normalizers(rows, process_group=process_group)

    def forward(self, tensordict: TensorDictBase, normalizers: Normalizers | None = None) -> DistillationLossOutput:
        """Compute the loss of rows ``[B]`` as their part of a step; see :meth:`RLOOLoss.forward`."""
        normalizers = self.normalizers(tensordict) if normalizers is None else normalizers
        # A rank without rows takes part in the passes of both models
        rows, present = (tensordict, 1.0) if len(tensordict) else (placeholder_rows(), 0.0)
        student, teacher = action_logits(self.actor_network, rows), self.teacher.logits(rows)
        size = min(student.shape[1], teacher.shape[1])  # some models of a family pad their vocabulary further
        student, teacher = (each[:, :size].log_softmax(-1) for each in (student, teacher.to(student.device)))
        actions = ActionTokens(*(t.to(student.device) for t in action_tokens(to_lazy_stack(rows))))
        divergence = place_actions(generalized_jsd(student, teacher, self.beta), actions)
        weighted = present * divergence * row_weights(rows).to(divergence)[:, None]
        tokens = present * actions.mask * multiplicity(rows).to(student.device)[:, None]
        loss = aggregate(weighted, actions.mask, "token_mean", num_tokens=normalizers.num_tokens)
        mean = masked_mean(divergence.detach(), tokens)
        return DistillationLossOutput(self.coeff * loss, kl_to_teacher=mean, num_action_tokens=tokens.sum())
