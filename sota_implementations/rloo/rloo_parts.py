"""The parts of the loop in rloo_sync.py, made from its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hydra.utils import instantiate
from rloo_engine import check_engine, make_policy, make_updater, probe
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector, RefillingCollector
from torchrl_rloo.data import (
    MixtureSampler,
    PromptDataset,
    keys,
    longest_prompt,
    merge_identical,
    micro_batches,
)
from torchrl_rloo.diagnostics import (
    Evaluation,
    TrainingPlan,
    completion_metrics,
    parity_metrics,
)
from torchrl_rloo.embedded import resolve_model, resolve_task
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.tasks import TaskBase
from torchrl_rloo.envs.transforms import KLRewardTransform, RewardTransform, ShapingTransform
from torchrl_rloo.functional import ESTIMATORS, parse_dtype
from torchrl_rloo.modules import (
    AdapterReference,
    TransformersWrapper,
    add_adapter,
    context_length,
    frozen_copy,
    frozen_reference,
    load_model,
    record_log_probs,
)
from torchrl_rloo.objectives import PRESETS, AdaptiveKLCoefficient, Preset, RLOOLoss
from torchrl_rloo.replay import (
    DeferredRerolls,
    EachScore,
    GroupCache,
    MCAdvantage,
    PassRatePool,
    WeightedScores,
    ZeroSignalFilter,
    drop_zero_advantage,
)
from torchrl_rloo.replay.cache import FIRST_GROUP_ID
from torchrl_rloo.replay.outcomes import Returns
from torchrl_rloo.rewards import Executor, load_reward, make_executor
from torchrl_rloo.run import Checkpointer, RunLogger, linear_schedule

HEADLINE = ("reward", "eval/greedy", "eval/sampled", "time/step")


def build(cfg: dict, output: Path) -> SimpleNamespace:
    """The parts of the loop, made from the settings."""
    model_name = resolve_model(cfg["model"]["name"], cfg["seed"], log=print)
    model, tokenizer = load_model(**(cfg["model"] | {"name": model_name}))
    if cfg["lora"] is not None:
        model = add_adapter(model, cfg["lora"])
    template = cfg["data"].get("template_kwargs") or {}
    task = resolve_task(**cfg["task"])
    train_set, eval_set = task.load(**cfg["data"], seed=cfg["seed"], tokenizer=tokenizer)
    plan = TrainingPlan(
        **cfg["plan"],
        train_prompts=len(train_set),
        eval_prompts=len(eval_set),
        max_prompt_tokens=longest_prompt(tokenizer, (row["query"] for row in chain(train_set, eval_set)), **template),
        max_new_tokens=cfg["generate"]["max_new_tokens"],
        context_length=context_length(model),
    )
    print(f"{model_name}: {model.num_parameters():,} parameters\ntraining: {train_set}\nheld out: {eval_set}\n{plan}")

    check_engine(cfg, plan)
    sampler = make_sampler(model, **cfg["sampler"])
    preset, kl_coeff = make_preset(cfg, plan)
    turns = {"tokenizer": tokenizer, "generate_kwargs": {"seed": cfg["seed"], **cfg["generate"]}}
    trainer = TransformersWrapper(model, generate=False, layout=cfg["train"]["layout"], **turns)
    loss_fn = RLOOLoss(trainer, **preset.loss)
    limits = {"micro_batch_size": plan.micro_batch_size, "max_tokens": cfg["train"]["micro_batch_tokens"]}
    executor = make_executor(**cfg["reward"].pop("executor"))
    rewards, shaping = make_rewards(task, executor, output, **cfg["reward"])
    after_rewards = list(shaping)
    if kl_coeff != 0:
        reference = frozen_reference(trainer) if cfg["lora"] is None else AdapterReference(trainer)
        masked = loss_fn.mask_truncated_completions
        after_rewards.append(
            KLRewardTransform(reference, preset.kl_in_reward, mask_truncated_completions=masked, **limits)
        )
    if preset.advantage.get("rewards") == "normalize_then_sum":
        preset = replace(preset, advantage={"reward_weights": rewards.weights} | preset.advantage)
    curriculum = make_curriculum(task, train_set, plan, rewards, **cfg["curriculum"])
    env = DatasetChatEnv(
        train_set,
        tokenizer,
        prompts_per_batch=plan.prompts_per_step,
        num_generations=plan.num_generations,
        rewards=rewards,
        after_rewards=after_rewards,
        sampler=curriculum.sampler,
        seed=cfg["seed"],
        template_kwargs=template,
    )
    scorer = task.make_scorer() if cfg["eval"]["scorer"] is None else load_reward(cfg["eval"]["scorer"])
    evaluation = {k: v for k, v in cfg["eval"].items() if k not in ("scorer", "every")}
    evaluation |= {"extract": task.extract_answer, "executor": executor, "env_kwargs": {"template_kwargs": template}}
    advantage = MCAdvantage(plan.num_generations, **preset.advantage)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(plan.rows_per_step),
        sampler=SamplerWithoutReplacement(),
        transform=advantage,
        batch_size=plan.rows_per_step // plan.minibatches,
        generator=torch.Generator().manual_seed(cfg["seed"]),
    )
    optimizer = torch.optim.AdamW(model.parameters(), **cfg["optimizer"])
    scheduler = linear_schedule(optimizer, plan.optimizer_steps, **cfg["schedule"])
    # last, since an engine takes its time to start: what is wrong with the other settings has shown by now
    policy, engine = make_policy(cfg, model_name, sampler, turns)
    collector = LLMCollector(env, policy, weight_updater=make_updater(cfg, model, sampler, policy, engine))
    if engine is not None:
        probe(cfg, policy, trainer, [row["query"] for row in islice(eval_set, 8)], template)
    log = {"loggers": cfg["log"]["loggers"], "logger_kwargs": cfg["log"]["logger_kwargs"]}
    logger = RunLogger(output, total_steps=plan.steps, headline=HEADLINE, **log)
    stateful = dict(model=model, sampler=sampler, optimizer=optimizer, scheduler=scheduler)
    collect, kept = make_collect(collector, trainer, plan, make_signal(rewards, preset), limits, curriculum)
    stateful |= dict(collector=collector, buffer=buffer, logger=logger) | kept
    stateful |= {"kl_coeff": kl_coeff} if hasattr(kl_coeff, "state_dict") else {}
    return SimpleNamespace(
        plan=plan,
        model=model,
        tokenizer=tokenizer,
        rewards=rewards,
        quarantine=rewards.runner.quarantine,
        collector=collector,
        collect=collect,
        describe=partial(describe, rewards, loss_fn, curriculum.counted),
        staleness=partial(staleness, collector),
        report_progress=partial(report_progress, rewards, collector, plan),
        reward_seconds=partial(reward_seconds, rewards),
        buffer=buffer,
        loss_fn=loss_fn,
        record=partial(record, trainer, loss_fn, limits, collector),
        micro_batches=partial(split, loss_fn, cfg["train"], plan.micro_batch_size),
        adapt=partial(adapt, kl_coeff),
        optimizer=optimizer,
        scheduler=scheduler,
        logger=logger,
        engine=engine,
        evaluate=Evaluation(policy, eval_set, scorer, **evaluation),
        checkpoints=Checkpointer(output / "checkpoints", keep=cfg["checkpoint"]["keep"]),
        counted=[rewards, advantage, *shaping, *curriculum.counted],
        stateful=stateful,
    )


def make_rewards(
    task: TaskBase,
    executor: Executor,
    output: Path,
    functions: Sequence | None,
    weights: Sequence[float] | None,
    shaping: Sequence[dict],
    **settings: Any,
) -> tuple[RewardTransform, list[ShapingTransform]]:
    """What trajectories earn, and what becomes of the scores before they are a return."""
    own = functions is None
    rewards = RewardTransform(
        task.make_rewards() if own else [load_reward(spec) for spec in functions],
        weights=task.reward_weights if own and weights is None else weights,
        executor=executor,
        quarantine=output / "quarantine.jsonl",
        **settings,
    )
    return rewards, [instantiate(transform, rewards) for transform in shaping]


def make_curriculum(
    task: TaskBase,
    train_set: PromptDataset,
    plan: TrainingPlan,
    rewards: RewardTransform,
    pass_rate: dict | None,
    rerolls: dict | None,
    refill: dict | None,
    cache: dict | None,
) -> SimpleNamespace:
    """Which prompts are drawn; how groups are chosen is passed on to :func:`make_collect`."""
    # a prompt that is solved is so whatever shaping makes of the scores
    returns = WeightedScores(rewards.weights, rewards.clip_range, raw=True)
    sampler, observers = task.make_sampler(train_set), []
    counted = [] if sampler is None else [sampler]
    if pass_rate is not None:
        if sampler is not None:
            raise ValueError(
                "curriculum.pass_rate draws from all prompts alike, a mixture by its weights: leave one out"
            )
        sampler = PassRatePool(len(train_set), returns=returns, **pass_rate)
        observers.append(sampler.update)
        counted.append(sampler)
    if rerolls is not None:
        inner = MixtureSampler([len(train_set)]) if sampler is None else sampler
        settings = {"delay": 10 * plan.prompts_per_step} | rerolls
        sampler = DeferredRerolls(inner, returns=returns, **settings)
        observers.append(sampler.update)
        counted.append(sampler)
    return SimpleNamespace(sampler=sampler, observers=observers, counted=counted, refill=refill, cache=cache)


def make_signal(rewards: RewardTransform, preset: Preset) -> Returns:
    """By what groups are told to have a signal: what advantages compare, but before any KL, which always differs."""
    if preset.advantage.get("rewards") == "normalize_then_sum":
        return EachScore()
    return WeightedScores(rewards.weights, rewards.clip_range)


def make_collect(
    collector: LLMCollector,
    trainer: TransformersWrapper,
    plan: TrainingPlan,
    returns: Returns,
    limits: dict,
    curriculum: SimpleNamespace,
) -> tuple[Callable[[], tuple[TensorDictBase | None, TensorDictBase]], dict[str, Any]]:
    """What gives a step's rows ``(to train on, all that were sampled)``, and the parts of it that have a state."""
    kept: dict[str, Any] = {}
    if curriculum.refill is None:
        if curriculum.cache is not None:
            raise ValueError("curriculum.cache fills up what curriculum.refill leaves empty: set that, to {} at least")

        def collect() -> tuple[TensorDictBase | None, TensorDictBase]:
            rows = collector.collect()
            for observe in curriculum.observers:
                observe(rows)
            return rows, rows

        return collect, kept
    settings = {"tolerance": 0.0} | curriculum.refill
    signal = ZeroSignalFilter(settings.pop("tolerance"), returns=returns)
    refill = RefillingCollector(collector, signal, plan.prompts_per_step, observers=curriculum.observers, **settings)
    kept["refill"] = refill
    curriculum.counted += [signal, refill]
    if curriculum.cache is not None:
        kept["cache"] = GroupCache(scorer=trainer, **limits, **curriculum.cache)
        curriculum.counted.append(kept["cache"])

    def collect_informative() -> tuple[TensorDictBase | None, TensorDictBase]:
        rows, sampled = refill.collect()
        if (cache := kept.get("cache")) is not None:
            fresh, rows = rows, cache.fill(rows, plan.prompts_per_step, collector.policy_version)
            if fresh is not None:
                cache.add(fresh)
        return rows, sampled  # never None: surplus is less than a step

    return collect_informative, kept


