"""Scores of a reward model: a sequence classifier with a tokenizer and a chat template."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ADAPTER_KWARGS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")


class SequenceClassifier:
    """Reward from a sequence classifier: the logit of the whole conversation.

    Prompt and completion messages are rendered together with the chat template of the reward model, without a
    generation prompt. Plain texts are joined, and the tokenizer adds its special tokens. The model is loaded at the
    first call. A pickle holds only its name, or the weights if ``model`` is a module. Rows are sorted by length and
    padded on the right. Their order and ``batch_size`` change scores only by rounding (2e-6 at scores around 1 in
    float32). Each call sets evaluation mode and disables gradients. Calls of several threads are executed in turn.

    Metric: ``<name>/overlong``, the share of rows with more than ``max_length`` tokens, before any truncation.

    A Gaussian reward model (recipe ``reward_model`` with ``model.gaussian=true``) scores its mean, minus
    ``uncertainty`` times the overlap with its rewards of held-out completions
    (:func:`~torchrl_rloo.functional.rewards.mean_overlap`).

    Args:
        model: hub id, directory of a model or of a LoRA adapter (requires peft), or loaded module.
        tokenizer: tokenizer, or its hub id or directory. None loads it from the path of the model.
        name: name in logs. None uses the last part of the model's path.
        label: index of the logit to use as the score. None requires a model with one label.
        uncertainty: coefficient of the overlap, for a Gaussian reward model.
        batch_size: rows per forward pass; 1 if neither tokenizer nor model has a pad token, by which classifiers find
            the end of a text.
        max_length: maximum number of tokens per row. None uses the limit of the model.
        truncation: treatment of longer rows. None abstains, because a score needs both ends. ``"left"`` drops the
            beginning and ``"right"`` the end, which holds the position that most classifiers score.
        device: device of the model. None means the CPU, or the current device of a module.
        dtype: ``"float32"``, ``"bfloat16"``, ... None means float32, or the current dtype of a module.
        offload: keep the model on the CPU between calls, so that a GPU has room for training. Requires ``device``.
        template_kwargs: keyword arguments of the chat template.
        **model_kwargs: keyword arguments of ``from_pretrained`` (``attn_implementation=``, ``revision=``, ...).
            ``device_map="auto"`` splits a large model over the GPUs of this process (requires accelerate).

    Raises:
        ValueError: if a setting is out of range. At the first call, if the model has several labels and ``label`` is
            None, is a language model, or its checkpoint has no classification head.
        ImportError: at the first call, if an adapter is loaded without peft.

    Example:
        >>> reward = SequenceClassifier("Skywork/Skywork-Reward-V2-Qwen3-0.6B", device="cpu")  # loads nothing yet
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
        uncertainty: float = 0.0,
        batch_size: int = 16,
        max_length: int | None = None,
        truncation: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        offload: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        **model_kwargs: Any,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1 row per forward pass")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length={max_length} must be at least 1 token; use None for the limit of the model")
        if offload and str(device or "cpu").startswith("cpu"):
            raise ValueError(f"offload=True requires a GPU, got device={device!r}; set device='cuda', or offload=False")
        if "device_map" in model_kwargs and device is not None:
            raise ValueError(f"device={device!r} cannot be combined with device_map; remove one of them")
        if truncation not in (None, "left", "right"):
            raise ValueError(f"truncation={truncation!r} must be 'left', 'right', or None (longer rows abstain)")
        self.model = os.fspath(model) if isinstance(model, str | os.PathLike) else model
        if model_kwargs and not isinstance(self.model, str):
            raise ValueError(f"{sorted(model_kwargs)} cannot be combined with a loaded module; pass a name or path")
        if not 0 <= uncertainty < float("inf"):
            raise ValueError(f"uncertainty={uncertainty} must be finite and at least 0")
        self.tokenizer, self.label, self.batch_size, self.uncertainty = tokenizer, label, batch_size, uncertainty
        self.max_length, self.truncation, self.device, self.dtype = max_length, truncation, device, dtype
        self.template_kwargs, self.model_kwargs, self.offload = dict(template_kwargs or {}), model_kwargs, offload
        # Name the reward after the model, without its folder or owner
        path = self.model if isinstance(self.model, str) else _path_of(self.model)
        self.__name__ = name or path.rstrip("/").rpartition("/")[2] or type(self.model).__name__
        # Load the model at the first call, which may be in another process
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
        """Return ``B`` logits, None for empty rows and, unless ``truncation`` is set, for overlong rows."""
        with self._lock:
            # Encode the conversations
            model, tokenizer = self._load()
            rows = [
                scored_ids(tokenizer, prompt, completion, **self.template_kwargs)
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
            # Truncate overlong rows, or leave them out
            most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            # The smaller limit of both: RoBERTa has two unusable positions, and a tokenizer may have no limit
            limit = self.max_length or min(most or sys.maxsize, tokenizer.model_max_length)
            overlong = [len(ids) > limit for ids in rows]
            if log_metric is not None and rows:
                log_metric(f"{self.__name__}/overlong", sum(overlong) / len(rows))
            if self.truncation is not None:
                rows = [ids[:limit] if self.truncation == "right" else ids[-limit:] for ids in rows]
                overlong = [False] * len(rows)
            # Score rows of similar length together, to save padding
            order = sorted((i for i, ids in enumerate(rows) if ids and not overlong[i]), key=lambda i: -len(rows[i]))
            scores: list[float | None] = [None] * len(rows)
            size = 1 if tokenizer.pad_token_id is None else self.batch_size
            try:
                if self.offload:
                    model.to(device=self.device)
                for start in range(0, len(order), size):
                    batch = order[start : start + size]
                    for i, score in zip(batch, self._forward(model, tokenizer, [rows[i] for i in batch]), strict=True):
                        scores[i] = score
            finally:
                if self.offload:
                    model.to(device="cpu")
            return scores

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_loaded", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _loaded=None, _lock=threading.Lock())

    def _forward(self, model: torch.nn.Module, tokenizer: Any, rows: list[list[int]]) -> list[float]:
        import torch

        from torchrl_rloo.functional.rewards import mean_overlap

        length = max(len(ids) for ids in rows)
        ids = torch.tensor([r + [tokenizer.pad_token_id] * (length - len(r)) for r in rows], device=model.device)
        mask = torch.tensor([[1] * len(r) + [0] * (length - len(r)) for r in rows], device=model.device)
        with torch.inference_mode():
            logits = model.eval()(input_ids=ids, attention_mask=mask).logits.float()  # [rows, labels]
            scores = logits[:, self.label or 0]
            if self.uncertainty:
                known = torch.tensor(model.config.held_out_rewards, device=scores.device)  # means and deviations [2, N]
                scores = scores - self.uncertainty * mean_overlap(scores, logits[:, 1].exp(), *known)
        return scores.tolist()

    def prepare(self) -> None:
        """Load the model and its tokenizer, unless they are loaded; raise what the class says."""
        self._load()

    def _load(self) -> tuple[torch.nn.Module, Any]:
        """Return the model and its tokenizer; load and check them once."""
        from torchrl_rloo.runtime.lookup import parse_dtype

        if self._loaded is None:
            place = "cpu" if self.offload else self.device
            if isinstance(self.model, str):
                dtype = self.dtype or "float32"
                model = load_classifier(self.model, dtype=dtype, label=self.label, **self.model_kwargs)
                if "device_map" not in self.model_kwargs:
                    model = model.to(place or "cpu")
            else:
                placement = {"device": place, "dtype": self.dtype and parse_dtype(self.dtype)}
                model = self.model.to(**{name: value for name, value in placement.items() if value is not None})
            tokenizer = self._load_tokenizer(model)
            _check_head(model, self.label, self.__name__)
            if self.uncertainty and (getattr(model.config, "held_out_rewards", None) is None or self.label is not None):
                raise ValueError(
                    f"uncertainty={self.uncertainty} requires a Gaussian reward model, and label=None; "
                    "train it with: torchrl-rloo run reward_model model.gaussian=true"
                )
            _set_pad_token(model, tokenizer)
            self._loaded = model, tokenizer
        return self._loaded

    def _load_tokenizer(self, model: torch.nn.Module) -> Any:
        from transformers import AutoTokenizer

        from torchrl_rloo.runtime.lookup import HUB_KWARGS

        source = self.tokenizer
        if source is None:
            source = self.model if isinstance(self.model, str) else _path_of(model)
        if source == "":
            raise ValueError(
                f"reward model {self.__name__} is a module without name_or_path; pass SequenceClassifier(model, "
                "tokenizer=...)"
            )
        if not isinstance(source, str | os.PathLike):
            return source
        kwargs = {k: v for k, v in self.model_kwargs.items() if k in HUB_KWARGS and self.tokenizer is None}
        return AutoTokenizer.from_pretrained(source, **kwargs)


def scored_ids(tokenizer: Any, prompt: Any, completion: Any, **template_kwargs: Any) -> list[int]:
    """Return the ``[T]`` token ids of a trajectory for a reward model, in training and in scoring.

    Prompt and completion are both texts, else ``TypeError``, or both messages, which require a chat template and may
    have no images, else ``ValueError``.
    """
    from torchrl_rloo.data.templates import encode_messages, join_conversation
    from torchrl_rloo.images.parts import image_paths

    if isinstance(prompt, str) and isinstance(completion, str):
        return list(tokenizer(prompt + completion)["input_ids"])
    if isinstance(prompt, str) or isinstance(completion, str):
        raise TypeError(f"prompt={prompt!r:.90} and completion={completion!r:.90} must be both texts or both messages")
    messages = join_conversation(prompt, completion)
    if image_paths(messages):
        raise ValueError("reward models read text only, but the conversation has images; use a judge that sees them")
    return encode_messages(tokenizer, messages, **template_kwargs)


def load_classifier(
    name: str, *, dtype: str = "float32", label: int | None = None, **model_kwargs: Any
) -> torch.nn.Module:
    """Load a sequence classifier or an adapter of one in evaluation mode on the CPU.

    A ``label`` of None loads an adapter onto a base model with one label; otherwise also pass ``num_labels=``. Raise
    ``ValueError`` if the checkpoint has no classification head.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils.peft_utils import find_adapter_config_file

    from torchrl_rloo.runtime.lookup import parse_dtype

    torch_dtype = parse_dtype(dtype)
    # Adapters do not contain the weights of their base model
    if find_adapter_config_file(name, **{k: model_kwargs[k] for k in _ADAPTER_KWARGS if k in model_kwargs}) is not None:
        return _load_adapter(name, torch_dtype, {**({"num_labels": 1} if label is None else {}), **model_kwargs})
    # Refuse a checkpoint without a head, because transformers would draw a random one
    model, info = AutoModelForSequenceClassification.from_pretrained(
        name, dtype=torch_dtype, output_loading_info=True, **model_kwargs
    )
    if info["missing_keys"]:
        raise ValueError(
            f"{name} has no weights for {sorted(info['missing_keys'])}, so its scores would be random; use a reward "
            "model with a trained classification head, not a language model"
        )
    return model.eval()


def _load_adapter(name: str, dtype: torch.dtype, kwargs: dict[str, Any]) -> torch.nn.Module:
    try:
        from peft import AutoPeftModelForSequenceClassification
    except ImportError as error:
        raise ImportError(f"{name} is an adapter, which requires peft: pip install 'torchrl_rloo[peft]'") from error
    return AutoPeftModelForSequenceClassification.from_pretrained(name, dtype=dtype, **kwargs).eval()


def _check_head(model: torch.nn.Module, label: int | None, name: str) -> None:
    if getattr(model, "get_output_embeddings", lambda: None)() is not None:
        raise ValueError(
            f"reward model {name} is a language model; pass a sequence classifier, of which a logit scores"
        )
    labels = model.config.num_labels
    if label is None and labels != 1 and getattr(model.config, "held_out_rewards", None) is None:
        raise ValueError(f"reward model {name} has {labels} labels; set label=0 ... {labels - 1}")
    if label is not None and not 0 <= label < labels:
        raise ValueError(f"label={label} must be in 0 ... {labels - 1}: reward model {name} has {labels} labels")


def _set_pad_token(model: torch.nn.Module, tokenizer: Any) -> None:
    """Set the same pad id in model and tokenizer: the model scores at the last token that is not padding."""
    config = model.config.get_text_config()
    if tokenizer.pad_token_id is None and config.pad_token_id is not None:
        tokenizer.pad_token_id = config.pad_token_id
    config.pad_token_id = tokenizer.pad_token_id


def _path_of(model: torch.nn.Module) -> str:
    return getattr(model, "name_or_path", "") or ""
