"""Checks before a run: what an engine would fail at late, or silently."""

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


def check_engine(
    arguments: Mapping[str, Any] | None, plan: TrainingPlan, lora: Mapping[str, Any] | None, sampler_dtype: str | None
) -> None:
    """Refuse settings of an engine that do not fit those of the run.

    Args:
        arguments: of the engine; None where no engine samples.
        plan: sizes of the run.
        lora: arguments of the adapter, None without one.
        sampler_dtype: dtype that weights are rounded to before they are sent.

    Raises:
        ValueError: for a context that is too short, or LoRA settings that do not fit each other.
    """
    arguments = arguments or {}
    longest, limit = plan.max_prompt_tokens + plan.max_new_tokens, arguments.get("max_model_len")
    if isinstance(limit, int) and 0 < limit < longest:
        raise ValueError(
            f"inference.engine.max_model_len={limit} would cut completions off: prompts have up to "
            f"{plan.max_prompt_tokens} tokens and generate.max_new_tokens={plan.max_new_tokens}; set at least {longest}"
        )
    if not arguments.get("enable_lora"):
        return
    if lora is None:
        raise ValueError(
            "this inference sends engines only an adapter, and lora=null has none: set lora={r: 16, target_modules: "
            "all-linear}, or inference=vllm"
        )
    if sampler_dtype is not None:
        raise ValueError(
            f"sampler.dtype={sampler_dtype} rounds full weights, but only an adapter is sent: set "
            f"inference.engine.dtype={sampler_dtype}"
        )
    rank, most = lora.get("r", 8), arguments.get("max_lora_rank", 16)  # the defaults of peft and vLLM
    if rank > most:
        raise ValueError(f"lora.r={rank} exceeds inference.engine.max_lora_rank={most}: raise that")


def check_parity(
    policy: TurnPolicy,
    trainer: TransformersWrapper,
    prompts: PromptDataset,
    *,
    sampler_dtype: str | None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Print how far an engine's log-probs are from the trainer's, and what to do about it.

    Args:
        policy: samples by the engine.
        trainer: scores with the training model.
        prompts: sampled from; the first eight are.
        sampler_dtype: dtype that the engine computes in; None if unknown.
        template_kwargs: for the chat template.
    """
    queries = [row[keys.QUERY] for row in islice(prompts, 8)]
    encoded = [torch.tensor(encode_prompt(policy.tokenizer, query, **(template_kwargs or {}))) for query in queries]
    rows = stack_rows([TensorDict({keys.PROMPT_TOKENS: ids}, []) for ids in encoded])
    dtypes = {"sampler_dtype": sampler_dtype, "trainer_dtype": trainer.model.dtype}
    gap, advice = ParityProbe(policy, trainer, rows, max_new_tokens=policy.config.max_new_tokens, **dtypes)()
    print(
        f"sampler against trainer: {gap.mean:.2g} nats a token, at most {gap.max:.2g}", *advice, sep="\n- ", flush=True
    )