def report_progress(rewards: RewardTransform, collector: LLMCollector, plan: TrainingPlan, step: int) -> None:
    """Tells reward functions how far the run is."""
    state = rewards.trainer_state
    state.global_step, state.max_steps, state.num_input_tokens_seen = step, plan.steps, collector.num_tokens
    state.epoch = step * plan.prompts_per_step / plan.train_prompts


def describe(
    rewards: RewardTransform, loss_fn: RLOOLoss, curriculum: Sequence, rows: TensorDictBase
) -> dict[str, float]:
    """Metrics of the rows that were sampled, and what reward functions and the curriculum have to say."""
    masked = loss_fn.mask_truncated_completions
    metrics = completion_metrics(rows, rewards.names, rewards.weights, mask_truncated_completions=masked)
    metrics |= {f"logged/{name.replace('/', '_')}": value for name, value in rewards.take_metrics().items()}
    return metrics | {k: v for part in curriculum if hasattr(part, "metrics") for k, v in part.metrics().items()}


def staleness(collector: LLMCollector, rows: TensorDictBase) -> float:
    """Weight updates since the rows were sampled, on average."""
    return collector.policy_version - float(rows[keys.POLICY_VERSION].float().mean())


def reward_seconds(rewards: RewardTransform) -> dict[str, float]:
    """How long the reward functions take, of all their calls so far."""
    quantiles = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    latency = {name.removesuffix("/sample"): h for name, h in rewards.latency.items() if name.endswith("/sample")}
    return {
        f"time/reward/{name}/{q}": h.quantile(p) for name, h in latency.items() if h.n for q, p in quantiles.items()
    }


