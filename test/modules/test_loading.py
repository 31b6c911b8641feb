"""Loading of models: one-line errors for wrong names, and custom chat templates."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from torchrl.data.llm import History, add_chat_template

from torchrl_rloo.data.templates import answer_turn, encode_conversation, encode_prompt
from torchrl_rloo.modules import save_model
from torchrl_rloo.modules.loading import add_adapter, count_trained, load_model, read_chat_template

ROLES = ("system", "user", "assistant", "user", "assistant")
TEMPLATE = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}|{% endfor %}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["text", "file", "directory", "name"])
def test_a_chat_template_is_used_and_saved(kind: str, saved: Path, tokenizer, tmp_path: Path) -> None:
    source: str | Path = TEMPLATE
    if kind == "file":
        source = tmp_path / "mine.jinja"
        source.write_text(TEMPLATE)
    elif kind == "directory":
        source, own = tmp_path / "tokenizer", load_model(saved)[1]
        own.chat_template = TEMPLATE
        own.save_pretrained(source)
    elif kind == "name":
        source = "of-this-test"
        add_chat_template(source, TEMPLATE)
    _, loaded = load_model(saved, chat_template=source)
    assert loaded.chat_template == TEMPLATE
    loaded.save_pretrained(tmp_path / "saved")
    assert read_chat_template(tmp_path / "saved") == TEMPLATE
    assert load_model(saved)[1].chat_template == tokenizer.chat_template


@pytest.mark.parametrize("name", ["chatml", "llama3", "zephyr", "chatml_format", "qwen", "llama", "deepseek", "falcon"])
def test_a_named_template_serves_several_turns(name: str, tokenizer) -> None:
    """Answer a turn as the whole conversation renders it, and mask the assistant's messages."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = read_chat_template(name)
    texts = ("Be brief.", "1+2?", "3", "2+2?", "4")
    chat = [{"role": role, "content": text} for role, text in zip(ROLES, texts, strict=True)]
    ids, mask = encode_conversation(tokenizer, chat)
    masked = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert re.findall(r"\d", masked) == ["3", "4"]
    before = encode_prompt(tokenizer, chat[:2]) + encode_prompt(tokenizer, "3")
    answered = before + answer_turn(tokenizer, chat[:3], chat[3:4], last_token=before[-1]).ids
    shown, rendered = tokenizer.decode(answered), tokenizer.decode(encode_prompt(tokenizer, chat[:4]))
    assert shown.split() == rendered.replace("Assistant: 3", "Assistant:3").split()  # white space is the policy's
    if name in ("chatml_format", "qwen", "llama"):
        history = History.from_text(tokenizer.decode(ids), chat_template_name=name)
        assert list(zip(history.role, history.content, strict=True)) == list(zip(ROLES, texts, strict=True))


def test_a_template_that_is_none_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape("chat_template='mine.jinja' is neither a file")):
        load_model(saved, chat_template="mine.jinja")
    with pytest.raises(FileNotFoundError, match="nor one of .*'chatml', .*'qwen'"):
        load_model(saved, chat_template="qwn")
    bare = load_model(saved)[1]
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        read_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/no/such/model", "is neither a local file or directory .* nor a hub id: correct the path"),
        ("./model", "is neither a local file or directory .* nor a hub id: correct the path"),
        ("a/b/c", "is neither a local file or directory .* nor a hub id: correct the path"),
        ("org/no-such-model", "is neither a local directory nor a model that the hub can give: "),
        (".", "is a directory without config.json"),
    ],
)
def test_a_model_that_is_not_there(name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"^name={re.escape(repr(name))} {reason}") as caught:
        load_model(name, local_files_only=True)
    assert "\n" not in str(caught.value)


def test_a_saved_adapter_is_not_trained_on_unseen(checkpoint: Path, tmp_path: Path) -> None:
    """A new adapter would replace a saved one, which has no trained parameters by itself."""
    pytest.importorskip("peft")
    model, tokenizer = load_model(checkpoint)
    assert count_trained(model) == model.num_parameters()
    save_model(add_adapter(model, {"r": 2, "target_modules": "all-linear"}), tokenizer, tmp_path)
    loaded, _ = load_model(tmp_path)
    with pytest.raises(ValueError, match="already has an adapter"):
        add_adapter(loaded, {"r": 2})
    with pytest.raises(ValueError, match="no trained parameters"):
        count_trained(loaded)
    save_model(load_model(checkpoint)[0], tokenizer, tmp_path)
    assert not (tmp_path / "adapter_config.json").exists() and count_trained(load_model(tmp_path)[0])


def test_a_saved_adapter_continues_with_its_settings(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, tokenizer = load_model(checkpoint)
    first = add_adapter(model, {"r": 2, "lora_alpha": 7, "target_modules": "all-linear"})
    for parameter in first.parameters():
        parameter.data += 0.1 * parameter.requires_grad
    save_model(first, tokenizer, tmp_path)
    second = add_adapter(load_model(checkpoint)[0], {"adapter": tmp_path})
    expected = first.state_dict()
    assert second.peft_config["default"].lora_alpha == 7 and count_trained(second) == count_trained(first)
    assert all(bool((tensor == expected[name]).all()) for name, tensor in second.state_dict().items())
    with pytest.raises(ValueError, match=r"unknown names \['r'\]"):
        add_adapter(load_model(checkpoint)[0], {"adapter": tmp_path, "r": 4})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rank": 4}, r"unknown names \['rank'\] in lora={'rank': 4}"),
        ({"r": 4, "lora_aplha": 8}, r"unknown names \['lora_aplha'\].*did you mean 'lora_alpha'"),
        ({"task_type": "CAUSAL_LM"}, r"unknown names \['task_type'\]"),
        ({5: 1, "r": 4}, r"unknown names \[5\]"),
    ],
)
def test_unknown_names_of_an_adapter_are_refused(model, config, message):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=message) as raised:
        add_adapter(model, config)
    assert "\n" not in str(raised.value)
