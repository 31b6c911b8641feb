"""DataLoadingPrimer: draws prompts from a dataset at every reset, several copies of each.

Replaces TorchRL's class, whose ``state_dict`` is empty, so that a run cannot be resumed in the middle of an epoch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.rows import non_tensor, stack_rows
from torchrl_rloo.data.sampling import PromptSampler

_LOGGER = logging.getLogger(__name__)
_DRAWN: ContextVar[TensorDictBase | None] = ContextVar("rows drawn before the reset", default=None)


class DatasetExhaustedError(RuntimeError):
    """There are no prompts left for another batch."""


class DataLoadingPrimer(Transform):
    """Fill a reset environment with prompts: ``num_generations`` rows for each draw, under one fresh ``group_id``.

    ``prompt_id`` is the prompt's index in the dataset, the same in every epoch; ``group_size`` is ``num_generations``.

    Args:
        dataset: the prompts.
        num_generations: ``G``, rows per draw. The environment's batch size must be a multiple of it.
        shuffle: whether each epoch goes through the dataset in a new random order, or always in its own.
        seed: of the primer's own random stream.
        first_group_id: groups are numbered from here; primers whose rows meet in one buffer need ranges of their own.
        epochs: how often to go through the dataset; None for ever. Draws of one batch may come from two epochs. What is
            left at the end and does not fill a batch is counted in the log and not drawn.
        sampler: chooses the prompts instead (a :class:`~torchrl_rloo.data.sampling.MixtureSampler` or a
            :class:`~torchrl_rloo.data.PassRatePool`, say), without end; there are no epochs then. Its state is saved
            in the primer's.

    Raises:
        ValueError: for a number below 1, if the epochs do not fill one batch, or for a sampler beside ``epochs`` or
            ``shuffle=False``.

    Its ``state_dict`` holds the place in the epoch, so a resumed run draws exactly what it would have drawn.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        *,
        num_generations: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        first_group_id: int = 0,
        epochs: int | None = None,
        sampler: PromptSampler | None = None,
    ):
        super().__init__()
        for name, value in (("num_generations", num_generations), ("epochs", epochs)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if sampler is not None and (epochs is not None or not shuffle):
            raise ValueError(f"epochs={epochs} and shuffle={shuffle} mean nothing beside a sampler: leave them out")
        self.dataset, self.num_generations, self.shuffle, self.epochs = dataset, num_generations, shuffle, epochs
        self.generator = torch.Generator().manual_seed(seed)
        self.epoch, self.position, self.next_group_id = 0, 0, first_group_id
        self.first_group_id, self.sampler = first_group_id, sampler
        self._put_back: deque[tuple[int, int]] = deque()
        if sampler is None:
            self._start_epoch()

    def _start_epoch(self) -> None:
        self._epoch_start = self.generator.get_state()
        n = len(self.dataset)
        self._order = torch.randperm(n, generator=self.generator).tolist() if self.shuffle else list(range(n))

    def remaining(self) -> float:
        """Draws that are left, those put back included; infinite without a limit on epochs."""
        if self.epochs is None:
            return float("inf")
        return (self.epochs - self.epoch) * len(self.dataset) - self.position + len(self._put_back)

    def draw(self) -> tuple[dict[str, Any], int]:
        """The next prompt, with its ``prompt_id``, and its ``group_id``.

        Raises:
            DatasetExhaustedError: after the last epoch.
            IndexError: if the sampler chooses a prompt that the dataset has not.
        """
        if self._put_back:
            index, group_id = self._put_back.popleft()
        else:
            index, group_id = self._next_index(), self.next_group_id
            self.next_group_id += 1
        return {**self.dataset[index], keys.PROMPT_ID: torch.tensor(index)}, group_id

    def requeue(self, draws: Iterable[tuple[int, int]]) -> None:
        """Takes draws back whose groups were not delivered: they come first at the next draws, under the same id.

        Args:
            draws: ``(prompt_id, group_id)`` of each.
        """
        self._put_back = deque(sorted((*self._put_back, *draws), key=lambda draw: draw[1]))

    @contextmanager
    def with_requeued(self, draws: Iterable[tuple[int, int]]) -> Iterator[None]:
        """A ``state_dict`` taken meanwhile is one in which these draws are put back."""
        kept = self._put_back
        self.requeue(draws)
        try:
            yield
        finally:
            self._put_back = kept

    def draw_groups(self, groups: int) -> list[TensorDictBase]:
        """The rows of the next ``groups`` draws, ``[num_generations]`` each, with nothing but what the dataset says.

        Raises:
            DatasetExhaustedError: if fewer draws are left.
            ValueError: if the epochs have fewer from the start.
        """
        if self.remaining() < groups:
            if self.next_group_id == self.first_group_id:
                raise ValueError(
                    f"{len(self.dataset)} prompts x {self.epochs} epochs give {int(self.remaining())} draws, fewer "
                    f"than the {groups} prompts of one batch: add prompts or epochs, or lower the batch size"
                )
            if self.remaining():
                _LOGGER.warning("%d prompts at the end do not fill a batch and are not drawn", int(self.remaining()))
            raise DatasetExhaustedError(f"{int(self.remaining())} draws are left, a batch needs {groups}")
        return [stack_rows(self._copies(*self.draw())) for _ in range(groups)]

    @staticmethod
    @contextmanager
    def giving(rows: TensorDictBase) -> Iterator[None]:
        """Lets resets of this thread begin with rows of :meth:`draw_groups`, any number of them, instead of draws."""
        token = _DRAWN.set(rows)
        try:
            yield
        finally:
            _DRAWN.reset(token)

    def _next_index(self) -> int:
        if self.sampler is not None:
            index = self.sampler.draw(self.generator)
            if not 0 <= index < len(self.dataset):
                raise IndexError(
                    f"{type(self.sampler).__name__} chose prompt {index}, but the dataset has {len(self.dataset)}: "
                    "make it of the same size"
                )
            return index
        if self.remaining() < 1:
            raise DatasetExhaustedError(f"all {self.epochs} epochs of {len(self.dataset)} prompts are drawn")
        if self.position == len(self.dataset):
            self.epoch, self.position = self.epoch + 1, 0
            self._start_epoch()
        self.position += 1
        return self._order[self.position - 1]

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if (drawn := _DRAWN.get()) is not None:
            return drawn
        n = self.parent.batch_size[0]
        restart = None if tensordict is None else tensordict.get("_reset", None)
        if restart is None:
            return stack_rows(self._draw_rows(n))
        restart = restart.reshape(n, -1).any(1).tolist()
        fresh = iter(self._draw_rows(sum(restart)))
        rows = []
        for row, reset in zip(tensordict.unbind(0), restart, strict=True):
            rows.append(next(fresh).set("_reset", row["_reset"]) if reset else row)
        return stack_rows(rows)

    def _draw_rows(self, n: int) -> list[TensorDictBase]:
        groups, left = divmod(n, self.num_generations)
        if left:
            raise ValueError(
                f"{n} rows are reset at once, which is not a multiple of num_generations={self.num_generations}: "
                "groups are drawn whole"
            )
        return [row for group in self.draw_groups(groups) for row in group.unbind(0)]

    def _copies(self, prompt: dict[str, Any], group_id: int) -> list[TensorDictBase]:
        entries = {k: v if isinstance(v, torch.Tensor) else non_tensor(v) for k, v in prompt.items()}
        entries |= {keys.GROUP_ID: torch.tensor(group_id), keys.GROUP_SIZE: torch.tensor(self.num_generations)}
        empty = torch.Size([])
        return [TensorDict._new_unsafe(dict(entries), batch_size=empty) for _ in range(self.num_generations)]

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Declares what a reset brings along: the query, the dataset's other columns, the prompt's index, the group."""
        shape = self.parent.batch_size
        state = input_spec["full_state_spec"]
        for name in self.dataset.columns:
            state[name] = NonTensor(shape=shape, example_data=self.dataset[0][name])
        for name in (keys.PROMPT_ID, keys.GROUP_ID, keys.GROUP_SIZE):
            state[name] = Unbounded(shape=shape, dtype=torch.int64)
        return input_spec

    def get_extra_state(self) -> dict[str, Any]:
        """Place in the dataset, for ``state_dict``: plain values and one tensor."""
        state = {"next_group_id": self.next_group_id, "fingerprint": self.dataset.fingerprint}
        state["requeue"] = [list(draw) for draw in self._put_back]
        if self.sampler is not None:
            return state | {"generator": self.generator.get_state(), "sampler": self.sampler.state_dict()}
        return state | {"epoch": self.epoch, "position": self.position, "epoch_start": self._epoch_start}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Goes to a place in the dataset, for ``load_state_dict``.

        Raises:
            ValueError: if the state is of another dataset, or of a primer with a sampler where this has none or the
                reverse: the draws would silently be others.
        """
        if state["fingerprint"] != self.dataset.fingerprint:
            raise ValueError(
                f"the state is of a dataset with fingerprint {state['fingerprint']}, this one has "
                f"{self.dataset.fingerprint}: resume with the same data"
            )
        if ("sampler" in state) != (self.sampler is not None):
            had, has = ("a", "none") if self.sampler is None else ("no", "one")
            raise ValueError(f"the state is of a primer with {had} sampler, this one has {has}: resume with the same")
        self.next_group_id = state["next_group_id"]
        self._put_back = deque((index, group_id) for index, group_id in state.get("requeue", ()))
        if self.sampler is not None:
            self.generator.set_state(state["generator"])
            self.sampler.load_state_dict(state["sampler"])
            return
        self.epoch, self.position = state["epoch"], state["position"]
        self.generator.set_state(state["epoch_start"])
        self._start_epoch()