def record(
    trainer: TransformersWrapper,
    loss_fn: RLOOLoss,
    limits: dict,
    collector: LLMCollector,
    rows: TensorDictBase,
    parity: bool,
) -> tuple[TensorDictBase, dict[str, float]]:
    """The training model's own log-probs before the first update, where the loss or the parity metrics read them."""
    if parity or {keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY} & set(loss_fn.in_keys):
        rows = record_log_probs(trainer, rows, entropy=keys.PROXIMAL_ENTROPY, **limits)
    # of surplus the gap has an update in it, and a cache's log-probs are the trainer's own
    fresh = (rows[keys.POLICY_VERSION] == collector.policy_version) & (rows[keys.GROUP_ID] < FIRST_GROUP_ID)
    return rows, parity_metrics(rows[fresh]) if parity and fresh.any() else {}


def split(loss_fn: RLOOLoss, train: dict, size: int | None, batch: TensorDictBase) -> Iterator[TensorDictBase]:
    """The rows that have a gradient, in parts that fit one forward and backward pass."""
    if not loss_fn.needs_zero_advantage:
        batch = drop_zero_advantage(batch)
    if train["merge_identical"]:
        batch = merge_identical(batch)
    return micro_batches(batch, size, max_tokens=train["micro_batch_tokens"], layout=train["layout"])


