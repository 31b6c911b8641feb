"""Rows that exercise every part of a loss, and a policy that is exact in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import action_tokens, place_actions
from torchrl_rloo.modules.policies import ScoredActions

SHAPES = ["ppaa", "ppaaccaaa", "pppppapcca", "pa", "ppaaaaaaccac", "pccaap", "paapaaa"]  # a marks the action tokens
ADVANTAGES = [1.0, -0.5, 2.0, -1.5, 0.0, 0.7, -1.0]
TRUNCATED = [False, True, False, False, True, False, False]


class BigramPolicy(torch.nn.Module):
    """Simplest language model: the logits of a token are the table row of the previous token."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(vocabulary, vocabulary, dtype=torch.float64, generator=generator))

    def distributions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probs of all tokens but the first, ``[T - 1, V]``."""
        return self.table[tokens[:-1]].log_softmax(-1)

    def score(self, rows: TensorDictBase) -> ScoredActions:
        actions = action_tokens(rows)
        log_probs, entropies = [], []
        for row in rows.unbind(0):
            full, action = self.distributions(row[keys.TOKENS]), row[keys.ACTION_MASK][1:]
            log_probs.append(full.gather(-1, row[keys.TOKENS][1:, None])[:, 0][action])
            entropies.append(-(full.exp() * full).sum(-1)[action])
        return ScoredActions(
            log_probs=place_actions(torch.cat(log_probs), actions),
            entropy=place_actions(torch.cat(entropies), actions),
            actions=actions,
        )

    def forward(self, rows: TensorDictBase) -> ScoredActions:
        return self.score(rows)


def build_rows(own: Callable[[torch.Tensor], torch.Tensor], vocabulary: int, dtype: torch.dtype) -> TensorDictBase:
    """Build rows of a policy whose weights have moved since; ``own`` returns its current log-probs ``[T]``."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for i, shape in enumerate(SHAPES):
        tokens = torch.randint(3, vocabulary, (len(shape),), generator=generator)
        action = torch.tensor([c == "a" for c in shape])

        def moved(start: torch.Tensor, by: float, action=action) -> torch.Tensor:
            noise = by * torch.randn(len(start), dtype=torch.float64, generator=generator)
            return torch.where(action, start + noise, 0.0).to(dtype)

        now = own(tokens).double()
        proximal = moved(now, 0.25)
        entropy = torch.where(action, 6 * torch.rand(len(shape), dtype=torch.float64, generator=generator), 0.0)
        row = TensorDict(
            {
                keys.GROUP_ID: torch.tensor(i // 2),
                keys.TRUNCATED: torch.tensor([TRUNCATED[i]]),
                keys.ADVANTAGE: torch.tensor([[ADVANTAGES[i]]], dtype=dtype),
                keys.PROXIMAL_LOG_PROBS: proximal,
                keys.PROXIMAL_ENTROPY: entropy.to(dtype),
                keys.REF_LOG_PROBS: moved(now, 0.4),
            }
        )
        row.set("tokens", Tokens(full=tokens))
        row.set("masks", Masks(all_assistant_mask=action, all_attention_mask=torch.ones_like(action)))
        row.set("log_probs", LogProbs(full=moved(proximal.double(), 0.3)))
        result.append(row)
    return stack_rows(result)


def changed(rows: TensorDictBase, key, values: Sequence[torch.Tensor]) -> TensorDictBase:
    """Return the rows with another entry, one value for each."""
    result = [row.clone() for row in rows.unbind(0)]
    for row, value in zip(result, values, strict=True):
        row.set(key, value)
    return stack_rows(result)


def token_advantages(rows: TensorDictBase) -> TensorDictBase:
    """Return the rows with an advantage per action token, ``[T, 1]``, of both signs."""
    generator = torch.Generator().manual_seed(1)
    values = []
    for row in rows.unbind(0):
        action, advantage = row[keys.ACTION_MASK], row[keys.ADVANTAGE]
        noise = torch.randn(len(action), 1, dtype=torch.float64, generator=generator)
        values.append(torch.where(action[:, None], advantage.double() + noise, 0.0).to(advantage.dtype))
    return changed(rows, keys.ADVANTAGE, values)


def weighted(rows: TensorDictBase) -> TensorDictBase:
    """Return the rows with sample weights."""
    return changed(rows, keys.SAMPLE_WEIGHT, [torch.tensor(0.25 * (i + 1)) for i in range(len(rows))])


def merged(rows: TensorDictBase) -> TensorDictBase:
    """Return the rows with multiplicities of one to three."""
    return changed(rows, keys.MULTIPLICITY, [torch.tensor(1 + i % 3) for i in range(len(rows))])


@pytest.fixture(scope="session")
def rows_with():
    """Function that adds entries, as in ``rows_with(rows, "token_advantages", "weighted", "merged")``."""
    variants = {"token_advantages": token_advantages, "weighted": weighted, "merged": merged}

    def change(rows: TensorDictBase, *names: str) -> TensorDictBase:
        for name in names:
            rows = variants[name](rows)
        return rows

    return change


@pytest.fixture(scope="module")
def bigram() -> BigramPolicy:
    """Policy over 24 tokens in float64."""
    return BigramPolicy(24, seed=0)


@pytest.fixture(scope="module")
def bigram_rows(bigram: BigramPolicy) -> TensorDictBase:
    """Rows that the policy has moved away from since, in float64."""

    def own(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taken = bigram.distributions(tokens).gather(-1, tokens[1:, None])[:, 0]
        return torch.cat([taken.new_zeros(1), taken])

    return build_rows(own, 24, torch.float64)


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., TensorDictBase]:
    """Function ``rows_of(own, vocabulary, dtype)``; see :func:`build_rows`."""
    return build_rows
