"""RLOO, synchronous: sample completions, score them, train on them, update the sampler, repeat.

python rloo_sync.py                                   the embedded task, on CPU cores
python rloo_sync.py model.name=... data.source=...    any model and dataset
python rloo_sync.py --help                            all settings; config/rloo_sync.yaml explains them
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from math import inf
from pathlib import Path
from types import SimpleNamespace

import hydra
import torch
from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict, TensorDictBase
from torch.nn.utils import clip_grad_norm_
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import encode_prompt, keys, longest_prompt, merge_identical, micro_batches, tensor_rows
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.diagnostics import (
    DEFINITIONS,
    Evaluation,
    ParityProbe,
    TrainingPlan,
    completion_metrics,
    completion_table,
    parity_metrics,
    write_report,
)
from torchrl_rloo.embedded import resolve_model, resolve_prompts
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import KLRewardTransform, RewardTransform
from torchrl_rloo.functional import ESTIMATORS
from torchrl_rloo.modules import (
    AdapterReference,
    TransformersWrapper,
    TurnPolicy,
    add_adapter,
    context_length,
    frozen_copy,
    frozen_reference,
    load_model,
    parse_dtype,
    record_log_probs,
    vLLMWrapper,
)
from torchrl_rloo.modules.engines import Engine, asleep
from torchrl_rloo.objectives import PRESETS, AdaptiveKLCoefficient, Preset, RLOOLoss, merge_outputs
from torchrl_rloo.replay import MCAdvantage, drop_zero_advantage
from torchrl_rloo.run import Checkpointer, RunLogger, StepTimer, StopSignal, cpu_seconds, linear_schedule, run_state
from torchrl_rloo.weight_update import (
    InProcessWeightUpdater,
    SequentialWeightUpdater,
    WeightUpdater,
    self_test,
)

HEADLINE = ("reward", "eval/greedy", "eval/sampled", "time/step")
PROBE_PROMPTS = 8


def main(cfg: DictConfig) -> None:
    settings, output, timer = OmegaConf.to_container(cfg, resolve=True), Path(cfg.output_dir), StepTimer()
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    if cfg.resume not in ("auto", "never"):
        raise ValueError(f"resume={cfg.resume!r} must be 'auto' or 'never'")
    run = build(copy.deepcopy(settings), output)
    gc.collect()
    gc.freeze()  # prompts and libraries stay; the collector need not sweep them at every step
    start, cpu_before = 0, 0.0
    state = run.checkpoints.load() if cfg.resume == "auto" else run.checkpoints.clear()
    if state is not None:
        start, cpu_before = run_state.restore(state, settings, run.stateful)
        if run.engine is not None:
            run.collector.weight_updater.updaters[-1].push_weights(run.collector.policy_version)
        print(f"resumed after step {start} from {run.checkpoints.directory}", flush=True)

    def due(step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    def evaluate(step: int) -> dict[str, float]:
        with timer("eval"):
            metrics, table = run.evaluate()
        run.logger.log_table(step, "held-out completions", table[: cfg.log.samples])
        return metrics

    with run.engine or nullcontext(), StopSignal() as stop, run.logger:
        if start == 0:
            run.logger.log(0, evaluate(0), timings=timer.take())
        for step in range(start + 1, run.plan.steps + 1):
            # sample: whole groups of finished trajectories, with rewards
            with timer("collect"):
                rows = run.collector.collect()
            metrics = completion_metrics(
                rows,
                run.rewards.names,
                run.rewards.weights,
                mask_truncated_completions=run.loss_fn.mask_truncated_completions,
            )
            metrics["staleness"] = run.collector.policy_version - float(rows["policy_version"].float().mean())

            # train: leave-one-out advantages as the rows enter the buffer, then one or more passes over it
            outputs, norms = [], []
            with timer("train"), asleep(run.engine if cfg.inference.sleep else None):
                recorded, parity = run.record(tensor_rows(rows), parity=due(step, cfg.inference.parity_every))
                run.buffer.extend(recorded)
                for _ in range(run.plan.passes):
                    for batch in run.buffer:
                        counts = run.loss_fn.count(batch)
                        for micro in run.micro_batches(batch):
                            out = run.loss_fn(micro, counts)
                            out.loss.backward()
                            outputs.append(out.detach())
                        norms.append(
                            clip_grad_norm_(run.model.parameters(), cfg.max_grad_norm or inf, error_if_nonfinite=True)
                        )
                        run.optimizer.step()
                        run.scheduler.step()
                        run.optimizer.zero_grad()
                run.buffer.empty()
            metrics |= merge_outputs(outputs, num_updates=len(norms)) | parity
            metrics["grad_norm"] = float(torch.stack(norms).mean())
            metrics |= run.adapt(metrics, len(rows))
            metrics |= {"learning_rate": run.scheduler.get_last_lr()[0], "num_tokens": run.collector.num_tokens}
            metrics |= {f"count/{name}": n for counts in run.counts for name, n in counts.items()}

            # update the sampler
            with timer("sync"):
                if due(step, cfg.sampler.sync_every):
                    run.collector.update_policy_weights_()

            last = step == run.plan.steps
            if due(step, cfg.eval.every) or last:
                metrics |= evaluate(step)
            if due(step, cfg.log.samples_every):
                run.logger.log_table(step, "training completions", completion_table(rows, cfg.log.samples))
            timings = timer.take() | {"cpu_seconds": cpu_before + cpu_seconds()}
            timings["tokens_per_second"] = metrics["completions/mean_length"] * len(rows) / timings["time/collect"]
            run.logger.log(step, metrics, timings=timings)
            if due(step, cfg.checkpoint.every) or last or stop.requested:
                cpu = cpu_before + cpu_seconds()
                run.checkpoints.save(step, run_state.gather(step, cpu, settings, run.stateful))
            if stop.requested and not last:
                print(f"stopped after step {step}; the same command goes on from there", flush=True)
                return
    finish(run, settings, output, cpu_before + cpu_seconds())


def finish(run: SimpleNamespace, settings: dict, output: Path, cpu: float) -> None:
    """Saves the model, writes the report, and prints the result as one line of JSON."""
    run.model.save_pretrained(output / "model")
    run.tokenizer.save_pretrained(output / "model")
    evaluations = [record for record in run.logger.history if "eval/greedy" in record]
    before, after = evaluations[0], evaluations[-1]
    result = {
        "held_out_accuracy_before": before["eval/greedy"],
        "held_out_accuracy_after": after["eval/greedy"],
        "held_out_sampled_before": before["eval/sampled"],
        "held_out_sampled_after": after["eval/sampled"],
        "cpu_seconds": round(cpu, 1),
    }
    report = write_report(
        output,
        history=run.logger.history,
        summary=result | {"plan": str(run.plan)},
        tables=run.logger.tables,
        definitions=DEFINITIONS,
        settings=settings,
    )
    print(json.dumps(result | {"report": str(report.resolve()), "model": str((output / "model").resolve())}))


def build(cfg: dict, output: Path) -> SimpleNamespace:
    """The parts of the loop, made from the settings."""
    model_name = resolve_model(cfg["model"]["name"], cfg["seed"], log=print)
    model, tokenizer = load_model(**(cfg["model"] | {"name": model_name}))
    if cfg["lora"] is not None:
        model = add_adapter(model, cfg["lora"])
    template = cfg["data"].get("template_kwargs") or {}
    train_set, eval_set = resolve_prompts(**cfg["data"], seed=cfg["seed"], tokenizer=tokenizer)
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
    functions = [load(f) for f in cfg["reward"].pop("functions")]
    rewards, after_rewards = RewardTransform(functions, **cfg["reward"]), []
    if kl_coeff != 0:
        reference = frozen_reference(trainer) if cfg["lora"] is None else AdapterReference(trainer)
        masked = loss_fn.mask_truncated_completions
        after_rewards.append(
            KLRewardTransform(reference, preset.kl_in_reward, mask_truncated_completions=masked, **limits)
        )
    env = DatasetChatEnv(
        train_set,
        tokenizer,
        prompts_per_batch=plan.prompts_per_step,
        num_generations=plan.num_generations,
        rewards=rewards,
        after_rewards=after_rewards,
        seed=cfg["seed"],
        template_kwargs=template,
    )
    scorer = load(cfg["eval"]["scorer"])
    evaluation = {"batch_size": cfg["eval"]["batch_size"], "env_kwargs": {"template_kwargs": template}}
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
        queries = [row["query"] for row in islice(eval_set, PROBE_PROMPTS)]
        probe(cfg, policy, trainer, [torch.tensor(encode_prompt(tokenizer, q, **template)) for q in queries])
    log = {"loggers": cfg["log"]["loggers"], "logger_kwargs": cfg["log"]["logger_kwargs"]}
    logger = RunLogger(output, total_steps=plan.steps, headline=HEADLINE, **log)
    stateful = dict(model=model, sampler=sampler, optimizer=optimizer, scheduler=scheduler)
    stateful |= dict(collector=collector, buffer=buffer, logger=logger)
    stateful |= {"kl_coeff": kl_coeff} if hasattr(kl_coeff, "state_dict") else {}
    return SimpleNamespace(
        plan=plan,
        model=model,
        tokenizer=tokenizer,
        rewards=rewards,
        collector=collector,
        buffer=buffer,
        loss_fn=loss_fn,
        record=partial(record, trainer, loss_fn, limits),
        micro_batches=partial(split, loss_fn, cfg["train"], plan.micro_batch_size),
        adapt=partial(adapt, kl_coeff),
        optimizer=optimizer,
        scheduler=scheduler,
        logger=logger,
        engine=engine,
        evaluate=Evaluation(policy, eval_set, scorer, **evaluation),
        checkpoints=Checkpointer(output / "checkpoints", keep=cfg["checkpoint"]["keep"]),
        counts=(rewards.counts, advantage.counts),
        stateful=stateful,
    )


def check_engine(cfg: dict, plan: TrainingPlan) -> None:
    """Refuses what an engine would fail at only when it samples or gets its first weights, or not at all."""
    arguments, lora = cfg["inference"]["engine"] or {}, cfg["lora"]
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
            "this inference sends engines an adapter alone, and lora=null has none: set lora={r: 16, target_modules: "
            "all-linear}, or inference=vllm"
        )
    if (dtype := cfg["sampler"]["dtype"]) is not None:
        raise ValueError(
            f"sampler.dtype={dtype} rounds what is sent, but only an adapter is: set inference.engine.dtype={dtype}"
        )
    rank, most = lora.get("r", 8), arguments.get("max_lora_rank", 16)  # the defaults of peft and vLLM
    if rank > most:
        raise ValueError(f"lora.r={rank} is more than inference.engine.max_lora_rank={most}: raise that")


def make_policy(cfg: dict, model_name: str, sampler: torch.nn.Module, turns: dict) -> tuple[TurnPolicy, Engine | None]:
    """What samples, and the engine behind it if it is not the sampler itself."""
    arguments = cfg["inference"]["engine"]
    if arguments is None:
        return TransformersWrapper(sampler, **turns), None
    if "model" in arguments:
        arguments = arguments | {"model": arguments["model"] or model_name}
    engine = instantiate(arguments)
    return vLLMWrapper(engine, **turns), engine


def make_updater(
    cfg: dict, model: torch.nn.Module, sampler: torch.nn.Module, policy: TurnPolicy, engine: Engine | None
) -> WeightUpdater:
    """What brings the trained weights to what samples."""
    to_sampler = InProcessWeightUpdater(model, sampler)
    if engine is None:
        return to_sampler
    to_engine = instantiate(cfg["inference"]["updater"], sampler, engine)
    policy.recover = to_engine.restart
    if cfg["inference"]["self_test"]:
        found = self_test(to_engine, sampler, policy.tokenizer, engine)
        print(
            f"weight updates arrive: others moved the model's log-probs by {found.movement:.2g} nats, and the engine's "
            f"to within {found.gap_changed:.2g} of them",
            flush=True,
        )
    return SequentialWeightUpdater(to_sampler, to_engine)


def probe(cfg: dict, policy: TurnPolicy, trainer: TransformersWrapper, prompts: Sequence[torch.Tensor]) -> None:
    """Prints how far an engine's log-probs are from the trainer's, and what to do about it."""
    sent, computed = cfg["sampler"]["dtype"] or cfg["model"]["dtype"], cfg["inference"]["engine"].get("dtype")
    dtypes = {"sampler_dtype": sent if computed == "float32" else computed, "trainer_dtype": cfg["model"]["dtype"]}
    rows = stack_rows([TensorDict({keys.PROMPT_TOKENS: ids}, []) for ids in prompts])
    gap, advice = ParityProbe(policy, trainer, rows, max_new_tokens=cfg["generate"]["max_new_tokens"], **dtypes)()
    print(
        f"sampler against trainer: {gap.mean:.2g} nats a token, at most {gap.max:.2g}", *advice, sep="\n- ", flush=True
    )


def record(
    trainer: TransformersWrapper, loss_fn: RLOOLoss, limits: dict, rows: TensorDictBase, parity: bool
) -> tuple[TensorDictBase, dict[str, float]]:
    """The training model's own log-probs before the first update, where the loss or the parity metrics read them."""
    if parity or {keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY} & set(loss_fn.in_keys):
        rows = record_log_probs(trainer, rows, entropy=keys.PROXIMAL_ENTROPY, **limits)
    return rows, parity_metrics(rows) if parity else {}


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
    own = getattr(ESTIMATORS.get(advantage["estimator"]), "whiten", "none")
    if (advantage.get("whiten") or own) != "none":
        advantage = {"whiten_groups": plan.prompts_per_step} | advantage
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


def load(function: str | dict):
    """A function by its dotted path, or an object by its ``_target_``."""
    return get_method(function) if isinstance(function, str) else instantiate(function)


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))  # so that a user's own rewards are found by their dotted path
    hydra.main(version_base="1.3", config_path="config", config_name="rloo_sync")(main)()
