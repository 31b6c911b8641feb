"""Option ``--dry-run`` of a recipe: one step of the recipe itself, with a tiny model and scripted turns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torchrl_rloo.cli.fields import SettingError, known_settings

if TYPE_CHECKING:
    from torchrl_rloo.cli.rloo_config import RLOOConfig

ROWS, HELD_OUT = 64, 8  # rows of the source to read, and held-out prompts
TEXTS = ("I do not know.", "Let me see.")  # turns where no right answer is known
LOCAL_LOGGERS = ("tensorboard",)
HELP = "--dry-run runs one step of this recipe in a temporary folder, with a tiny model and scripted turns"
COVERED = (
    "covered: settings, prompts, chat template, environment (tools are built, not called), rewards, collector, weight "
    "updates with checksums, advantages, loss and gradient, optimizer, evaluation, checkpoint, report"
)
NOT_COVERED = (
    "not covered: the model's own weights and memory, vLLM, sampling, GPUs, several ranks, a running Ray cluster, time "
    "per step, whether the policy learns"
)


def has_dry_run(config: type) -> bool:
    """Return whether a recipe with this configuration has a dry run: whether it trains on groups."""
    return {"plan.num_generations", "check.mode"} <= set(known_settings(config))


def check_supported(config: type) -> None:
    """Raise if a recipe has no dry run, or several ranks run it."""
    if not has_dry_run(config):
        raise SettingError("--dry-run requires a recipe that trains on groups: rloo, rloo_tools, rloo_agent, or a copy")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise SettingError("--dry-run runs in one process; start it without --ranks")


def dry_run(main: Callable[[Any], None], cfg: Any) -> None:
    """Run one step of a recipe in a temporary folder, and print what it touched."""
    start = perf_counter()
    with TemporaryDirectory(prefix="torchrl_rloo_dry_run_") as folder:
        path = Path(folder)
        settings = make_settings(cfg, path)
        with redirect_stdout(StringIO()):  # the run prints the same again
            write_script(settings, path / "script.json")
        main(settings)
        print(f"dry run: {_summary(Path(settings.output_dir))}, in {perf_counter() - start:.0f} s")
    print(COVERED, NOT_COVERED, sep="\n")


def make_settings(cfg: Any, folder: Path) -> Any:
    """Save a tiny model to a folder, and return the settings of a dry run with it."""
    plan, train, inference = cfg.plan, cfg.train, cfg.inference
    model = {"name": save_model(cfg, folder / "model"), "device": "cpu", "quantization": None, "kwargs": {}}
    offload = {"parallel": "none", "shard_size": None, "load_shards": False, "offload": []}
    # Play turns in the place of the engine, and keep its weight updates unless they need a GPU
    engine = {"_target_": f"{__name__}.load_script", "model": None, "script": str(folder / "script.json")}
    if inference.on_ray:
        nested = engine | {"_partial_": True}
        engine = {"_target_": "torchrl_rloo.ray.RayEngine", "make_engine": nested, "num_cpus": 1}
    updater = dict(inference.updater or {}) if _publishes(inference.updater) else {}
    updater |= {"_target_": "torchrl_rloo.weight_update.WeightPublisher", "transport": "auto"}
    small_sets = {name: replace(s, size=min(s.size, HELD_OUT)) for name, s in cfg.eval.sets.items()}
    changed = {
        "output_dir": str(folder / "output"),
        "resume": "never",
        "lora": cfg.lora and {n: v for n, v in cfg.lora.items() if n != "adapter"} | {"target_modules": "all-linear"},
        "model": replace(cfg.model, **model, quantization_kwargs={}),
        "train": replace(train, **offload, tensor_parallel=1, context_parallel=1),
        "plan": replace(plan, steps=1, epochs=None, prompts_per_step=_prompts(cfg)),
        "data": replace(cfg.data, limit=min(cfg.data.limit or ROWS, ROWS), eval_size=min(cfg.data.eval_size, HELD_OUT)),
        "schedule": replace(cfg.schedule, warmup_steps=None),
        "sampler": replace(cfg.sampler, offload=False),
        "inference": replace(inference, engine=engine, updater=updater, replicas=1, per_replica={}, sleep=False),
        "eval": replace(cfg.eval, every=1, sets=small_sets),
        "check": replace(cfg.check, mode="off", own=[]),
        "checkpoint": replace(cfg.checkpoint, every=1),
        "ray": replace(cfg.ray, address=None),
        "log": replace(cfg.log, loggers=[name for name in cfg.log.loggers if name in LOCAL_LOGGERS], logger_kwargs={}),
    }
    return replace(cfg, **changed)


def save_model(cfg: Any, folder: Path) -> str:
    """Save a random model of two layers with the tokenizer and the context of the one that the settings name."""
    from torchrl_rloo.embedded import build_model
    from torchrl_rloo.embedded.warm_start import build_untrained
    from torchrl_rloo.envs.tasks.base import EMBEDDED
    from torchrl_rloo.modules import load_tokenizer
    from torchrl_rloo.modules.model_files import save_tokenizer
    from torchrl_rloo.runtime.lookup import HUB_KWARGS

    located = {name: value for name, value in cfg.model.kwargs.items() if name in HUB_KWARGS}
    if cfg.model.name == EMBEDDED:
        model, tokenizer = build_untrained(cfg.task.name, cfg.seed)
    else:
        from torchrl_rloo.cli.plan import model_config

        tokenizer = load_tokenizer(cfg.model.name, **located)
        model = build_model(tokenizer, seed=cfg.seed)
        context = getattr(model_config(cfg), "max_position_embeddings", None)
        model.config.max_position_embeddings = context or model.config.max_position_embeddings
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return str(folder)


def write_script(cfg: RLOOConfig, file: Path) -> None:
    """Write the turns of each prompt: its right answer in the format that earns most, and a wrong one."""
    from torchrl_rloo.cli.held_out import EvalSet, load_eval_sets
    from torchrl_rloo.diagnostics.checks import probe_rewards
    from torchrl_rloo.diagnostics.checks.probes import scripted_texts

    task = cfg.make_task()
    _, tokenizer = cfg.model.load(cfg.model.name)
    train_set, eval_set = cfg.data.load(task, tokenizer, cfg.seed)
    own = EvalSet(eval_set, task, None, tuple, {}, 0, [])
    sets = load_eval_sets(cfg, own, train_set, tokenizer, None)
    with closing(cfg.reward.make(task, quarantine=None)) as rewards:
        scoring = {"weights": rewards.weights, "clip_range": rewards.clip_range, "executor": rewards.executor}
        probes = probe_rewards(rewards.functions, train_set, tokenizer, **scoring)
    turns = []
    for dataset in (train_set, *(each.prompts for each in sets.values())):
        prompts = dataset.for_tokenizer(tokenizer).encode(tokenizer, **cfg.data.template_kwargs)
        for ids, texts in zip(prompts, scripted_texts(dataset, probes), strict=True):
            turns += [[list(ids), _encode(tokenizer, texts)]] if texts else []
    file.write_text(json.dumps({"turns": turns, "default": _encode(tokenizer, TEXTS)}), encoding="utf-8")


def load_script(model: str, script: str) -> Any:
    """Return an engine that plays the turns of a file, with a model in this process."""
    from torchrl_rloo.engines.scripted import ScriptedModelEngine
    from torchrl_rloo.modules import load_model

    content: Mapping[str, Any] = json.loads(Path(script).read_text(encoding="utf-8"))
    turns = {tuple(ids): played for ids, played in content["turns"]}
    return ScriptedModelEngine(*load_model(model), turns=turns, default=content["default"])


def _publishes(updater: Mapping[str, Any] | None) -> bool:
    return str((updater or {}).get("_target_")).endswith(".WeightPublisher")


def _prompts(cfg: Any) -> int:
    """Return the least number of prompts, of at least two, whose rows divide into the minibatches."""
    plan = cfg.plan
    if "normalize" in cfg.advantage:  # over groups of a number that may be set
        return plan.prompts_per_step
    counts = range(min(2, plan.prompts_per_step), plan.prompts_per_step + 1)
    fitting = [n for n in counts if n * plan.num_generations % plan.minibatches == 0]
    return fitting[0] if fitting else plan.prompts_per_step


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    ids = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [[*each, tokenizer.eos_token_id] for each in ids]


def _summary(output: Path) -> str:
    """Return what the files of a dry run show."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = {name: value for record in records for name, value in record.items()}
    checkpoints = sorted(path.name for path in (output / "checkpoints").glob("step_*"))
    gradient = f"gradient norm {last['grad_norm']:.3g}" if last.get("grad_norm") else "no gradient"
    if not last.get("reward_std", last.get("grad_norm")):
        gradient += " (all rewards were equal)"
    files = f"checkpoint {checkpoints[-1]}, report and model written and removed"
    return f"1 step, mean reward {last.get('reward', float('nan')):.3g}, {gradient}, {files}"
