"""Credit assignment: advantages of rows, turns or tokens from the rewards of complete groups; running baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ActionTokens, entry_of, gather_actions, place_actions
from torchrl_rloo.functional.advantages import (
    ESTIMATORS,
    Estimator,
    answered_mask,
    estimator_option,
    normalize_then_sum,
    subtract_minimum,
)
from torchrl_rloo.functional.returns import rewards_to_go, spread_turns, turn_index, turn_rewards
from torchrl_rloo.runtime.lookup import Choice, number_field


def third_argument(estimator: Estimator) -> tuple[NestedKey, Callable[[TensorDictBase], torch.Tensor]] | None:
    """Return the entry of rows that an estimator's third argument needs, and what reads it; None if it has none."""
    if estimator_option(estimator, "wants_prompts"):
        key = getattr(estimator, "key", keys.PROMPT_ID)
        return key, lambda row: row[key].reshape(())
    if estimator_option(estimator, "wants_lengths"):
        return keys.ACTION_MASK, _count_actions
    if estimator_option(estimator, "wants_greedy"):
        return keys.ORIGIN, lambda row: row[keys.ORIGIN].reshape(()) == keys.GREEDY
    return None


def _count_actions(row: TensorDictBase) -> torch.Tensor:
    earlier = entry_of(row, keys.PREVIOUS_SEGMENTS)
    return row[keys.ACTION_MASK].sum() + (0 if earlier is None else earlier["mask"].sum())


