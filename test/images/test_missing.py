"""Images that are missing, changed or cut: one row abstains, and a pass that needs one stops with its name."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tensordict import NonTensorData, TensorDict

from support.vision_models import FAMILIES, build, picture
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, stack_rows, tensor_rows
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.data.templates import encode_prompt
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv
from torchrl_rloo.envs.transforms import RewardTransform
from torchrl_rloo.images import ImageError
from torchrl_rloo.modules import TransformersWrapper


def collector_of(family: str, folder: Path, *, encoded: bool, **limits):
    """Return a collector over two prompts, the policy, and the files of their images."""
    model, tokenizer, store = build(family, folder)
    images = [picture(40, 24, 1), picture(24, 56, 2)]
    prompts = load_prompts([{"prompt": "What is it?", "image": image} for image in images], tokenizer=tokenizer)
    if not encoded:  # the environment encodes them, and reads the sizes of the images
        tokenizer.images = fresh(tokenizer.images)
        prompts = load_prompts([dict(row) for row in prompts.rows], images=store)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4, "seed": 0})
    rewards = RewardTransform(lambda completions, **_: [float(len(c)) for c in completions])
    sizes = {"prompts_per_batch": 2, "num_generations": 2, "rewards": rewards}
    env = DatasetChatEnv(prompts, tokenizer, **sizes, **limits)
    paths = [
        Path(part["url"]) for row in prompts.rows for part in row["query"][0]["content"] if part["type"] == "image"
    ]
    return LLMCollector(env, policy, dialog_turns_per_batch=4), policy, paths


def fresh(encoder):
    """Return the encoder of another process, which has read no image yet."""
    twin = pickle.loads(pickle.dumps(encoder))
    twin._sizes.clear()
    return twin


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize("fault", ["deleted", "changed", "truncated"])
def test_a_row_whose_image_is_gone_abstains_and_the_others_train(fault: str, encoded: bool, tmp_path: Path) -> None:
    collector, policy, paths = collector_of("qwen2_5_vl", tmp_path, encoded=encoded)
    if fault == "deleted":
        paths[1].unlink()
    else:
        content = paths[1].read_bytes()
        paths[1].write_bytes(content[: len(content) // 2] if fault == "truncated" else paths[0].read_bytes())
    rows = next(iter(collector))
    collector.shutdown()
    reasons = {(stop_reason(row["next"]), bool(row[keys.REWARD].isnan().all())) for row in rows.unbind(0)}
    assert reasons == {("answered", False), ("failed", True)} or reasons == {("turn_tokens", False), ("failed", True)}
    scores = (
        policy.get_new_version(generate=False).score(tensor_rows(rows)) if fault == "deleted" and not encoded else None
    )
    assert scores is None or scores.log_probs.isfinite().all()


def test_a_pass_that_needs_a_missing_image_names_it(tmp_path: Path) -> None:
    collector, policy, paths = collector_of("qwen2_5_vl", tmp_path, encoded=True)
    rows = next(iter(collector))
    collector.shutdown()
    paths[0].unlink()
    with pytest.raises(ImageError, match=paths[0].stem):
        policy.get_new_version(generate=False).score(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_is_cut_has_no_part_of_an_image(family: str, tmp_path: Path) -> None:
    _, policy, paths = collector_of(family, tmp_path, encoded=True)
    tokenizer, text = policy.tokenizer, {"type": "text", "text": "What is it?"}
    image = {"type": "image", "url": str(paths[0])}
    queries = [[{"role": "user", "content": parts}] for parts in ([text], [image, text])]
    env = ChatEnv(tokenizer, max_tokens=len(encode_prompt(tokenizer, queries[0])) + 3)
    short, cut = env.open_rows(stack_rows([TensorDict({"query": NonTensorData(q)}, []) for q in queries])).unbind(0)
    assert stop_reason(cut) == "total_tokens" and keys.IMAGES not in cut.keys() and stop_reason(short) == "running"
    assert not (cut[keys.PROMPT_TOKENS] == policy.images.family.image_id).any() and len(cut[keys.PROMPT_TOKENS])
