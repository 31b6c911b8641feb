from __future__ import annotations

import pickle
import threading
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Qwen2Config, Qwen2ForSequenceClassification

from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.functional.rewards import mean_overlap
from torchrl_rloo.rewards.classifier import SequenceClassifier, scored_ids
from torchrl_rloo.rewards.protocol import RewardBatch, call_reward
from torchrl_rloo.rewards.registry import load_reward
from torchrl_rloo.rewards.runner import RewardRunner

ROUNDING = 1e-5  # float32, for scores around 1
TEXTS = ["7", "a longer answer, with words", "", "12 + 30 = 42", "x" * 40]


def build_classifier(num_labels=1, pad_token_id=0, seed=0, **settings):
    """Create a random classifier with scores around 1."""
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        num_labels=num_labels,
        pad_token_id=pad_token_id,
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForSequenceClassification(config).eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "my-reward-model"
    build_classifier().save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def rows(texts=TEXTS, prompt="1 + 1 ="):
    return RewardBatch([prompt] * len(texts), texts, [[1]] * len(texts))


def chats(texts=TEXTS):
    prompts = [[{"role": "user", "content": "Say it."}]] * len(texts)
    return RewardBatch(prompts, [[{"role": "assistant", "content": t}] for t in texts], [[1]] * len(texts))


def scores(reward, batch):
    return call_reward(reward, batch).scores


def test_scores_are_the_models_logits_of_whole_rows_one_by_one(directory):
    reward = SequenceClassifier(directory, batch_size=3)
    model = Qwen2ForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    tokenizer = build_tokenizer()
    for batch in (rows(), chats()):
        expected = []
        for prompt, completion in zip(batch.prompts, batch.completions, strict=True):
            if isinstance(prompt, str):
                ids = tokenizer(prompt + completion)["input_ids"]
            else:
                ids = tokenizer.apply_chat_template(prompt + completion, return_dict=True)["input_ids"]
            with torch.no_grad():
                expected.append(model(torch.tensor([ids])).logits.item())
        assert scores(reward, batch) == pytest.approx(expected, abs=ROUNDING)
        assert torch.tensor(expected).std() > 0.1


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", ROUNDING), ("float64", 1e-12)])
@pytest.mark.parametrize("batch_size", [2, 5, 64])
def test_scores_depend_on_neither_batch_size_nor_order(directory, batch_size, dtype, tolerance):
    expected = scores(SequenceClassifier(directory, batch_size=1, dtype=dtype), rows())
    reward = SequenceClassifier(directory, batch_size=batch_size, dtype=dtype)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3]):
        assert scores(reward, rows().select(order)) == pytest.approx([expected[i] for i in order], abs=tolerance)


@pytest.mark.parametrize("pad_token_id", [None, 5])
def test_a_model_that_knows_no_padding_or_another_learns_the_tokenizers(pad_token_id):
    model = build_classifier(pad_token_id=pad_token_id)
    reward = SequenceClassifier(model, tokenizer=build_tokenizer(), batch_size=8)
    alone = [scores(reward, rows([text]))[0] for text in TEXTS]
    assert scores(reward, rows()) == pytest.approx(alone, abs=ROUNDING)
    assert model.config.pad_token_id == build_tokenizer().pad_token_id


def test_a_tokenizer_without_padding_takes_the_models_or_rows_are_scored_one_by_one():
    tokenizer = build_tokenizer()
    expected = pytest.approx(scores(SequenceClassifier(build_classifier(), tokenizer=tokenizer), rows()), abs=ROUNDING)
    tokenizer.pad_token = None
    bare = SequenceClassifier(build_classifier(pad_token_id=None), tokenizer=tokenizer, name="rm")
    assert scores(bare, rows()) == expected and tokenizer.pad_token is None
    assert scores(SequenceClassifier(build_classifier(), tokenizer=tokenizer), rows()) == expected


def test_a_model_or_a_directory_among_the_rewards_is_a_reward_model(directory, monkeypatch):
    """As in TRL, with its own tokenizer; a language model and a path without a model are refused by name."""
    module = Qwen2ForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    monkeypatch.chdir(directory.parent)
    runner = RewardRunner([str(directory), {"_target_": "stop_properly", "function": module}, "boxed_accuracy"])
    assert runner.names[0] == "my-reward-model" and len(runner.names) == 3
    expected = scores(SequenceClassifier(directory), chats())
    batch = replace(chats(), columns={"answer": ["7"] * len(TEXTS)})
    for column in (*runner(batch).scores[:2], *RewardRunner(directory.name)(batch).scores):
        assert column == pytest.approx(expected, abs=ROUNDING)
    assert load_reward("org/reward-model").__name__ == "reward-model"
    with pytest.raises(FileNotFoundError, match="nowhere/model"):
        load_reward("./nowhere/model")
    model = build_model(build_tokenizer(), seed=0)
    with pytest.raises(ValueError, match="is a language model; pass a sequence classifier"):
        RewardRunner([{"_target_": "sequence_classifier", "model": model, "tokenizer": build_tokenizer()}])


