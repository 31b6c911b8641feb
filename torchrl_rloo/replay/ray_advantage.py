"""MCAdvantage in a Ray actor, for groups whose members come from several writers.

TorchRL's class of this name sends whole rows through its actor. This one reads metadata; rows stay in the object store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

from torchrl_rloo.data.rows import concatenate, stack_rows
from torchrl_rloo.ray_actors import call, start_actor
from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.group_store import GroupAdvantages, split_members
from torchrl_rloo.replay.pending import BufferTransform
from torchrl_rloo.replay.ray_objects import OwnedRows, fetch_group, restore_rows, save_rows


class RayMCAdvantage(BufferTransform):
    """Replay-buffer transform like :class:`MCAdvantage`, whose groups wait in an actor that all writers share.

    Members of a group may come from any writer. The writer that completes a group receives all of its rows, with
    advantages. The actor reads metadata only, unless the credit or a KL is per token. Rows stay in the object store,
    where they outlive the writer that sampled them.

    A pickled copy uses the same actor. So does another instance in the cluster with the same ``actor_name``.

    Args:
        num_generations: see :class:`MCAdvantage`, as are all arguments that are not named here.
        remote_config: resources of the actor, see ``ray.remote``. None reserves no CPU.
        actor_name: name of the actor in the cluster's namespace; an actor of this name is used if there is one. None
            creates one that ends with the last copy of this transform.
        **kwargs: arguments of :class:`MCAdvantage`, except ``process_group``.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if the named actor has other settings, or :class:`MCAdvantage` refuses an argument.

    Note:
        If the actor dies, its incomplete groups are lost and each call raises ``ray.exceptions.RayActorError``. Restore
        the last ``state_dict``, or have the ledger sample the groups again.

    Example:
        ::

            buffer = ReplayBuffer(storage=RowStorage(), transform=RayMCAdvantage(actor_name="advantages"))
    """

    def __init__(
        self,
        num_generations: int | None = None,
        *,
        remote_config: Mapping[str, Any] | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        if kwargs.get("process_group") is not None:
            raise ValueError("process_group cannot be combined with an actor, which normalizes over all writers")
        advantage = MCAdvantage(num_generations, **kwargs)
        self._reads_tokens = advantage.reads_tokens
        settings = {"num_generations": num_generations, **kwargs}
        self._actor = start_actor(_AdvantageActor, (advantage,), remote_config, actor_name, settings)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Take rows in and return those of all groups that they complete, with advantages, or None."""
        if tensordict is None:
            return None
        rows = stack_rows([tensordict]) if tensordict.ndim == 0 else stack_rows(tensordict.reshape(-1).unbind(0))
        ready = call(self._actor.add.remote(split_members(rows, self._reads_tokens)))
        return concatenate([fetch_group(group) for group in ready]) if ready else None

    @property
    def counts(self) -> dict[str, int]:
        """Counters of :class:`MCAdvantage`, ``"advantage/pending_rows"`` and ``"advantage/waiting_groups"``."""
        return call(self._actor.counters.remote())

    @property
    def pending_rows(self) -> int:
        """Rows that wait for the rest of their group."""
        return self.counts["advantage/pending_rows"]

    @property
    def waiting_groups(self) -> int:
        """Complete groups that wait for the rest of the batch to normalize."""
        return self.counts["advantage/waiting_groups"]

    def get_extra_state(self) -> dict[str, Any]:
        """Return held rows, counters and the estimator's state, which :class:`MCAdvantage` can load as well."""
        return save_rows(call(self._actor.state.remote()))

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore held rows, counters and the estimator's state."""
        call(self._actor.load_state.remote(restore_rows(state)))


class _AdvantageActor(OwnedRows, GroupAdvantages):
    pass
