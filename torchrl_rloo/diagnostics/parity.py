"""Do the sampler and the trainer give the same tokens the same log-probs? Measured before a run and at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import action_tokens, as_lazy, concatenate, gather_actions, ragged, stack_rows
from torchrl_rloo.diagnostics.statistics.parity import RATIO_BOUNDS, LogProbGap, log_prob_gap
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.modules.recording import record_log_probs

Dtype = torch.dtype | str | None

# What rounding explains of the mean and of the largest gap. Measured between vLLM and transformers at equal weights: in
# float32 3e-7 to 1e-5 nats and at most 7e-5; in bfloat16 0.7 to 2.7 % of the surprisal and at most 0.46 nats. With the
# weights of another run, or without the temperature: 28 % and more, though only 0.01 nats where the model is sure.
FLOAT32_MEAN, FLOAT32_MAX = 1e-4, 1e-3
BFLOAT16_SHARE, BFLOAT16_MAX = 0.1, 1.0
# Where a correction begins to matter: share of the tokens outside RATIO_BOUNDS, ESS of the rows. In bfloat16 a model of
# 30M random parameters came to 0.013 and 0.93.
OUTSIDE_LIMIT, ESS_LIMIT = 0.02, 0.9


def row_gap(rows: TensorDictBase, trainer_log_probs: NestedKey = keys.PROXIMAL_LOG_PROBS) -> LogProbGap:
    """:func:`log_prob_gap` over the action tokens of the rows that carry behaviour log-probs.

    Args:
        rows: batch size ``[B]``.
        trainer_log_probs: where each row has those of the training model, ``[T]`` in nats.

    Raises:
        KeyError: if a row that carries behaviour log-probs lacks the trainer's.
    """
    sampled = [row for row in rows.unbind(0) if keys.LOG_PROBS in row.keys(True)] if len(rows) else []
    if not sampled:
        return log_prob_gap(torch.zeros(0, 0), torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool))
    if any(trainer_log_probs not in row.keys(True) for row in sampled):
        raise KeyError(
            f"rows have no entry {trainer_log_probs!r}: write it with record_log_probs before the first update"
        )
    sampled = stack_rows(sampled)
    actions = action_tokens(sampled)
    sampler, trainer = (gather_actions(ragged(sampled, k), actions) for k in (keys.LOG_PROBS, trainer_log_probs))
    return log_prob_gap(sampler, trainer, actions.mask)


def parity_metrics(rows: TensorDictBase, trainer_log_probs: NestedKey = keys.PROXIMAL_LOG_PROBS) -> dict[str, float]:
    """``parity/...``: how far the sampler's log-probs of a batch lie from the trainer's; see ``DEFINITIONS``.

    Args:
        rows: batch size ``[B]``, scored by :func:`~torchrl_rloo.modules.record_log_probs` before the first update on
            them. Rows without behaviour log-probs do not count.
        trainer_log_probs: where the scores are.

    Returns:
        The metrics; none if no action token was compared.

    Raises:
        KeyError: if a row that carries behaviour log-probs lacks the trainer's.
    """
    gap = row_gap(rows, trainer_log_probs)
    if not gap.tokens:
        return {}
    figures = {"mean": gap.mean, "max": gap.max, "k3": gap.k3, "ess": gap.row_ess, "outside": gap.outside}
    return {f"parity/{name}": float(value) for name, value in figures.items()}


class ParityReport(NamedTuple):
    """What :class:`ParityProbe` found.

    Attributes:
        gap: between the sampler and the trainer.
        advice: what to do about it, most urgent first; empty where the two agree to float32.
    """

    gap: LogProbGap
    advice: list[str]


class ParityProbe:
    """Samples a turn of each prompt, scores it with the training model, and says what a gap between the two means.

    For the start of a run, and after a weight update that is in doubt. It touches no random stream of the run: each of
    its rows has a seed of its own. Where the scorer's distribution is not the plain softmax, a large gap is measured
    once more against that, since samplers that leave temperature or truncation out of their log-probs are common.

    Args:
        policy: what samples: anything that continues rows of ``("tokens", "prompt")`` and writes ``tokens``, ``masks``
            and ``log_probs`` as :class:`TransformersWrapper` does.
        scorer: the training model's wrapper, with ``generate=False`` and the sampling settings of the policy.
        prompts: rows with ``("tokens", "prompt")``, batch size ``[B]``; a few are enough. They are left as they are.
        max_new_tokens: most tokens of a turn.
        seed: of the first row; each further one has the next.
        sampler_dtype: what the sampler computes in, e.g. ``torch.bfloat16``; None if unknown.
        trainer_dtype: the same of the trainer.
        micro_batch_size: rows scored at once; None for all.

    Raises:
        ValueError: if there are no prompts.
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        scorer: TransformersWrapper,
        prompts: TensorDictBase,
        *,
        max_new_tokens: int = 64,
        seed: int = 0,
        sampler_dtype: Dtype = None,
        trainer_dtype: Dtype = None,
        micro_batch_size: int | None = None,
    ):
        if not len(prompts):
            raise ValueError("prompts is empty: a probe needs at least one row to sample from")
        self.policy, self.scorer, self.prompts = policy, scorer, ragged(prompts, keys.PROMPT_TOKENS)
        self.max_new_tokens, self.seed, self.micro_batch_size = max_new_tokens, seed, micro_batch_size
        self.sampler_dtype, self.trainer_dtype = sampler_dtype, trainer_dtype

    @torch.no_grad()
    def __call__(self) -> ParityReport:
        rows = as_lazy(self.policy(self._rows()))
        rows = concatenate(rows.unbind(0)) if rows.ndim == 2 else rows  # several samples a prompt
        gap, plain = self._gap(rows, self.scorer), None
        dtypes = (self.sampler_dtype, self.trainer_dtype)
        if not _explained(gap, _exact(*dtypes)) and self.scorer.distribution != SamplingDistribution():
            unsupported = stack_rows([row.exclude(keys.SUPPORT_IDS[0]) for row in rows.unbind(0)])
            plain = self._gap(unsupported, self.scorer.get_new_version(generate_kwargs={}))
        return ParityReport(gap, advice(gap, *dtypes, plain=plain))

    def _rows(self) -> TensorDictBase:
        limit = torch.tensor(self.max_new_tokens)
        seeded = [
            {keys.PROMPT_TOKENS: prompt, keys.SEED: torch.tensor(self.seed + i), keys.MAX_NEW_TOKENS: limit}
            for i, prompt in enumerate(self.prompts)
        ]
        return stack_rows([TensorDict(row, []) for row in seeded])

    def _gap(self, rows: TensorDictBase, scorer: TransformersWrapper) -> LogProbGap:
        return row_gap(record_log_probs(scorer, rows, micro_batch_size=self.micro_batch_size))