def test_an_encoder_with_its_own_special_tokens():
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=320, num_labels=1, initializer_range=0.3, **settings))
    # In training mode, dropout would change the scores
    reward = SequenceClassifier(model.train(), tokenizer=build_tokenizer(), batch_size=8)
    alone = [scores(reward, rows([text]))[0] for text in TEXTS]
    assert scores(reward, rows()) == pytest.approx(alone, abs=ROUNDING) and not model.training


def test_its_own_template_and_the_settings_of_that(directory):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ sep | default('|') }}{% endfor %}"
    reward = SequenceClassifier(directory, tokenizer=tokenizer, template_kwargs={"sep": "#"})
    expected = scores(SequenceClassifier(directory), rows(["Say it.#7#"], prompt=""))
    assert scores(reward, chats(["7"])) == pytest.approx(expected)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template"):
        scores(SequenceClassifier(directory, tokenizer=tokenizer), chats())


def test_a_turn_that_the_prompt_left_open_is_one_message():
    prompt = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is "}]
    ids = scored_ids(build_tokenizer(), prompt, [{"role": "assistant", "content": "7"}])
    whole = scored_ids(build_tokenizer(), prompt[:1], [{"role": "assistant", "content": "It is 7"}])
    assert ids == whole
    with pytest.raises(TypeError, match="both texts or both messages"):
        scored_ids(build_tokenizer(), "?", [{"role": "assistant", "content": "7"}])


def test_rows_that_are_too_long_abstain_and_are_counted(directory):
    reward = SequenceClassifier(directory, max_length=20)
    call = call_reward(reward, rows(["7", "x" * 40, "8", "y" * 40]))
    assert [s is None for s in call.scores] == [False, True, False, True]
    assert call.metrics == [("my-reward-model/overlong", 0.5)]
    by_the_model = call_reward(SequenceClassifier(directory), rows(["7", "x" * 200]))
    assert by_the_model.scores[1] is None and by_the_model.metrics[0][1] == 0.5


@pytest.mark.parametrize(("truncation", "kept"), [("left", "xyz"), ("right", "1 + ")])
def test_rows_that_are_too_long_can_be_cut_at_either_end(directory, truncation, kept):
    length = len(build_tokenizer()(kept)["input_ids"])
    reward = SequenceClassifier(directory, max_length=length, truncation=truncation)
    expected = scores(SequenceClassifier(directory), rows([kept], prompt=""))
    assert scores(reward, rows(["1 + 2 xyz"], prompt="")) == pytest.approx(expected, abs=ROUNDING)


def test_rows_without_a_token_abstain(directory):
    assert scores(SequenceClassifier(directory), rows(["", "7"], prompt=""))[0] is None
    assert scores(SequenceClassifier(directory), rows([])) == []


def test_a_label_has_to_be_picked_from_several(tmp_path):
    build_classifier(num_labels=3).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 3 labels.*label=0 ... 2"):
        scores(SequenceClassifier(tmp_path), rows())
    with pytest.raises(ValueError, match="label=3"):
        scores(SequenceClassifier(tmp_path, label=3), rows())
    model = build_classifier(num_labels=3)
    logits = model(torch.tensor([build_tokenizer()("1 + 1 =7")["input_ids"]])).logits[0]
    for label in range(3):
        assert scores(SequenceClassifier(tmp_path, label=label), rows(["7"])) == pytest.approx([logits[label].item()])


def test_a_language_model_is_refused(tmp_path):
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no weights for.*score"):
        scores(SequenceClassifier(tmp_path), rows())


def test_an_adapter_directory(tmp_path, directory):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(Qwen2ForSequenceClassification.from_pretrained(directory), config).eval()
    with torch.no_grad():
        model.base_model.model.score.modules_to_save["default"].weight.mul_(2)
    model.save_pretrained(tmp_path / "adapter")
    build_tokenizer().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(torch.tensor([build_tokenizer()("1 + 1 =7")["input_ids"]])).logits.item()
    reward = SequenceClassifier(tmp_path / "adapter")
    assert scores(reward, rows(["7"])) == pytest.approx([expected], abs=ROUNDING)
    assert scores(reward, rows()) == pytest.approx([scores(reward, rows([t]))[0] for t in TEXTS], abs=ROUNDING)
    assert reward.__name__ == "adapter"


