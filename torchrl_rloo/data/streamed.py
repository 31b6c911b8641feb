"""Prompts of a source that is larger than memory, or has no end: read as they are drawn, and kept on disk.

Row ``i`` of the source, without dropped ones, has the ``prompt_id`` ``i`` in every epoch. Each row that was read is in
a temporary file (in ``TMPDIR``), so that re-queued groups and later epochs find it. Memory holds 8 bytes a row.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from torchrl_rloo.data.prompts import PromptDataset, canonical_content

UNKNOWN_LENGTH = 2**62
_FIRST = 256  # rows that are read at once, for checks before a run


class StreamedPrompts(PromptDataset):
    """Checked rows that are read once, as far as they are drawn, and the sampler that draws among the next ``buffer``.

    ``len`` returns :data:`UNKNOWN_LENGTH`. ``beginning`` has the first rows, which are also ``rows``.
    """

    beginning: PromptDataset = None

    def __init__(self, rows: Iterable[dict[str, Any]], buffer: int, max_prompt_length: int | None):
        self._source, self._file, self._ends = iter(rows), tempfile.TemporaryFile(), array("Q", [0])
        self._digest, self.buffer, self.max_prompt_length = hashlib.sha256(), buffer, max_prompt_length
        self.epoch, self.position, self.waiting = 0, 0, []  # the next row to wait, and those that a draw chooses from
        while self.num_read < _FIRST and self._read():
            pass
        self.beginning = PromptDataset(self[i] for i in range(self.num_read))
        self.rows, self.chat = self.beginning.rows, False

    @property
    def num_read(self) -> int:
        """Number of rows that were read so far."""
        return len(self._ends) - 1

    def _read(self) -> bool:
        """Read one more row of the source; return False at its end."""
        if (row := next(self._source, None)) is None:
            return False
        self._digest.update(canonical_content(row).encode())
        content = pickle.dumps(row)
        if os.pwrite(self._file.fileno(), content, self._ends[-1]) < len(content):
            raise OSError(f"no space in {tempfile.gettempdir()} for the rows of a stream; set TMPDIR")
        self._ends.append(self._ends[-1] + len(content))
        return True

    def __len__(self) -> int:
        return UNKNOWN_LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.num_read:
            raise IndexError(f"row {index} of the stream is not among the {self.num_read} that were read")
        start, end = self._ends[index], self._ends[index + 1]
        return pickle.loads(os.pread(self._file.fileno(), end - start, start))  # written by this process alone

    def __str__(self) -> str:
        return f"{'chat' if self.conversational else 'text'} prompts of a stream, {self.buffer:,} at a time"

    @property
    def fingerprint(self) -> str:
        """Hash of the beginning; that of all rows is in the state."""
        return self.beginning.fingerprint

    def encode(self, tokenizer, **template_kwargs: Any) -> list[list[int]]:
        """Return the ids of the beginning."""
        return self.beginning.encode(tokenizer, **template_kwargs)

    def encoded(self, tokenizer, **template_kwargs: Any) -> None:
        """Return None: no ids are kept."""

    def longest(self, tokenizer, **template_kwargs: Any) -> int:
        """Return the bound of the prompts in tokens."""
        if self.max_prompt_length is None:
            raise ValueError("streaming requires max_prompt_length, since no one knows the longest prompt; set it")
        return self.max_prompt_length

    @property
    def counts(self) -> Counter[str]:
        """Rows read from the source, and epochs done."""
        return Counter({"stream/rows": self.num_read, "stream/epochs": self.epoch})

    def draw(self, generator: torch.Generator) -> int:
        """Return the number of a random one of the next rows; an epoch ends with the source."""
        while len(self.waiting) < self.buffer and (self.position < self.num_read or self._read()):
            self.waiting.append(self.position)
            self.position += 1
        if not self.waiting:
            self.epoch, self.position = self.epoch + 1, 0
            return self.draw(generator)
        place = int(torch.randint(len(self.waiting), (), generator=generator))
        self.waiting[place], self.waiting[-1] = self.waiting[-1], self.waiting[place]
        return self.waiting.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the waiting rows, and a hash of the rows that were read."""
        state = {"epoch": self.epoch, "position": self.position, "buffer": self.buffer, "read": self.num_read}
        return state | {"digest": self._digest.hexdigest(), "waiting": torch.tensor(self.waiting, dtype=torch.int64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read the source again up to a position; raise ``ValueError`` if it has other rows than before."""
        if state["buffer"] != self.buffer:
            raise ValueError(f"the state has buffer={state['buffer']}, this stream {self.buffer}; resume with the same")
        while self.num_read < state["read"] and self._read():
            pass
        if self.num_read <= state["read"] and self._digest.hexdigest() != state["digest"]:
            raise ValueError(f"the first {state['read']} rows of the stream have changed; resume with the same data")
        self.epoch, self.position, self.waiting = state["epoch"], state["position"], state["waiting"].tolist()
