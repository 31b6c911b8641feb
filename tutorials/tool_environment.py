"""A tool environment from nothing: a tool, a reward, prompts, how calls are written, and the loop that learns them."""

import operator
import random
import re

import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import AsyncLLMCollector
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.diagnostics import write_transcripts
from torchrl_rloo.embedded import warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.tools import RegexParser, tool
from torchrl_rloo.envs.transforms import ToolTransform
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater


# A tool is a function. Whatever it raises is told to the policy, and so is a call that took too long.
@tool(timeout=5.0)
def compute(task: str) -> int:
    """Adds, subtracts or multiplies two whole numbers.

    Args:
        task: such as 47*38.
    """
    a, sign, b = re.fullmatch(r"(\d+)([-+*])(\d+)", task).groups()
    return {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](int(a), int(b))


# A reward sees the whole conversation: 1 for the right number in the box, less a tenth for every call beyond the first.
def frugal(prompts, completions, answer, **columns):
    texts = ["".join(m["content"] for m in messages if m["role"] == "assistant") for messages in completions]
    return [(f"\\boxed{{{a}}}" in t) - 0.1 * max(0, t.count("<tool>") - 1) for t, a in zip(texts, answer, strict=True)]


# Prompts are rows; columns other than the messages go to rewards and tools.
rng, system = random.Random(0), {"role": "system", "content": "Call the tool, then put the answer in \\boxed{}."}
pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(512)]
rows = [{"prompt": [system, {"role": "user", "content": f"What is {a}*{b}?"}], "answer": a * b} for a, b in pairs]

# The policy writes <tool>47*38</tool>: the part that the pattern names is the argument. Text around it is no matter.
torch.manual_seed(0)
model, tokenizer = load_model(warm_start(seed=0, task="calculator", log=print))  # calls seldom, and not always right
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 20, "seed": 0})
tools = ToolTransform([compute], RegexParser(r"<tool>(?P<task>.*?)</tool>", tool="compute"), show_schemas=False)
env = DatasetChatEnv(
    load_prompts(rows),
    tokenizer,
    prompts_per_batch=16,
    num_generations=8,
    transforms=[tools],
    rewards=frugal,
    max_turns=4,
)

# Each conversation goes on as soon as its own turn is sampled and its own calls are answered.
collector = AsyncLLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
buffer = ReplayBuffer(
    storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=128
)
loss_fn = RLOOLoss(policy.get_new_version(generate=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)
for step in range(30):
    batch = collector.collect()
    buffer.extend(tensor_rows(batch))
    for part in buffer:
        accumulate(loss_fn, part)
        optimizer_step(model, optimizer, max_grad_norm=1.0)
    buffer.empty()
    collector.update_policy_weights_()
    calls = batch["num_tool_calls"].float().mean()
    print(f"step {step}: reward {batch['next', 'reward'].mean():.2f}, calls {calls:.2f}")
collector.shutdown()
print(write_transcripts("transcripts.html", batch, tokenizer, reward_names=["frugal"]))
