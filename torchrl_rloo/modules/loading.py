"""Loading of a model and its tokenizer from a hub id or a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchrl_rloo.data.dtypes import parse_dtype
from torchrl_rloo.lookup import check_path
from torchrl_rloo.modules.checkpointing import checkpointing_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OF_THE_HUB = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")


def load_model(
    name: str | os.PathLike,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    gradient_checkpointing: bool = False,
    chat_template: str | os.PathLike | None = None,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    The model is in evaluation mode for good: without dropout, trainer and sampler agree.

    Args:
        name: a hub id or a local directory.
        dtype: ``"float32"``, ``"bfloat16"``, ...
        device: where to put the model.
        gradient_checkpointing: recompute each layer in the backward pass: less memory, about a third more time.
            :class:`~torchrl_rloo.modules.TransformersWrapper`, ``ValueHead`` and ``RewardModel`` recompute in
            evaluation mode too.
        chat_template: replaces the tokenizer's own and is saved with it: a ``.jinja`` file, a directory of a tokenizer,
            or the template itself. None keeps the tokenizer's.
        **kwargs: passed to ``AutoModelForCausalLM.from_pretrained`` (``attn_implementation=``, ...). Those that locate
            a model (``revision=``, ``trust_remote_code=``, ...) go to :func:`load_tokenizer` as well.

    Raises:
        ValueError: for an unknown dtype, a missing CUDA device, a tokenizer without an end-of-sequence token, or
            ``gradient_checkpointing`` of a model without it.
        FileNotFoundError: if there is no such model or template.
    """
    tokenizer = load_tokenizer(name, chat_template=chat_template, **{k: kwargs[k] for k in _OF_THE_HUB if k in kwargs})
    from transformers import AutoModelForCausalLM  # takes 2 s

    torch_dtype = parse_dtype(dtype)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch {torch.__version__} finds no CUDA device: set device='cpu'")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch_dtype, **kwargs)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
        if not checkpointing_layers(model):
            raise ValueError(
                f"gradient_checkpointing=True, but {type(model).__name__} has no layers that recompute: set it to False"
            )
    return model.to(device).eval(), tokenizer


def load_tokenizer(
    name: str | os.PathLike, *, chat_template: str | os.PathLike | None = None, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; one without a pad token pads with its end of sequence.

    Args:
        name: hub id or local directory.
        chat_template: see :func:`load_model`.
        **kwargs: passed to ``AutoTokenizer.from_pretrained``.

    Raises:
        ValueError: for a tokenizer without an end-of-sequence token.
        FileNotFoundError: if there is no such model or template.
    """
    _check_path(name, kwargs.get("subfolder", ""))
    template = None if chat_template is None else read_chat_template(chat_template)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(f"model={str(name)!r} is neither a local directory nor a hub id: {reason}") from error
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {name} has no eos_token, so a turn could never end: set tokenizer.eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked by length, so sharing the id does no harm
    return tokenizer


def read_chat_template(source: str | os.PathLike) -> str:
    """Return a chat template.

    Args:
        source: a ``.jinja`` file, a directory of a tokenizer, or the template itself.

    Raises:
        FileNotFoundError: if it is none of these.
        ValueError: if the directory's tokenizer has no template.

    Example:
        >>> read_chat_template("{{ messages[0]['content'] }}")
        "{{ messages[0]['content'] }}"
    """
    if "{{" in str(source) or "{%" in str(source):
        return str(source)
    path = Path(source).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not path.is_dir():
        raise FileNotFoundError(
            f"chat_template={str(source)!r} is neither a file (no {str(path.absolute())!r}), nor a directory of a "
            "tokenizer, nor a template with {{ }}: correct the path"
        )
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(path).chat_template
    if not template:
        raise ValueError(f"chat_template={str(source)!r}: the tokenizer there has no chat template")
    return template


def _check_path(name: str | os.PathLike, subfolder: str) -> None:
    """Refuse a local path that does not lead to a model, before anything slow."""
    check_path("model", name)
    path, files = Path(name).expanduser(), ("config.json", "adapter_config.json")
    if path.is_dir() and not any((path / subfolder / file).is_file() for file in files):
        raise FileNotFoundError(
            f"model={os.fspath(name)!r} is a directory without config.json: give one with a saved model"
        )


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> Path:
    """Save a model with its tokenizer in Hugging Face format, in place of what an earlier run saved there.

    Weights that an earlier model left behind would be loaded with these, such as an adapter's.

    Args:
        model: the model, or its LoRA adapter.
        tokenizer: its tokenizer.
        folder: made if it does not exist.

    Returns:
        The folder.
    """
    folder = Path(folder)
    for stale in (
        *folder.glob("*.safetensors"),
        *folder.glob("*.safetensors.index.json"),
        folder / "adapter_config.json",
    ):
        stale.unlink(missing_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def count_trained(model: torch.nn.Module) -> int:
    """Return the number of trained parameters.

    Raises:
        ValueError: if there are none, as in a saved adapter that was loaded to answer.
    """
    number = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not number:
        raise ValueError("the model has no trained parameters: merge a saved adapter into its base model")
    return number


def add_adapter(model: PreTrainedModel, config: Mapping[str, Any]) -> torch.nn.Module:
    """Add a LoRA adapter (Hu et al. 2021, arXiv 2106.09685) to a model; only the adapter is trained.

    Args:
        model: the base model; its weights are frozen.
        config: arguments of ``peft.LoraConfig``, such as ``r`` and ``target_modules``.

    Raises:
        ImportError: if peft is not installed.
        ValueError: for a model that has an adapter, or a ``lora_dropout`` other than 0: a policy trains in evaluation
            mode, so that its log-probs are those of the sampler, and dropout is off there.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "the model has an adapter already, which a new one would replace: merge it first "
            "(peft: AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(...))"
        )
    if config.get("lora_dropout"):
        raise ValueError(
            f"lora_dropout={config['lora_dropout']} would have no effect: the model trains in evaluation mode, so that "
            "trainer and sampler agree. Set it to 0, or regularize with weight decay or a KL term"
        )
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("an adapter needs peft: pip install 'torchrl_rloo[peft]'") from error
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config)).eval()


def context_length(model: PreTrainedModel) -> int | None:
    """Return the longest sequence a model takes, in tokens; None if its configuration names no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
