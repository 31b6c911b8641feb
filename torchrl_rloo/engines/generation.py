"""Sampling from a Hugging Face causal language model that keeps the exact ids and their exact distribution.

``model.generate`` is not used. It drops a sampled EOS that equals the padding id, and ignores per-row seeds and limits.
With a penalty or truncation, its log-probs are not those of the sampled distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import torch

from torchrl_rloo.engines.head import Head
from torchrl_rloo.engines.turn_rules import SampledTurns, TurnRules
from torchrl_rloo.functional import SamplingDistribution
from torchrl_rloo.functional.products import fast_layers
from torchrl_rloo.functional.sampling import NEVER, Support, draw_tokens, process_logits, sample_tokens
from torchrl_rloo.images.encoder import PassImages, encoder_of

_MIN_KEPT = 0.75  # share of the lines above which dropping the others costs more than it saves


@dataclass(frozen=True)
class GenerationConfig:
    """Sampling distribution and stop conditions of a turn.

    ``seed`` is that of the policy's random stream; None draws from torch's global generator. ``stop_token_ids`` end a
    turn like the end-of-sequence ids of tokenizer and model, which ``ignore_eos`` ignores. The stop token, and the ids
    that spell a stop string, were sampled, so they are action tokens.
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
            raise ValueError(f"stop_strings={list(self.stop_strings)} must not contain an empty string; remove it")
        if self.ignore_eos and (self.distribution.min_new_tokens or self.distribution.structured):
            raise ValueError("ignore_eos=True cannot be combined with min_new_tokens or structured; set it to False")

    @classmethod
    def from_kwargs(cls, generate_kwargs: Mapping[str, Any] | None) -> GenerationConfig:
        """Create a config from fields of this class and of ``SamplingDistribution``, and ``do_sample``."""
        kwargs = dict(generate_kwargs or {})
        do_sample = kwargs.pop("do_sample", None)
        distribution_names = {f.name for f in fields(SamplingDistribution)}
        valid = {f.name for f in fields(cls)} - {"distribution"} | distribution_names
        if unknown := sorted(set(kwargs) - valid):
            raise TypeError(
                f"unknown sampling arguments {unknown}; valid: {sorted(valid | {'do_sample'})}. "
                "For several samples of a prompt use num_samples of the wrapper."
            )
        # Translate do_sample to a temperature
        if do_sample is True and kwargs.get("temperature") == 0:
            raise ValueError(
                "do_sample=True cannot be combined with temperature=0, which is greedy; remove one of them"
            )
        if do_sample is False:
            if kwargs.get("temperature", 0) != 0:
                raise ValueError(
                    f"do_sample=False is greedy and cannot be combined with temperature={kwargs['temperature']}; "
                    "set temperature=0"
                )
            kwargs["temperature"] = 0.0
        distribution = SamplingDistribution(**{k: kwargs.pop(k) for k in distribution_names & set(kwargs)})
        for name in ("stop_token_ids", "stop_strings"):
            if isinstance(kwargs.get(name), str | int):
                kwargs[name] = (kwargs[name],)
            kwargs[name] = tuple(kwargs.get(name) or ())
        return cls(distribution=distribution, **kwargs)


class Generated(NamedTuple):
    """One sampled turn.

    Attributes:
        tokens: ``[n]`` int64, sampled ids. The last is the stop token unless ``truncated``.
        log_probs: ``[n]`` float32, in nats, under the sampled distribution.
        truncated: True if the token limit ended the turn.
        support: ids that top-k, top-p and min-p left at each token, int32 like their sizes; None if not recorded.
        versions: ``[n]`` int64, policy version that sampled each token; None if the sampler does not report it.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    truncated: bool
    support: Support | None = None
    versions: torch.Tensor | None = None


def end_of_sequence_ids(tokenizer, model=None) -> tuple[int, ...]:
    """Return the sorted ids that end a turn according to the tokenizer and, if given, the model."""
    return tuple(sorted({tokenizer.eos_token_id, *model_stop_ids(model)} - {None}))


def model_stop_ids(model) -> tuple[int, ...]:
    """Return the ids that end a turn according to the model's generation config; empty for None."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return tuple(i for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None)


@torch.no_grad()
def generate(
    model,
    prompts: Sequence[torch.Tensor],
    distribution: SamplingDistribution,
    *,
    uniforms: torch.Tensor,
    limits: torch.Tensor,
    stop_ids: Sequence[int],
    stop_strings: Sequence[str] = (),
    tokenizer=None,
    head: Head | None = None,
    record_support: bool = False,
    images: Sequence[Sequence[str]] | None = None,
) -> list[Generated]:
    """Sample one turn after each of ``B`` prompts ``[P_i]``, and return them on the CPU. Equal prompts are read once.

    ``uniforms`` ``[B, L]`` has a random number for each token that may be sampled; ``limits`` ``[B]`` bounds the rows.
    With a ``head``, logits are the scorer's, in float32 even for narrower weights. ``record_support`` also returns the
    ids that the truncation left at each token. ``images`` are the files of each prompt's images.

    A model that a probe finds inexact raises ``NotImplementedError``.
    """
    from torchrl_rloo.engines.exactness import pads_prompts  # imports torchrl, which takes 2 s

    sample = partial(
        _sample_batch,
        model,
        distribution,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
        head=head,
        record_support=record_support,
    )
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    images = [()] * len(prompts) if images is None else images
    # The scorer's layers use the same products
    with fast_layers(model):
        if pads_prompts(model, head) or len(lengths.unique()) == 1:
            return sample(prompts, uniforms, limits, images)
        # Sample each length of prompts by itself if only those decode exactly
        turns: dict[int, Generated] = {}
        for length in lengths.unique():
            rows = (lengths == length).nonzero()[:, 0].tolist()
            parts = ([values[row] for row in rows] for values in (prompts, images))
            turns.update(zip(rows, sample(next(parts), uniforms[rows], limits[rows], next(parts)), strict=True))
    return [turns[row] for row in range(len(prompts))]


