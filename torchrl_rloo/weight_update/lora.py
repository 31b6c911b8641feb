"""LoRAPublisher: sends only the LoRA adapter, a few megabytes in a file in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from torchrl_rloo.images.towers import language_model_name
from torchrl_rloo.weight_update.delivery import Deliveries, Delivery, Snapshot
from torchrl_rloo.weight_update.protocol import ADAPTER_FILE, EngineError, InFlight, TargetGroup, WeightTarget, xxh3
from torchrl_rloo.weight_update.publisher import Publisher
from torchrl_rloo.weight_update.shards import collective, gather, is_sender, reshard
from torchrl_rloo.weight_update.shared_memory import MEMORY

_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # init_lora_weights that change the base


@dataclass(eq=False)
class AdapterSnapshot(Snapshot):
    """Folder with a version of the adapter, and the checksum of its tensors."""

    folder: Path | None = None
    checksum: str = ""


class LoRAPublisher(Publisher):
    """Updater that sends the active LoRA adapter to engines that have the frozen base model.

    Each push writes the adapter in peft's format to a new folder, which engines load by its path. The publisher removes
    the folder once all engines sample with a later one. The model does not change.

    A request never continues with an adapter that it was not started with. Engines abort running requests when they
    change from the base model to the first adapter or back, for any ``in_flight``.

    Args:
        model: peft ``PeftModel``. If it is sharded with ``fully_shard``, every rank must make an updater and the same
            calls. Rank 0 sends.
        engines: engines of the base model's checkpoint, or a group of them, see
            :class:`~torchrl_rloo.weight_update.protocol.TargetGroup`. They require ``enable_lora=True`` and
            ``max_lora_rank`` of at least the adapter's rank. Ranks other than 0 need none.
        directory: parent of the folders, the same path for all engines. None takes ``/dev/shm``, or the directory for
            temporary files if ``/dev/shm`` is not writable.
        timeout: seconds that one step may take in one engine: draining its requests, or loading.
        in_flight: treatment of running requests, see :meth:`WeightTarget.pause`.

    Raises:
        ImportError: if peft is not installed.
        TypeError: if the model is not a ``PeftModel``.
        ValueError: unless exactly one plain LoRA adapter is active and only its parameters are trained.

    Example:
        With a peft model and an engine of its base model::

            publisher = LoRAPublisher(peft_model, engine)
            publisher.push_weights()
    """

    def __init__(
        self,
        model: nn.Module,
        engines: WeightTarget | Sequence[WeightTarget] | TargetGroup,
        *,
        directory: str | PathLike | None = None,
        timeout: float = 120.0,
        in_flight: InFlight = "finish",
    ):
        super().__init__(
            model,
            engines,
            sends=is_sender(),
            in_flight=in_flight,
            timeout=timeout,
        )
        self.model = _peft_model(model)
        self.adapter = _plain_adapter(self.model)
        self._directory = directory
        self._root: Path | None = None
        self._pushes = 0
        if self.group is not None and self.sends:
            self.group.attach(self.fill)

    def close(self) -> None:
        """Remove the files. Engines keep the adapter that they have loaded."""
        super().close()
        if self._root is not None:
            self._finalizer()
            self._root = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors on rank 0, on the CPU and under peft's names."""
        from peft import get_peft_model_state_dict

        with collective("gathered the adapter"):
            reshard(self.model)
            state = get_peft_model_state_dict(self.model, adapter_name=self.adapter, save_embedding_layers=False)
            whole = gather([tensor.detach() for tensor in state.values()])
        return {name: tensor.cpu().contiguous() for name, tensor in zip(state, whole, strict=False)}

    def _new_snapshot(self, version: int, keep: bool) -> AdapterSnapshot:
        return AdapterSnapshot(version)

    @torch.no_grad()
    def _gather(self, snapshot: AdapterSnapshot, deliveries: Deliveries) -> None:
        """Write the adapter. Its folder is all that an engine needs, so there is nothing to stage."""
        self._tell(True, None)
        tensors = self._tensors()
        try:
            snapshot.folder = self._write(tensors, snapshot.version)
        except OSError as error:
            raise OSError(
                f"the adapter could not be written ({error}); set another directory of LoRAPublisher"
            ) from error
        snapshot.checksum = xxh3([tensors[name] for name in sorted(tensors)])

    @torch.no_grad()
    def _help(self, order: None) -> None:
        self._tensors()

    def _add_staging(self, delivery: Delivery, snapshot: AdapterSnapshot) -> None:
        """Add no steps."""

    def _add_load(self, delivery: Delivery, snapshot: AdapterSnapshot) -> None:
        info = {"version": snapshot.version, "path": str(snapshot.folder), "checksum": snapshot.checksum}

        def load(engine: WeightTarget) -> None:
            reports = engine.update_weights("adapter", info, timeout=self.timeout)
            confirmed = [(report.get("version"), list(report.get("checksums", ()))) for report in reports]
            expected = (info["version"], [info["checksum"]])
            if not confirmed or any(one != expected for one in confirmed):
                raise EngineError(f"its workers report versions and checksums {confirmed}, not {expected}")

        delivery.add("loading the adapter", load)

    def _release(self, snapshot: AdapterSnapshot) -> None:
        if snapshot.folder is not None:
            shutil.rmtree(snapshot.folder, ignore_errors=True)

    def _write(self, tensors: dict[str, torch.Tensor], version: int) -> Path:
        if self._root is None:
            directory = self._directory or (MEMORY if os.access(MEMORY, os.W_OK) else None)
            if directory is not None:
                Path(directory).mkdir(parents=True, exist_ok=True)
            self._root = Path(tempfile.mkdtemp(prefix="torchrl_rloo-adapters-", dir=directory))
            self._finalizer = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        self._pushes += 1
        folder = self._root / f"version-{version}-push-{self._pushes}"
        part = folder.with_suffix(".part")
        part.mkdir()
        self.model.peft_config[self.adapter].save_pretrained(str(part))
        save_file(tensors, part / ADAPTER_FILE)
        part.rename(folder)
        return folder


