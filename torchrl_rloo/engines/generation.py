"""Sampling from a Hugging Face causal language model, with the exact ids and the exact distribution kept.

Why not ``model.generate``: it drops a sampled EOS that equals the padding id, ignores per-row seeds and limits, and
returns log-probs of a distribution other than the sampled one when a penalty or truncation is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from torchrl_rloo.engines.head import Head
from torchrl_rloo.functional import SamplingDistribution, process_logits, sample_tokens
from torchrl_rloo.functional.sampling import Support, draw_tokens


@dataclass(frozen=True)
class GenerationConfig:
    """What to generate: the sampling distribution and when to stop.

    Args:
        max_new_tokens: limit on the tokens of one turn.
        distribution: what tokens are drawn from.
        stop_token_ids: ids that end a turn, besides the tokenizer's and the model's own end-of-sequence ids. The stop
            token is an action token: it was sampled.
        stop_strings: texts that end a turn once the decoded turn contains one; the ids that spell it are kept.
        seed: of the policy's own random stream; None draws from torch's global one.
        ignore_eos: go on after the tokenizer's and the model's own end-of-sequence ids.
    """

    max_new_tokens: int = 128
    distribution: SamplingDistribution = field(default_factory=SamplingDistribution)
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if any(not s for s in self.stop_strings):
            raise ValueError(f"stop_strings={list(self.stop_strings)} must not hold an empty string")

    @classmethod
    def from_kwargs(cls, generate_kwargs: Mapping[str, Any] | None) -> GenerationConfig:
        """Reads a flat ``generate_kwargs`` mapping, and refuses names it does not know.

        Raises:
            TypeError: for an unknown argument, with the list of known ones.
            ValueError: for a value out of range, or ``do_sample=False`` with a temperature above 0.

        Example:
            >>> GenerationConfig.from_kwargs({"max_new_tokens": 8, "temperature": 0.5}).distribution.temperature
            0.5
        """
        kwargs = dict(generate_kwargs or {})
        do_sample = kwargs.pop("do_sample", None)
        in_distribution = {f.name for f in fields(SamplingDistribution)}
        known = {f.name for f in fields(cls)} - {"distribution"} | in_distribution
        if unknown := sorted(set(kwargs) - known):
            raise TypeError(
                f"unknown sampling arguments {unknown}; known are {sorted(known | {'do_sample'})}. "
                "For several samples of a prompt use num_samples of the wrapper."
            )
        if do_sample is True and kwargs.get("temperature") == 0:
            raise ValueError("do_sample=True, but temperature=0 is greedy: leave one of the two out")
        if do_sample is False:
            if kwargs.get("temperature", 0) != 0:
                raise ValueError(f"do_sample=False is greedy, but temperature={kwargs['temperature']}: set it to 0")
            kwargs["temperature"] = 0.0
        distribution = SamplingDistribution(**{k: kwargs.pop(k) for k in in_distribution & set(kwargs)})
        for name in ("stop_token_ids", "stop_strings"):
            if isinstance(kwargs.get(name), str | int):
                kwargs[name] = (kwargs[name],)
            kwargs[name] = tuple(kwargs.get(name) or ())
        return cls(distribution=distribution, **kwargs)


class Generated(NamedTuple):
    """One sampled turn.

    Attributes:
        tokens: ``[n]`` int64, the sampled ids; the last is the stop token unless ``truncated``.
        log_probs: ``[n]`` float32, in nats, under the distribution sampled.
        truncated: the token limit ended the turn.
        support: the ids that top-k, top-p and min-p left at each token, int32 like their sizes; None if not asked for.
        versions: ``[n]`` int64, policy version that sampled each token; None if the sampler does not keep count.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    truncated: bool
    support: Support | None = None
    versions: torch.Tensor | None = None


def end_of_sequence_ids(tokenizer, model=None) -> tuple[int, ...]:
    """The ids that end a turn by the tokenizer's and, if given, the model's own account."""
    ids = {tokenizer.eos_token_id}
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids.update(own if isinstance(own, list | tuple) else [own])
    return tuple(sorted(ids - {None}))