class Groups(NamedTuple):
    """Complete groups and the estimator that compares their rows."""

    rows: Sequence[TensorDictBase]
    index: torch.Tensor  # [N] int64, index of each row's group
    actions: ActionTokens | None  # None if neither credit nor KL is per token
    estimator: Estimator

    def estimate(self, returns: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the estimator's advantages ``[M]`` of returns ``[M]``."""
        third = third_argument(self.estimator)
        values = [] if third is None else [torch.stack([third[1](row) for row in self.rows])]
        advantages = self.estimator(returns, index, *values)
        if getattr(advantages, "shape", None) != returns.shape:
            got = tuple(advantages.shape) if isinstance(advantages, torch.Tensor) else type(advantages).__name__
            raise ValueError(
                f"estimator={estimator_name(self.estimator)} returned {got} for rewards of shape "
                f"{tuple(returns.shape)}: return one advantage for each reward"
            )
        return advantages

    def has_signal(self, returns: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return bool ``[M]``, True for returns that are not NaN and have another to compare with, where needed."""
        return answered_mask(returns, index, needs_group=estimator_option(self.estimator, "needs_group"))


class Estimates(NamedTuple):
    """Advantages before KL and normalization; ``L`` is 1 for one advantage per row, else the action tokens."""

    advantages: torch.Tensor  # [N, L]
    has_signal: torch.Tensor  # [N, L] bool, True where a return exists and had another to compare with
    answered: torch.Tensor  # [N] bool, False where the row abstains
    returns: torch.Tensor  # returns that the estimator compared, NaN where a row abstains


class Credit(Choice):
    """Base of credit assignments, which map :class:`Groups` to their :class:`Estimates`."""

    reads: ClassVar[tuple[NestedKey, ...]] = (keys.REWARD,)
    default_estimator: ClassVar[str] = "rloo"
    per_token: ClassVar[bool] = False
    token_discount: ClassVar[float] = 1.0  # of token rewards, the KL included

    def check_estimator(self, estimator: Estimator) -> None:
        """Raise a ValueError if the estimator cannot be used with this credit."""

    def check_row(self, row: TensorDictBase) -> None:
        """Raise a ValueError if the row cannot be used with this credit."""
        if self.per_token:
            check_token_rewards(row)

    def __call__(self, groups: Groups) -> Estimates:
        """Return the advantages of the groups' rows."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrajectoryCredit(Credit):
    """One advantage for all action tokens of a row, from the row's reward."""

    def __call__(self, groups: Groups) -> Estimates:
        rewards = torch.stack([entry_of(row, keys.REWARD).reshape(()) for row in groups.rows])
        advantages, signal = groups.estimate(rewards, groups.index), groups.has_signal(rewards, groups.index)
        return Estimates(advantages[:, None], signal[:, None], ~rewards.isnan(), rewards)


@dataclass(frozen=True)
class NormalizeThenSum(Credit):
    """One advantage per row: the weighted sum of each reward function's advantage (GDPO, arXiv 2601.05242).

    See :func:`~torchrl_rloo.functional.advantages.normalize_then_sum`. It reads ``("next", "rewards")``, ``[F]`` per
    row, so clip and KL of the summed reward have no effect. GDPO's last step is ``normalize=Whiten(...)``.

    Args:
        weights: ``F`` finite weights, one for each reward function.
    """

    weights: Sequence[float]
    reads: ClassVar[tuple[NestedKey, ...]] = (keys.REWARDS,)
    default_estimator: ClassVar[str] = "grpo"

    def __post_init__(self) -> None:
        if not self.weights or not all(abs(float(w)) < float("inf") for w in self.weights):
            raise ValueError(f"weights={list(self.weights)} must be finite numbers, one for each reward function")

    def check_estimator(self, estimator: Estimator) -> None:
        """Refuse an estimator with one baseline per prompt."""
        _refuse_prompt_baseline(estimator, self, "function")

    def check_row(self, row: TensorDictBase) -> None:
        """Refuse a row whose number of rewards differs from the number of weights."""
        if (n := row[keys.REWARDS].numel()) != len(self.weights):
            raise ValueError(f"weights={list(self.weights)} for rows with {n} rewards: set one weight for each reward")

    def __call__(self, groups: Groups) -> Estimates:
        rewards, index = torch.stack([row[keys.REWARDS].reshape(-1) for row in groups.rows]), groups.index
        advantages = normalize_then_sum(rewards, index, self.weights, groups.estimate)
        signal = torch.stack([groups.has_signal(scores, index) for scores in rewards.unbind(-1)], -1).any(-1)
        return Estimates(advantages[:, None], signal[:, None], ~rewards.isnan().all(-1), rewards)


@dataclass(frozen=True)
class TurnCredit(Credit):
    """One advantage per turn: its return, compared with those of the same turn in the group's other rows.

    A turn's return sums the rewards ``("next", "token_rewards", "full")`` (``[T]``) of the turn and of later turns.
    """

    discount: float = number_field(1.0, high=1)  # discount of later rewards, per turn
    reads: ClassVar[tuple[NestedKey, ...]] = (keys.REWARD, keys.TOKEN_REWARDS, keys.TOKENS, keys.ACTION_MASK)
    per_token: ClassVar[bool] = True

    def check_estimator(self, estimator: Estimator) -> None:
        """Refuse an estimator with one baseline per prompt, or one that compares whole rows."""
        _refuse_prompt_baseline(estimator, self, "turn")
        if third_argument(estimator) is not None:
            raise ValueError(
                f"estimator={estimator_name(estimator)} compares whole rows, but {self} compares turns: use "
                "credit='trajectory'"
            )

    def __call__(self, groups: Groups) -> Estimates:
        # Sum the rewards of each turn, then of the turns that follow
        rewards, answered = _token_rewards(groups)
        actions = groups.actions
        turns = place_actions(turn_index(actions.action_mask)[actions.action_mask], actions)
        turns = torch.where(actions.mask, turns, -1)
        earned, mask = turn_rewards(rewards, turns)
        returns = rewards_to_go(earned, mask, self.discount).masked_fill(~answered[:, None], torch.nan)[mask]

        # Compare the same turn of a group's rows: one index for each turn of each group
        index = (groups.index[:, None].expand_as(mask)[mask], torch.arange(mask.shape[1]).expand_as(mask)[mask])
        index = torch.stack(index).unique(dim=1, return_inverse=True)[1]

        def at_tokens(values: torch.Tensor) -> torch.Tensor:
            return spread_turns(torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask, values), turns)

        has_signal = at_tokens(groups.has_signal(returns, index).long()) > 0
        return Estimates(at_tokens(groups.estimate(returns, index)), has_signal, answered, returns)


@dataclass(frozen=True)
class TokenCredit(Credit):
    r"""One advantage per action token: its return minus the baseline of the whole trajectory.

    .. math:: A_{it} = G_{it} - (R_i - A_i)

    :math:`R_i` is the return of the first action token and :math:`A_i` its advantage under the estimator.
    """

    discount: float = number_field(1.0, high=1)  # discount of later rewards and of the KL, per action token
    reads: ClassVar[tuple[NestedKey, ...]] = TurnCredit.reads
    per_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "token_discount", self.discount)

    def check_estimator(self, estimator: Estimator) -> None:
        """Refuse an estimator that rescales, whose baseline cannot be recovered from its advantages."""
        if estimator_option(estimator, "rescales"):
            raise ValueError(
                f"estimator={estimator_name(estimator)} rescales rewards (or does not say rescales=False), but {self} "
                "requires its baseline: use 'rloo', 'dr_grpo' or 'reinforce'"
            )

    def __call__(self, groups: Groups) -> Estimates:
        rewards, answered = _token_rewards(groups)
        mask = groups.actions.mask
        returns = rewards_to_go(rewards, mask, self.discount)
        whole = returns[:, :1].sum(1).masked_fill(~answered, torch.nan)
        baseline = whole - groups.estimate(whole, groups.index)
        has_signal = mask & groups.has_signal(whole, groups.index)[:, None]
        advantages = torch.where(has_signal, returns - baseline[:, None], 0.0)
        return Estimates(advantages, has_signal, answered, whole)


