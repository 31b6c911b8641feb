"""Train a language model by on-policy distillation: it samples, and a teacher scores each sampled token.

Examples:
  distill.py                               the built-in model learns from one trained on flawless demonstrations
  distill.py distill.divergence=full       compare whole distributions
  distill.py distill.reward_coeff=1 plan.num_generations=4    add the advantages of the task's reward
  distill.py task=gsm8k model.name=my/small teacher.name=my/large model.device=cuda optimizer.lr=1e-6
  distill.py model.name=my/small teacher.name=http://teacher:8000    the teacher is a vLLM server
  distill.py teacher.name=self 'teacher.context="The answer is {answer}. "'    the student learns what a hint shows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from torchrl_rloo.cli import config as c
from torchrl_rloo.cli import rloo_sections as s
from torchrl_rloo.cli.fields import DType, OneOf, Positive, Range, Share, Whole
from torchrl_rloo.cli.recipe import command_line, parse_args, run_recipe
from torchrl_rloo.cli.rloo_config import LoopConfig


@dataclass
class TeacherConfig:
    """Teacher: a model, the student itself, or a server."""

    name: str = "embedded"  # directory or hub id, http://host:port of a vLLM server, self, or embedded
    context: str | None = None  # text before the prompt that only the teacher sees, with columns: "It is {answer}. "
    sync_every: Whole = 0  # with name=self, steps between moves of the teacher towards the student; 0: it stays
    share: Annotated[float, Range(0, 1, above=True)] = 0.05  # share of the student's weights in a move; 1: replace it
    dtype: DType | None = None  # data type of the teacher's weights; null: model.dtype
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of from_pretrained

    @property
    def is_server(self) -> bool:
        """True if a server scores."""
        return self.name.startswith(("http://", "https://"))


@dataclass
class DistillConfig:
    """Divergence of the student from the teacher."""

    divergence: Annotated[str, OneOf("sampled", "full")] = "sampled"  # of sampled tokens, or of all (full)
    beta: Share = 1.0  # for full: 1 reverse KL, 0 forward KL, between: generalized Jensen-Shannon
    coeff: Positive = 1.0  # factor of the divergence
    discount: Share = 0.0  # for sampled, of the divergence of later tokens; 0: a token answers for itself
    reward_coeff: Annotated[float, Range(0)] = 0.0  # factor of the leave-one-out advantages of the task's reward


@dataclass
class Config(LoopConfig):
    """Settings of on-policy distillation."""

    output_dir: str = "outputs/distill/${task.name}/seed${seed}"  # directory of checkpoints, metrics, report and model
    plan: s.PlanConfig = field(default_factory=lambda: s.PlanConfig(60, 64, 1))
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)

    common = (*LoopConfig.common, "teacher.name", "teacher.context", "distill.divergence", "distill.reward_coeff")

    def __post_init__(self):
        super().__post_init__()
        teacher, distill, g = self.teacher, self.distill, self.generate
        full, own, moves = distill.divergence == "full", teacher.name == "self", teacher.sync_every
        if not teacher.is_server and not own:
            c.check_path("teacher.name", teacher.name)
        other = "distill.divergence=full" if full else "a server" if teacher.is_server else None
        truncates = g.top_p < 1 or g.top_k is not None or g.min_p > 0 or g.repetition_penalty != 1
        blind, equal = not distill.reward_coeff, own and not teacher.context
        wrong = {
            "distill.beta has no effect on sampled tokens; set distill.divergence=full": not full and distill.beta != 1,
            "distill.discount has no effect with distill.divergence=full; set it to 0": full and distill.discount,
            "a server returns no distributions; set distill.divergence=sampled": full and teacher.is_server,
            f"{other} requires top_p=1, top_k=null, min_p=0, repetition_penalty=1": other and truncates,
            "a server scores at generate.temperature=1; set that": g.temperature != 1 and teacher.is_server,
            "teacher.sync_every requires teacher.name=self, whose weights change": moves and not own,
            "teacher.sync_every cannot be combined with lora; set it to 0": moves and self.lora,
            "teacher.share requires teacher.sync_every": not moves and teacher.share != TeacherConfig.share,
            "teacher.name=self starts equal to the student; set teacher.context": equal and blind,
            "loss has no effect with distill.divergence=full without reward_coeff": full and blind and self.loss,
            "loss.entropy_coeff must be a number": isinstance(self.loss.get("entropy_coeff"), dict),
            "distill.reward_coeff requires plan.num_generations=2 or more": not blind and self.plan.num_generations < 2,
            "train.load_shards=true cannot be combined with a teacher; set it to false": self.train.load_shards,
            "a teacher reads whole rows; use an engine outside of a Ray cluster": self.inference.on_ray,
            "a teacher cannot score environment.on_rewrite=split": self.environment.on_rewrite == "split",
        }
        for message in (message for message, found in wrong.items() if found):
            raise ValueError(message)


if __name__ == "__main__":  # parse before torch is imported, so --help and wrong settings respond at once
    CONFIG = parse_args(Config, __file__, __doc__)

from contextlib import closing, nullcontext  # noqa: E402

import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from transformers import PreTrainedModel

from torchrl_rloo import diagnostics, modules
from torchrl_rloo.cli.loop import Loaded, Sampling
from torchrl_rloo.data import encode_prompt
from torchrl_rloo.embedded.warm_start import TEACHERS, warm_start
from torchrl_rloo.engines import VLLMServer, sleeping
from torchrl_rloo.functional import EstimatorSpec, leave_one_out
from torchrl_rloo.modules import EngineScorer, Teacher, TransformersWrapper
from torchrl_rloo.objectives import DistillationLoss, RLOOLoss, make_method, merge_outputs
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.run import Run, meters, repeat_after_rollback, timings
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate, catch_up, minibatches, offload_activations, optimizer_step

DISPLAY = {"headline": ("reward", "kl", "eval/greedy", "time/step"), "digest": diagnostics.waiting_table}


def main(cfg: Config) -> None:
    with cfg.train.join_ranks(cfg.model.device) as ranks:
        repeat_after_rollback(lambda step: train(cfg if step is None else replace(cfg, resume=step), ranks))


def train(cfg: Config, ranks: Ranks) -> None:
    # Method, task and student. Wrong settings raise before anything is loaded
    cfg.check_before_loading()
    health, full, weight = cfg.health.make(), cfg.distill.divergence == "full", cfg.distill.reward_coeff
    kl = {"where": "token", "coeff": cfg.distill.coeff, "discount": cfg.distill.discount, "clip": None}
    method = make_method("rloo_openrlhf", loss=cfg.loss, kl=None if full else kl)
    loaded = Loaded.of(cfg, ranks)
    model, plan = loaded.model, loaded.plan

    # Student and teacher. Each rank has a copy or a shard of both
    sampler = cfg.sampler.make(model, ranks)
    initial = load_teacher(cfg, loaded, ranks)
    for each, name in ((model, loaded.name), (initial, cfg.teacher.name)):
        if each is not None:
            cfg.train.distribute(each, ranks, name, **cfg.model.kwargs)
    settings = {"packing": cfg.train.packing, "generate_kwargs": cfg.generate.arguments(cfg.seed)}
    trainer = TransformersWrapper(model, tokenizer=loaded.tokenizer, generate=False, **settings, **cfg.train.scoring)
    teacher, scorer = make_teacher(cfg, loaded, trainer, initial)

    # Learning: advantages of each token, losses, optimizer, schedule
    estimator = EstimatorSpec(lambda returns, groups: weight * leave_one_out(returns, groups))
    if not weight:  # the reward is only measured
        estimator = EstimatorSpec(lambda returns, groups: torch.zeros_like(returns), needs_group=False)
    advantage = MCAdvantage(plan.num_generations, **method.advantage_arguments | {"estimator": estimator})
    buffer = ReplayBuffer(
        storage=RowStorage(),
        sampler=SamplerWithoutReplacement(),
        transform=advantage,
        generator=torch.Generator().manual_seed(cfg.seed),
    )
    policy_loss = RLOOLoss(trainer, **method.loss_arguments)
    full_loss = [DistillationLoss(trainer, teacher, beta=cfg.distill.beta, coeff=cfg.distill.coeff)] if full else []
    losses = full_loss + ([policy_loss] if weight or not full else [])
    optimizer = cfg.optimizer.make(model, offload_states="optimizer" in cfg.train.offload)
    scheduler = cfg.schedule.make(optimizer, plan.optimizer_steps)

    # Sampling, and the run, which resumes, checkpoints, logs and stops
    limits = {"micro_batch_size": plan.micro_batch_size, "max_tokens": cfg.train.micro_batch_tokens}
    scoring = {"reference": None if full else teacher, "kl_to_ref_coeff": 0.0}  # which only records its log-probs
    sampling = Sampling.of(cfg, ranks, loaded, sampler, trainer, **scoring, **limits)
    source, engine = sampling.source, sampling.engine
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "buffer": buffer, "source": source}
    parts |= {"teacher": initial if cfg.teacher.sync_every else None, "sampler": None if sampler is model else sampler}
    run = Run(cfg.output_dir, plan.steps, parts, **cfg.run_arguments(), **DISPLAY, health=health, ranks=ranks)
    server = closing(scorer.engine) if cfg.teacher.is_server else nullcontext()
    with engine or nullcontext(), server, closing(loaded.rewards), closing(source), run:
        report = diagnostics.RunReport(run, command_line())
        sampling.start(run, loaded.rewards)
        for step in run.steps():
            ranks.place = f"step {step}"
            rows, _ = sampling.collect(run, cfg, loaded, policy_loss)  # 1. sample, and score with the teacher
            outputs, norms = {loss: [] for loss in losses}, []
            with run.time("train"), sleeping(engine if cfg.inference.sleep else None):
                if rows is not None:  # 2. compute the advantages: the reward's, minus the KL of each token
                    buffer.extend(rows)
                for batch in minibatches(buffer, plan.minibatches, plan.epochs_per_batch):  # 3. optimize
                    with offload_activations("activations" in cfg.train.offload):
                        for loss in losses:
                            outputs[loss] += accumulate(loss, batch, ranks=ranks, **limits)
                    norms.append(optimizer_step(model, optimizer, scheduler, cfg.train.max_grad_norm))
                buffer.empty()
                catch_up(scheduler, step * plan.optimizer_steps // plan.steps)
            with run.time("sync"):  # 4. push the weights to the sampler, and move the teacher
                if run.is_due(cfg.sampler.sync_every):
                    source.update_policy_weights_()
                if run.is_due(cfg.teacher.sync_every):
                    scorer.update()
            merged = [merge_outputs(found, num_updates=max(1, len(norms))) for found in outputs.values()]
            for metrics in merged:
                run.log(metrics | {"loss": sum(each.get("loss", 0.0) for each in merged)})
            run.log({"grad_norm": float(torch.stack(norms).mean())} if norms else {})
            run.log({"learning_rate": scheduler.get_last_lr()[0]} | meters(engine, *source.parts))
            if run.is_due(cfg.eval.every) or run.is_last:  # 5. evaluate on held-out prompts
                sampling.held_out.run(run)
            run.log({}, timings=timings(*source.parts))
            report.refresh()
    if run.finished:
        sampling.finish(run, report, loaded)


def load_teacher(cfg: Config, loaded: Loaded, ranks: Ranks) -> PreTrainedModel | None:
    """Load the teacher's model; None for a server, and for the student without its adapter."""
    if cfg.teacher.is_server or cfg.teacher.name == "self":
        return None if cfg.teacher.is_server or cfg.lora is not None else modules.frozen_copy(loaded.model)
    task = loaded.task.name if loaded.task.name in TEACHERS else "addition"
    builds = cfg.teacher.name == "embedded"
    name = warm_start(cfg.seed, task, clean=True, log=print) if builds else modules.local_model(cfg.teacher.name, print)
    changes = {"quantization": None, "dtype": cfg.teacher.dtype or cfg.model.dtype, "kwargs": cfg.teacher.kwargs}
    model, tokenizer = replace(cfg.model, **changes).load(name, device=str(ranks.device))
    if tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise ValueError(f"teacher.name={cfg.teacher.name} has other tokens than the model; use one of its family")
    return model.requires_grad_(False)


