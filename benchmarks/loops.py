"""One RLOO run with torchrl_rloo and with TRL: same start, prompts, rewards, optimizer and steps.

``python loops.py SIDE RUN`` executes the run that the JSON object ``RUN`` describes, and prints its figures as one line
of JSON. :mod:`bench_vs_trl` starts one such process for each figure.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import cpu_seconds, peak_memory_mb
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from torchrl_rloo.rewards import boxed_accuracy

# A base model has no chat template, but its prompts must begin with this token
PLAIN_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Run:
    """Settings of both sides.

    Attributes:
        model: directory of the start model and its tokenizer.
        prompts: file of JSON lines with a ``"prompt"`` of chat messages and the columns of the reward, in order.
        steps: number of generations, each followed by one optimizer step over all its rows.
        num_prompts: prompts per step.
        num_generations: completions per prompt.
        max_new_tokens: maximum number of tokens in a completion.
        reward: name in ``REWARDS``.
        learning_rate: peak learning rate.
        warm_up_steps: steps until the peak. The rate then falls linearly to ``final_share`` of it.
        final_share: share of the peak rate at the end; 1 keeps the rate constant.
        seed: seed of the sampled tokens and of the rows' order.
        warm_steps: number of first steps that the speed excludes.
        held_out: file of prompts to answer greedily after the run; None skips it.
        held_out_every: steps between greedy answers within the run, which figures of time exclude; 0 skips them.
        end: token that ends a completion on both sides, in place of the tokenizer's; None keeps that.
        micro_batch_size: rows of a forward and backward pass; None takes all.
        packing: layout of the rows that our side scores.
        images: whether the model sees the files in the prompts' ``"images"``; all of its weights are trained.
        trl: further arguments of TRL's ``RLOOConfig``.
    """

    model: str
    prompts: str
    steps: int
    num_prompts: int
    num_generations: int
    max_new_tokens: int
    reward: str
    learning_rate: float
    warm_up_steps: int = 0
    final_share: float = 1.0
    seed: int = 0
    warm_steps: int = 1
    held_out: str | None = None
    held_out_every: int = 0
    end: str | None = None
    micro_batch_size: int | None = None
    packing: str = "none"
    images: bool = False
    trl: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows per step."""
        return self.num_prompts * self.num_generations

    def rate(self, step: int) -> float:
        """Return the share of the peak learning rate at a step."""
        fall = (1 - self.final_share) * step / self.steps
        return min(1.0, (step + 1) / (self.warm_up_steps or 1)) * (1 - fall)


