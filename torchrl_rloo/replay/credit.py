"""Credit: the advantage of a row, of each of its turns or of each of its tokens, from what complete groups earned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ActionTokens, gather_actions, place_actions
from torchrl_rloo.functional.advantages import ESTIMATORS, Estimator, answers, estimator_option, normalize_then_sum
from torchrl_rloo.functional.choices import Choice, number
from torchrl_rloo.functional.returns import rewards_to_go, spread_turns, turn_index, turn_rewards


class Groups(NamedTuple):
    """Complete groups and the estimator that compares their rows."""

    rows: Sequence[TensorDictBase]
    index: torch.Tensor  # [N] int64, the group of each row
    actions: ActionTokens | None  # None where no part looks at tokens
    estimator: Estimator

    def estimate(self, returns: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the estimator's ``[M]`` advantages of ``[M]`` returns.

        Raises:
            ValueError: if it returns another shape.
        """
        if estimator_option(self.estimator, "wants_prompts"):
            prompts = torch.stack([row[keys.PROMPT_ID].reshape(()) for row in self.rows])
            advantages = self.estimator(returns, index, prompts)
        else:
            advantages = self.estimator(returns, index)
        if getattr(advantages, "shape", None) != returns.shape:
            got = tuple(advantages.shape) if isinstance(advantages, torch.Tensor) else type(advantages).__name__
            raise ValueError(
                f"estimator={name_of(self.estimator)} returned {got} for rewards of shape {tuple(returns.shape)}: "
                "return one advantage for each reward"
            )
        return advantages

    def answers(self, returns: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return bool ``[M]``: returns that are there and, if the estimator compares, have another to compare with."""
        return answers(returns, index, needs_group=estimator_option(self.estimator, "needs_group"))


class Estimates(NamedTuple):
    """Advantages before KL and normalization. ``L`` is 1 for rows, else the number of action tokens."""

    advantages: torch.Tensor  # [N, L]
    has_signal: torch.Tensor  # [N, L] bool: answered, and had another to compare with
    answered: torch.Tensor  # [N] bool
    returns: torch.Tensor  # what the estimator compared, NaN where it abstained


class Credit(Choice):
    """Base of the ways to give credit. Called with :class:`Groups`, it returns their :class:`Estimates`."""

    reads: ClassVar[tuple[NestedKey, ...]] = (keys.REWARD,)
    default_estimator: ClassVar[str] = "rloo"
    per_token: ClassVar[bool] = False
    token_discount: ClassVar[float] = 1.0  # of rewards at tokens, a KL among them

    def check_estimator(self, estimator: Estimator) -> None:
        """Raise a ValueError for an estimator that cannot be used."""

    def check_row(self, row: TensorDictBase) -> None:
        """Raise a ValueError for a row that cannot be used."""
        if self.per_token:
            check_token_rewards(row)

    def __call__(self, groups: Groups) -> Estimates:
        """Return the advantages."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrajectoryCredit(Credit):
    """One advantage for all action tokens of a row, from its reward."""

    def __call__(self, groups: Groups) -> Estimates:
        rewards = torch.stack([row[keys.REWARD].reshape(()) for row in groups.rows])
        advantages, signal = groups.estimate(rewards, groups.index), groups.answers(rewards, groups.index)
        return Estimates(advantages[:, None], signal[:, None], ~rewards.isnan(), rewards)


@dataclass(frozen=True)
class NormalizeThenSum(Credit):
    """One advantage for a row: each reward function's own, weighted and summed (GDPO, arXiv 2601.05242).

    See :func:`~torchrl_rloo.functional.advantages.normalize_then_sum`. It reads the ``F`` rewards of ``("next",
    "rewards")``; clip and KL of the summed reward have no effect. GDPO's last step is ``normalize=Whiten(...)``.

    Args:
        weights: ``F`` numbers.
    """

    weights: Sequence[float]
    reads: ClassVar[tuple[NestedKey, ...]] = (keys.REWARDS,)
    default_estimator: ClassVar[str] = "grpo"

    def __post_init__(self) -> None:
        if not self.weights or not all(abs(float(w)) < float("inf") for w in self.weights):
            raise ValueError(f"weights={list(self.weights)} must be finite numbers, one for each reward function")

    def check_estimator(self, estimator: Estimator) -> None:
        """Refuse an estimator with one baseline per prompt."""
        _refuse_prompts(estimator, self, "function")

    def check_row(self, row: TensorDictBase) -> None:
        """Refuse a row with another number of rewards than weights."""
        if (n := row[keys.REWARDS].numel()) != len(self.weights):
            raise ValueError(f"weights={list(self.weights)} for rows with {n} rewards: give one for each function")

    def __call__(self, groups: Groups) -> Estimates:
        rewards, index = torch.stack([row[keys.REWARDS].reshape(-1) for row in groups.rows]), groups.index
        advantages = normalize_then_sum(rewards, index, self.weights, groups.estimate)
        signal = torch.stack([groups.answers(each, index) for each in rewards.unbind(-1)], -1).any(-1)
        return Estimates(advantages[:, None], signal[:, None], ~rewards.isnan().all(-1), rewards)


@dataclass(frozen=True)
class TurnCredit(Credit):
    """One advantage for each turn: its return, compared with the same turn of the group's other members.

    A turn's return are the rewards ``("next", "token_rewards", "full")`` of the turn and of those after it.

    Args:
        discount: of the rewards to go, per turn.
    """

    discount: float = number(1.0, high=1)
    reads: ClassVar[tuple[NestedKey, ...]] = (keys.REWARD, keys.TOKEN_REWARDS, keys.TOKENS, keys.ACTION_MASK)
    per_token: ClassVar[bool] = True

    def check_estimator(self, estimator: Estimator) -> None:
        """Refuse an estimator with one baseline per prompt."""
        _refuse_prompts(estimator, self, "turn")

    def __call__(self, groups: Groups) -> Estimates:
        rewards, answered = _token_rewards(groups)
        actions = groups.actions
        turns = place_actions(turn_index(actions.action_mask)[actions.action_mask], actions)
        turns = torch.where(actions.mask, turns, -1)
        earned, mask = turn_rewards(rewards, turns)
        returns = rewards_to_go(earned, mask, self.discount).masked_fill(~answered[:, None], torch.nan)[mask]
        which = (groups.index[:, None].expand_as(mask)[mask], torch.arange(mask.shape[1]).expand_as(mask)[mask])
        which = torch.stack(which).unique(dim=1, return_inverse=True)[1]  # one index for each turn of each group

        def at_tokens(values: torch.Tensor) -> torch.Tensor:
            return spread_turns(torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask, values), turns)

        has_signal = at_tokens(groups.answers(returns, which).long()) > 0
        return Estimates(at_tokens(groups.estimate(returns, which)), has_signal, answered, returns)


