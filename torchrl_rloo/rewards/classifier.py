"""Scores from a reward model: a sequence classifier with its own tokenizer and chat template."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_OF_THE_HUB = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")
_OF_ADAPTERS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")


class SequenceClassifier:
    """One score per trajectory: the logit that a sequence classifier gives the whole conversation.

    Messages are rendered by the reward model's own chat template, prompt and completion together and no turn opened
    after them; plain text is prompt and completion joined, with the special tokens that the tokenizer puts around any
    text. The model is loaded at the first call, and a pickle of this object holds its name alone; a module given as an
    object is pickled with its weights. Rows are sorted by length and padded on the right; scores depend on the order of
    the rows and on ``batch_size`` by no more than rounding (2e-6 of scores around 1 in float32).

    It never trains: evaluation mode is set at each call, without gradients. Calls from several threads take turns.

    Metric: ``<name>/overlong``, the share of the rows with more than ``max_length`` tokens.

    Args:
        model: a hub id, a directory of a model or of a LoRA adapter (which needs peft), or a loaded module.
        tokenizer: a tokenizer, or where to load it from; by default from where the model is.
        name: the name in the logs; by default the last part of the model's path.
        label: which logit of a model that has several is the score; must be left out for a model with one.
        batch_size: rows in one forward pass.
        max_length: tokens; by default as many as the model takes.
        truncation: what happens to rows with more: None: they abstain, since neither end can be missed; ``"left"``:
            they lose their beginning; ``"right"``: their end, which holds what most classifiers score.
        device: where to put the model; by default the CPU, or for a module where it is.
        dtype: ``"float32"``, ``"bfloat16"``, ...; by default float32, or for a module what it is.
        template_kwargs: passed to the chat template.
        **model_kwargs: passed to ``from_pretrained`` (``attn_implementation=``, ``revision=``, ...).

    Raises:
        ValueError: for a setting out of range. At the first call: for a model with other than one label and no
            ``label``, a checkpoint without a classification head, or a tokenizer without a pad token (set one:
            classifiers find the end of a text by it).
        ImportError: at the first call, for an adapter without peft.

    Example:
        >>> reward = SequenceClassifier("Skywork/Skywork-Reward-V2-Qwen3-0.6B", device="cpu")  # nothing is loaded yet
        >>> reward.__name__
        'Skywork-Reward-V2-Qwen3-0.6B'
    """

    def __init__(
        self,
        model: str | os.PathLike | torch.nn.Module,
        *,
        tokenizer: Any = None,
        name: str | None = None,
        label: int | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
        truncation: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **model_kwargs: Any,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1 row per forward pass")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length={max_length} must be at least 1 token, or None for what the model takes")
        if truncation not in (None, "left", "right"):
            raise ValueError(f"truncation={truncation!r} must be 'left', 'right', or None (longer rows abstain)")
        self.model = os.fspath(model) if isinstance(model, str | os.PathLike) else model
        if model_kwargs and not isinstance(self.model, str):
            raise ValueError(f"{sorted(model_kwargs)} are for loading a model by name, but a module was given")
        self.tokenizer, self.label, self.batch_size = tokenizer, label, batch_size
        self.max_length, self.truncation, self.device, self.dtype = max_length, truncation, device, dtype
        self.template_kwargs, self.model_kwargs = dict(template_kwargs or {}), model_kwargs
        path = self.model if isinstance(self.model, str) else _path_of(self.model)
        self.__name__ = name or path.rstrip("/").rpartition("/")[2] or type(self.model).__name__
        self._loaded: tuple[torch.nn.Module, Any] | None = None
        self._lock = threading.Lock()

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """``B`` logits; None for rows that are too long, unless ``truncation`` is set, or have no token at all."""
        with self._lock:
            model, tokenizer = self._load()
            rows = [
                scored_ids(tokenizer, prompt, completion, **self.template_kwargs)
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
            limit = self.max_length or _context_length(model, tokenizer)
            overlong = [len(ids) > limit for ids in rows]
            if log_metric is not None and rows:
                log_metric(f"{self.__name__}/overlong", sum(overlong) / len(rows))
            if self.truncation is not None:
                rows = [ids[:limit] if self.truncation == "right" else ids[-limit:] for ids in rows]
                overlong = [False] * len(rows)
            taken = sorted((i for i, ids in enumerate(rows) if ids and not overlong[i]), key=lambda i: -len(rows[i]))
            scores: list[float | None] = [None] * len(rows)
            for start in range(0, len(taken), self.batch_size):
                chosen = taken[start : start + self.batch_size]
                for i, score in zip(chosen, self._forward(model, tokenizer, [rows[i] for i in chosen]), strict=True):
                    scores[i] = score
            return scores

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_loaded", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _loaded=None, _lock=threading.Lock())

    def _forward(self, model: torch.nn.Module, tokenizer: Any, rows: list[list[int]]) -> list[float]:
        import torch

        length = max(len(ids) for ids in rows)
        ids = torch.tensor([r + [tokenizer.pad_token_id] * (length - len(r)) for r in rows], device=model.device)
        mask = torch.tensor([[1] * len(r) + [0] * (length - len(r)) for r in rows], device=model.device)
        with torch.inference_mode():
            logits = model.eval()(input_ids=ids, attention_mask=mask).logits  # [rows, labels]
        return logits[:, self.label or 0].float().tolist()

    def prepare(self) -> None:
        """Loads the model and its tokenizer, if that is still to be done.

        Raises:
            OSError: if there is no such model.
            ValueError: for a model that gives no scores.
        """
        self._load()

    def _load(self) -> tuple[torch.nn.Module, Any]:
        """The model and its tokenizer, loaded and checked once."""
        from torchrl_rloo.data.dtypes import parse_dtype

        if self._loaded is None:
            if isinstance(self.model, str):
                model = load_classifier(
                    self.model, dtype=self.dtype or "float32", label=self.label, **self.model_kwargs
                ).to(self.device or "cpu")
            else:
                model = self.model.to(**_given(device=self.device, dtype=self.dtype and parse_dtype(self.dtype)))
            tokenizer = self._load_tokenizer(model)
            _check_labels(model, self.label, self.__name__)
            _agree_on_padding(model, tokenizer, self.__name__)
            self._loaded = model, tokenizer
        return self._loaded

    def _load_tokenizer(self, model: torch.nn.Module) -> Any:
        from transformers import AutoTokenizer

        source = self.tokenizer
        if source is None:
            source = self.model if isinstance(self.model, str) else _path_of(model)
        if source == "":
            raise ValueError(f"reward model {self.__name__} is a module that names no directory: pass tokenizer=")
        if not isinstance(source, str | os.PathLike):
            return source
        hub = {k: v for k, v in self.model_kwargs.items() if k in _OF_THE_HUB and self.tokenizer is None}
        return AutoTokenizer.from_pretrained(source, **hub)


def scored_ids(tokenizer: Any, prompt: Any, completion: Any, **template_kwargs: Any) -> list[int]:
    """The ids that a reward model reads of a trajectory; whoever trains one has to give it the same.

    Args:
        tokenizer: the reward model's.
        prompt: text, or chat messages.
        completion: likewise.
        **template_kwargs: passed to the chat template.

    Raises:
        TypeError: if one is text and the other is not.
        ValueError: for messages without a chat template.
    """
    from torchrl_rloo.data.templates import encode_messages, join_conversation

    if isinstance(prompt, str) and isinstance(completion, str):
        return list(tokenizer(prompt + completion)["input_ids"])
    if isinstance(prompt, str) or isinstance(completion, str):
        raise TypeError(f"prompt {prompt!r:.90} and completion {completion!r:.90} must be both text, or both messages")
    return encode_messages(tokenizer, join_conversation(prompt, completion), **template_kwargs)


def load_classifier(
    name: str, *, dtype: str = "float32", label: int | None = None, **model_kwargs: Any
) -> torch.nn.Module:
    """A sequence classifier in evaluation mode, on the CPU.

    Args:
        name: a hub id, or a directory of a model or of a LoRA adapter.
        dtype: ``"float32"``, ``"bfloat16"``, ...
        label: None: an adapter is loaded onto a base model with one label; else pass ``num_labels=``, too.
        **model_kwargs: passed to ``from_pretrained``.

    Raises:
        ValueError: for an unknown dtype, or a checkpoint without a classification head.
        ImportError: for an adapter, if peft is not installed.
        OSError: if there is no such model.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils.peft_utils import find_adapter_config_file

    from torchrl_rloo.data.dtypes import parse_dtype

    torch_dtype = parse_dtype(dtype)
    if find_adapter_config_file(name, **{k: model_kwargs[k] for k in _OF_ADAPTERS if k in model_kwargs}) is not None:
        return _load_adapter(name, torch_dtype, {**({"num_labels": 1} if label is None else {}), **model_kwargs})
    model, info = AutoModelForSequenceClassification.from_pretrained(
        name, dtype=torch_dtype, output_loading_info=True, **model_kwargs
    )
    if info["missing_keys"]:
        raise ValueError(
            f"{name} has no weights for {sorted(info['missing_keys'])}, so its scores would be random: a reward model "
            "needs a trained classification head, which a language model has not"
        )
    return model.eval()


