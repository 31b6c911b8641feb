"""LoRAUpdater: sends only the LoRA adapter, a few megabytes in a file in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from torchrl_rloo.weight_update.base import WeightSyncError
from torchrl_rloo.weight_update.peers import EngineUpdaterBase, PeerError, Round
from torchrl_rloo.weight_update.protocol import ADAPTER_FILE, checksum
from torchrl_rloo.weight_update.shared_memory import MEMORY
from torchrl_rloo.weight_update.source import gather, is_sender, is_sharded, reshard
from torchrl_rloo.weight_update.target import EngineError, EngineTimeoutError, InFlight, WeightTarget

_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # init_lora_weights that change the base


class LoRAUpdater(EngineUpdaterBase):
    """Updater that sends the active LoRA adapter to engines that have the frozen base model.

    Each push writes the adapter in peft's format to a new folder, which engines load by its path. The updater removes
    the folder once all engines sample with a later one. The model does not change.

    Args:
        model: peft ``PeftModel``. If it is sharded with ``fully_shard``, every rank must make an updater and the same
            calls. Rank 0 sends.
        engines: engines of the base model's checkpoint, with ``enable_lora=True`` and ``max_lora_rank`` of at least the
            adapter's rank. Ranks other than 0 need none.
        directory: parent of the folders, the same path for all engines. None takes ``/dev/shm``, or the directory for
            temporary files if ``/dev/shm`` is not writable.
        timeout: seconds that a push may take.
        in_flight: treatment of running requests, see :meth:`WeightTarget.pause`.
        max_restarts: largest number of :meth:`restart` calls. None disables the limit.

    Raises:
        ImportError: if peft is not installed.
        TypeError: if the model is not a ``PeftModel``.
        ValueError: unless exactly one plain LoRA adapter is active and only its parameters are trained.

    Example:
        With a peft model and an engine of its base model::

            updater = LoRAUpdater(peft_model, engine)
            updater.push_weights(version=1)
    """

    def __init__(
        self,
        model: nn.Module,
        engines: WeightTarget | Sequence[WeightTarget],
        *,
        directory: str | PathLike | None = None,
        timeout: float = 120.0,
        in_flight: InFlight = "finish",
        max_restarts: int | None = None,
    ):
        self.sends = is_sender()
        super().__init__(
            engines,
            sends=self.sends,
            sharded=is_sharded(model),
            in_flight=in_flight,
            timeout=timeout,
            max_restarts=max_restarts,
        )
        self.model = _peft_model(model)
        self.adapter = _plain_adapter(self.model)
        self._directory = directory
        self._root: Path | None = None
        self._pushes = 0

    @torch.no_grad()
    def push_weights(self, version: int) -> None:
        """Send the current adapter to all engines.

        Raises:
            WeightSyncError: if an engine did not confirm it. That engine samples with its previous adapter, or refuses
                to sample if the new one may still load. Others may have the new one. The next push, even of the same
                version, updates all engines.
        """
        self._version = version
        tensors = self._tensors()
        failure = None
        if self.sends:
            try:
                self._push(tensors, version)
            except Exception as error:  # raised after the other ranks have been told
                failure = error
        self._agree(failure)

    def close(self) -> None:
        """Remove the files. Engines keep the adapter that they have loaded."""
        if self._root is not None:
            self._finalizer()
            self._root = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors on the CPU, under peft's names."""
        from peft import get_peft_model_state_dict

        reshard(self.model)
        state = get_peft_model_state_dict(self.model, adapter_name=self.adapter, save_embedding_layers=False)
        return {name: gather(tensor.detach()).cpu().contiguous() for name, tensor in state.items()}

    def _push(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        # Write the adapter to a new folder
        try:
            folder = self._write(tensors, version)
        except OSError as error:
            raise WeightSyncError(
                f"the adapter of version {version} could not be written ({error}); set another directory of LoRAUpdater"
            ) from error

        # Have all engines load it within the time limit
        info = {"version": version, "path": str(folder), "checksum": checksum([tensors[n] for n in sorted(tensors)])}
        deadline = monotonic() + self.timeout
        calls = [lambda engine: self._update(engine, info, deadline)] * len(self._peers)
        try:
            Round(self._peers, calls, "loading the adapter", self.timeout).wait()
        except PeerError as error:
            cause = error.__cause__
            raise WeightSyncError(
                f"{error.peer} has no adapter of version {version}: {error.purpose} failed with "
                f"{type(cause).__name__}: {cause}. It samples with its previous adapter or refuses to sample; push "
                "again"
            ) from cause

        # Remove earlier adapters, which no engine uses any more
        for other in self._root.iterdir():
            if other != folder:
                shutil.rmtree(other)

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

    def _update(self, engine: WeightTarget, info: dict[str, Any], deadline: float) -> None:
        try:
            engine.pause(self.in_flight, timeout=self.timeout)
            if (left := deadline - monotonic()) <= 0:  # the push has failed, and a later one may have begun
                raise EngineTimeoutError(f"running requests took longer than timeout={self.timeout:g} s")
            reports = engine.update_weights("adapter", info, timeout=left)
            found = [(r["version"], list(r["checksums"])) for r in reports]
            wanted = (info["version"], [info["checksum"]])
            if not found or any(one != wanted for one in found):
                raise EngineError(f"its workers report versions and checksums {found}, not {wanted}")
        finally:
            engine.resume()


def _peft_model(model: nn.Module) -> Any:
    """Return the PeftModel inside wrappers that compile or replicate it."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("LoRAUpdater requires peft; run: pip install 'torchrl_rloo[peft]'") from error
    inner = model
    while not isinstance(inner, PeftModel) and isinstance(inner, nn.Module):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
    if inner is None:
        raise TypeError(
            f"model is a {type(model).__name__}, but must be a peft PeftModel; use EngineUpdater to send all weights"
        )
    return inner


def _plain_adapter(model: Any) -> str:
    """Return the name of the active adapter, or raise ValueError if engines cannot add it to their base weights."""
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(
            f"LoRAUpdater requires one active adapter, got {active}; use EngineUpdater, which merges several"
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
            "the engines would differ; use EngineUpdater to send merged weights"
        )
    if unsupported:
        raise ValueError(f"adapter {active[0]!r} has {unsupported}, which engines do not support; remove it")
    if others := [n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n]:
        raise ValueError(
            f"{others[0]} is trained but is not part of the adapter, so engines would never receive it; freeze it"
        )
    return active[0]
