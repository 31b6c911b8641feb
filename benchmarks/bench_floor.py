"""CPU time of a whole training step compared to its floor, a bare loop over the same model.

    python benchmarks/bench_floor.py

The floor samples with the model's cached decoding, then runs one forward and one backward pass over the rows. The
toolkit's step has all its parts: environment, collector, buffer with MCAdvantage, RLOOLoss and optimizer. Both sides
run in this process on one thread, in alternating order. Each ratio is of two adjacent steps.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from bench_vs_trl import BATCH, SIZES, word_prompts
from common import ONE_THREAD, cpu_seconds, print_result, print_table, qwen2, word_tokenizer

os.environ.update(ONE_THREAD)  # must be set before torch is imported

import torch  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from torchrl_rloo.engines.decoder import cache_argument  # noqa: E402


class Floor:
    """Model calls that a step requires at least, over rows of equal length, which need no mask."""

    def __init__(self, model, prompts: Sequence[torch.Tensor]):
        length = round(sum(map(len, prompts)) / len(prompts))
        ids = torch.cat(prompts)  # cut into equal rows, with as many tokens as the other side reads
        self.model, self.prompts, self.step = model, ids[: len(ids) // length * length].view(-1, length), 0

    def __call__(self) -> Iterator[tuple[str, float]]:
        """Run one step, and yield the CPU time at the end of each part."""
        count, copies, length = BATCH.values()
        start = self.step * count % (len(self.prompts) - count)
        prompts = self.prompts[start : start + count]
        self.step += 1
        sampled = self.sample(prompts, copies, length)
        yield "collect", cpu_seconds()
        rows = torch.cat([prompts.repeat_interleave(copies, 0), sampled], 1)
        logits = self.model(rows, use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, sampled[..., None])
        yield "forward", cpu_seconds()
        log_probs.mean().backward()
        self.model.zero_grad()
        yield "backward", cpu_seconds()

    @torch.no_grad()
    def sample(self, prompts: torch.Tensor, copies: int, length: int) -> torch.Tensor:
        """Read each prompt once and sample ``copies`` answers of ``length`` tokens."""
        cache = DynamicCache(config=self.model.config)
        kwargs = {cache_argument(self.model): cache, "use_cache": True}
        logits = self.model(prompts, logits_to_keep=1, **kwargs).logits
        cache.batch_repeat_interleave(copies)
        logits = logits.repeat_interleave(copies, 0)
        sampled = [torch.multinomial(logits[:, -1].softmax(-1), 1)]
        while len(sampled) < length:
            logits = self.model(sampled[-1], **kwargs).logits
            sampled.append(torch.multinomial(logits[:, -1].softmax(-1), 1))
        return torch.cat(sampled, 1)


class Toolkit:
    """Training step as a user of the toolkit writes it (see ``loops.py``)."""

    def __init__(self, model, tokenizer, prompts, steps: int):
        from loops import id_sum
        from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

        from torchrl_rloo.collectors import LLMCollector
        from torchrl_rloo.data import load_prompts
        from torchrl_rloo.envs import DatasetChatEnv
        from torchrl_rloo.modules import TransformersWrapper
        from torchrl_rloo.objectives import RLOOLoss
        from torchrl_rloo.replay import MCAdvantage, RowStorage

        count, copies, length = BATCH.values()
        rows = count * copies
        env = DatasetChatEnv(
            load_prompts(prompts),
            tokenizer,
            prompts_per_batch=count,
            num_generations=copies,
            rewards=id_sum,
            shuffle=False,
        )
        policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": length, "seed": 0})
        self.collector = LLMCollector(env, policy, total_dialog_turns=steps * rows)
        self.buffer = ReplayBuffer(
            storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=rows
        )
        self.loss = RLOOLoss(policy.get_new_version(generate=False))
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.rows = iter(self.collector)

    def __call__(self) -> Iterator[tuple[str, float]]:
        """Run one step, and yield the CPU time at the end of each part."""
        from torchrl_rloo.data import tensor_rows

        rows = next(self.rows)
        yield "collect", cpu_seconds()
        self.buffer.extend(tensor_rows(rows))
        (batch,) = self.buffer
        yield "buffer", cpu_seconds()
        out = self.loss(batch, self.loss.normalizers(batch))
        yield "forward", cpu_seconds()
        out.loss.backward()
        yield "backward", cpu_seconds()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.buffer.empty()
        yield "optimizer", cpu_seconds()


def measure(side: Callable[[], Iterator[tuple[str, float]]]) -> dict[str, float]:
    """Return the CPU seconds of each part of one step, and of the whole step."""
    start = last = cpu_seconds()
    parts = {}
    for name, now in side():
        parts[name], last = now - last, now
    return parts | {"step": last - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = word_tokenizer(SIZES[args.size]["vocab_size"])
    model = qwen2(tokenizer, **SIZES[args.size]).eval()
    steps = args.rounds + 2
    lines = word_prompts(steps * BATCH["num_prompts"])
    prompts = [
        torch.tensor(
            tokenizer(tokenizer.apply_chat_template(x["prompt"], tokenize=False, add_generation_prompt=True))[
                "input_ids"
            ]
        )
        for x in lines
    ]
    sides = {"floor": Floor(model, prompts), "toolkit": Toolkit(model, tokenizer, lines, steps)}
    results = {name: [] for name in sides}
    for round_ in range(steps):
        for name in sorted(sides, reverse=round_ % 2 == 1):
            figures = measure(sides[name])
            if round_ >= 2:  # the first two rounds warm up
                results[name].append(figures)
    table = []
    for name, done in results.items():
        parts = {part: median(d[part] for d in done) for part in done[0]}
        table.append(
            {"side": name}
            | {part: parts.get(part) for part in ("collect", "buffer", "forward", "backward", "optimizer", "step")}
        )
    ratios = sorted(t["step"] / f["step"] for t, f in zip(results["toolkit"], results["floor"], strict=True))
    quartiles = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print_table(
        f"{args.size}: CPU s of a step, medians of {args.rounds} rounds. toolkit / floor: {median(ratios):.2f} "
        f"(quartiles {quartiles[0]:.2f} to {quartiles[1]:.2f})",
        table,
    )
    print_result({"ratio": median(ratios), "quartiles": quartiles, "parts": table})


if __name__ == "__main__":
    main()
