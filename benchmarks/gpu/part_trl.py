"""Part ``trl``: tokens per second of a whole step, sampling and training, compared with TRL's ``RLOOTrainer``.

Both sides sample with transformers in this process, on the same prompts, from the same weights, in the same data type.
Rewards, optimizer, clipping and the number of rows are the same. Neither uses gradient checkpointing. A third side is
TRL with vLLM in its process, where vLLM is installed.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import SHAPES, Setup, attempt, build_model, build_tokenizer, clear, synchronize


class Clock:
    """Reward function that differs within groups, and times of the ends of steps."""

    __name__ = "reward"

    def __init__(self, device: str):
        self.device = device
        self.times: list[float] = []  # start of the first step, then the end of each
        self.sampled: list[float] = []  # end of the sampling of each step
        self.tokens: list[int] = []
        self._open = False

    def __call__(self, prompts, completions, completion_ids, **columns: Any) -> list[float]:
        # A step may ask for its rewards in several calls; its sampling ends before the last
        synchronize(self.device)
        if not self._open:
            self.sampled.append(0.0)
            self.tokens.append(0)
        self._open = True
        self.sampled[-1] = time.perf_counter()
        self.tokens[-1] += sum(map(len, completion_ids))
        return [sum(ids) % 1009 / 1009 for ids in completion_ids]

    def tick(self) -> None:
        """Record the end of a step, or the start of the first."""
        synchronize(self.device)
        self.times.append(time.perf_counter())
        self._open = False

    def figures(self, warm_up: int) -> dict[str, Any]:
        """Return medians over the steps after the warm-up."""
        steps = [b - a for a, b in zip(self.times, self.times[1:], strict=False)][warm_up:]
        sampling = [b - a for a, b in zip(self.times, self.sampled, strict=False)][warm_up:]
        tokens = median(self.tokens[warm_up:])
        step, sample = median(steps), median(sampling)
        return {
            "step_s": step,
            "sampling_s": sample,
            "training_s": step - sample,
            "new_tokens": tokens,
            "tokens_per_s": tokens / step,
        }


def make_optimizer(model) -> torch.optim.Optimizer:
    """Create the optimizer of both sides."""
    return torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0, fused=True)


def train_ours(model, tokenizer, prompts: str, sizes: dict[str, int], clock: Clock) -> None:
    """Train with this package, as ``benchmarks/loops.py`` does, with packed rows that share prompts."""
    from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

    from torchrl_rloo.collectors import LLMCollector
    from torchrl_rloo.data import load_prompts, tensor_rows
    from torchrl_rloo.envs import DatasetChatEnv
    from torchrl_rloo.modules import TransformersWrapper
    from torchrl_rloo.objectives import RLOOLoss
    from torchrl_rloo.replay import MCAdvantage
    from torchrl_rloo.training import accumulate, optimizer_step
    from torchrl_rloo.weight_update import InProcessWeightUpdater

    rows_per_step = sizes["num_prompts"] * sizes["num_generations"]
    env = DatasetChatEnv(
        load_prompts(prompts),
        tokenizer,
        prompts_per_batch=sizes["num_prompts"],
        num_generations=sizes["num_generations"],
        rewards=clock,
        shuffle=False,
    )
    kwargs = {"max_new_tokens": sizes["max_new_tokens"], "seed": 0}
    policy = TransformersWrapper(model.eval(), tokenizer=tokenizer, generate_kwargs=kwargs)
    collector = LLMCollector(
        env,
        policy,
        total_dialog_turns=sizes["steps"] * rows_per_step,
        weight_updater=InProcessWeightUpdater(model, model),
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(rows_per_step),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(sizes["num_generations"]),
        batch_size=rows_per_step,
    )
    loss_fn = RLOOLoss(policy.get_new_version(generate=False, packing="shared_prefix"))
    optimizer = make_optimizer(model)
    clock.tick()
    for rows in collector:
        buffer.extend(tensor_rows(rows))
        for batch in buffer:
            accumulate(loss_fn, batch)
            optimizer_step(model, optimizer, max_grad_norm=1.0)
        buffer.empty()
        collector.update_policy_weights_()
        clock.tick()


def train_trl(model, tokenizer, prompts: str, sizes: dict[str, int], clock: Clock, use_vllm: bool = False) -> None:
    """Train with TRL's trainer and its defaults wherever they match the other side.

    Raises:
        RuntimeError: if vLLM is to sample, and is not installed or lacks a GPU.
    """
    from datasets import Dataset
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import TrainerCallback
    from trl import RLOOConfig, RLOOTrainer

    class Steps(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            clock.tick()

        def on_step_end(self, *args, **kwargs):
            clock.tick()

    with tempfile.TemporaryDirectory() as output:
        config = RLOOConfig(
            output,
            max_steps=sizes["steps"],
            per_device_train_batch_size=sizes["num_prompts"] * sizes["num_generations"],
            gradient_accumulation_steps=1,
            num_generations=sizes["num_generations"],
            max_completion_length=sizes["max_new_tokens"],
            shuffle_dataset=False,
            beta=0.0,
            epsilon=0.2,
            max_grad_norm=1.0,
            bf16=False,  # the weights themselves are bfloat16, on both sides
            use_cpu=clock.device == "cpu",
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=0,
            use_vllm=use_vllm,
            vllm_mode="colocate",
            vllm_max_model_length=1024,
        )
        if use_vllm and find_spec("vllm") is None:
            raise RuntimeError("vllm is not installed")
        if use_vllm and clock.device == "cpu":
            raise RuntimeError("vllm samples on a GPU only")
        if use_vllm:  # it reads the first weights from a folder
            model.save_pretrained(output)
            tokenizer.save_pretrained(output)
            model.name_or_path = output
        optimizer = make_optimizer(model)
        RLOOTrainer(
            model,
            reward_funcs=clock,
            args=config,
            train_dataset=Dataset.from_list([json.loads(line) for line in Path(prompts).read_text().splitlines()]),
            processing_class=tokenizer,
            callbacks=[Steps()],
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
        ).train()


SIDES = {"trl": train_trl, "ours": train_ours, "trl, vllm": partial(train_trl, use_vllm=True)}


def measure(side: str, size: str, prompts: str, sizes: dict[str, int], setup: Setup) -> dict[str, Any]:
    """Run some steps of one side, and return its medians and peak memory."""
    clear(setup.device)
    model, clock = build_model(size, setup), Clock(setup.device)
    SIDES[side](model, build_tokenizer(size), prompts, sizes, clock)
    peak = torch.cuda.max_memory_allocated() if setup.device == "cuda" else None
    return clock.figures(sizes["warm_up"]) | {"peak_bytes": peak}


def run(setup: Setup) -> dict[str, Any]:
    """Run the sides in alternation, and vLLM once at the end, since its process keeps its memory.

    The ratios divide our tokens per second by TRL's, pair by pair.
    """
    size = setup.pick("0.5B", "tiny")
    full = {"num_prompts": 8, "num_generations": 8, "max_new_tokens": 256, "steps": 3, "warm_up": 1}
    tiny = {"num_prompts": 2, "num_generations": 2, "max_new_tokens": 6, "steps": 2, "warm_up": 1}
    sizes, pairs = setup.pick(full, tiny), setup.pick(2, 1)
    rng, words = random.Random(0), min(1000, SHAPES[size]["vocab_size"] - 10)
    texts = [" ".join(f"w{rng.randrange(words)}" for _ in range(rng.randint(32, 96))) for _ in range(64)]
    results: dict[str, Any] = {"model": size, **sizes, **{side: [] for side in SIDES}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": t}]}) + "\n" for t in texts))
        for side in ["trl", "ours"] * pairs + ["trl, vllm"]:
            results[side].append(attempt(measure, side, size, str(path), sizes, setup))
            setup.keep(results)
    both = list(zip(results["ours"], results["trl"], strict=True))
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in both if "tokens_per_s" in a and "tokens_per_s" in b]
    return results | {"ratios": ratios, "ratio": median(ratios) if ratios else None}
