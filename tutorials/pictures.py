# %% [markdown]
# # A reward that looks at pictures
#
# You draw pictures, ask a question about each, and train the built-in vision-language model to answer it.
# No column has the right answers: the reward function gets the pictures, and counts their pixels.
# At the end you know how a picture gets into a prompt, how a row names it, and how to tell whether a policy looks.

# %%
import json
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from PIL import Image, ImageDraw
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.embedded import warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater

torch.manual_seed(0)
STEPS = 24
COLORS = {"red": (230, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "black": (20, 20, 20)}
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Pictures of yours
#
# Each picture has two to four rectangles of different sizes and colors. They are PNG files next to a file of rows, and
# its column `image` has their names.


# %%
def draw(rng):
    """Draw a picture of 32x32 pixels, the size that the built-in model sees."""
    picture = Image.new("RGB", (32, 32), "white")
    brush = ImageDraw.Draw(picture)
    corners = rng.sample([(1, 1), (17, 1), (1, 17), (17, 17)], rng.randint(2, 4))
    for (left, top), color in zip(corners, rng.sample(list(COLORS), len(corners)), strict=True):
        width, height = rng.randint(3, 13), rng.randint(3, 13)
        brush.rectangle((left, top, left + width, top + height), COLORS[color])
    return picture


rng = random.Random(0)
with open(folder / "pictures.jsonl", "w") as file:
    for number in range(512):
        draw(rng).save(folder / f"{number}.png")
        file.write(json.dumps({"question": "What color is the largest?", "image": f"{number}.png"}) + "\n")

figure, axes = plt.subplots(1, 6, figsize=(7, 1.3), layout="constrained")
for number, ax in enumerate(axes):
    ax.imshow(Image.open(folder / f"{number}.png"))
    ax.axis("off")
plt.show()

# %% [markdown]
# ## Model and prompts
#
# The built-in model for pictures is an Idefics3 that imitates a teacher who is often unsure. It has seen other shapes.
# `load_model` also takes a hub id, such as `HuggingFaceTB/SmolVLM2-2.2B-Instruct`. The tokenizer of a vision-language
# model has the image processor, and the *store* of images: a folder of files named by the hash of their bytes.

# %%
model, tokenizer = load_model(warm_start(seed=0, task="shapes"), images=folder / "store")
prompts = load_prompts(folder / "pictures.jsonl", prompt_column="question", tokenizer=tokenizer)
print(prompts)
for part in prompts[0]["query"][0]["content"]:
    print(part["type"], "->", part.get("text") or Path(part["url"]).name)

# %% [markdown]
# ## A reward that reads pixels
#
# A reward function that names `images` gets a list of pictures for each completion. This one gives the area of the
# color that was named, as a share of the largest area. So the second largest earns something, and no answer nothing.


# %%
def area_named(completions, images, **columns):
    """Return the area of the named color over that of the largest; 0 if no color is named."""
    scores = []
    for messages, (picture,) in zip(completions, images, strict=True):
        pixels = {rgb: count for count, rgb in picture.getcolors()}
        areas = {name: pixels.get(rgb, 0) for name, rgb in COLORS.items()}
        answer = messages[-1]["content"].rpartition("</think>")[2]
        scores.append(areas.get(answer, 0) / max(areas.values()))
    return scores


picture = Image.open(folder / "0.png").convert("RGB")
for answer in (*COLORS, "unsure"):
    said = [{"role": "assistant", "content": f"<think></think>{answer}"}]
    print(f"{area_named([said], [[picture]])[0]:.2f}  {answer}")

# %% [markdown]
# ## Sample
#
# A row has no pixels. It has the ids that the model read, with the tokens of the image, and `images`, the hash of each
# image. The store checks the hash whenever it reads a file.

# %%
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 20, "seed": 0})
env = DatasetChatEnv(prompts, tokenizer, rewards=area_named, prompts_per_batch=16, num_generations=8)
collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
rows = collector.collect()

row = rows[0]
print("hash of the image:", bytes(row["images"][0].tolist()).hex()[:16], "...")
print("context:", repr(tokenizer.decode(row["tokens", "full"][~row["masks", "all_assistant_mask"]])))
for row in rows[:8]:
    print(f"reward {row['next', 'reward'].item():.2f}  {row['completion'][0]['content']}")

# %% [markdown]
# ## Train
#
# The loop is that of `first_loop.py`. The vision tower is frozen; the rest of the model learns.

# %%
buffer = ReplayBuffer(
    storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=128
)
loss_fn = RLOOLoss(policy.get_new_version(generate=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)
curve = []

for step in range(STEPS):
    rows = collector.collect()
    curve.append(rows["next", "reward"].mean().item())
    buffer.extend(tensor_rows(rows))
    for batch in buffer:
        accumulate(loss_fn, batch, micro_batch_size=64)
        optimizer_step(model, optimizer, max_grad_norm=1.0)
    buffer.empty()
    collector.update_policy_weights_()
    if step % 4 == 0:
        print(f"step {step}: reward {curve[-1]:.2f}")

# %% [markdown]
# ## Does it look?
#
# A policy may earn rewards without looking, by naming a color that is often large. So score the last answers with the
# pictures of other prompts: what remains is what it earns without looking. Each step has new pictures, so none was
# learned by heart.

# %%
encoder = tokenizer.images
answers = [row["completion"] for row in rows.unbind(0)]
shown = [[encoder.store.load(path) for path in encoder.paths(row["images"])] for row in rows.unbind(0)]
own, other = (sum(area_named(answers, images)) / len(answers) for images in (shown, shown[8:] + shown[:8]))
print(f"reward with the own picture {own:.2f}, with that of the next prompt {other:.2f}")

figure, axes = plt.subplots(figsize=(7, 3), facecolor="white", layout="constrained")
axes.plot(curve, color="tab:blue", label="own picture")
axes.axhline(other, color="tab:gray", linestyle="--", label="picture of the next prompt, last step")
axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
axes.legend(loc="lower right")
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## What to try next
#
# - Return 1 for the largest and 0 for the others, and compare the curves.
# - Train the vision tower as well: `load_model(..., train_vision=True)`.
# - Look at the conversations: `write_transcripts` of `torchrl_rloo.diagnostics` shows the pictures in their places.
# - Use a real model and data: the guide [](../how-to/images.md) has the models, and what is refused.