def make_teacher(cfg: Config, loaded: Loaded, trainer: TransformersWrapper, model: PreTrainedModel | None) -> tuple:
    """Return the teacher, with the prompts that it sees, and its scorer, which may move or be a server to close."""
    prompts = None
    if cfg.teacher.context is not None:
        shown = [show(cfg.teacher.context, row) for row in loaded.train_set.rows]
        prompts = [encode_prompt(loaded.tokenizer, query, **cfg.data.template_kwargs) for query in shown]
        longest, context = max(map(len, prompts)) + cfg.generate.max_new_tokens, loaded.plan.context_length
        if context is not None and longest > context:
            raise ValueError(f"teacher.context makes rows of {longest} tokens, beyond the context of {context}")
    if cfg.teacher.is_server:
        scorer = EngineScorer(VLLMServer(cfg.teacher.name), trainer.distribution)
    else:  # the student without its adapter, or another model
        scorer = modules.AdapterReference(trainer) if model is None else trainer.get_new_version(model=model)
    if cfg.teacher.sync_every:
        scorer = modules.MovingReference(scorer, trainer.model, cfg.teacher.share)
    return Teacher(scorer, prompts), scorer


def show(context: str, row: Mapping[str, Any]) -> Any:
    """Return a row's query with the context, filled with the row's columns, before the user's text."""
    try:
        text = context.format_map(row)
    except KeyError as error:
        raise ValueError(f"teacher.context={context!r} names {error}, which the prompts have no column for") from None
    query = row["query"]
    if isinstance(query, str):
        return text + query
    last = max(i for i, message in enumerate(query) if message["role"] == "user")
    return [m | {"content": text + m["content"]} if i == last else m for i, m in enumerate(query)]


if __name__ == "__main__":
    run_recipe(main, CONFIG)
