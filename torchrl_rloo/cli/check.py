"""Checks before a run: their settings, the facts that they read, and command ``torchrl-rloo check``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torchrl_rloo.cli.config import InferenceConfig
from torchrl_rloo.cli.sampling_sections import CollectorConfig, RayConfig, RolloutsConfig, SamplerConfig

if TYPE_CHECKING:
    from torchrl_rloo.cli.rloo_config import RLOOConfig
    from torchrl_rloo.data import PromptDataset
    from torchrl_rloo.diagnostics import TrainingPlan
    from torchrl_rloo.diagnostics.checks import Facts, Finding
    from torchrl_rloo.envs.transforms import RewardTransform
    from torchrl_rloo.modules import TurnPolicy
    from torchrl_rloo.objectives import Preset

PROMPTS = 16  # training prompts that the start model samples a group of, at most those of a step
LEAST_SAMPLES, MOST_SAMPLES = 4, 16  # completions of a prompt from which its groups are estimated
IN_FLIGHT = "finish"  # default of weight updates
OPTIMIZER_STATES = 2  # float32 numbers that AdamW keeps of a trained weight


class CheckError(ValueError):
    """Error of a run that checks refuse."""


class Checked(BaseException):
    """End of a run that only checks, with what it found."""

    def __init__(self, findings: Sequence[Finding], facts: Facts):
        super().__init__(len(findings))
        self.findings, self.facts = findings, facts


def preflight(cfg: RLOOConfig, policy: TurnPolicy, **parts: Any) -> None:
    """Check a run before its first step, and print what is wrong.

    Args:
        cfg: settings of the recipe.
        policy: policy with the start weights.
        **parts: further arguments of :func:`gather_facts`.

    Raises:
        CheckError: if a check finds an error, with ``check.mode=stop``.
    """
    asked = cfg.__dict__.get("checked")  # the settings of command check
    if cfg.check.mode == "off" and asked is None:
        return
    from torchrl_rloo.diagnostics.checks import CHECKS, run_checks, summarize

    facts = gather_facts(asked or cfg, policy, memory=asked is not None, **parts)
    findings = run_checks(facts, {**CHECKS, **cfg.check.load_own()})
    if asked is not None:
        raise Checked(findings, facts)
    wrong = [finding for finding in findings if finding.level != "ok"]
    print(*wrong, f"before the first step: {summarize(findings)}", sep="\n", flush=True)
    errors = [finding for finding in wrong if finding.level == "error"]
    if errors and cfg.check.mode == "stop":
        raise CheckError(f"check.mode=stop refuses {errors[0].check}: {errors[0].sentence}; {errors[0].remedy}")


def check_recipe(main: Callable[[RLOOConfig], None], cfg: RLOOConfig) -> Sequence[Finding]:
    """Run a recipe up to its checks before the first step, and print all that they find.

    The model samples itself, in one process, also if the settings name an engine or ranks. What the recipe writes goes
    to a temporary folder.

    Args:
        main: function of the recipe.
        cfg: settings of the recipe.

    Returns:
        The findings.

    Raises:
        RuntimeError: if the recipe ends without checks.
    """
    from torchrl_rloo.diagnostics.checks import summarize

    one = {"parallel": "none", "shard_size": None, "load_shards": False, "tensor_parallel": 1, "context_parallel": 1}
    with TemporaryDirectory(prefix="torchrl_rloo_check_") as folder:
        alone = replace(
            cfg,
            output_dir=folder,
            resume="never",
            loss=cfg.corrected_loss(),
            train=replace(cfg.train, offload=[], **one),
            sampler=SamplerConfig(),
            collector=CollectorConfig(),
            inference=InferenceConfig(),
            ray=RayConfig(),
            rollouts=RolloutsConfig(),
            log=replace(cfg.log, loggers=[], logger_kwargs={}),
        )
        alone.__dict__["checked"] = cfg
        try:
            main(alone)
        except Checked as done:
            findings, facts = done.findings, done.facts
        else:
            raise RuntimeError("the recipe ended without preflight(...), which it must call before its first step")
    print("", *findings, sep="\n")
    if facts.samples:
        sample = facts.samples[0]
        print(
            f"\na completion of the start model ({sample.tokens} tokens, return {sample.value}): {sample.completion!r}"
        )
    print(f"\n{summarize(findings)}")
    return findings


def gather_facts(
    cfg: RLOOConfig,
    policy: TurnPolicy,
    *,
    model: Any,
    plan: TrainingPlan,
    method: Preset,
    rewards: RewardTransform,
    train_set: PromptDataset,
    eval_set: PromptDataset,
    make_transforms: Callable[[], list],
    chat: dict[str, Any],
    memory: bool = False,
) -> Facts:
    """Collect the input of all checks: settings, prompts, scores of constructed completions, and samples.

    Args:
        cfg: settings of the recipe.
        policy: policy with the start weights.
        model: model to train.
        plan: sizes of the run.
        method: method of the run.
        rewards: rewards of the run.
        train_set: prompts to train on.
        eval_set: held-out prompts.
        make_transforms: factory of the transforms that answer turns.
        chat: limits of a conversation.
        memory: whether to plan the memory of a step.
    """
    from torchrl_rloo.data import encode_prompt
    from torchrl_rloo.diagnostics.checks import Facts, probe_rewards
    from torchrl_rloo.diagnostics.checks.probes import beginning_losses, find_form_hints, required_columns
    from torchrl_rloo.evaluation import sample_start
    from torchrl_rloo.modules.model_files import is_collective

    # Score constructed completions, and completions of the start model
    tokenizer = policy.tokenizer
    train = train_set.beginning.for_tokenizer(tokenizer)
    scoring = {"weights": rewards.weights, "clip_range": rewards.clip_range, "executor": rewards.executor}
    group, sampled = min(max(plan.num_generations, LEAST_SAMPLES), MOST_SAMPLES), {}
    if cfg.generate.temperature > 0:
        start = sample_start(
            policy,
            train,
            rewards.functions,
            prompts=min(PROMPTS, plan.prompts_per_step),
            num_generations=group,
            make_transforms=make_transforms,
            env_kwargs=chat,
            **scoring,
        )
        scale = plan.rows_per_step / len(start.samples)
        sampled = {"samples": start.samples, "failures": start.failures}
        sampled |= {"reward_seconds": start.reward_seconds * scale, "sample_seconds": start.sample_seconds * scale}
    first = encode_prompt(tokenizer, train.rows[0]["query"], **cfg.data.template_kwargs)
    return Facts(
        plan,
        train,
        eval_set.for_tokenizer(tokenizer),
        tokenizer,
        template_kwargs=cfg.data.template_kwargs,
        # A model that ranks share cannot run on rank 0 alone
        beginning_losses=None if is_collective(model) else beginning_losses(model, tokenizer, first),
        stop_ids=policy.stop_ids,
        stop_strings=cfg.generate.stop_strings or (),
        answer_columns=required_columns(rewards.functions, train.columns),
        functions=rewards.names,
        learned_reward=any(_is_learned(function) for function in rewards.functions),
        probes=probe_rewards(rewards.functions, train, tokenizer, **scoring),
        form_hints=find_form_hints(rewards.functions, train, tokenizer, rewards.executor),
        temperature=cfg.generate.temperature,
        loss=method.loss_arguments,
        kl_coeff=0.0 if method.kl is None else float(method.kl.coeff),
        kl_target=None if method.kl is None else method.kl.target,
        normalized=_is_normalized(cfg, method),
        staleness=_staleness(cfg),
        in_flight=(cfg.inference.updater or {}).get("in_flight", IN_FLIGHT) if cfg.inference.engine else None,
        sync_every=cfg.sampler.sync_every,
        eval_every=cfg.eval.every,
        stop_rules=cfg.health.stop_on,
        checkpoint_bytes=_checkpoint_bytes(model),
        checkpoints=cfg.checkpoint.keep + 1,  # the oldest is removed after the newest is written
        free_bytes=shutil.disk_usage(_existing(Path(cfg.output_dir))).free,
        **sampled,
        **(_plan_memory(cfg, plan.max_prompt_tokens) if memory else {}),
    )


def _is_learned(function: Any) -> bool:
    """Return whether a reward function, or one that it wraps, asks a model."""
    from torchrl_rloo.rewards.classifier import SequenceClassifier
    from torchrl_rloo.rewards.judge import LLMJudge
    from torchrl_rloo.rewards.remote import RemoteScorer

    while function is not None and not isinstance(function, SequenceClassifier | LLMJudge | RemoteScorer):
        function = getattr(function, "function", None)
    return function is not None


def _is_normalized(cfg: Any, method: Any) -> bool:
    """Return whether returns are clipped or scaled before they multiply the gradient."""
    scales = method.advantage.get("estimator") == "grpo" or method.advantage.get("normalize") is not None
    return bool(scales or cfg.reward.clip_range or cfg.reward.shaping)


def _staleness(cfg: Any) -> int:
    """Return the weight updates between sampling and training of a row, at most."""
    late = 0 if cfg.sampler.share_weights else max(0, cfg.sampler.sync_every - 1)
    return max(cfg.collector.max_staleness or 0, late)


def _checkpoint_bytes(model: Any) -> int:
    """Return the bytes of a model's weights and of AdamW's states, about."""
    weights = {id(p): p for p in model.parameters()}.values()
    states = 4 * OPTIMIZER_STATES * sum(p.numel() for p in weights if p.requires_grad)
    return states + sum(p.numel() * p.element_size() for p in weights)


def _existing(path: Path) -> Path:
    """Return the nearest folder above a path that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _plan_memory(cfg: Any, prompt_tokens: int) -> dict[str, int]:
    """Return the planned memory of a step and that of the device; nothing if the settings cannot be planned."""
    from torchrl_rloo.cli.plan import memory_settings, model_config
    from torchrl_rloo.diagnostics import plan_memory, read_shape

    try:
        config = model_config(cfg)
        settings, _ = memory_settings(cfg, config, int(os.environ.get("WORLD_SIZE", "1")), None, prompt_tokens)
    except ValueError as error:
        print(f"the memory of a step is not planned: {error}", file=sys.stderr)
        return {}
    known = settings.device_bytes
    if settings.device == "cpu":
        known = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    peak = plan_memory(read_shape(config, cfg.lora, train_vision=cfg.model.train_vision), settings).peak
    return {"peak_bytes": peak} | ({} if known is None else {"device_bytes": known})
