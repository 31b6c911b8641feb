"""Check that transforms of a replay buffer work on metadata of rows, without their tokens."""

from __future__ import annotations

from torchrl.envs import Transform

from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.gae import TokenGAE


def check_works_on_metadata(transform: Transform, groups_per_batch: int | None = None) -> None:
    """Raise if a transform of the buffer reads tokens, which :func:`~torchrl_rloo.data.metadata.metadata_of` drops.

    These work: every estimator of :class:`MCAdvantage`, also a :class:`~torchrl_rloo.replay.RunningBaseline`; the
    credits ``"trajectory"`` and ``"normalize_then_sum"``; both normalizations; ``ZeroSignalFilter`` and
    ``TopKSelector``. Shaping and rewards of turns work as far as they change the trajectory's reward, since they run
    in the environment, which has the tokens.

    Args:
        transform: transform of the replay buffer.
        groups_per_batch: number of groups of each step. None does not check the groups to normalize together.

    Raises:
        ValueError: for credit per turn or per token, a KL per token, a critic, or a normalization that would hold
            groups back for a later step.
    """
    if isinstance(transform, TokenGAE):
        raise ValueError("TokenGAE reads the tokens of rows and cannot work on metadata; use MCAdvantage")
    if not isinstance(transform, MCAdvantage):
        return
    if transform.credit.per_token:
        raise ValueError(
            f"credit={transform.credit} reads the tokens of rows and cannot work on metadata; use credit='trajectory' "
            "or 'normalize_then_sum'"
        )
    if transform.kl is not None:
        raise ValueError(
            f"kl={transform.kl} gives each token an advantage and cannot work on metadata; use where='reward' or 'loss'"
        )
    if transform.normalize is None or groups_per_batch is None:
        return
    if groups_per_batch % transform.normalize.groups:
        raise ValueError(
            f"normalize.groups={transform.normalize.groups} must divide the {groups_per_batch} groups of a step, since "
            "a rank keeps its rows for one step only"
        )