@dataclass(frozen=True)
class OptimalTokenCredit(Credit):
    """One advantage per action token: the reward minus the optimal baseline at its place in the group.

    OTB, Li et al. 2026 (arXiv 2602.07078), whose weights approximate the squared norm of the gradient up to a token::

        A_it = r_i - sum_j r_j W_jt / sum_j W_jt,    W_it = sum_{s <= t} (1 - 2 pi_is + sum_v pi_isv^2)

    The sum over the vocabulary follows from the log-probs of the token at the temperature and at half of it:
    ``sum_v pi_v^2 = exp(2 log pi - log pi_sharp)``. Where a row alone is as long, it gets 0.
    """

    reads: ClassVar[tuple[NestedKey, ...]] = (keys.REWARD, keys.LOG_PROBS, keys.SHARP_LOG_PROBS)
    per_token: ClassVar[bool] = True

    def check_estimator(self, estimator: Estimator) -> None:
        """Refuse an estimator other than the default, since the baseline is that of the credit."""
        if estimator is not ESTIMATORS["rloo"]:
            raise ValueError(f"estimator={estimator_name(estimator)} has no effect with {self}; set estimator='rloo'")

    def __call__(self, groups: Groups) -> Estimates:
        rewards, actions = torch.stack([row[keys.REWARD].reshape(()) for row in groups.rows]), groups.actions
        log_probs, sharp = (gather_actions([row[k] for row in groups.rows], actions).double() for k in self.reads[1:])
        returns, _, answered = subtract_minimum(rewards, groups.index)
        mask = actions.mask & answered[:, None]
        norms = 1 - 2 * log_probs.exp() + (2 * log_probs - sharp).exp()
        weights = torch.where(mask, norms, 0.0).cumsum(1) * mask
        parts = torch.stack([weights * returns[:, None], weights], 1)
        weighted, total = torch.zeros_like(parts).index_add(0, groups.index, parts)[groups.index].unbind(1)
        advantages = returns[:, None] - weighted / total.clamp(min=1e-12)
        has_signal = mask & groups.has_signal(rewards, groups.index)[:, None]
        return Estimates(torch.where(has_signal, advantages, 0.0), has_signal, answered, rewards)


CREDITS: dict[str, type] = {
    "trajectory": TrajectoryCredit,
    "normalize_then_sum": NormalizeThenSum,
    "turn": TurnCredit,
    "token": TokenCredit,
    "optimal_token": OptimalTokenCredit,
}


