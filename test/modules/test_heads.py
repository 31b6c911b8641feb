from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2ForSequenceClassification

from torchrl_rloo.data import keys, load_preferences, stack_rows
from torchrl_rloo.data.preferences import MARGIN
from torchrl_rloo.embedded import build_model
from torchrl_rloo.modules.heads import RewardModel, ValueHead, encode_pairs, load_reward_model
from torchrl_rloo.rewards.classifier import SequenceClassifier

SOURCE = [
    {"system": "Be brief.", "question": "2+2?", "chosen": "4", "rejected": "I do not know what that would be"},
    {"system": "Be brief.", "question": "And what is 17+25, do you think?", "chosen": "It is 42.", "rejected": "41"},
]


@pytest.fixture(scope="module")
def examples():
    return load_preferences(SOURCE, "chatml.intel", markup="tokenizer")


def save_lm(tokenizer, directory):
    build_model(tokenizer, seed=0).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def trained(directory):
    """Build a classifier with a nonzero head."""
    model, tokenizer = load_reward_model(directory)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model, tokenizer


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_what_is_saved_scores_alike_everywhere(make_tokenizer, examples, tmp_path, pad_is_eos):
    """Ragged rows, plain Transformers and the classifier reward give equal scores."""
    bpe = make_tokenizer(pad_is_eos=pad_is_eos)
    model, tokenizer = trained(save_lm(bpe, tmp_path / "lm"))
    rows = encode_pairs(examples, tokenizer)
    with torch.no_grad():
        ours = RewardModel(model).score(stack_rows([row["chosen"] for row in rows.unbind(0)]))
    assert ours.unique().numel() == 2
    model.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")

    plain, plain_tokenizer = (
        cls.from_pretrained(tmp_path / "rm") for cls in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    conversations = [[*e["prompt"], *e["chosen"]] for e in examples]
    inputs = plain_tokenizer.apply_chat_template(conversations, return_dict=True, return_tensors="pt", padding=True)
    torch.testing.assert_close(plain.eval()(**inputs).logits[:, 0].detach(), ours, rtol=0, atol=1e-5)
    reward = SequenceClassifier(tmp_path / "rm")
    scores = reward([e["prompt"] for e in examples], [e["chosen"] for e in examples], [[]] * 2)
    assert scores == pytest.approx(ours.tolist(), abs=1e-5)


def test_the_pad_token_of_a_language_model_is_no_end_of_turn(make_tokenizer, tmp_path):
    """Otherwise the classifier would ignore the end, and score truncated completions like finished ones."""
    bpe = make_tokenizer(pad_is_eos=True)
    model, tokenizer = trained(save_lm(bpe, tmp_path))
    assert tokenizer.pad_token_id not in (None, bpe.eos_token_id)
    assert model.config.pad_token_id == tokenizer.pad_token_id < model.get_input_embeddings().num_embeddings
    ids = torch.tensor([5, 6, bpe.eos_token_id])
    score = RewardModel(model).score
    finished, cut = (score(stack_rows([rows_of(t)])) for t in (ids, ids[:2]))
    assert float(finished) != float(cut)


def rows_of(ids: torch.Tensor):
    return TensorDict({keys.TOKENS: ids}, [])


def test_a_new_head_starts_at_zero_and_a_classifier_stays(tokenizer, tmp_path):
    model, _ = load_reward_model(save_lm(tokenizer, tmp_path / "lm"))
    assert isinstance(model, Qwen2ForSequenceClassification) and not model.training
    assert model.score.weight.shape[0] == 1 and not model.score.weight.any()
    assert torch.equal(model.model.embed_tokens.weight, build_model(tokenizer, seed=0).model.embed_tokens.weight)
    model, tokenizer = trained(tmp_path / "lm")
    model.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    again, _ = load_reward_model(tmp_path / "rm")
    assert torch.equal(again.score.weight, model.score.weight)
    assert load_reward_model(tmp_path / "rm", dtype="bfloat16")[0].dtype == torch.bfloat16


def test_rows_hold_the_whole_conversation_and_the_margin(tokenizer, examples):
    first, second = examples
    rows = encode_pairs([{**first, MARGIN: 0.5}, {**second, MARGIN: 2}], tokenizer)
    assert rows[MARGIN].tolist() == [0.5, 2.0]
    for row, example in zip(rows.unbind(0), examples, strict=True):
        for part in ("chosen", "rejected"):
            text = tokenizer.apply_chat_template([*example["prompt"], *example[part]], tokenize=False)
            assert tokenizer.decode(row[part][keys.TOKENS]) == text
    with pytest.raises(ValueError, match="example 0: chosen and rejected have the same tokens"):
        encode_pairs([{**first, "rejected": first["chosen"]}], tokenizer)


def test_what_is_no_reward_model_is_refused(tokenizer, tmp_path):
    model, tokenizer = load_reward_model(save_lm(tokenizer, tmp_path / "lm"))
    model.config.num_labels = 3
    Qwen2ForSequenceClassification(model.config).save_pretrained(tmp_path / "three")
    tokenizer.save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="classifier of 3 labels, but gaussian=False requires 1"):
        load_reward_model(tmp_path / "three")
    with pytest.raises(ValueError, match="has 3 labels"):
        RewardModel(model)
    model.config.num_labels, model.config.pad_token_id = 1, None
    with pytest.raises(ValueError, match="pad_token_id is None"):
        RewardModel(model)