@torch.no_grad()
def generate(
    model,
    prompts: Sequence[torch.Tensor],
    config: GenerationConfig,
    *,
    uniforms: torch.Tensor,
    limits: torch.Tensor,
    stop_ids: Sequence[int],
    tokenizer=None,
    head: Head | None = None,
    record_support: bool = False,
) -> list[Generated]:
    """Samples one turn after each prompt. Equal prompts are read once and share the result.

    Args:
        model: a causal language model in evaluation mode.
        prompts: ``B`` tensors of ids ``[P_i]``, of any lengths at least 1.
        config: the distribution and the stop strings.
        uniforms: ``[B, L]`` numbers in ``[0, 1)``, one for each token that may be sampled.
        limits: ``[B]`` int64, the most tokens each row may sample, at most ``L``.
        stop_ids: ids that end a turn.
        tokenizer: decodes for stop strings; not needed without them.
        head: the model's head, if it was found: logits are then the scorer's, in float32 for narrower weights, too.
        record_support: whether to return which ids the truncation left at each token; not for temperature 0.

    Returns:
        One :class:`Generated` a row, on the CPU.
    """
    from torchrl_rloo.engines.decoder import Decoder  # imports transformers, which takes 2 s

    device = model.device
    decoder = Decoder(model, head, prompts, config.distribution.repetition_penalty != 1)
    batch, length = uniforms.shape
    uniforms, stops = uniforms.to(device), torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
    first_limit = int(limits.min())
    limits = limits.to(device)
    tokens = torch.zeros(batch, length, dtype=torch.long, device=device)
    log_probs = torch.zeros(batch, length, device=device)
    counts = limits.clone()
    stopped = torch.zeros(batch, dtype=torch.bool, device=device)
    active = torch.arange(batch, device=device)  # the row of each line of the decoder
    live = torch.ones_like(active, dtype=torch.bool)  # lines whose row is still being sampled
    supports = _Supports(tokens) if record_support else None
    for step in range(length):
        # Draw a token for every line; what finished rows draw is cut off at the end
        numbers = uniforms[active, step]
        if supports is None:
            sampled, sampled_log_probs = sample_tokens(decoder.logits, config.distribution, numbers, decoder.seen)
        else:
            full = process_logits(decoder.logits, config.distribution, decoder.seen).log_softmax(-1)
            sampled, sampled_log_probs = draw_tokens(full, numbers)
            supports.add(active[live], step, full[live])
        tokens[active, step], log_probs[active, step] = sampled, sampled_log_probs

        # Note which rows end here
        done = torch.isin(sampled, stops)
        if config.stop_strings:
            done |= _contains(tokenizer, tokens[active, : step + 1], config.stop_strings)
        ended = live & done
        if ended.any():
            rows = active[ended]
            stopped[rows], counts[rows] = True, step + 1
            live = live & ~done
        if step + 1 >= first_limit:
            live = live & (limits[active] > step + 1)
        remaining = int(live.sum())
        if remaining == 0:
            break

        # Feed the tokens to the model, without finished lines once that pays for moving the cache
        if remaining < 0.75 * len(active):
            decoder.keep(live)
            active, sampled, live = active[live], sampled[live], live[live]
        decoder.feed(sampled)
    lengths = counts.tolist()
    recorded = supports.of_rows(lengths) if supports is not None else [None] * batch
    rows = zip(tokens.cpu(), log_probs.cpu(), lengths, stopped.tolist(), recorded, strict=True)
    return [Generated(t[:n].clone(), p[:n].clone(), not s, support) for t, p, n, s, support in rows]


class _Supports:
    """Collects which ids a truncation left at each step, and hands them out row by row."""

    def __init__(self, tokens: torch.Tensor):
        self.sizes = torch.zeros_like(tokens, dtype=torch.int32)
        self.rows: list[torch.Tensor] = []
        self.ids: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor, step: int, log_probs: torch.Tensor) -> None:
        kept = ~log_probs.isneginf()
        lines, ids = kept.nonzero(as_tuple=True)
        self.sizes[rows, step] = kept.sum(1, dtype=torch.int32)
        self.rows.append(rows[lines])
        self.ids.append(ids.int())

    def of_rows(self, lengths: Sequence[int]) -> list[Support]:
        order = torch.cat(self.rows).argsort(stable=True)  # by row, and within a row by step as they came
        ids, sizes = torch.cat(self.ids)[order].cpu(), self.sizes.cpu()
        own = ids.split(sizes.sum(1).tolist())
        return [Support(i.clone(), s[:n].clone()) for i, s, n in zip(own, sizes, lengths, strict=True)]


def _contains(tokenizer, tokens: torch.Tensor, texts: Sequence[str]) -> torch.Tensor:
    tail = 4 * max(map(len, texts)) + 8  # a character has at most four bytes, and a byte at most one token
    decoded = tokenizer.batch_decode(tokens[:, -tail:].tolist())
    return torch.tensor([any(t in d for t in texts) for d in decoded], dtype=torch.bool, device=tokens.device)