def id_sum(prompts, completions, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    """Return cheap rewards that differ within every group, so that no row has advantage 0."""
    return [sum(ids) % 1009 / 1009 for ids in completion_ids]


def first_number(prompts, completions, completion_ids, answer: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 for completions whose first number is the answer."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(re.findall(r"\d+", text)[:1] == [right]) for text, right in zip(texts, answer, strict=True)]


REWARDS: dict[str, Callable[..., list[float]]] = {
    "id_sum": id_sum,
    "boxed_accuracy": boxed_accuracy,
    "first_number": first_number,
}


class Meter:
    """Rewards, tokens and CPU time of each step.

    As TRL's reward function it records all rows that it scores. Our side scores equal completions once, so it passes
    its rows to ``record``.
    """

    __name__ = "reward"

    def __init__(self, function: Callable[..., list[float]], evaluate: Callable[[], float], every: int):
        self.function, self.evaluate, self.every = function, evaluate, every
        self.rewards: list[float] = []
        self.tokens: list[int] = []
        self.held_out: dict[int, float] = {}
        self.cpu: list[float] = []
        self.excluded = 0.0

    def __call__(self, prompts, completions, completion_ids, **columns: Any) -> list[float]:
        scores = self.function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        self.record(scores, sum(map(len, completion_ids)))
        return scores

    def record(self, scores: list[float], tokens: int) -> None:
        """Record all rows of a step."""
        self.rewards.append(sum(scores) / len(scores))
        self.tokens.append(tokens)

    def start(self) -> None:
        self._mark(0)

    def step(self) -> None:
        self._mark(len(self.cpu))

    def _mark(self, step: int) -> None:
        now = cpu_seconds()
        self.cpu.append(now - self.excluded)
        if self.every and step % self.every == 0:
            self.held_out[step] = self.evaluate()
            self.excluded += cpu_seconds() - now


def make_optimizer(model: torch.nn.Module, run: Run) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Create the optimizer and schedule of both sides."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    return optimizer, LambdaLR(optimizer, run.rate)


def train_ours(run: Run, model, tokenizer, meter: Meter) -> None:
    """Train as the README does."""
    from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

    from torchrl_rloo.collectors import LLMCollector
    from torchrl_rloo.data import load_prompts, tensor_rows
    from torchrl_rloo.envs import DatasetChatEnv
    from torchrl_rloo.modules import TransformersWrapper
    from torchrl_rloo.objectives import RLOOLoss
    from torchrl_rloo.replay import MCAdvantage, RowStorage
    from torchrl_rloo.training import accumulate, optimizer_step
    from torchrl_rloo.weight_update import InProcessWeightUpdater

    env = DatasetChatEnv(
        load_prompts(run.prompts),
        tokenizer,
        prompts_per_batch=run.num_prompts,
        num_generations=run.num_generations,
        rewards=meter.function,
        shuffle=False,
    )
    policy = TransformersWrapper(
        model.eval(), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": run.max_new_tokens, "seed": run.seed}
    )
    collector = LLMCollector(
        env,
        policy,
        total_dialog_turns=run.steps * run.rows,
        weight_updater=InProcessWeightUpdater(model, model),
    )
    buffer = ReplayBuffer(
        storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=run.rows
    )
    loss_module = RLOOLoss(policy.get_new_version(generate=False, packing=run.packing))
    optimizer, schedule = make_optimizer(model, run)
    meter.start()
    for rows in collector:
        actions = sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows.unbind(0))
        meter.record(rows["next", "rewards"].flatten().tolist(), actions)
        buffer.extend(tensor_rows(rows))
        for batch in buffer:
            accumulate(loss_module, batch, micro_batch_size=run.micro_batch_size)
            optimizer_step(model, optimizer, schedule, max_grad_norm=1.0)
        buffer.empty()
        collector.update_policy_weights_()
        meter.step()


def train_trl(run: Run, model, tokenizer, meter: Meter) -> None:
    """Train with TRL's RLOOTrainer, and its defaults wherever they match the other side."""
    from datasets import Dataset, Image, List
    from transformers import AutoProcessor, TrainerCallback
    from trl import RLOOConfig, RLOOTrainer

    class Steps(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            meter.start()

        def on_step_end(self, *args, **kwargs):
            meter.step()

    data = Dataset.from_list(read_lines(run.prompts))
    if run.images:
        data, tokenizer = data.cast_column("images", List(Image())), AutoProcessor.from_pretrained(run.model)
    with tempfile.TemporaryDirectory() as output:
        size = run.micro_batch_size or run.rows
        settings = dict(
            max_steps=run.steps,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=run.rows // size,
            num_generations=run.num_generations,
            max_completion_length=run.max_new_tokens,
            shuffle_dataset=False,
            beta=0.0,
            epsilon=0.2,
            max_grad_norm=1.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=run.seed,
        )
        config = RLOOConfig(output, **settings | run.trl)
        RLOOTrainer(
            model,
            reward_funcs=meter,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Steps()],
            optimizers=make_optimizer(model, run),
        ).train()


SIDES = {"ours": train_ours, "trl": train_trl}


@torch.no_grad()
def greedy_accuracy(model, tokenizer, run: Run) -> float:
    """Return the share of correct answers by the model's ``generate``, for the weights of either side."""
    rows = read_lines(run.held_out)
    training, right = model.training, 0.0
    model.eval()
    for start in range(0, len(rows), 256):
        part = rows[start : start + 256]
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in part],
            add_generation_prompt=True,
            tokenize=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        inputs = {k: inputs[k] for k in ("input_ids", "attention_mask")}
        ids = model.generate(**inputs, max_new_tokens=run.max_new_tokens, do_sample=False)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers = [row["answer"] for row in part]
        right += sum(REWARDS[run.reward](prompts=part, completions=texts, completion_ids=ids, answer=answers))
    model.train(training)
    return right / len(rows)


def read_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def load(run: Run) -> tuple[torch.nn.Module, Any]:
    """Load the start model, and end its completions with ``run.end``."""
    if run.images:
        from torchrl_rloo.modules import load_model

        return load_model(run.model, train_vision=True)
    if run.end is None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(run.model)  # AutoTokenizer would load a Qwen2Tokenizer
        return AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32), tokenizer
    from torchrl_rloo.modules import load_model

    model, tokenizer = load_model(run.model)
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.eos_token, tokenizer.padding_side = run.end, "left"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def main(side: str, description: str) -> None:
    run = Run(**json.loads(description))
    torch.manual_seed(run.seed)  # the buffer's sampler draws from torch's global generator
    model, tokenizer = load(run)
    meter = Meter(REWARDS[run.reward], partial(greedy_accuracy, model, tokenizer, run), run.held_out_every)
    loaded = peak_memory_mb()
    SIDES[side](run, model, tokenizer, meter)
    result = {"side": side, "run": asdict(run), "loaded_mb": loaded, "peak_mb": peak_memory_mb()}
    result |= {"rewards": meter.rewards, "tokens": meter.tokens, "cpu": [t - meter.cpu[0] for t in meter.cpu]}
    result["cpu_s"] = result["cpu"][-1]
    steady = meter.cpu[run.warm_steps :]
    result["cpu_s_per_step"] = (steady[-1] - steady[0]) / (len(steady) - 1)
    result["tokens_per_step"] = sum(meter.tokens[run.warm_steps :]) / len(meter.tokens[run.warm_steps :])
    if run.held_out is not None:
        if run.steps not in meter.held_out:
            meter.held_out[run.steps] = greedy_accuracy(model, tokenizer, run)
        result["held_out"] = list(meter.held_out.items())
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
