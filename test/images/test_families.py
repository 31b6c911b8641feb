"""Vision-language models of all families are as exact as text: ids, log-probs, packs, gradients."""

from __future__ import annotations

import copy
import functools
import pickle
import tempfile
import types

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from support import vision_models as tiny
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.templates import encode_prompt, render
from torchrl_rloo.envs import ChatEnv
from torchrl_rloo.images.encoder import ImageEncoder, PassImages
from torchrl_rloo.modules import TransformersWrapper, add_adapter
from torchrl_rloo.modules.policies import padded_arguments

SIZES = [(40, 24), (24, 56), (100, 30), (33, 33), (17, 200), (64, 64)]
PACKINGS = ("none", "packed", "shared_prefix")


@functools.cache
def built(family: str):
    return tiny.build(family, tempfile.mkdtemp())


def prompt(*paths: str, text: str = "What color is it?") -> list[dict]:
    return [
        {"role": "user", "content": [*({"type": "image", "url": p} for p in paths), {"type": "text", "text": text}]}
    ]


def reset(tokenizer, queries: list) -> TensorDict:
    env = ChatEnv(tokenizer, batch_size=len(queries))
    return env.reset(stack_rows([TensorDict({"query": NonTensorData(query)}, []) for query in queries]))


def queries_of(store) -> list:
    """Return prompts with one image, twice the same, another of equal size, two images, one twice, and none."""
    a, b, c = (store.add(tiny.picture(*size, seed)) for seed, size in enumerate([(40, 24), (24, 56), (40, 24)]))
    return [prompt(a), prompt(a), prompt(c), prompt(a, b), prompt(b, b), prompt(text="How many?")]


def sample(model, tokenizer, store, **kwargs):
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 12, "seed": 0, **kwargs}
    )
    return policy, policy(reset(tokenizer, queries_of(store)))


def sampled(rows) -> list[torch.Tensor]:
    return [row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in rows.unbind(0)]