def adapt(kl_coeff: float | AdaptiveKLCoefficient, metrics: dict[str, float], num_rows: int) -> dict[str, float]:
    """Moves an adaptive KL coefficient; the one that this step had is logged."""
    before = {"kl_coeff": float(kl_coeff)} if kl_coeff != 0 else {}
    if hasattr(kl_coeff, "update"):
        kl_coeff.update(metrics["kl"], num_rows)
    return before


def make_preset(cfg: dict, plan: TrainingPlan) -> tuple[Preset, float | AdaptiveKLCoefficient]:
    """The algorithm with the settings that differ from its own, and its KL coefficient."""
    if cfg["algorithm"] not in PRESETS:
        raise ValueError(f"algorithm={cfg['algorithm']!r} must be one of {sorted(PRESETS)}")
    preset = PRESETS[cfg["algorithm"]]
    if preset.critic:
        raise ValueError(f"algorithm={cfg['algorithm']} learns a critic, which this loop has not: see tutorials/ppo.py")
    loss, advantage = preset.loss | cfg["loss"], preset.advantage | cfg["advantage"]
    if loss["aggregation"] == "constant":
        loss = {"aggregation_constant": cfg["generate"]["max_new_tokens"]} | loss
    estimator, gdpo = ESTIMATORS.get(advantage["estimator"]), advantage.get("rewards") == "normalize_then_sum"
    own = "mean_std" if gdpo else getattr(estimator, "whiten", "none")
    whitens = (advantage.get("whiten") or own) != "none"
    if whitens:
        advantage = {"whiten_groups": plan.prompts_per_step} | advantage
    if cfg["curriculum"]["refill"] is not None and (whitens or not getattr(estimator, "needs_group", True)):
        raise ValueError(
            "curriculum.refill leaves out groups of equal returns, but these advantages compare groups with each other "
            f"(estimator={advantage['estimator']!r}, whiten={advantage.get('whiten') or own!r}), so they need all of a "
            "step: set curriculum.refill=null, or take an algorithm that compares rows of one group (rloo, grpo, dapo)"
        )
    preset = replace(preset, loss=loss, advantage=advantage)
    if loss["ratio"] == "none" and plan.minibatches * plan.passes > 1:
        print("note: ratio='none' takes every update for the first on its rollout batch: the later ones are off-policy")
    coeff = preset.kl_coeff if cfg["kl_to_ref_coeff"] is None else cfg["kl_to_ref_coeff"]
    if cfg["kl_target"] is not None:
        if not coeff:
            raise ValueError(f"kl_target={cfg['kl_target']} adapts a KL coefficient, but kl_to_ref_coeff is 0: set it")
        coeff = AdaptiveKLCoefficient(coeff, cfg["kl_target"])
    return preset.with_kl(coeff), coeff


def make_sampler(model: torch.nn.Module, share_weights: bool, dtype: str | None, sync_every: int) -> torch.nn.Module:
    """The model to sample with: the training model itself, or a copy."""
    if share_weights and (dtype is not None or sync_every != 1):
        raise ValueError(
            f"sampler.share_weights=true samples with the training model as it is, so sampler.dtype={dtype} and "
            f"sampler.sync_every={sync_every} cannot be had: set sampler.share_weights=false"
        )
    if share_weights:
        return model
    sampler = frozen_copy(model, parse_dtype(dtype) if dtype else None)
    for copied, own in zip(sampler.parameters(), model.parameters(), strict=True):
        copied.requires_grad_(own.requires_grad)  # tells the self-test what will change: of an adapter, it alone
    return sampler