def test_never_trains_and_leaves_no_trace(directory):
    model = build_classifier(attention_dropout=0.5).train()
    reward = SequenceClassifier(model, tokenizer=build_tokenizer())
    first = scores(reward, rows())
    model.train()  # as other code might
    assert scores(reward, rows()) == first
    assert all(p.grad is None for p in model.parameters())
    model.train()(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()  # its weights are not inference tensors


def test_dtype_and_device(directory):
    reward = SequenceClassifier(directory, dtype="bfloat16", device="cpu")
    exact, rough = scores(SequenceClassifier(directory), rows()), scores(reward, rows())
    assert rough != exact and rough == pytest.approx(exact, abs=0.3)
    with pytest.raises(ValueError, match="float31"):
        scores(SequenceClassifier(directory, dtype="float31"), rows())


def test_an_offloaded_model_is_on_its_device_only_while_it_scores(directory, monkeypatch):
    reward = SequenceClassifier(directory, device="cuda", offload=True)
    reward.prepare()
    model, moves = reward._loaded[0], []
    monkeypatch.setattr(model, "to", lambda device: moves.append(device))  # no GPU is needed to see the moves
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: moves.append("forward") or forward(**inputs))
    assert len(reward([""] * 3, ["7", "8", ""], [None] * 3)) == 3
    assert moves == ["cuda", "forward", "cpu"]
    monkeypatch.setattr(model, "forward", lambda **inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reward([""], ["7"], [None])
    assert moves[-1] == "cpu"


def test_layers_are_split_by_a_device_map(directory):
    whole, split = SequenceClassifier(directory), SequenceClassifier(directory, device_map={"": "cpu"})
    assert split([""], ["7"], [None]) == whole([""], ["7"], [None])


def test_pickles_by_name_and_loads_at_the_first_call(directory):
    reward = SequenceClassifier(str(directory) + "/", batch_size=2)
    assert reward.__name__ == "my-reward-model"
    expected = scores(reward, rows())
    pickled = pickle.dumps(reward)
    assert len(pickled) < 1000
    assert scores(pickle.loads(pickled), rows()) == expected
    SequenceClassifier("/no/such/model")  # loads nothing yet
    with pytest.raises(OSError):
        scores(SequenceClassifier("/no/such/model"), rows())


def test_a_module_pickles_with_its_weights():
    reward = SequenceClassifier(build_classifier(), tokenizer=build_tokenizer())
    expected = scores(reward, rows())
    copy = pickle.loads(pickle.dumps(reward))
    assert reward.__name__ == copy.__name__ == "Qwen2ForSequenceClassification"
    assert scores(copy, rows()) == expected


def test_a_module_from_a_directory_finds_its_tokenizer_and_name(directory):
    reward = SequenceClassifier(Qwen2ForSequenceClassification.from_pretrained(directory))
    assert reward.__name__ == "my-reward-model"
    assert scores(reward, rows()) == scores(SequenceClassifier(directory), rows())
    with pytest.raises(ValueError, match=r"pass SequenceClassifier\(model, tokenizer="):
        scores(SequenceClassifier(build_classifier()), rows())


def test_threads_take_turns(directory):
    reward, results = SequenceClassifier(directory, batch_size=2), []
    expected = scores(SequenceClassifier(directory, batch_size=2), rows())
    threads = [threading.Thread(target=lambda: results.append(scores(reward, rows()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [expected] * 4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_length": 0}, "max_length=0"),
        ({"truncation": "middle"}, "truncation='middle'"),
        ({"offload": True}, "offload=True requires a GPU, got device=None"),
        ({"device": "cpu", "device_map": "auto"}, "device='cpu' cannot be combined with device_map"),
    ],
)
def test_settings_out_of_range(settings, named):
    with pytest.raises(ValueError, match=named):
        SequenceClassifier("some/model", **settings)


def test_loading_settings_need_a_name():
    with pytest.raises(ValueError, match="revision.*cannot be combined with a loaded module"):
        SequenceClassifier(build_classifier(), revision="main")


def test_a_gaussian_reward_model_distrusts_what_overlaps_with_known_rewards(tmp_path):
    model, known = build_classifier(num_labels=2), [[0.0, 1.0, -0.5], [1.0, 0.5, 0.1]]
    model.config.held_out_rewards = known
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    plain = scores(SequenceClassifier(tmp_path), rows(TEXTS[:2]))
    penalized = scores(SequenceClassifier(tmp_path, uncertainty=2.0), rows(TEXTS[:2]))
    for text, mean, score in zip(TEXTS, plain, penalized, strict=False):
        with torch.no_grad():
            outputs = model(torch.tensor([build_tokenizer()("1 + 1 =" + text)["input_ids"]])).logits[0]
        assert mean == pytest.approx(float(outputs[0]), abs=ROUNDING)
        overlap = mean_overlap(outputs[:1], outputs[1:].exp(), *torch.tensor(known))
        assert score == pytest.approx(mean - 2 * float(overlap), abs=10 * ROUNDING)


@pytest.mark.parametrize("labels, settings", [(1, {}), (2, {"label": 0})])
def test_uncertainty_requires_a_gaussian_reward_model(labels, settings):
    model = build_classifier(num_labels=labels)
    with pytest.raises(ValueError, match="uncertainty=0.5 requires a Gaussian reward model"):
        SequenceClassifier(model, tokenizer=build_tokenizer(), uncertainty=0.5, **settings).prepare()
    with pytest.raises(ValueError, match="uncertainty=-1"):
        SequenceClassifier(model, uncertainty=-1)
