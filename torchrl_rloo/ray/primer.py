"""DataLoadingPrimer whose position is in a Ray actor, for environments in several processes.

TorchRL's class of this name sends whole batches of prompts through its actor. This one sends ids; each process has the
dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchrl.envs import Transform

from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer
from torchrl_rloo.ray.session import call, start_actor


class RayDataLoadingPrimer(DataLoadingPrimer):
    """:class:`DataLoadingPrimer` that environments in several processes share: no two of them draw the same group.

    A pickled copy uses the same actor. So does another instance in the cluster with the same ``actor_name``.

    Args:
        dataset: the prompts, equal in all processes.
        remote_config: resources of the actor, see ``ray.remote``. None reserves no CPU.
        actor_name: name of the actor in the cluster's namespace; an actor of this name is used if there is one. It ends
            with the process that started it. None creates one that ends with the last copy of this primer.
        **kwargs: arguments of :class:`DataLoadingPrimer`.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if the named actor has other settings, :class:`DataLoadingPrimer` refuses an argument, or a sampler
            learns from rows, which the actor does not see.

    Note:
        If the actor dies, draws raise ``ray.exceptions.RayActorError``. If a process dies, its draws are not drawn
        again until :meth:`requeue` is called with them. A ``state_dict`` holds the position of all processes, and the
        open groups of the collector that takes it. Where several collectors share a primer, call :meth:`requeue` with
        the open groups of the others after loading it.

    Example:
        ::

            make_primer = partial(RayDataLoadingPrimer, actor_name="prompts")
            env = DatasetChatEnv(dataset, tokenizer, make_primer=make_primer)
    """

    def __init__(
        self,
        dataset: PromptDataset,
        *,
        remote_config: Mapping[str, Any] | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ):
        # The primer of the actor draws; this object only makes rows
        primer = DataLoadingPrimer(dataset, **kwargs)
        if hasattr(primer.sampler, "update"):
            raise ValueError(
                f"sampler={type(primer.sampler).__name__} learns from rows, which an actor does not see; use one "
                "DataLoadingPrimer, or a sampler without update"
            )
        Transform.__init__(self)
        self.dataset, self.num_generations, self.shuffle = dataset, primer.num_generations, primer.shuffle
        self.epochs, self.sampler, self.first_group_id = primer.epochs, primer.sampler, primer.first_group_id
        self.greedy, self.demonstrations = primer.greedy, primer.demonstrations
        self._journal: list[tuple[int, int]] | None = None
        self._open: list[tuple[int, int]] = []  # draws that a state holds as re-queued, within with_requeued
        settings = {**kwargs, "dataset": dataset.fingerprint, "sampler": type(primer.sampler).__name__}
        self._actor = start_actor(_PrimerActor, (dataset, kwargs), remote_config, actor_name, settings)

    @property
    def next_group_id(self) -> int:
        """Id of the next new draw of any process."""
        return call(self._actor.get.remote("next_group_id"))

    @property
    def num_requeued(self) -> int:
        """Number of re-queued draws, which come before new ones."""
        return call(self._actor.get.remote("num_requeued"))

    def remaining(self) -> float:
        """Return the number of draws left, re-queued ones included; infinite if ``epochs`` is None."""
        return float("inf") if self.epochs is None else call(self._actor.do.remote("remaining"))

    def draw_ids(self, groups: int) -> list[tuple[int, int]]:
        return self._note(call(self._actor.do.remote("draw_ids", groups)))

    def _draw_ids(self) -> tuple[int, int]:
        return self._note([call(self._actor.do.remote("_draw_ids"))])[0]

    def _note(self, draws: list[tuple[int, int]]) -> list[tuple[int, int]]:
        if self._journal is not None:
            self._journal += draws
        return draws

    def requeue(self, draws: Iterable[tuple[int, int]]) -> None:
        if draws := list(draws):
            call(self._actor.do.remote("requeue", draws))

    @contextmanager
    def with_requeued(self, draws: Iterable[tuple[int, int]]) -> Iterator[None]:
        self._open = list(draws)
        try:
            yield
        finally:
            self._open = []

    def get_extra_state(self) -> dict[str, Any]:
        """Return the position in the dataset, which a :class:`DataLoadingPrimer` can load as well."""
        return call(self._actor.state.remote(self._open))

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the position in the dataset, for all processes."""
        call(self._actor.do.remote("set_extra_state", state))


class _PrimerActor:
    """Actor that draws ids for all processes."""

    def __init__(self, dataset: PromptDataset, kwargs: dict[str, Any]):
        self._primer = DataLoadingPrimer(dataset, **kwargs)

    def get(self, name: str) -> Any:
        return getattr(self._primer, name)

    def do(self, name: str, *args: Any) -> Any:
        return getattr(self._primer, name)(*args)

    def state(self, requeued: list[tuple[int, int]]) -> dict[str, Any]:
        with self._primer.with_requeued(requeued):
            return self._primer.get_extra_state()