@dataclass(frozen=True)
class TokenCredit(Credit):
    r"""One advantage for each action token: its return, less the baseline of the whole trajectory.

    .. math:: A_{it} = G_{it} - (R_i - A_i)

    with :math:`R_i` the return of the first action token and :math:`A_i` its advantage under the estimator.

    Args:
        discount: of the rewards to go, per action token, a KL among them.
    """

    discount: float = number(1.0, high=1)
    reads: ClassVar[tuple[NestedKey, ...]] = TurnCredit.reads
    per_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "token_discount", self.discount)

    def check_estimator(self, estimator: Estimator) -> None:
        """Refuse an estimator that rescales: its baseline cannot be told from its advantages."""
        if estimator_option(estimator, "rescales"):
            raise ValueError(
                f"estimator={name_of(estimator)} rescales rewards (or does not say rescales=False), but {self} needs "
                "its baseline: use 'rloo', 'dr_grpo' or 'reinforce'"
            )

    def __call__(self, groups: Groups) -> Estimates:
        rewards, answered = _token_rewards(groups)
        mask = groups.actions.mask
        returns = rewards_to_go(rewards, mask, self.discount)
        whole = returns[:, :1].sum(1).masked_fill(~answered, torch.nan)
        baseline = whole - groups.estimate(whole, groups.index)
        has_signal = mask & groups.answers(whole, groups.index)[:, None]
        advantages = torch.where(has_signal, returns - baseline[:, None], 0.0)
        return Estimates(advantages, has_signal, answered, whole)


CREDITS: dict[str, type] = {
    "trajectory": TrajectoryCredit,
    "normalize_then_sum": NormalizeThenSum,
    "turn": TurnCredit,
    "token": TokenCredit,
}


def _token_rewards(groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards ``[N, A]`` in float64, so that returns of equal sums are equal, and who answered ``[N]``."""
    rewards = gather_actions([row[keys.TOKEN_REWARDS].double() for row in groups.rows], groups.actions)
    whole = torch.stack([row[keys.REWARD].reshape(()) for row in groups.rows])
    return rewards, ~whole.isnan() & ~rewards.isnan().any(-1)


def check_token_rewards(row: TensorDictBase) -> None:
    """Raise a ValueError if a row's token rewards, where it has any, lie on a token that is not an action."""
    given = row.get(keys.TOKEN_REWARDS, None)
    if given is not None and given[~row[keys.ACTION_MASK]].nan_to_num(0.0).any():
        raise ValueError(
            f"{keys.TOKEN_REWARDS!r} has a reward at a token that is not an action, where nothing would be credited "
            "with it: put it at the last action token before"
        )


def name_of(estimator: Estimator) -> str:
    """Return the name of an estimator in the table, or that of its function or class."""
    names = [repr(name) for name, known in ESTIMATORS.items() if known is estimator]
    return names[0] if names else getattr(estimator, "__name__", type(estimator).__name__)


def _refuse_prompts(estimator: Estimator, credit: Credit, unit: str) -> None:
    if estimator_option(estimator, "wants_prompts"):
        raise ValueError(
            f"estimator={name_of(estimator)} keeps one baseline for each prompt, but {credit} would need one for each "
            f"{unit}: use credit='trajectory' or 'token'"
        )
