"""Checks before a run, of errors that would otherwise show late or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDict

from torchrl_rloo.data import PromptDataset, encode_prompt, keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.diagnostics.parity import ParityProbe
from torchrl_rloo.diagnostics.plan import TrainingPlan
from torchrl_rloo.modules import TransformersWrapper, TurnPolicy
from torchrl_rloo.runtime.ranks import Ranks


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
    rows = stack_rows([TensorDict({keys.PROMPT_TOKENS: ids}, []) for ids in encoded])
    dtypes = {"sampler_dtype": sampler_dtype, "trainer_dtype": trainer.model.dtype}
    limit = trainer.config.max_new_tokens
    gap, advice = ParityProbe(policy, trainer, rows, max_new_tokens=limit, ranks=ranks, **dtypes)()
    if ranks is not None and not ranks.is_main:
        return
    print(
        f"sampler against trainer: {gap.mean:.2g} nats per token, at most {gap.max:.2g}",
        *advice,
        sep="\n- ",
        flush=True,
    )
