"""DataLoadingPrimer: draws prompts from a dataset at every reset, several copies of each.

Replaces TorchRL's class, whose empty ``state_dict`` makes it impossible to resume a run in the middle of an epoch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, NonTensor, Unbounded

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.rows import make_non_tensor, rows_to_reset, stack_rows
from torchrl_rloo.data.sampling import PromptSampler
from torchrl_rloo.data.streamed import StreamedPrompts
from torchrl_rloo.envs.turn_transform import EnvTransform
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments

_LOGGER = logging.getLogger(__name__)


class DatasetExhaustedError(RuntimeError):
    """Error raised when too few prompts are left for another batch."""


class DataLoadingPrimer(EnvTransform):
    """Transform that fills a reset environment with prompts: ``num_generations`` rows per draw, under one ``group_id``.

    Each row gets the dataset's columns (``"query"`` and others) and three int64 scalars: ``"prompt_id"``, the prompt's
    index in the dataset; ``"group_id"``, unique per draw; ``"group_size"``, which is ``num_generations``. The
    ``state_dict`` holds the position in the epoch, so a resumed run draws exactly what it would have drawn.

    Args:
        dataset: the prompts.
        num_generations: ``G``, rows per draw. The environment's batch size must be a multiple of it.
        shuffle: whether to draw each epoch in a new random order; False keeps the dataset's order. None asks the
            dataset.
        seed: seed of the primer's random stream.
        first_group_id: first ``"group_id"``. Primers whose rows share a buffer need disjoint ranges.
        epochs: passes over the dataset; None repeats forever. The draws of a batch may come from two epochs. Draws that
            are left at the end but do not fill a batch are logged and skipped.
        sampler: chooser of the prompts, such as :class:`~torchrl_rloo.data.sampling.MixtureSampler` or
            :class:`~torchrl_rloo.data.PassRatePool`; None draws epochs, or the next rows of a stream. A sampler never
            ends, and its state is saved with the primer's.
        greedy: whether the first member of each group is greedy (``ORIGIN``), as a baseline.
        demonstrations: function from a prompt's columns to the ids of its demonstrations. Further members, one for
            each, take them as their turn; one member at least is sampled. None demonstrates nothing.

    Raises:
        ValueError: if a number is below 1, the epochs do not fill one batch, or a sampler is combined with ``epochs``
            or ``shuffle=False``.

    Example:
        >>> from torchrl_rloo.data import load_prompts
        >>> primer = DataLoadingPrimer(load_prompts([{"prompt": "1+1?"}, {"prompt": "2+2?"}]), shuffle=False)
        >>> [(prompt["query"], group_id) for prompt, group_id in (primer.draw(), primer.draw())]
        [('1+1?', 0), ('2+2?', 1)]
    """

    @with_torchrl_arguments
    def __init__(
        self,
        dataset: PromptDataset,
        *,
        num_generations: int = 1,
        shuffle: bool | None = None,
        seed: int = 0,
        first_group_id: int = 0,
        epochs: int | None = None,
        sampler: PromptSampler | None = None,
        greedy: bool = False,
        demonstrations: Callable[[Mapping[str, Any]], Sequence[torch.Tensor]] | None = None,
    ):
        super().__init__()
        if not isinstance(dataset, PromptDataset):
            raise TypeError(f"dataset is a {type(dataset).__name__}; pass load_prompts(...), which checks its rows")
        for name, value in (("num_generations", num_generations), ("epochs", epochs)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if (greedy or demonstrations is not None) and num_generations < 2:
            raise ValueError("num_generations=1 leaves no sampled member after the greedy or demonstrated ones; use 2")
        shuffle = not dataset.in_order if shuffle is None else shuffle
        if isinstance(dataset, StreamedPrompts) and sampler is None:
            sampler = dataset
        if sampler is not None and (epochs is not None or not shuffle):
            raise ValueError(f"epochs={epochs} and shuffle={shuffle} cannot be combined with a sampler; omit them")
        self.dataset, self.num_generations, self.shuffle, self.epochs = dataset, num_generations, shuffle, epochs
        self.generator = torch.Generator().manual_seed(seed)
        self.epoch, self.position, self.next_group_id = 0, 0, first_group_id
        self.first_group_id, self.sampler = first_group_id, sampler
        self.greedy, self.demonstrations = greedy, demonstrations
        self._requeued: deque[tuple[int, int]] = deque()
        self._journal: list[tuple[int, int]] | None = None  # draws within requeue_on_error
        if sampler is None:
            self._start_epoch()

    def _start_epoch(self) -> None:
        self._epoch_start = self.generator.get_state()
        n = len(self.dataset)
        self._order = torch.randperm(n, generator=self.generator).tolist() if self.shuffle else list(range(n))

    def remaining(self) -> float:
        """Return the number of draws left, re-queued ones included; infinite if ``epochs`` is None."""
        if self.epochs is None:
            return float("inf")
        return (self.epochs - self.epoch) * len(self.dataset) - self.position + len(self._requeued)

    def draw(self) -> tuple[dict[str, Any], int]:
        """Draw the next prompt."""
        prompt_id, group_id = self._draw_ids()
        return self._prompt(prompt_id), group_id

    def _draw_ids(self) -> tuple[int, int]:
        """Return the next ``(prompt_id, group_id)``."""
        if self._requeued:
            index, group_id = self._requeued.popleft()
        else:
            index, group_id = self._next_index(), self.next_group_id
            self.next_group_id += 1
        if self._journal is not None:
            self._journal.append((index, group_id))
        return index, group_id

    def _prompt(self, prompt_id: int) -> dict[str, Any]:
        return {**self.dataset[prompt_id], keys.PROMPT_ID: torch.tensor(prompt_id)}

    def requeue(self, draws: Iterable[tuple[int, int]]) -> None:
        """Queue draws again whose groups were not delivered; the next draws return them first, under the same ids."""
        self._requeued = deque(sorted((*self._requeued, *draws), key=lambda draw: draw[1]))

    @contextmanager
    def requeue_on_error(self) -> Iterator[None]:
        """Queue all draws of this context again if it raises, so that no group is lost."""
        self._journal = []
        try:
            yield
        except BaseException:
            self.requeue(self._journal)
            raise
        finally:
            self._journal = None

    @property
    def num_requeued(self) -> int:
        """Number of re-queued draws, which come before new ones."""
        return len(self._requeued)

    @contextmanager
    def with_requeued(self, draws: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Let a ``state_dict`` that is taken in this context hold these draws as re-queued."""
        kept = self._requeued
        self.requeue(draws)
        try:
            yield
        finally:
            self._requeued = kept

    def draw_groups(self, groups: int) -> list[TensorDictBase]:
        """Draw the next ``groups`` groups; rows have only the dataset's columns, the two ids and the group size."""
        return [self.make_group(*draw) for draw in self.draw_ids(groups)]

    def draw_ids(self, groups: int) -> list[tuple[int, int]]:
        """Draw as :meth:`draw_groups` does, without the rows."""
        if self.remaining() < groups:
            if self.next_group_id == self.first_group_id:
                raise ValueError(
                    f"{len(self.dataset)} prompts x {self.epochs} epochs give {int(self.remaining())} draws, fewer "
                    f"than the {groups} prompts of one batch; add prompts or epochs, or lower the batch size"
                )
            if self.remaining():
                _LOGGER.warning("skipping the last %d prompts, which do not fill a batch", int(self.remaining()))
            raise DatasetExhaustedError(f"{int(self.remaining())} draws are left, a batch needs {groups}")
        return [self._draw_ids() for _ in range(groups)]

    def make_group(self, prompt_id: int, group_id: int) -> TensorDictBase:
        """Return the rows of a group that was drawn before, as :meth:`draw_groups` returned them."""
        return stack_rows(self._copies(self._prompt(prompt_id), group_id))

    def _next_index(self) -> int:
        # A sampler chooses without epochs
        if self.sampler is not None:
            index = self.sampler.draw(self.generator)
            if not 0 <= index < len(self.dataset):
                raise IndexError(
                    f"{type(self.sampler).__name__} chose prompt {index}, but the dataset has {len(self.dataset)} "
                    "prompts; create the sampler with the dataset's size"
                )
            return index
        # Otherwise take the next prompt of the epoch's order
        if self.remaining() < 1:
            raise DatasetExhaustedError(f"all {self.epochs} epochs of {len(self.dataset)} prompts are drawn")
        if self.position == len(self.dataset):
            self.epoch, self.position = self.epoch + 1, 0
            self._start_epoch()
        self.position += 1
        return self._order[self.position - 1]

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if tensordict is None or "_reset" not in tensordict.keys():
            return stack_rows(self._draw_rows(self.parent.batch_size[0]))
        # Replace only the rows that are reset
        resets = rows_to_reset(tensordict)
        fresh = iter(self._draw_rows(sum(resets)))
        rows = []
        for row, reset in zip(tensordict.unbind(0), resets, strict=True):
            rows.append(next(fresh).set("_reset", row["_reset"]) if reset else row)
        return stack_rows(rows)

    def _draw_rows(self, n: int) -> list[TensorDictBase]:
        groups, left = divmod(n, self.num_generations)
        if left:
            raise ValueError(
                f"{n} rows are reset at once, which must be a multiple of num_generations={self.num_generations}, "
                "since groups are drawn whole"
            )
        return [row for group in self.draw_groups(groups) for row in group.unbind(0)]

    def _copies(self, prompt: dict[str, Any], group_id: int) -> list[TensorDictBase]:
        entries = {k: v if isinstance(v, torch.Tensor) else make_non_tensor(v) for k, v in prompt.items()}
        entries |= {keys.GROUP_ID: torch.tensor(group_id), keys.GROUP_SIZE: torch.tensor(self.num_generations)}
        empty = torch.Size([])
        rows = [TensorDict._new_unsafe(dict(entries), batch_size=empty) for _ in range(self.num_generations)]
        if self.greedy or self.demonstrations is not None:
            shown = [] if self.demonstrations is None else list(self.demonstrations(prompt))
            origins = [keys.GREEDY] * self.greedy + [keys.DEMONSTRATION] * len(shown)
            for i, row in enumerate(rows):
                origin = origins[i] if i < min(len(origins), len(rows) - 1) else keys.SAMPLED
                row.set(keys.ORIGIN, torch.tensor(origin))
                if self.demonstrations is not None:
                    ids = shown[i - self.greedy] if origin == keys.DEMONSTRATION else torch.zeros(0, dtype=torch.int64)
                    row.set(keys.DEMONSTRATION_IDS, ids)
        return rows

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Add the entries that a reset writes: the dataset's columns, two ids and the group size."""
        shape = self.parent.batch_size
        state = input_spec["full_state_spec"]
        for name in self.dataset.columns:
            state[name] = NonTensor(shape=shape, example_data=self.dataset[0][name])
        for name in (keys.PROMPT_ID, keys.GROUP_ID, keys.GROUP_SIZE):
            state[name] = Unbounded(shape=shape, dtype=torch.int64)
        return input_spec

    def get_extra_state(self) -> dict[str, Any]:
        """Return the position in the dataset, for ``state_dict``, as plain values and one tensor."""
        state = {"next_group_id": self.next_group_id, "fingerprint": self.dataset.fingerprint}
        state["requeue"] = [list(draw) for draw in self._requeued]
        if self.sampler is not None:
            return state | {"generator": self.generator.get_state(), "sampler": self.sampler.state_dict()}
        return state | {"epoch": self.epoch, "position": self.position, "epoch_start": self._epoch_start}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the position in the dataset, for ``load_state_dict``."""
        if state["fingerprint"] != self.dataset.fingerprint:
            raise ValueError(
                f"the state belongs to a dataset with fingerprint={state['fingerprint']}, but this dataset has "
                f"fingerprint={self.dataset.fingerprint}; resume with the same data"
            )
        if ("sampler" in state) != (self.sampler is not None):
            had, has = ("a", "none") if self.sampler is None else ("no", "one")
            raise ValueError(
                f"the state belongs to a primer with {had} sampler, but this primer has {has}; resume with the same "
                "sampler settings"
            )
        # Continue the ids; groups that were not delivered come first
        self.next_group_id = state["next_group_id"]
        self._requeued = deque((index, group_id) for index, group_id in state.get("requeue", ()))
        if self.sampler is not None:
            self.generator.set_state(state["generator"])
            self.sampler.load_state_dict(state["sampler"])
            return
        # Draw the order of the epoch again, from the generator's state at its start
        self.epoch, self.position = state["epoch"], state["position"]
        self.generator.set_state(state["epoch_start"])
        self._start_epoch()