SHAPES = ["ppaa", "ppaaccaaa", "pppppapcca", "pa"]


@pytest.fixture(scope="module")
def rows() -> TensorDictBase:
    generator, result = torch.Generator().manual_seed(0), []
    for shape in SHAPES:
        tokens = torch.randint(3, 300, (len(shape),), generator=generator)
        mask = torch.tensor([c == "a" for c in shape])
        result.append(TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: mask}, []))
    return stack_rows(result)


@pytest.fixture
def own_model(tokenizer):
    return build_model(tokenizer, seed=0).eval()


def value_trained(head: ValueHead) -> ValueHead:
    with torch.no_grad():
        head.projection.weight.normal_(generator=torch.Generator().manual_seed(0))
        head.projection.bias.fill_(0.3)
    return head


def test_the_first_estimates_are_zero(own_model, rows) -> None:
    values, actions = ValueHead(own_model).values(rows)
    assert (values == 0).all() and values.dtype == torch.float32 and values.requires_grad
    assert values.shape == actions.mask.shape == (4, 5)
    assert actions.mask.sum(1).tolist() == [shape.count("a") for shape in SHAPES]
    narrow = ValueHead(own_model.bfloat16())
    assert narrow.projection.weight.dtype == narrow.values(rows)[0].dtype == torch.float32


@pytest.mark.parametrize("share_trunk", [False, True])
def test_an_estimate_is_read_before_its_token(share_trunk: bool, own_model, rows) -> None:
    head = value_trained(ValueHead(own_model, share_trunk=share_trunk))
    values, actions = head.values(rows)
    for i, row in enumerate(rows.unbind(0)):
        hidden = own_model.model(input_ids=row[keys.TOKENS][None], use_cache=False).last_hidden_state[0]
        before = [t - 1 for t, is_action in enumerate(row[keys.ACTION_MASK].tolist()) if is_action]
        expected = hidden[before] @ head.projection.weight[0] + 0.3
        torch.testing.assert_close(values[i, : len(before)], expected, rtol=0, atol=1e-4)
        assert (values[i, len(before) :] == 0).all()


def test_an_own_trunk_is_a_copy_that_trains(own_model, rows) -> None:
    head = value_trained(ValueHead(own_model))
    head.values(rows)[0].sum().backward()
    assert len(list(head.parameters())) == len(list(own_model.model.parameters())) + 2
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert all(p.grad is None for p in own_model.parameters())


def test_a_shared_trunk_stays_the_policys(own_model, rows) -> None:
    head = value_trained(ValueHead(own_model, share_trunk=True))
    assert [name for name, _ in head.named_parameters()] == ["projection.weight", "projection.bias"]
    assert set(head.state_dict()) == {"projection.weight", "projection.bias"}
    torch.optim.AdamW([*own_model.parameters(), *head.parameters()])  # raises for duplicate parameters
    head.values(rows)[0].sum().backward()
    assert all(p.grad is not None for p in own_model.model.parameters())


def test_a_model_without_decoder_is_refused() -> None:
    with pytest.raises(TypeError, match="it is a Linear"):
        ValueHead(torch.nn.Linear(2, 2))