def _sample_batch(
    model,
    distribution: SamplingDistribution,
    prompts: Sequence[torch.Tensor],
    uniforms: torch.Tensor,
    limits: torch.Tensor,
    images: Sequence[Sequence[str]],
    *,
    stop_ids: Sequence[int],
    stop_strings: Sequence[str],
    tokenizer,
    head: Head | None,
    record_support: bool,
) -> list[Generated]:
    """Sample prompts that are read together."""
    from torchrl_rloo.engines.decoder import Decoder  # imports transformers, which takes 2 s

    # Allocate the results; the decoder's lines are the rows that are still being sampled
    device = model.device
    batch, length = uniforms.shape
    longest = max(len(prompt) + int(limit) for prompt, limit in zip(prompts, limits, strict=True))
    encoder = encoder_of(tokenizer)
    shown = None if encoder is None else PassImages(encoder, prompts, images)
    decoder = Decoder(model, head, prompts, longest, distribution.repetition_penalty != 1, shown)
    uniforms, stops = uniforms.to(device), torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
    first_limit = int(limits.min())
    limits = limits.to(device)
    tokens = torch.zeros(batch, length, dtype=torch.long, device=device)
    log_probs = torch.zeros(batch, length, device=device)
    counts = limits.clone()
    stopped = torch.zeros(batch, dtype=torch.bool, device=device)
    active = torch.arange(batch, device=device)  # row of each line of the decoder
    live = torch.ones_like(active, dtype=torch.bool)  # lines whose row is still being sampled
    supports = _SupportRecorder(tokens) if record_support else None
    turns = SampledTurns(TurnRules(distribution, tokenizer, stop_ids, decoder.logits.shape[1]), batch)
    for step in range(length):
        # Draw a token for every line. Tokens of finished rows are cut off at the end
        numbers, state = uniforms[active, step], turns.state(tokens[:, :step], active, live)
        if supports is None:
            sampled, sampled_log_probs = sample_tokens(decoder.logits, distribution, numbers, decoder.seen, **state)
        else:
            full = process_logits(decoder.logits, distribution, decoder.seen, **state)
            sampled, sampled_log_probs = draw_tokens(full, numbers)
            supports.add(active[live], step, full[live])
        tokens[active, step], log_probs[active, step] = sampled, sampled_log_probs

        # Mark the rows that end here
        done = torch.isin(sampled, stops)
        if stop_strings:
            done |= _contains(tokenizer, tokens[active, : step + 1], stop_strings)
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

        # Feed the tokens to the model. Drop finished lines only if that saves more than moving the cache costs
        if remaining < _MIN_KEPT * len(active):
            decoder.keep(live)
            active, sampled, live = active[live], sampled[live], live[live]
        decoder.feed(sampled)

    # Cut each row at its end
    lengths = counts.tolist()
    recorded = supports.split(lengths) if supports is not None else [None] * batch
    rows = zip(tokens.cpu(), log_probs.cpu(), lengths, stopped.tolist(), recorded, strict=True)
    return [Generated(t[:n].clone(), p[:n].clone(), not s, support) for t, p, n, s, support in rows]


class _SupportRecorder:
    """Recorder of the ids that a truncation left at each step, which splits them by row."""

    def __init__(self, tokens: torch.Tensor):
        self.sizes = torch.zeros_like(tokens, dtype=torch.int32)
        self.rows: list[torch.Tensor] = []
        self.ids: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor, step: int, log_probs: torch.Tensor) -> None:
        kept = log_probs > NEVER / 2
        lines, ids = kept.nonzero(as_tuple=True)
        self.sizes[rows, step] = kept.sum(1, dtype=torch.int32)
        self.rows.append(rows[lines])
        self.ids.append(ids.int())

    def split(self, lengths: Sequence[int]) -> list[Support]:
        # Sort by row; the sort is stable, so the steps of a row keep their order
        order = torch.cat(self.rows).argsort(stable=True)
        ids, sizes = torch.cat(self.ids)[order].cpu(), self.sizes.cpu()
        row_ids = ids.split(sizes.sum(1).tolist())
        return [Support(i.clone(), s[:n].clone()) for i, s, n in zip(row_ids, sizes, lengths, strict=True)]


def _contains(tokenizer, tokens: torch.Tensor, texts: Sequence[str]) -> torch.Tensor:
    tail = 4 * max(map(len, texts)) + 8  # a character has at most four bytes, and a byte takes at most one token
    decoded = tokenizer.batch_decode(tokens[:, -tail:].tolist())
    return torch.tensor([any(t in d for t in texts) for d in decoded], dtype=torch.bool, device=tokens.device)
