"""Rules of a turn: the ids that may follow those that it has, by a grammar, bad words and a smallest length.

The sampler and the scorer replay the same rules on the same ids, so the ratio is of the distribution that was sampled.
Grammars are those of xgrammar, which vLLM uses as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from torchrl_rloo.functional.sampling import SamplingDistribution, unpack_bits

_COMPILERS: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()  # of grammars, by tokenizer and vocabulary
_KINDS = {  # how to check and how to compile each kind of grammar
    "regex": ("from_regex", "compile_regex"),
    "json": ("from_json_schema", "compile_json_schema"),
    "grammar": ("from_ebnf", "compile_grammar"),
}


class TurnRules:
    """Rules of a distribution for a vocabulary of ``vocab_size`` ids."""

    def __init__(self, distribution: SamplingDistribution, tokenizer: Any, stop_ids: Sequence[int], vocab_size: int):
        self.distribution, self.stop_ids, self.vocab_size = distribution, sorted(stop_ids), vocab_size
        self.bind = True  # False for a placeholder row, where everything is allowed
        self.bad_words = [ids for word in distribution.bad_words for ids in _spellings(tokenizer, word)]
        self.grammar = None
        if distribution.structured is not None:
            kind, text = distribution.structured
            xgrammar, compilers = _xgrammar(), _COMPILERS.setdefault(tokenizer, {})
            if vocab_size not in compilers:
                info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
                compilers[vocab_size] = xgrammar.GrammarCompiler(info)  # keeps what it compiled
            self.grammar = getattr(compilers[vocab_size], _KINDS[kind][1])(text)

    def bits(self, lines: int) -> torch.Tensor:
        """Return bits ``[lines, W]`` in which all ids are allowed; see ``token_log_probs``."""
        return torch.full((lines, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def allowed(self, tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return the bits of what is allowed in place of tokens ``[N]``, whose turns begin at ``starts`` ``[N]``."""
        bits, turn, start = self.bits(len(tokens)), Turn(self), 0
        if not self.bind:
            return bits.to(tokens.device)
        for n, (token, first) in enumerate(zip(tokens.tolist(), starts.tolist(), strict=True)):
            if first != start:
                turn, start = Turn(self), first
            turn.fill(bits, n)
            if not bits[n, token // 32].item() >> token % 32 & 1:
                raise ValueError(
                    f"action token {token}, number {n - start} of a turn, is not allowed by min_new_tokens, bad_words "
                    "or structured of generate_kwargs; score rows with the settings that sampled them"
                )
            turn.accept(token)
        return bits.to(tokens.device)


class Turn:
    """Ids of one turn so far, and its place in the grammar."""

    def __init__(self, rules: TurnRules):
        self.rules, self.tokens, self.matcher = rules, [], None
        if rules.grammar is not None:
            self.matcher = _xgrammar().GrammarMatcher(rules.grammar, override_stop_tokens=rules.stop_ids)

    def fill(self, bits: torch.Tensor, line: int) -> None:
        """Clear the bits of the ids that may not come next, in a line of :meth:`TurnRules.bits` on the CPU."""
        if self.matcher is not None and not self.matcher.is_terminated():
            self.matcher.fill_next_token_bitmask(bits, line)
        begun = len(self.tokens) >= self.rules.distribution.min_new_tokens
        forbidden = [] if begun else list(self.rules.stop_ids)
        forbidden += [
            last for *start, last in self.rules.bad_words if self.tokens[-len(start) or len(self.tokens) :] == start
        ]
        words = bits[line].numpy().view(np.uint32)
        for i in forbidden:
            words[i // 32] &= ~np.uint32(1 << i % 32)

    def accept(self, token: int) -> None:
        """Append a token."""
        self.tokens.append(token)
        if self.matcher is not None and not self.matcher.is_terminated():
            self.matcher.accept_token(token)


class SampledTurns:
    """Turns ``[B]`` that are being sampled, and what the next token of each takes from it."""

    def __init__(self, rules: TurnRules, size: int):
        self.rules, self.turns = rules, [Turn(rules) for _ in range(size)] if rules.distribution.has_rules else []

    def state(self, tokens: torch.Tensor, rows: torch.Tensor, live: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``counts`` and ``allowed`` of :func:`process_logits` for some rows of tokens ``[B, t]`` so far."""
        state, vocab_size = {}, self.rules.vocab_size
        if self.rules.distribution.counts_tokens:
            so_far = tokens[rows]
            ones = torch.ones(so_far.shape, device=tokens.device)
            state["counts"] = ones.new_zeros(len(rows), vocab_size).scatter_add_(1, so_far, ones)
        if self.turns:
            bits = self.rules.bits(len(rows))
            for line, row in zip(live.nonzero()[:, 0].tolist(), rows[live].tolist(), strict=True):
                for token in tokens[row, len(self.turns[row].tokens) :].tolist():
                    self.turns[row].accept(token)
                self.turns[row].fill(bits, line)
            state["allowed"] = unpack_bits(bits.to(rows.device), slice(0, vocab_size))
        return state


def turn_starts(tokens: torch.Tensor, positions: torch.Tensor, stop_ids: Sequence[int]) -> torch.Tensor:
    """Return at which of the ``N`` positions the turn of each begins: after tokens that were not sampled, or a stop.

    Shapes: ``tokens [B, T]``, ``positions [B, T]`` bool, to ``[N]`` int64.
    """
    stops = torch.tensor(stop_ids, dtype=tokens.dtype, device=tokens.device)
    before = torch.zeros_like(positions)
    before[:, 1:] = positions[:, :-1] & ~torch.isin(tokens[:, :-1], stops)
    begins = ~before[positions]
    return torch.where(begins, torch.arange(len(begins), device=begins.device), 0).cummax(0).values


def check_rules(distribution: SamplingDistribution, tokenizer: Any) -> None:
    """Raise a ValueError if the grammar or the bad words of a distribution are invalid."""
    for word in distribution.bad_words:
        _spellings(tokenizer, word)
    if distribution.structured is not None:
        grammars, (kind, text) = _xgrammar().Grammar, distribution.structured
        try:
            getattr(grammars, _KINDS[kind][0])(text)
        except Exception as error:
            raise ValueError(f"structured={{{kind}: {text:.80}}} is invalid: {str(error).strip():.300}") from error


def _spellings(tokenizer: Any, word: str) -> list[list[int]]:
    """Return the ids of a bad word, and with a space before if that is one other token, by the rule of vLLM."""
    plain, spaced = (tokenizer.encode(text + word.lstrip(), add_special_tokens=False) for text in ("", " "))
    if not plain:
        raise ValueError(f"bad_words={word!r} has no tokens; remove it")
    return [plain, spaced] if spaced and spaced[0] != plain[0] and len(spaced) == len(plain) else [plain]


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ImportError("structured requires xgrammar; run pip install 'torchrl_rloo[structured]'") from error
    return xgrammar
