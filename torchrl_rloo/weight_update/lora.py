"""Only a LoRA adapter is sent: a few megabytes in a file in memory, whatever the size of the model."""

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

from torchrl_rloo.modules.engines.base import Engine, EngineError, EngineTimeoutError, InFlight
from torchrl_rloo.modules.engines.weight_protocol import ADAPTER_FILE, checksum
from torchrl_rloo.weight_update.base import WeightSyncError
from torchrl_rloo.weight_update.engine_updater import EngineUpdater
from torchrl_rloo.weight_update.peers import PeerError, Round
from torchrl_rloo.weight_update.shared_memory import MEMORY
from torchrl_rloo.weight_update.source import gather, is_sender, is_sharded, reshard

_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways of peft to begin an adapter


class LoRAUpdater(EngineUpdater):
    """Sends the active LoRA adapter of a model whose other weights the engines have and nobody trains.

    Each push writes the adapter in peft's format to a folder of its own, which engines load by its path; it is removed
    once they all sample with a later one. Nothing of the model changes.

    Args:
        model: a peft ``PeftModel``. One sharded with ``fully_shard`` is gathered: then every rank makes an updater and
            the same calls, and rank 0 sends.
        engines: built on the base model's checkpoint, with ``enable_lora=True`` and ``max_lora_rank`` of at least the
            adapter's rank; on the other ranks they may be none.
        directory: under which the folders are made, the same path for all engines; None means ``/dev/shm``, or the
            directory for temporary files where there is none.
        timeout: seconds that a push may take.
        in_flight: what becomes of running requests; see :meth:`Engine.pause`.
        max_restarts: how many calls of :meth:`restart` are granted; None is no limit.

    Raises:
        ImportError: if peft is not installed.
        TypeError: if the model is no ``PeftModel``.
        ValueError: if there is not one active adapter of plain LoRA, or if other parameters than its own are trained.
    """

    def __init__(
        self,
        model: nn.Module,
        engines: Engine | Sequence[Engine],
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
        """Sends the present adapter to all engines.

        Raises:
            WeightSyncError: if an engine did not confirm it. That engine samples with its adapter of before or, where
                the new one may yet come, refuses to sample; the others may have the new one. A further push, of the
                same version too, brings all of them up to date.
        """
        self._version = version
        tensors = self._tensors()
        failure = None
        if self.sends:
            try:
                self._push(tensors, version)
            except Exception as error:  # the other ranks hear of it before it is raised
                failure = error
        self._agree(failure)

    def close(self) -> None:
        """Removes the files. Engines may keep the adapter that they have loaded, but no longer load it again."""
        if self._root is not None:
            self._finalizer()
            self._root = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors on the CPU, under peft's names."""
        from peft import get_peft_model_state_dict

        reshard(self.model)
        state = get_peft_model_state_dict(self.model, adapter_name=self.adapter, save_embedding_layers=False)
        return {name: gather(tensor.detach()).cpu().contiguous() for name, tensor in state.items()}

    def _push(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        try:
            folder = self._write(tensors, version)
        except OSError as error:
            raise WeightSyncError(
                f"the adapter of version {version} could not be written ({error}): give LoRAUpdater another directory"
            ) from error
        info = {"version": version, "path": str(folder), "checksum": checksum([tensors[n] for n in sorted(tensors)])}
        deadline = monotonic() + self.timeout
        calls = [lambda engine: self._update(engine, info, deadline)] * len(self._peers)
        try:
            Round(self._peers, calls, "loading the adapter", self.timeout).wait()
        except PeerError as error:
            cause = error.__cause__
            raise WeightSyncError(
                f"{error.peer} has no adapter of version {version}: {error.doing} failed with {type(cause).__name__}: "
                f"{cause}. It samples with its adapter of before, or not at all; push again"
            ) from cause
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

    def _update(self, engine: Engine, info: dict[str, Any], deadline: float) -> None:
        try:
            engine.pause(self.in_flight, timeout=self.timeout)
            if (left := deadline - monotonic()) <= 0:  # a later push may have begun
                raise EngineTimeoutError(f"running requests took longer than timeout={self.timeout:g} s")
            reports = engine.update_weights("adapter", info, timeout=left)
            found, wanted = (
                [(r["version"], list(r["checksums"])) for r in reports],
                (info["version"], [info["checksum"]]),
            )
            if not found or any(one != wanted for one in found):
                raise EngineError(f"its workers report versions and checksums {found}, not {wanted}")
        finally:
            engine.resume()


def _peft_model(model: nn.Module) -> Any:
    """The PeftModel, out of what compiles or replicates it."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("LoRAUpdater needs peft: pip install 'torchrl_rloo[peft]'") from error
    inner = model
    while not isinstance(inner, PeftModel) and isinstance(inner, nn.Module):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
    if inner is None:
        raise TypeError(f"model is a {type(model).__name__}, not a peft PeftModel: send all weights with vLLMUpdater")
    return inner


def _plain_adapter(model: Any) -> str:
    """The name of the active adapter, one that engines can add to their own base weights."""
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(f"the model's active adapters are {active}: LoRAUpdater sends one; vLLMUpdater merges several")
    config = model.peft_config[active[0]]
    if config.peft_type.value != "LORA":
        raise ValueError(f"adapter {active[0]!r} is of kind {config.peft_type.value}; engines take LORA alone")
    unlike = {"use_dora": False, "lora_bias": False, "bias": "none"}
    wrong = {n: getattr(config, n) for n, plain in unlike.items() if getattr(config, n, plain) != plain}
    wrong |= {n: v for n in ("modules_to_save", "trainable_token_indices") if (v := getattr(config, n, None))}
    if isinstance(start := config.init_lora_weights, str) and start.startswith(_CHANGE_THE_BASE):
        raise ValueError(
            f"adapter {active[0]!r} has init_lora_weights={start!r}, which changes the base weights too, so engines "
            "would add it to others: send merged weights with vLLMUpdater"
        )
    if wrong:
        raise ValueError(f"adapter {active[0]!r} has {wrong}, which engines do not take: leave that out")
    if beside := [n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n]:
        raise ValueError(f"{beside[0]} is trained but not of the adapter, so engines would never get it: freeze it")
    return active[0]
