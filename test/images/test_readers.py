"""Parts that read rows or messages with images: they see them, or refuse them by name."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForSequenceClassification

from support.vision_models import FAMILIES, build, picture
from torchrl_rloo.data import encode_preferences, keys, tensor_rows
from torchrl_rloo.data.preferences import encode_demonstrations, mismatched_rows
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.engines import TransformersEngine
from torchrl_rloo.envs.tools.browser import Page
from torchrl_rloo.envs.transforms import UserSimulator
from torchrl_rloo.images.parts import image_label
from torchrl_rloo.images.shown import data_uri
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.modules.heads import RewardModel, ValueHead, encode_pairs
from torchrl_rloo.objectives import SFTLoss
from torchrl_rloo.objectives.preference import PreferenceLoss
from torchrl_rloo.rewards.classifier import scored_ids
from torchrl_rloo.rewards.remote import RemoteScorer

from .test_turns import play


def conversation(*paths: str) -> list[dict]:
    shown = [{"type": "image", "url": path} for path in paths]
    messages = [{"role": "user", "content": [*shown, {"type": "text", "text": "What?"}]}]
    return [*messages, {"role": "assistant", "content": "A cup."}]


@pytest.mark.parametrize("family", FAMILIES)
def test_demonstrations_and_preferences_keep_their_images(family: str, tmp_path) -> None:
    model, tokenizer, store = build(family, tmp_path)
    first, second = (store.add(picture(*size, seed)) for seed, size in enumerate([(40, 24), (16, 32)]))
    messages = [conversation(first), conversation(second, first), conversation()]
    rows = encode_demonstrations(messages, tokenizer)
    assert [len(r.get(keys.IMAGES, None) if keys.IMAGES in r.keys() else []) for r in rows.unbind(0)] == [1, 2, 0]
    losses = []
    for packing in ("none", "packed"):
        scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing=packing)
        losses.append(SFTLoss(scorer)(rows).loss_sft.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    # The loss depends on the pixels
    other = encode_demonstrations([conversation(store.add(picture(40, 24, seed=9))), *messages[1:]], tokenizer)
    assert torch.equal(other[0][keys.TOKENS], rows[0][keys.TOKENS])
    assert abs(SFTLoss(scorer)(other).loss_sft.item() - losses[1]) > 1e-6
    pairs = [
        {"prompt": m[:1], "chosen": m[1:], "rejected": [{"role": "assistant", "content": "No."}]} for m in messages
    ]
    encoded = encode_preferences(pairs, tokenizer)
    assert torch.equal(encoded[1]["chosen", keys.IMAGES], rows[1][keys.IMAGES])
    assert torch.equal(encoded[1]["rejected", keys.IMAGES], rows[1][keys.IMAGES])
    loss = PreferenceLoss(scorer, "simpo")(encoded).loss_preference
    assert torch.isfinite(loss)
    mixed = mismatched_rows(rows[:2])
    scorer.score(stack_rows([mixed[0], mixed[1]]))  # image tokens are those of the images
    assert torch.equal(mixed[0][keys.IMAGES], rows[0][keys.IMAGES])


def test_readers_of_text_refuse_images(tmp_path) -> None:
    model, tokenizer, store = build("qwen2_5_vl", tmp_path)
    messages = conversation(store.add(picture(40, 24)))
    rows = encode_demonstrations([messages], tokenizer)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, num_labels=1, pad_token_id=0, **small)
    reward_model = RewardModel(LlamaForSequenceClassification(config))
    with pytest.raises(ValueError, match="RewardModel reads text only"):
        reward_model.score(rows)
    with pytest.raises(ValueError, match="ValueHead reads text only"):
        ValueHead(model).values(rows)
    with pytest.raises(ValueError, match="reward models read text only"):
        scored_ids(tokenizer, messages[:1], messages[1:])
    with pytest.raises(ValueError, match="reward models read text only"):
        encode_pairs([{"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[1:]}], tokenizer)
    assert reward_model.score(encode_demonstrations([conversation()], tokenizer)).shape == (1,)


def test_a_remote_reward_gets_data(tmp_path) -> None:
    _, _, store = build("qwen2_5_vl", tmp_path)
    path = store.add(picture(40, 24))
    messages = conversation(path)
    scorer = RemoteScorer("http://localhost/", fields={"a": "prompts", "b": "prompts+completions", "c": "final_text"})
    values = {name: scorer._values(source, {"prompts": [messages[:1], "text"], "completions": [messages[1:], "x"]})
              for name, source in scorer.fields.items()}  # fmt: skip
    assert values["a"][0][0]["content"][0] == {"type": "image", "url": data_uri(path)}
    assert values["b"][0][0] == values["a"][0][0] and values["b"][1] == "textx" and values["c"] == ["A cup.", "x"]
    assert messages[0]["content"][0]["url"] == path


@pytest.mark.parametrize("sees", [True, False])
def test_a_simulator_sees_images_or_their_labels(sees: bool, tmp_path, random_model, bpe) -> None:
    model, tokenizer, store = build("idefics3", tmp_path)
    path = store.add(picture(40, 24))
    dataset = PromptDataset([{"query": conversation(path)[:1]}])
    engine = TransformersEngine(model, tokenizer) if sees else TransformersEngine(random_model, bpe)
    requests, generate = [], engine.generate
    engine.generate = lambda batch: requests.extend(batch) or generate(batch)
    user = UserSimulator(engine, "You are a user.", tokenizer=tokenizer if sees else bpe, max_replies=1)
    rows, _ = play(model, tokenizer, dataset, [user], max_turns=2)
    assert not user.counts["user/failed"] and requests
    for request in requests:
        if sees:
            assert [image.path for image in request.images] == [path]
        else:
            assert image_label(path) in bpe.decode(request.prompt) and not request.images
    engine.close()


def test_a_screenshot_is_an_image() -> None:
    async def screenshot(type: str) -> bytes:
        return b"png"

    page = Page(["localhost"], 5.0)
    page.page = SimpleNamespace(screenshot=screenshot)
    assert asyncio.run(page.act({"action": "screenshot"})) == {"type": "image", "url": "data:image/png;base64,cG5n"}


def test_rows_without_images_still_stack(tmp_path) -> None:
    _, tokenizer, store = build("qwen2_5_vl", tmp_path)
    rows = encode_demonstrations([conversation(store.add(picture(40, 24))), conversation()], tokenizer)
    assert isinstance(tensor_rows(rows)[1], TensorDict)
