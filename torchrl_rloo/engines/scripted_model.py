"""Engine that plays scripted turns with the log-probs of a model, to run a training loop without sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchrl_rloo.engines.base import Request, Sample
from torchrl_rloo.engines.head import score_positions
from torchrl_rloo.engines.transformers_engine import TransformersEngine


class ScriptedModelEngine(TransformersEngine):
    """Engine that answers each prompt with one of its scripted turns, and receives weights like a real engine.

    The log-probs are those of the model with its current weights, so ratios, parity and the self-test of weight updates
    are meaningful.

    Args:
        model: causal language model of the log-probs.
        tokenizer: see :class:`TransformersEngine`.
        turns: token ids of the turns by the ids of a prompt. A request's seed chooses one of them.
        default: turns of other prompts, such as those of later turns.

    Raises:
        ValueError: if there are no turns, or one of them is empty.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> model = build_model(build_tokenizer(), seed=0).eval()
        >>> engine = ScriptedModelEngine(model, turns={(5, 6): [[7, 8], [9]]}, default=[[1]])
        >>> [sample.tokens for sample in engine.generate([Request(ids, 4, seed=0) for ids in ([5, 6], [5])])]
        [[7, 8], [1]]
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        turns: Mapping[tuple[int, ...], Sequence[Sequence[int]]],
        default: Sequence[Sequence[int]],
    ):
        super().__init__(model, tokenizer)
        if not all(each and all(each) for each in (default, *turns.values())):
            raise ValueError("turns and default must have at least one turn each, of at least one token")
        self.turns, self.default = dict(turns), default

    @torch.no_grad()
    def _sample(self, requests: Sequence[Request]) -> list[Sample]:
        # Choose the turns
        chosen = [self.turns.get(tuple(request.prompt), self.default) for request in requests]
        turns = [list(each[request.seed % len(each)]) for each, request in zip(chosen, requests, strict=True)]
        played = [turn[: request.limit] for turn, request in zip(turns, requests, strict=True)]
        # Score them, padded on the right
        rows = [torch.tensor([*request.prompt, *turn]) for request, turn in zip(requests, played, strict=True)]
        starts = torch.tensor([len(request.prompt) for request in requests])[:, None]
        ends = torch.tensor([len(row) for row in rows])[:, None]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        places = torch.arange(tokens.shape[1])[None]
        positions = (places >= starts) & (places < ends)
        log_probs = self._score(tokens, positions, requests[0].distribution).split([len(turn) for turn in played])
        return [
            Sample(turn, scores.tolist(), "stop" if turn == whole else "length", [self.version] * len(turn))
            for turn, whole, scores in zip(played, turns, log_probs, strict=True)
        ]

    def _score(self, tokens: torch.Tensor, positions: torch.Tensor, distribution: Any) -> torch.Tensor:
        """Return the log-probs ``[N]`` of the tokens at ``positions``; 0 for a greedy distribution."""
        if distribution.temperature == 0:
            return torch.zeros(int(positions.sum()))
        device = self.model.device
        scored = score_positions(
            self.model, self.head, tokens.to(device), positions.to(device), distribution, entropy=False
        )
        return scored.log_probs.float().cpu()
