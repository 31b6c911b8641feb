"""Parity of sampler and trainer: gaps of their log-probs, and checks of the engine before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import PromptDataset, encode_prompt, keys
from torchrl_rloo.data.rows import (
    action_tokens,
    concatenate,
    gather_actions,
    ragged,
    stack_rows,
    to_lazy_stack,
    unbind_rows,
)
from torchrl_rloo.diagnostics.plan import TrainingPlan
from torchrl_rloo.functional.kl import k3
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.functional.statistics import effective_sample_size
from torchrl_rloo.images.encoder import digests
from torchrl_rloo.images.parts import image_paths
from torchrl_rloo.modules import TransformersWrapper, TurnPolicy
from torchrl_rloo.modules.reference import record_log_probs
from torchrl_rloo.runtime.ranks import Ranks

RATIO_BOUNDS = (0.9, 1.1)

Dtype = torch.dtype | str | None

# Mean and largest gap that rounding explains. Measured between vLLM and transformers at equal weights: in float32 a
# mean of 3e-7 to 1e-5 nats and at most 7e-5; in bfloat16 0.7 to 2.7 % of the surprisal and at most 0.46 nats.
# Weights of another run, or a missing temperature, gave 28 % and more, but only 0.01 nats if the model is certain.
FLOAT32_MEAN, FLOAT32_MAX = 1e-4, 1e-3
BFLOAT16_SHARE, BFLOAT16_MAX = 0.1, 1.0
# Share of tokens outside RATIO_BOUNDS and ESS of the rows from which a correction matters. A model of 30M random
# parameters in bfloat16 has 0.013 and 0.93.
OUTSIDE_LIMIT, ESS_LIMIT = 0.02, 0.9


def row_gap(rows: TensorDictBase, ranks: Ranks | None = None) -> LogProbGap:
    """Compute :func:`log_prob_gap` over the action tokens of the rows that have behavior log-probs, over all ranks."""
    gaps = _row_gaps(rows)
    if ranks is not None:
        told = ranks.all_gather(gaps, "gaps of log-probs")[:: ranks.share_size]
        gaps = RowGaps(*map(torch.cat, zip(*told, strict=True)))
    return total_gap(gaps)


def _row_gaps(rows: TensorDictBase) -> RowGaps:
    """Return the gap on each row that has behavior log-probs, on the CPU."""
    sampled = [row for row in unbind_rows(rows) if keys.LOG_PROBS in row.keys(True)]
    if not sampled:
        return row_gaps(torch.zeros(0, 0), torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool))
    if any(keys.PROXIMAL_LOG_PROBS not in row.keys(True) for row in sampled):
        raise KeyError(
            f"rows have no entry {keys.PROXIMAL_LOG_PROBS!r}; write it with record_log_probs before the first update"
        )
    sampled = stack_rows(sampled)
    actions = action_tokens(sampled)
    sampler, trainer = (
        gather_actions(ragged(sampled, key), actions) for key in (keys.LOG_PROBS, keys.PROXIMAL_LOG_PROBS)
    )
    return RowGaps(*(value.cpu() for value in row_gaps(sampler, trainer, actions.mask)))


def parity_metrics(rows: TensorDictBase, ranks: Ranks | None = None) -> dict[str, float]:
    """Compute the metrics ``parity/...`` of a batch: the gap between sampler and trainer log-probs.

    Args:
        rows: batch size ``[B]``, scored by :func:`~torchrl_rloo.modules.record_log_probs` before the first update on
            them. Rows without behavior log-probs are ignored.
        ranks: ranks that call together, each with its own rows, of which there may be none. None compares alone.

    Returns:
        Values by name (``torchrl_rloo.diagnostics.DEFINITIONS``); empty if no action token was compared.

    Raises:
        KeyError: if a row with behavior log-probs lacks the trainer's.
    """
    gap = row_gap(rows, ranks)
    if not gap.tokens:
        return {}
    figures = {"mean": gap.mean, "max": gap.max, "k3": gap.k3, "ess": gap.row_ess, "outside": gap.outside_share}
    return {f"parity/{name}": float(value) for name, value in figures.items()}


class ParityReport(NamedTuple):
    """Result of :func:`probe_parity`."""

    gap: LogProbGap
    advice: list[str]


@torch.no_grad()
def probe_parity(
    policy: Callable[[TensorDictBase], TensorDictBase] | None,
    scorer: TransformersWrapper,
    prompts: TensorDictBase,
    *,
    max_new_tokens: int = 64,
    sampler_dtype: Dtype = None,
    trainer_dtype: Dtype = None,
    ranks: Ranks | None = None,
) -> ParityReport:
    """Sample a turn per prompt, score it with the training model, and advise on the gap of their log-probs.

    The run's random streams stay unchanged, since every row has its own seed. With ranks, all call this function; the
    policy of rank 0 samples.
    """
    if not len(prompts):
        raise ValueError("prompts is empty; a probe requires at least one row")
    ranks, limit = Ranks.single() if ranks is None else ranks, torch.tensor(max_new_tokens)

    def sample() -> TensorDictBase:
        rows = [row.select(keys.PROMPT_TOKENS, keys.IMAGES, strict=False) for row in prompts.unbind(0)]
        for i, row in enumerate(rows):
            row.update({keys.SEED: torch.tensor(i), keys.MAX_NEW_TOKENS: limit})
        return policy(stack_rows(rows))

    rows = to_lazy_stack(ranks.broadcast(sample))
    rows = concatenate(rows.unbind(0)) if rows.ndim == 2 else rows  # several samples per prompt
    gap, plain = row_gap(record_log_probs(scorer, rows, ranks=ranks)), None
    # Score the plain softmax as well: the sampler may leave temperature and truncation out of its log-probs
    exact = _is_float32(sampler_dtype, trainer_dtype)
    if not _is_rounding(gap, exact) and scorer.distribution != SamplingDistribution():
        unsupported = stack_rows([row.exclude(keys.SUPPORT_IDS[0]) for row in rows.unbind(0)])
        plain_scorer = scorer.get_new_version(generate_kwargs={})
        plain = row_gap(record_log_probs(plain_scorer, unsupported, ranks=ranks))
    return ParityReport(gap, advice(gap, sampler_dtype, trainer_dtype, plain=plain))


def advice(
    gap: LogProbGap, sampler_dtype: Dtype = None, trainer_dtype: Dtype = None, *, plain: LogProbGap | None = None
) -> list[str]:
    """Return the steps that reduce a gap between sampler and trainer, most urgent first; none if it is of float32.

    Unless both dtypes are float32, the gap may be as large as bfloat16 explains. ``plain`` is the gap of the same rows
    if the trainer scores the plain softmax; None if the policy samples from it.
    """
    if not gap.tokens:
        return ["no action token was compared; probe with prompts that the sampler continues"]
    if not gap.mean.isfinite():
        return ["a log-prob of the sampler or the trainer is NaN or infinite; look for NaN weights or float16 overflow"]
    exact = _is_float32(sampler_dtype, trainer_dtype)
    if not _is_rounding(gap, exact):
        return _advise_on_error(gap, exact, plain)
    return [] if _is_rounding(gap, exact=True) else _advise_on_rounding(gap, _dtype_name(sampler_dtype))


def _advise_on_error(gap: LogProbGap, exact: bool, plain: LogProbGap | None) -> list[str]:
    """Return the advice for a gap larger than rounding explains."""
    # First rule out log-probs of another distribution, which explain a gap at equal weights
    if plain is not None and _is_rounding(plain, exact) and plain.mean < gap.mean / 2:
        return [
            f"the sampler reports log-probs of the plain softmax (gap of {plain.mean:.2g} nats per token), not of the "
            f"sampled distribution (gap of {gap.mean:.2g}); make it report the latter, e.g. in vLLM with "
            "logprobs_mode='processed_logprobs'"
        ]
    # Otherwise list the possible causes in the order to check them
    mean, largest = _limits(gap, exact)
    steps = [
        f"the gap of {gap.mean:.2g} nats per token (largest {gap.max:.2g}) exceeds rounding (at most {mean:.2g}, "
        f"largest {largest:g}), so the sampler may have other weights; push the weights, reset its prefix cache and "
        "probe again",
        "if the weights are equal, compare temperature, top_k, top_p, min_p and repetition_penalty of sampler and "
        "scorer, and set logprobs_mode='processed_logprobs' in vLLM, whose default ignores all of them",
    ]
    if not exact:
        steps.append(
            "if these settings are also equal, probe with float32 in sampler and trainer, where equal weights differ "
            f"by less than {FLOAT32_MAX:g} nats at any token"
        )
    return steps


def _advise_on_rounding(gap: LogProbGap, sampler_dtype: str | None) -> list[str]:
    """Return the advice for a gap that rounding to bfloat16 explains."""
    steps = [
        f"bfloat16 explains the gap of {gap.mean:.2g} nats per token (largest {gap.max:.2g}), but so would weights a "
        "few steps old; to tell them apart, probe with float32 in sampler and trainer, where every gap must be below "
        f"{FLOAT32_MAX:g} nats",
        "if memory allows, use float32 in sampler and trainer (measured: at most 1e-5 nats per token); in only one of "
        "them it does not help (0.022 nats against 0.020 with bfloat16 in both)",
    ]
    # Reduce rounding in the sampler, unless it uses float32 already
    if sampler_dtype != "float32":
        steps += [
            "set hf_overrides={'head_dtype': 'float32'} in vLLM, since the trainer's head is always float32 (measured: "
            "it halves the gap of a small trained model, and removes 11 % if the layers below cause the rounding)",
            "on GPUs of compute capability 8.0 or more set VLLM_BATCH_INVARIANT=1, so that vLLM's log-probs do not "
            "depend on the rest of the batch, and use the same attention kernel in sampler and trainer if possible",
        ]
    # Correct for the gap in the loss only if it changes ratios noticeably
    if gap.outside_share > OUTSIDE_LIMIT or gap.row_ess < ESS_LIMIT:
        low, high = RATIO_BOUNDS
        steps.append(
            f"{gap.outside_share:.1%} of the tokens have a ratio outside [{low}, {high}], and the rows' effective "
            f"sample size is {gap.row_ess:.0%}; correct for the gap with RLOOLoss(old_log_probs='proximal', "
            "correction='sequence_truncate'), or with correction='tis' if ratio='token'"
        )
    return steps


def _limits(gap: LogProbGap, exact: bool) -> tuple[float, float]:
    if exact:
        return FLOAT32_MEAN, FLOAT32_MAX
    return max(FLOAT32_MEAN, BFLOAT16_SHARE * float(gap.surprisal)), BFLOAT16_MAX


def _is_rounding(gap: LogProbGap, exact: bool) -> bool:
    """Return whether rounding to float32 (``exact``) or bfloat16 explains the gap."""
    mean, largest = _limits(gap, exact)
    return bool(gap.mean <= mean) and bool(gap.max <= largest)


def _is_float32(sampler_dtype: Dtype, trainer_dtype: Dtype) -> bool:
    return _dtype_name(sampler_dtype) == _dtype_name(trainer_dtype) == "float32"


def _dtype_name(dtype: Dtype) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


# Gaps of two sets of log-probs


class LogProbGap(NamedTuple):
    """Result of :func:`log_prob_gap`, float64 scalars; all except ``tokens`` are NaN without action tokens."""

    mean: torch.Tensor
    max: torch.Tensor
    k3: torch.Tensor
    row_ess: torch.Tensor
    outside_share: torch.Tensor
    surprisal: torch.Tensor
    tokens: torch.Tensor


class RowGaps(NamedTuple):
    """Gap on each row, ``[B]`` float64 each; those of several batches may be concatenated."""

    tokens: torch.Tensor
    size: torch.Tensor
    largest: torch.Tensor
    k3: torch.Tensor
    outside: torch.Tensor
    surprisal: torch.Tensor
    log_ratio: torch.Tensor


@torch.no_grad()
def row_gaps(sampler_log_probs: torch.Tensor, trainer_log_probs: torch.Tensor, mask: torch.Tensor) -> RowGaps:
    """Compare the log-probs of each row; the arguments are those of :func:`log_prob_gap`."""
    sampler, trainer = sampler_log_probs.double(), trainer_log_probs.double()
    difference = torch.where(mask, trainer - sampler, 0.0)
    size, ratio = difference.abs(), difference.exp()
    inside = (ratio >= RATIO_BOUNDS[0]) & (ratio <= RATIO_BOUNDS[1])
    return RowGaps(
        tokens=mask.sum(1).double(),
        size=size.sum(1),
        largest=torch.cat([size.new_zeros(len(size), 1), size], 1).amax(1),
        k3=torch.where(mask, k3(sampler, trainer), 0.0).sum(1),
        outside=(mask & ~inside).sum(1).double(),
        surprisal=-torch.where(mask, sampler, 0.0).sum(1),
        log_ratio=difference.sum(1),
    )


def total_gap(gaps: RowGaps) -> LogProbGap:
    """Return the gap on all rows together."""
    tokens = gaps.tokens.sum()
    return LogProbGap(
        mean=gaps.size.sum() / tokens,
        max=gaps.largest.max() if tokens else tokens.new_tensor(torch.nan),
        k3=gaps.k3.sum() / tokens,
        row_ess=effective_sample_size(gaps.log_ratio[gaps.tokens > 0]),
        outside_share=gaps.outside.sum() / tokens,
        surprisal=gaps.surprisal.sum() / tokens,
        tokens=tokens,
    )


def log_prob_gap(sampler_log_probs: torch.Tensor, trainer_log_probs: torch.Tensor, mask: torch.Tensor) -> LogProbGap:
    r"""Compare the sampler's log-probs :math:`\log \mu` with the trainer's :math:`\log \pi` of the same tokens.

    Both are ``[B, A]`` in nats; the mask is True on action tokens. All values are over all tokens or rows. Rows
    without action tokens are ignored. A NaN difference makes ``mean`` and ``max`` NaN, and counts as outside.

    Example:
        >>> gap = log_prob_gap(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.5]]), torch.ones(1, 2).bool())
        >>> gap.mean.item(), gap.max.item(), gap.outside_share.item()
        (0.25, 0.5, 0.5)
    """
    return total_gap(row_gaps(sampler_log_probs, trainer_log_probs, mask))


# Checks before the first step


def check_engine(
    arguments: Mapping[str, Any] | None, plan: TrainingPlan, lora: Mapping[str, Any] | None, sampler_dtype: str | None
) -> None:
    """Raise if settings of an engine do not fit those of the run.

    Args:
        arguments: arguments of the engine; None if no engine samples.
        plan: sizes of the run.
        lora: arguments of the LoRA adapter; None if there is none.
        sampler_dtype: dtype that weights are rounded to before they are sent; None sends them unchanged.

    Raises:
        ValueError: if the engine's context is too short, or LoRA settings cannot be combined.
    """
    arguments = arguments or {}
    longest, limit = plan.max_prompt_tokens + plan.max_new_tokens, arguments.get("max_model_len")
    if isinstance(limit, int) and 0 < limit < longest:
        raise ValueError(
            f"inference.engine.max_model_len={limit} must be at least {longest}: prompts have up to "
            f"{plan.max_prompt_tokens} tokens, and generate.max_new_tokens={plan.max_new_tokens}"
        )
    # Checks of an engine that receives only an adapter
    if not arguments.get("enable_lora"):
        return
    if lora is None:
        raise ValueError(
            "lora=null cannot be combined with inference.engine.enable_lora=true, which sends only an adapter; set "
            "lora={r: 16, target_modules: all-linear}, or inference=vllm"
        )
    if sampler_dtype is not None:
        raise ValueError(
            f"sampler.dtype={sampler_dtype} cannot be combined with inference.engine.enable_lora=true, which sends no "
            f"full weights; set inference.engine.dtype={sampler_dtype}"
        )
    rank, most = lora.get("r", 8), arguments.get("max_lora_rank", 16)  # defaults of peft and vLLM
    if rank > most:
        raise ValueError(f"lora.r={rank} exceeds inference.engine.max_lora_rank={most}; raise the latter")


def check_parity(
    policy: TurnPolicy | None,
    trainer: TransformersWrapper,
    prompts: PromptDataset,
    *,
    sampler_dtype: str | None,
    template_kwargs: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Print the gap between an engine's log-probs and the trainer's, with advice on it.

    Args:
        policy: policy that samples with the engine; None on ranks other than 0.
        trainer: wrapper of the training model, which scores the samples.
        prompts: prompts, of which the first eight are sampled.
        sampler_dtype: dtype that the engine computes in; None if unknown.
        template_kwargs: arguments of the chat template; None passes none.
        ranks: ranks that score together, all of which call this function. None is a single process.
    """
    queries = [row[keys.QUERY] for row in islice(prompts, 8)]
    encoded = [torch.tensor(encode_prompt(trainer.tokenizer, query, **(template_kwargs or {}))) for query in queries]
    rows = [TensorDict({keys.PROMPT_TOKENS: ids}, []) for ids in encoded]
    if trainer.images is not None:
        for row, query in zip(rows, queries, strict=True):
            row.set(keys.IMAGES, digests(image_paths([] if isinstance(query, str) else query)).view(-1, 32))
    rows = stack_rows(rows)
    dtypes = {"sampler_dtype": sampler_dtype, "trainer_dtype": trainer.model.dtype}
    limit = trainer.config.max_new_tokens
    gap, advice = probe_parity(policy, trainer, rows, max_new_tokens=limit, ranks=ranks, **dtypes)
    if ranks is not None and not ranks.is_main:
        return
    print(
        f"sampler against trainer: {gap.mean:.2g} nats per token, at most {gap.max:.2g}",
        *advice,
        sep="\n- ",
        flush=True,
    )