def advice(
    gap: LogProbGap, sampler_dtype: Dtype = None, trainer_dtype: Dtype = None, *, plain: LogProbGap | None = None
) -> list[str]:
    """What to do about a gap, in the order in which to do it; empty where sampler and trainer agree to float32.

    Args:
        gap: between the sampler and the trainer.
        sampler_dtype: what the sampler computes in; None if unknown. Unless both ends are float32, a gap is judged by
            what bfloat16 explains.
        trainer_dtype: the same of the trainer.
        plain: the gap of the same rows where the trainer scores the plain softmax; None if that is what is sampled.

    Returns:
        One sentence for each step.
    """
    if not gap.tokens:
        return ["no action token was compared: probe with prompts that the sampler answers"]
    if not gap.mean.isfinite():
        return [
            "a log-prob of the sampler or the trainer is NaN or infinite: look for NaN weights, or float16 overflow"
        ]
    exact = _exact(sampler_dtype, trainer_dtype)
    if not _explained(gap, exact):
        return _errors(gap, exact, plain)
    return [] if _explained(gap, exact=True) else _rounding(gap, _name(sampler_dtype))


def _errors(gap: LogProbGap, exact: bool, plain: LogProbGap | None) -> list[str]:
    """Of a gap that rounding does not explain."""
    if plain is not None and _explained(plain, exact) and plain.mean < gap.mean / 2:
        return [
            f"the sampler's log-probs are those of the plain softmax ({plain.mean:.2g} nats a token from it, "
            f"{gap.mean:.2g} from the distribution that is sampled): have it report what it samples from, vLLM by "
            "logprobs_mode='processed_logprobs'"
        ]
    mean, largest = _limits(gap, exact)
    steps = [
        f"the gap of {gap.mean:.2g} nats a token (largest {gap.max:.2g}) is more than rounding explains (at most "
        f"{mean:.2g}, largest {largest:g}): the sampler may have other weights, so push them, have it drop its prefix "
        "cache, and probe again",
        "if the weights are equal, compare the temperature, top_k, top_p, min_p and repetition_penalty of the sampler "
        "and the scorer, and have vLLM report logprobs_mode='processed_logprobs': its default leaves them all out",
    ]
    if not exact:
        steps.append(
            "if those are equal too, probe with float32 at both ends: equal weights then differ by less than "
            f"{FLOAT32_MAX:g} nats at any token"
        )
    return steps


def _rounding(gap: LogProbGap, sampler_dtype: str | None) -> list[str]:
    """Of a gap that narrow floats explain."""
    steps = [
        f"the gap of {gap.mean:.2g} nats a token (largest {gap.max:.2g}) is no more than bfloat16 explains, "
        "but weights a few steps old look the same: with float32 at both ends every gap must be below "
        f"{FLOAT32_MAX:g} nats",
        "where memory allows, use float32 at both ends (measured: at most 1e-5 nats a token); at one end it does not "
        "help (0.022 nats against 0.020 with bfloat16 at both)",
    ]
    if sampler_dtype != "float32":
        steps += [
            "give vLLM a float32 head, as the trainer's always is, by hf_overrides={'head_dtype': 'float32'}: measured "
            "to halve the gap of a small trained model, and to take off 11 % where the layers below do the rounding",
            "on GPUs of compute capability 8.0 or more set VLLM_BATCH_INVARIANT=1, so that vLLM's log-probs do not "
            "depend on what else is in the batch, and let both ends use the same attention kernel if they can",
        ]
    if gap.outside > OUTSIDE_LIMIT or gap.row_ess < ESS_LIMIT:
        low, high = RATIO_BOUNDS
        steps.append(
            f"{gap.outside:.1%} of the tokens have a ratio outside [{low}, {high}], and the rows' effective sample "
            f"size is {gap.row_ess:.0%}: correct for it by RLOOLoss(old_log_probs='proximal', "
            "correction='sequence_truncate'), or with ratio='token' by correction='tis'"
        )
    return steps


def _limits(gap: LogProbGap, exact: bool) -> tuple[float, float]:
    if exact:
        return FLOAT32_MEAN, FLOAT32_MAX
    return max(FLOAT32_MEAN, BFLOAT16_SHARE * float(gap.surprisal)), BFLOAT16_MAX


def _explained(gap: LogProbGap, exact: bool) -> bool:
    """Whether rounding explains the gap: that of float32 if ``exact``, else that of bfloat16."""
    mean, largest = _limits(gap, exact)
    return bool(gap.mean <= mean) and bool(gap.max <= largest)


def _exact(sampler_dtype: Dtype, trainer_dtype: Dtype) -> bool:
    return _name(sampler_dtype) == _name(trainer_dtype) == "float32"


def _name(dtype: Dtype) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