def _load_adapter(name: str, dtype: torch.dtype, kwargs: dict[str, Any]) -> torch.nn.Module:
    try:
        from peft import AutoPeftModelForSequenceClassification
    except ImportError as error:
        raise ImportError(f"{name} is an adapter, which needs peft: pip install 'torchrl_rloo[peft]'") from error
    return AutoPeftModelForSequenceClassification.from_pretrained(name, dtype=dtype, **kwargs).eval()


def _check_labels(model: torch.nn.Module, label: int | None, name: str) -> None:
    labels = model.config.num_labels
    if label is None and labels != 1:
        raise ValueError(f"reward model {name} has {labels} labels: name the one to score by, label=0 ... {labels - 1}")
    if label is not None and not 0 <= label < labels:
        raise ValueError(f"label={label}: reward model {name} has {labels} labels, 0 ... {labels - 1}")


def _agree_on_padding(model: torch.nn.Module, tokenizer: Any, name: str) -> None:
    """The model looks for the last token that is no padding, so it has to know the id that rows are padded with."""
    config = model.config.get_text_config()
    if tokenizer.pad_token_id is None and config.pad_token_id is not None:
        tokenizer.pad_token_id = config.pad_token_id
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer of reward model {name} has no pad token and the model's config has no pad_token_id: pass "
            "tokenizer= with a pad_token that ends no text, the one from the model's training if it had one"
        )
    config.pad_token_id = tokenizer.pad_token_id


def _context_length(model: torch.nn.Module, tokenizer: Any) -> int:
    """The smaller of both limits: RoBERTa has two positions that no token can take, a tokenizer may name no limit."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(most or sys.maxsize, tokenizer.model_max_length)


def _path_of(model: torch.nn.Module) -> str:
    return getattr(model, "name_or_path", "") or ""


def _given(**settings: Any) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if v is not None}
