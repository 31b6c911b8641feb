"""TRL's RLOOTrainer on pictures, side by side: prompts, log-probs, rewards, advantages, loss and gradients are equal.

Our policy samples. TRL gets these completions and computes all else: it renders the prompts, prepares the pixels, pads
on the left and scores with its fused head.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from support import vision_models as tiny
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, tensor_rows
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.rows import pad, ragged
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.images.encoder import PassImages
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.modules.policies import padded_arguments
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage

pytest.importorskip("trl")

GROUP, NEW_TOKENS = 4, 10
QUESTIONS = ("What color is it?", "How many?", "What color is it?\n\nHow many?")
SIZES = ((40, 24), (24, 56), (64, 64))
CASES = [(family, count) for family in tiny.FAMILIES for count in (1, 2)]


def id_mean(prompts, completions, completion_ids, **columns) -> list[float]:
    return [sum(ids) / len(ids) / 100 for ids in completion_ids]


def ours(policy: TransformersWrapper, prompts: PromptDataset) -> TensorDictBase:
    """Return a group of rows for each prompt, with advantages."""
    env = DatasetChatEnv(
        prompts,
        policy.tokenizer,
        prompts_per_batch=len(prompts),
        num_generations=GROUP,
        rewards=id_mean,
        shuffle=False,
    )
    rows = LLMCollector(env, policy, total_dialog_turns=GROUP * len(prompts)).collect()
    buffer = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage(GROUP))
    buffer.extend(tensor_rows(rows))
    return buffer[:]


def theirs(model, processor, examples: list[dict], completion_ids: list[list[int]], folder):
    """Return TRL's trainer, and its batch for the given completions."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    class Trainer(RLOOTrainer):
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields):
            self.prompt_ids = prompt_ids
            return completion_ids

    config = RLOOConfig(
        str(folder),
        per_device_train_batch_size=len(examples),
        num_generations=GROUP,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer = Trainer(
        model,
        reward_funcs=id_mean,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": examples[0]["prompt"]}]),
        processing_class=processor,
    )
    return trainer, trainer._generate_and_score_completions(examples)


@pytest.fixture
def play(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """``play(family, count)``: policy, rows, TRL's trainer and its batch, for prompts of ``count`` pictures."""

    def make(family: str, count: int, change=lambda model, tokenizer: None):
        model, tokenizer, store = tiny.build(family, tmp_path / "images")
        change(model, tokenizer)
        pictures = [[tiny.picture(*size, seed + 9 * k) for k in range(count)] for seed, size in enumerate(SIZES)]
        prompts = [
            {"prompt": [{"role": "user", "content": question}], "images": shown}
            for question, shown in zip(QUESTIONS, pictures, strict=True)
        ]
        policy = TransformersWrapper(
            model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": NEW_TOKENS, "seed": 0}
        )
        rows = ours(policy, load_prompts(prompts, images=store))
        completions = [row[keys.TOKENS][row[keys.ACTION_MASK]].tolist() for row in rows.unbind(0)]
        processor = tiny.transformers_processor(family, tokenizer, monkeypatch)
        examples = [prompt for prompt in prompts for _ in range(GROUP)]
        return policy, rows, *theirs(model, processor, examples, completions, tmp_path / "trl")

    return make


@pytest.mark.parametrize(("family", "count"), CASES)
def test_trl_gives_the_same(family: str, count: int, play) -> None:
    policy, rows, trainer, batch = play(family, count, forbid_images)
    model = policy.model
    assert [row[keys.TOKENS][~row[keys.ACTION_MASK]].tolist() for row in rows.unbind(0)] == trainer.prompt_ids
    close(total_log_probs(rows) / NEW_TOKENS, batch["old_logps"] / NEW_TOKENS)
    close(torch.cat([row[keys.REWARD].flatten() for row in rows.unbind(0)]), trainer._logs["rewards"]["id_mean"])
    close(torch.stack([row[keys.ADVANTAGE].flatten()[0] for row in rows.unbind(0)]), batch["advantages"])
    assert batch["advantages"].abs().max() > 0.01

    # Change the weights, so that some rows are clipped and others are not
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)
    expected = trainer.compute_loss(model, batch)
    expected.backward()
    assert 0 < trainer._metrics["eval"]["clip_ratio/region_mean"][-1] < 1  # the model is in evaluation mode
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    assert any("vision" in name or "visual" in name for name in gradients)
    for packing in ("none", "packed", "shared_prefix"):
        model.zero_grad()
        loss = RLOOLoss(policy.get_new_version(generate=False, packing=packing))(rows).loss
        loss.backward()
        close(loss.detach(), expected.detach())
        for name, gradient in gradients.items():
            scale = max(1.0, float(gradient.abs().max()))
            close(model.get_parameter(name).grad / scale, gradient / scale)


def test_trl_scores_as_if_images_could_be_sampled(play) -> None:
    """TRL never samples an image id, but its log-probs are those of a policy that may."""
    policy, rows, _, batch = play("idefics3", 1)
    images = policy.images
    paths, tokens = [images.paths(row[keys.IMAGES]) for row in rows.unbind(0)], ragged(rows, keys.TOKENS)
    arguments = padded_arguments(policy.model, PassImages(images, tokens, paths))
    with torch.no_grad():
        probs = policy.model(input_ids=pad(tokens), use_cache=False, **arguments).logits.softmax(-1)
    lost = torch.nn.functional.pad(-torch.log1p(-probs[:, :-1, list(images.excluded)].sum(-1)), (1, 0))
    lost = (lost * pad(ragged(rows, keys.ACTION_MASK))).sum(1)
    assert lost.min() > 1e-3
    close((total_log_probs(rows) - lost) / NEW_TOKENS, batch["old_logps"] / NEW_TOKENS)


def total_log_probs(rows: TensorDictBase) -> torch.Tensor:
    return torch.stack([row[keys.LOG_PROBS][row[keys.ACTION_MASK]].sum() for row in rows.unbind(0)])


def forbid_images(model, tokenizer) -> None:
    """Give ids of images and videos probability 0, since TRL may sample the latter and scores both."""
    head = model.get_output_embeddings()
    bias = torch.zeros(len(head.weight))
    bias[list(tokenizer.images.excluded)] = -100.0
    head.bias = torch.nn.Parameter(bias)


def close(actual: torch.Tensor, expected) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=0, atol=1e-5, check_dtype=False)
