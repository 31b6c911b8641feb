"""Rows of groups for tests of storage, and what actors of these tests run, which they import from here."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import make_tensorclass


def make_row(group_id: int, member: int, size: int = 2, version: int = 0, length: int = 12) -> TensorDictBase:
    """Make a finished row, whose reward is its member's number; entries differ between rows."""
    generator = torch.Generator().manual_seed(1000 * group_id + member)
    tokens = torch.randint(0, 70_000, (length + member,), generator=generator)
    mask = torch.arange(len(tokens)) >= length // 2
    entries = {
        keys.QUERY: NonTensorData([{"role": "user", "content": f"question {group_id}"}]),
        keys.COMPLETION: NonTensorData([{"role": "assistant", "content": f"answer {member}"}]),
        keys.GROUP_ID: torch.tensor(group_id),
        keys.GROUP_SIZE: torch.tensor(size),
        keys.PROMPT_ID: torch.tensor(group_id % 7),
        keys.POLICY_VERSION: torch.tensor(version),
        keys.NUM_TURNS: torch.tensor(1),
        keys.ACTION_VERSIONS: torch.full((int(mask.sum()),), version),
        "tokens": make_tensorclass(Tokens, full=tokens, prompt=tokens[: length // 2]),
        "masks": make_tensorclass(Masks, all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask),
        "log_probs": make_tensorclass(LogProbs, full=-torch.rand(len(tokens), generator=generator) * mask),
        "next": TensorDict({"reward": torch.tensor([[float(member)]]), "done": torch.ones(1, dtype=torch.bool)}, []),
    }
    return TensorDict(entries, [])


def make_groups(*group_ids: int, size: int = 2, **row: Any) -> TensorDictBase:
    """Make the rows of whole groups."""
    return stack_rows([make_row(group_id, member, size, **row) for group_id in group_ids for member in range(size)])


class Writer:
    """Actor that writes rows of a separate process."""

    def extend(self, buffer: Any, *group_ids: int) -> None:
        """Add whole groups to a buffer."""
        buffer.extend(make_groups(*group_ids))

    def ping(self) -> None:
        """Return as long as the process lives."""

    def advance(self, transform: Any, group_id: int, member: int, size: int) -> bool:
        """Send a member to a transform, and return whether it completed its group."""
        return transform.inv(stack_rows([make_row(group_id, member, size)])) is not None


class Drawer:
    """Actor that draws groups in a separate process."""

    def draw(self, primer: Any, groups: int) -> list[int]:
        """Draw groups one after the other, and return their ids."""
        return [int(primer.draw_groups(1)[0][0][keys.GROUP_ID]) for _ in range(groups)]