def _peft_model(model: nn.Module) -> Any:
    """Return the PeftModel inside wrappers that compile or replicate it."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("LoRAPublisher requires peft; run: pip install 'torchrl_rloo[peft]'") from error
    inner = model
    while not isinstance(inner, PeftModel) and isinstance(inner, nn.Module):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
    if inner is None:
        raise TypeError(
            f"model is a {type(model).__name__}, but must be a peft PeftModel; use WeightPublisher to send all weights"
        )
    return inner


def _plain_adapter(model: Any) -> str:
    """Return the name of the active adapter, or raise ValueError if engines cannot add it to their base weights."""
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(
            f"LoRAPublisher requires one active adapter, got {active}; use WeightPublisher, which merges several"
        )
    config = model.peft_config[active[0]]
    if config.peft_type.value != "LORA":
        raise ValueError(f"adapter {active[0]!r} has type {config.peft_type.value}, but must be LORA; train plain LoRA")
    # Collect settings that change more than the low-rank products
    plain_values = {"use_dora": False, "lora_bias": False, "bias": "none"}
    unsupported = {n: getattr(config, n) for n, plain in plain_values.items() if getattr(config, n, plain) != plain}
    unsupported |= {n: v for n in ("modules_to_save", "trainable_token_indices") if (v := getattr(config, n, None))}
    if isinstance(start := config.init_lora_weights, str) and start.startswith(_BASE_CHANGING_INITS):
        raise ValueError(
            f"adapter {active[0]!r} has init_lora_weights={start!r}, which also changes the base weights, so those of "
            "the engines would differ; use WeightPublisher to send merged weights"
        )
    if unsupported:
        raise ValueError(
            f"adapter {active[0]!r} has {unsupported}, which engines cannot add to their weights; remove it, "
            "or send merged weights with WeightPublisher, as inference=vllm does"
        )
    if others := [n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n]:
        raise ValueError(
            f"{others[0]} is trained but is not part of the adapter, so engines would never receive it; freeze it"
        )
    language = language_model_name(model)
    if seen := [n for n, _ in model.named_parameters() if ".lora_" in n and language and f".{language}." not in n]:
        raise ValueError(
            f"engines would ignore {seen[0]}, which sees images; use WeightPublisher to send merged weights"
        )
    return active[0]