def _token_rewards(groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards ``[N, A]``, float64 so that equal sums compare equal, and a mask ``[N]`` of rows that answered."""
    rewards = gather_actions([row[keys.TOKEN_REWARDS].double() for row in groups.rows], groups.actions)
    whole = torch.stack([row[keys.REWARD].reshape(()) for row in groups.rows])
    return rewards, ~whole.isnan() & ~rewards.isnan().any(-1)


def check_token_rewards(row: TensorDictBase) -> None:
    """Raise a ValueError if a row has a token reward at a token that is not an action."""
    rewards, sampled = row.get(keys.TOKEN_REWARDS, None), row.get(keys.SAMPLED_MASK, None)
    sampled = row[keys.ACTION_MASK] if sampled is None else sampled
    if rewards is not None and rewards[~sampled].nan_to_num(0.0).any():
        raise ValueError(
            f"{keys.TOKEN_REWARDS!r} has a reward at a token that is not an action, so no action would get it: move it "
            "to the last action token before"
        )


def estimator_name(estimator: Estimator) -> str:
    """Return the name of an estimator in ``ESTIMATORS``, or the name of its function or class."""
    names = [repr(name) for name, known in ESTIMATORS.items() if known is estimator]
    return names[0] if names else getattr(estimator, "__name__", type(estimator).__name__)


def _refuse_prompt_baseline(estimator: Estimator, credit: Credit, unit: str) -> None:
    if estimator_option(estimator, "wants_prompts"):
        raise ValueError(
            f"estimator={estimator_name(estimator)} keeps one baseline for each prompt, but {credit} requires one for "
            f"each {unit}: use credit='trajectory' or 'token'"
        )


_KEYS = {"prompt": keys.PROMPT_ID, "role": keys.ROLE_ID}


class RunningBaseline:
    r"""Estimator that subtracts an exponential moving average of the rewards of the prompt, or role, in earlier draws.

    .. math:: A_i = r_i - b_p, \qquad b_p \leftarrow d \, b_p + (1 - d) \, \bar r_g

    All rows of a group use the baseline from before the group. A row's baseline does not depend on the row, and even a
    group of one row has a signal. Groups update it in the order of their index. A group in which all rows abstain
    changes nothing. ``"prompt_id"`` tells prompts apart, and ``"role_id"`` roles (:class:`~torchrl_rloo.data.Role`).

    Args:
        decay: :math:`d`, weight of the old average, in ``[0, 1)``.
        initial: baseline of a prompt, or role, that was never drawn.
        by: ``"prompt"``, or ``"role"`` for one baseline for each role over all prompts.

    Attributes:
        baselines: current baseline of each prompt or role that was drawn, by its id.
        key: entry of rows with that id.

    Raises:
        ValueError: if ``decay`` is out of range, or ``by`` is unknown.

    Example:
        >>> baseline = RunningBaseline(decay=0.5)
        >>> group, prompt = torch.tensor([0]), torch.tensor([7])
        >>> [baseline(torch.tensor([1.0]), group, prompt).item() for _ in range(3)]
        [1.0, 0.5, 0.25]
    """

    rescales, needs_group, wants_prompts = False, False, True

    def __init__(self, *, decay: float = 0.9, initial: float = 0.0, by: Literal["prompt", "role"] = "prompt"):
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be at least 0 and below 1")
        if by not in _KEYS:
            raise ValueError(f"by={by!r} must be one of {list(_KEYS)}")
        self.decay, self.initial, self.key = decay, initial, _KEYS[by]
        self.baselines: dict[int, float] = {}

    def __call__(self, rewards: torch.Tensor, groups: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """Return the advantages of the rows, and update the baselines.

        Shapes: ``rewards [N]``, ``groups [N]``, ``prompts [N]`` to ``[N]``.
        """
        advantages = torch.zeros_like(rewards)
        for group in groups.unique().tolist():
            rows = (groups == group) & ~rewards.isnan()
            if rows.any():
                prompt, earned = int(prompts[rows][0]), rewards[rows].double()
                baseline = self.baselines.get(prompt, self.initial)
                advantages[rows] = (earned - baseline).to(rewards.dtype)
                self.baselines[prompt] = self.decay * baseline + (1 - self.decay) * earned.mean().item()
        return advantages

    def state_dict(self) -> dict[str, Any]:
        """Return the baselines for a checkpoint."""
        return {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the baselines."""
        self.baselines = dict(state["baselines"])
