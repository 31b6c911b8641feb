"""Notices of optimizer steps from which a policy learns nothing."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.data.outcomes import final_return


def notify_without_tokens(rows: TensorDictBase, num_tokens: float) -> None:
    """Say once that a step has rows, but no action token that its loss covers."""
    if len(rows) and not num_tokens:
        notify_once(
            f"the loss covers no action token of a step, which trains nothing: check {keys.ACTION_MASK} of the rows, "
            "and what masks tokens, such as mask_truncated_completions and max_staleness"
        )


def notify_without_advantage(rows: TensorDictBase, advantage: NestedKey, *, other_terms: bool) -> None:
    """Say once that no row of a step has an advantage, and why.

    Args:
        rows: all rows of an optimizer step. Rows on a GPU are waited for, as in the count of their tokens.
        advantage: key of the advantages. The loss itself refuses rows without it.
        other_terms: whether the loss has terms that need no advantage, such as a KL.
    """
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