def largest_gap(policy, rows, **kwargs) -> float:
    scores = policy.get_new_version(generate=False, **kwargs).score(rows).log_probs
    return max(float((scores[i, : len(own)] - own).detach().abs().max()) for i, own in enumerate(sampled(rows)))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_scores_equal_samples_in_every_layout(family: str) -> None:
    model, tokenizer, store = built(family)
    policy, rows = sample(model, tokenizer, store)
    for packing in PACKINGS:
        assert largest_gap(policy, rows, packing=packing) < 1e-5
    assert max(largest_gap(policy, rows[i : i + 1]) for i in range(len(rows))) < 1e-5


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_distributions_that_truncate_are_exact(family: str) -> None:
    model, tokenizer, store = built(family)
    policy, rows = sample(model, tokenizer, store, temperature=0.7, top_p=0.9, repetition_penalty=1.2)
    assert largest_gap(policy, rows, packing="shared_prefix") < 1e-5


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_another_picture_of_equal_size_changes_scores_but_no_ids(family: str) -> None:
    model, tokenizer, store = built(family)
    policy, rows = sample(model, tokenizer, store)
    assert torch.equal(rows[0][keys.PROMPT_TOKENS], rows[2][keys.PROMPT_TOKENS])
    other = rows[0].clone().set(keys.IMAGES, rows[2][keys.IMAGES])
    mixed = stack_rows([rows[0], other])  # equal ids and different images: no prefix is shared
    for packing in PACKINGS:
        scores = policy.get_new_version(generate=False, packing=packing).score(mixed).log_probs
        assert float((scores[0] - scores[1]).detach().abs().max()) > 1e-3
        assert float((scores[0, : len(sampled(rows)[0])] - sampled(rows)[0]).detach().abs().max()) < 1e-5


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gradients_do_not_depend_on_the_layout(family: str) -> None:
    model, tokenizer, store = built(family)
    policy, rows = sample(model, tokenizer, store)
    gradients = {}
    for packing in PACKINGS:
        model.zero_grad()
        policy.get_new_version(generate=False, packing=packing).score(rows).log_probs.sum().backward()
        gradients[packing] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert any("vision" in name or "visual" in name for name in gradients["none"])
    for packing in PACKINGS[1:]:
        assert gradients[packing].keys() == gradients["none"].keys()
        for name, expected in gradients["none"].items():
            tolerance = 1e-4 * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(gradients[packing][name], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_recomputed_layers_give_the_same_gradients(family: str) -> None:
    model, tokenizer, store = built(family)
    policy, rows = sample(model, tokenizer, store)
    gradients = []
    for enabled in (False, True):
        twin = copy.deepcopy(model)
        if enabled:
            twin.gradient_checkpointing_enable()
        scorer = policy.get_new_version(model=twin, generate=False, packing="shared_prefix")
        scorer.score(rows).log_probs.sum().backward()
        gradients.append({name: p.grad for name, p in twin.named_parameters() if p.grad is not None})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_adapters_are_exact(family: str) -> None:
    model, tokenizer, store = built(family)
    adapted = add_adapter(copy.deepcopy(model), {"r": 4, "target_modules": "all-linear", "init_lora_weights": False})
    policy, rows = sample(adapted, tokenizer, store)
    for packing in PACKINGS:
        assert largest_gap(policy, rows, packing=packing) < 1e-5


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_ids_and_logits_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, store = built(family)
    processor = tiny.transformers_processor(family, tokenizer, monkeypatch)
    for seed, size in enumerate(SIZES):
        for more in ([], [(30, 70)]):
            paths = [store.add(tiny.picture(*s, seed)) for s in [size, *more]]
            images = [store.load(path) for path in paths]
            messages = prompt(*paths)
            ids = encode_prompt(tokenizer, messages)
            text = render(tokenizer, messages, add_generation_prompt=True)
            nested = [images] if family in ("idefics3", "smolvlm", "gemma3") else images
            inputs = processor(text=[text], images=nested, return_tensors="pt", add_special_tokens=False)
            assert inputs["input_ids"][0].tolist() == ids
            shown = PassImages(tokenizer.images, [torch.tensor(ids)], [paths])
            inputs.pop("num_crops", None)
            with torch.no_grad():
                expected = model(**inputs).logits
                logits = model(input_ids=inputs["input_ids"], use_cache=False, **padded_arguments(model, shown)).logits
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_text_that_spells_an_image_is_text(family: str) -> None:
    _, tokenizer, store = built(family)
    spelled = "".join(tokenizer.images.texts)
    path = store.add(tiny.picture(40, 24))
    ids = encode_prompt(tokenizer, prompt(path, text=spelled))
    assert ids.count(tokenizer.images.family.image_id) == tokenizer.images.number(path)
    assert spelled in tokenizer.decode(ids).replace(tokenizer.images.family.image_text * 2, "")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_image_ids_are_never_sampled(family: str) -> None:
    model, tokenizer, store = built(family)
    model, never = copy.deepcopy(model), tokenizer.images.excluded
    model.config.get_text_config().tie_word_embeddings = False
    head = torch.nn.Linear(64, model.get_output_embeddings().weight.shape[0])  # prefers images to everything else
    with torch.no_grad():
        head.weight.copy_(model.get_output_embeddings().weight)
        head.bias.zero_()
        head.bias[list(never)] = 50.0
    model.set_output_embeddings(head)
    policy, rows = sample(model, tokenizer, store)
    for row in rows.unbind(0):
        assert not torch.isin(row[keys.TOKENS][row[keys.ACTION_MASK]], torch.tensor(never)).any()
    assert largest_gap(policy, rows) < 1e-5
    greedy = policy.get_new_version(generate_kwargs={"temperature": 0, "max_new_tokens": 4})
    for row in greedy(reset(tokenizer, queries_of(store))).unbind(0):
        assert not torch.isin(row[keys.TOKENS][row[keys.ACTION_MASK]], torch.tensor(never)).any()


def test_image_ids_without_their_images_are_refused() -> None:
    model, tokenizer, store = built("qwen2_5_vl")
    policy, rows = sample(model, tokenizer, store)
    scorer = policy.get_new_version(generate=False)
    with pytest.raises(ValueError, match="image tokens, but its 0 images have 0"):
        scorer.score(stack_rows([rows[0].exclude(keys.IMAGES)]))
    with pytest.raises(ValueError, match="a row has 4 image tokens, but its 2 images have 12"):
        scorer.score(stack_rows([rows[0].clone().set(keys.IMAGES, rows[3][keys.IMAGES])]))


def test_a_text_model_refuses_images() -> None:
    from torchrl_rloo.embedded import build_tokenizer

    _, _, store = built("qwen2_5_vl")
    with pytest.raises(ValueError, match="reads text only"):
        reset(build_tokenizer(), [prompt(store.add(tiny.picture(40, 24)))])


def test_an_unknown_family_is_refused_by_name() -> None:
    config = types.SimpleNamespace(model_type="pixtral", vision_config=object())
    with pytest.raises(ValueError, match="model type 'pixtral' cannot see images here; use one of"):
        ImageEncoder(config, None, None)


def test_an_encoder_is_pickled_without_its_cache_and_copied_with_its_tokenizer() -> None:
    _, tokenizer, store = built("idefics3")
    path = store.add(tiny.picture(40, 24))
    tokenizer.images.tensors(path)
    twin = pickle.loads(pickle.dumps(tokenizer))
    assert len(pickle.dumps(tokenizer.images)) < 20_000
    assert encode_prompt(twin, prompt(path)) == encode_prompt(tokenizer, prompt(path))


def test_the_cache_keeps_to_its_memory() -> None:
    _, tokenizer, store = built("qwen2_5_vl")
    encoder = ImageEncoder(
        built("qwen2_5_vl")[0].config, tokenizer.images.family.processor, tokenizer, store, cache_bytes=300_000
    )
    paths = [store.add(tiny.picture(64, 64, seed)) for seed in range(20)]
    for path in paths:
        encoder.tensors(path)
    kept = sum(value.nbytes for tensors in encoder._tensors.values() for value in tensors.values())
    assert 0 < kept <= 300_000
