# %% [markdown]
# # A tool environment
#
# You make a tool from a typed function, choose how calls are written, and reward whole conversations.
# The built-in model calls the tool in fewer than half of its conversations, and learns to call it in nearly all.
# At the end you can read a conversation token by token, and you know which tokens are trained.

# %%
import operator
import random
import re
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts, stop_reason, tensor_rows
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

torch.manual_seed(0)  # for the buffer's shuffling; the environment and the policy have their own seeds
STEPS = 26

# %% [markdown]
# ## A tool
#
# A tool is a typed function with a docstring; both become the schema that a chat template can show to a model.
# The policy reads what the function returns. It also reads the message of an exception, and that a call timed out.


# %%
@tool(timeout=5.0)
def compute(task: str) -> int:
    """Add, subtract or multiply two whole numbers.

    Args:
        task: such as 47*38.
    """
    a, sign, b = re.fullmatch(r"(\d+)([-+*])(\d+)", task).groups()
    return {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](int(a), int(b))


print(compute.name, compute.parameters)

# %% [markdown]
# ## How calls are written
#
# Models write calls in different formats. `parser="hermes"`, `"qwen_xml"`, `"llama"` and `"mistral"` read the common
# ones. The built-in model writes `<tool>47*38</tool>`, so a pattern finds the argument.
#
# A `ToolTransform` runs the calls of each turn and appends the results. The conversation then continues with another
# turn of the policy. A turn without a call is the answer, and ends the conversation.

# %%
tools = ToolTransform([compute], RegexParser(r"<tool>(?P<task>.*?)</tool>", tool="compute"), show_schemas=False)

# %% [markdown]
# ## A reward for the whole conversation
#
# A completion holds all messages after the prompt: the policy's turns and the tool's results.
# This reward gives 1 for the right number in the box, and takes off 0.1 for every call after the first.


# %%
def frugal(completions, answer, **columns):
    """Return 1 for the right number in the box, less a tenth for every call after the first."""
    texts = ["".join(m["content"] for m in messages if m["role"] == "assistant") for messages in completions]
    return [(f"\\boxed{{{a}}}" in t) - 0.1 * max(0, t.count("<tool>") - 1) for t, a in zip(texts, answer, strict=True)]


rng = random.Random(0)
system = {"role": "system", "content": "Call the tool, then put the answer in \\boxed{}."}
pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(512)]
prompts = [{"prompt": [system, {"role": "user", "content": f"What is {a}*{b}?"}], "answer": a * b} for a, b in pairs]

# %% [markdown]
# ## The environment
#
# The model cannot multiply in its head. Its warm start imitates a teacher who mostly guesses instead of calling.
# `max_turns` ends a conversation that never stops calling.
#
# `LLMCollector` runs each conversation at its own pace: a slow tool delays only its own conversation. A tool that calls
# a server may need a limit: `ToolTransform(..., max_concurrent={"compute": 8})` runs at most 8 calls at a time.

# %%
model, tokenizer = load_model(warm_start(seed=0, task="calculator"))
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 20, "seed": 0})
env = DatasetChatEnv(
    load_prompts(prompts),
    tokenizer,
    prompts_per_batch=16,
    num_generations=8,
    transforms=[tools],
    rewards=frugal,
    max_turns=4,
)
collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
rows = collector.collect()

calls, reward = rows["num_tool_calls"].float(), rows["next", "reward"].flatten()
print(f"{(calls > 0).float().mean():.0%} of the conversations have a call")
print(f"mean reward with a call {reward[calls > 0].mean():.2f}, without {reward[calls == 0].mean():.2f}")

# %% [markdown]
# ## One conversation
#
# The row of a conversation is one sequence of tokens: the prompt, the call, the tool's result, the answer.
# Only the tokens that the policy sampled are trained. The tool's result is context, like the prompt.

# %%
row = next((row for row in rows.unbind(0) if row["num_tool_calls"] > 0), rows[0])
for message in [*row["query"], *row["completion"]]:
    print(f"{message['role']:>10}: {message['content']}")
print(f"reward {row['next', 'reward'].item():.1f}, {row['num_turns'].item()} turns, ended as {stop_reason(row)!r}\n")

ids, sampled = row["tokens", "full"], row["masks", "all_assistant_mask"]
marked = "".join(
    f"[{tokenizer.decode(i)}]" if mine else tokenizer.decode(i) for i, mine in zip(ids, sampled, strict=True)
)
print("sampled tokens in brackets:", marked, sep="\n")

# %% [markdown]
# `write_transcripts` makes a page of many conversations, which a browser opens. It sorts and filters them, and shows
# each token with its log-probability, mask and advantage.

# %%
page = write_transcripts(Path(tempfile.mkdtemp()) / "transcripts.html", rows, tokenizer, reward_names=["frugal"])
print("open in a browser:", page)
print("what the tools did:", dict(tools.counts))

# %% [markdown]
# ## Train
#
# Buffer, loss and step do not change with tools: a row of several turns is trained like any other.

# %%
buffer = ReplayBuffer(
    storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=128
)
loss_fn = RLOOLoss(policy.get_new_version(generate=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)
curves = []

for step in range(STEPS):
    rows = collector.collect()
    buffer.extend(tensor_rows(rows))
    for batch in buffer:
        accumulate(loss_fn, batch)
        optimizer_step(model, optimizer, max_grad_norm=1.0)
    buffer.empty()
    collector.update_policy_weights_()
    curves.append((rows["next", "reward"].mean().item(), rows["num_tool_calls"].float().mean().item()))
    if step % 5 == 0:
        print(f"step {step}: reward {curves[-1][0]:.2f}, calls {curves[-1][1]:.2f}")
collector.shutdown()

# %%
rewards, calls = zip(*curves, strict=True)
figure, axes = plt.subplots(figsize=(7, 3.5), facecolor="white", layout="constrained")
axes.plot(calls, ".-", color="tab:orange", label="mean number of calls")
axes.plot(rewards, ".-", color="tab:blue", label="mean reward")
axes.axhline(1.0, color="gray", linestyle=":", label="one call for each conversation")
axes.set(xlabel="step", ylabel="mean over 128 conversations", ylim=(0, None))
axes.legend(loc="lower right")
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Only conversations with a call earn anything, so the model learns to call. Box and operator improve at the same time.
# A second call would cost a tenth, so the number of calls ends near the dotted line.
#
# ## What to try next
#
# - Add a second tool, or `PythonInterpreter()`, to the list of `ToolTransform`.
# - Let `compute` raise `ToolError("try again")` now and then, and read `tools.counts`.
# - Run the recipe: `torchrl-rloo run rloo_tools` trains, evaluates and writes transcripts.
