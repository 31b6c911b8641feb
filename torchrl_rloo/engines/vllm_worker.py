"""Worker extension that receives, checks and loads weight buckets in each worker of a vLLM engine.

vLLM imports this file by the name of its worker extension, :class:`WeightWorker`. The import registers the weight
transfer backend, and the extension adds methods to the worker. The backend works around three defects of vLLM 0.32's
reload on CPU:

- A tied head keeps its old packed copy.
- Experts are not packed again.
- The next load repeats a failed one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.v1.sample.sampler import Sampler

from torchrl_rloo.engines.vllm_api import BACKEND, ERROR_LOG, silence_noise
from torchrl_rloo.engines.vllm_load import LoadPlan
from torchrl_rloo.images.encoder import processor_settings
from torchrl_rloo.weight_update.protocol import (
    ADAPTER_FILE,
    EngineError,
    OpenUpdate,
    TensorInfo,
    check_frozen,
    read_frozen,
    read_manifest,
    xxh3,
)
from torchrl_rloo.weight_update.transport import Receiver, open_receiver


@dataclass
class Connection(WeightTransferInitInfo):
    """Content of the step ``connect`` of :mod:`~torchrl_rloo.weight_update.protocol`."""

    transport: str
    manifest: list
    staged: bool
    checksum: str = "xxh3"
    frozen: list = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict, repr=False)  # may hold an NCCL id


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Content of the step ``bucket`` of :mod:`~torchrl_rloo.weight_update.protocol`."""

    version: int
    bucket: int
    first: int
    last: int
    checksum: str | None
    payload: dict[str, Any]


class RLOOWeightTransfer(WeightTransferEngine[Connection, Bucket]):
    """Weight transfer backend of vLLM that loads only tensors that match the manifest and their checksum.

    With ``staged``, it keeps all buckets in host memory and loads them after the last one. The engine samples until
    then, and an update that fails before changes nothing. Otherwise it loads each bucket as it arrives.
    """

    init_info_cls = Connection
    update_info_cls = Bucket
    supports_draft_weight_update = False

    receiver: Receiver | None = None
    manifest: list[TensorInfo]
    plan: LoadPlan | None = None
    staged = True
    loading = False
    kind = "xxh3"  # of checksums
    announced: tuple[int, bool] = (0, True)  # version and verify of the next start
    update: OpenUpdate | None = None

    def init_transfer_engine(self, init_info: Connection) -> None:
        """Check that the manifest covers the whole model, and open the transport."""
        self.shutdown()
        manifest, frozen = read_manifest(vars(init_info)), read_frozen(vars(init_info))
        self._check_manifest(manifest, [info for info, _ in frozen])
        if frozen:
            check_frozen(frozen, _checkpoint_reader(self.vllm_config))
        self.manifest, self.staged, self.kind = manifest, init_info.staged, init_info.checksum
        self.receiver = open_receiver(vars(init_info), self.device, self.parallel_config.rank)

    def start_weight_update(self) -> None:
        """Open an update."""
        if self.receiver is None:
            raise RuntimeError("no transport is connected; connect before start")
        version, verify = self.announced
        self.update = OpenUpdate(self.manifest, version, verify=verify, kind=self.kind)
        self.staging: dict[str, torch.Tensor] = {}
        if not self.staged:
            self._start_loading()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one bucket. A failure aborts the update."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.abort_update()
            raise

    def receive_weights(self, update_info: Bucket) -> None:
        """Receive and check one bucket, then stage or load it."""
        if self.update is None:
            raise RuntimeError("no update is open; start one first")
        weights = self.update.take(vars(update_info), self.receiver)
        if self.staged:
            self.staging |= {name: tensor.cpu() for name, tensor in weights.items()}
        else:
            self.model.load_weights(iter(weights.items()))

    def finish_weight_update(self) -> None:
        """Activate the new weights."""
        if self.update is None:
            raise RuntimeError("no update is open; start one first")
        try:
            self.update.complete()
            # Load staged tensors only now that all have arrived
            is_planned = self.staged and self.plan is not None
            if is_planned:
                self.plan.load(self.staging)
            else:
                if self.staged:
                    self._start_loading()
                    self.model.load_weights(iter(self.staging.items()))
                layerwise.finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            self.abort_update()
            raise
        # Make the weights usable before the next turn
        self.loading, self.staging = False, {}
        if is_planned:
            return
        if self.device.type == "cpu":
            self._repack_tied_head()
        else:
            torch.accelerator.synchronize()

    def abort_update(self) -> None:
        """Cancel an open update. Incomplete layers keep their old weights."""
        self.update, self.staging = None, {}
        if self.loading:
            self._restore_layers()
            self.loading = False

    def shutdown(self) -> None:
        """Close the transport."""
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    def _start_loading(self) -> None:
        if self.device.type == "cpu":
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None  # otherwise the experts would not be packed again
        self.loading = True
        layerwise.initialize_layerwise_reload(self.model)

    def _restore_layers(self) -> None:
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()
        layerwise.LOADING_LAYERS.clear()

    def _repack_tied_head(self) -> None:
        tables = {
            m.weight.data_ptr()
            for m in self.model.modules()
            if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead) and m.weight.numel()
        }
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and module.weight.numel() and module.weight.data_ptr() in tables:
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def _check_manifest(self, manifest: list[TensorInfo], frozen: list[TensorInfo]) -> None:
        """Run the model's loaders on tensors of the manifest's and the frozen shapes, without effect on the weights."""
        # Save the parameters that loaders overwrite at once
        process, layerwise._layerwise_process = layerwise._layerwise_process, lambda layer, info: None
        self.loading = True
        layerwise.initialize_layerwise_reload(self.model)
        in_use = [(p, p.data.clone()) for p in self.model.parameters() if not p.is_meta]
        sent = {info.name: torch.zeros((), dtype=info.torch_dtype).expand(info.shape) for info in [*manifest, *frozen]}
        try:
            for info in [*manifest, *frozen]:
                try:
                    self.model.load_weights(iter([(info.name, sent[info.name])]))
                except Exception as error:
                    raise ValueError(
                        f"the engine's model does not take tensor {info.name} of shape {list(info.shape)}: "
                        f"{type(error).__name__}: {error}"
                    ) from error
            self._check_complete()
            on_cpu = self.device.type == "cpu"
            kept = {info.name for info in frozen}
            self.plan = LoadPlan.record(self.model, self.model_config.dtype, sent, kept) if on_cpu else None
        finally:
            layerwise._layerwise_process = process
            self.abort_update()
            for parameter, values in in_use:
                parameter.data.copy_(values)

    def _check_complete(self) -> None:
        tied = getattr(self.model_config.hf_config.get_text_config(), "tie_word_embeddings", False)
        for name, layer in self.model.named_modules():
            expected = sum(p.numel() for p in layer.parameters(recurse=False) if p.is_meta)  # others are not reloaded
            loaded = layerwise.get_layerwise_info(layer).load_numel or 0
            # Vocabularies are padded, and a tied head is repacked
            if isinstance(layer, VocabParallelEmbedding):
                expected = 0 if tied and isinstance(layer, ParallelLMHead) else min(expected, 1)
            if loaded < expected:
                raise ValueError(
                    f"the update fills {loaded} of {expected} elements of {name}, whose others would keep their old "
                    "weights; send the whole model"
                )


def _checkpoint_reader(config: VllmConfig) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a tensor of the engine's checkpoint by its name."""
    model, loader = config.model_config, get_model_loader(config.load_config)
    _, paths, *_ = loader._prepare_weights(model.model, None, model.revision, False, None)
    files = {name: file for path in paths for file in [safe_open(path, "pt")] for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> torch.Tensor:
        if name not in files:
            raise EngineError(f"the engine's checkpoint has no frozen tensor {name}; set train_vision=True to send it")
        return files[name].get_tensor(name)

    return read


WeightTransferEngineFactory.register_engine(BACKEND, RLOOWeightTransfer)
_sample = Sampler.sample


def _sample_exactly(
    self: Sampler, logits: torch.Tensor, metadata: Any, logprobs_mode_override: str | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sample with log-probs that sum to 1: torch's float32 ``log_softmax`` of 262,144 CPU logits is 1e-4 too high."""
    sampled, log_probs = _sample(self, logits, metadata, logprobs_mode_override)
    mode = logprobs_mode_override or self.logprobs_mode
    if log_probs is not None and log_probs.device.type == "cpu" and mode == "processed_logprobs":
        log_probs.sub_(log_probs.exp().sum(-1, keepdim=True).log_())
    return sampled, log_probs


Sampler.sample = _sample_exactly

# vLLM imports this file in all processes of an engine
silence_noise()
if ERROR_LOG in os.environ:
    _errors = logging.FileHandler(os.environ[ERROR_LOG])
    _errors.setLevel(logging.ERROR)
    logging.getLogger("vllm").addHandler(_errors)


class WeightWorker:
    """Methods added to vLLM's worker for weight updaters."""

    def weight_report(self) -> dict[str, Any]:
        """Return the worker's rank, and the version, checksums and number of tensors of the last update."""
        update = self.weight_transfer_engine.update
        report = update.report() if update else {"version": None, "checksums": [], "tensors": 0}
        return {"rank": self.rank, **report}

    def image_settings(self) -> dict[str, Any] | None:
        """Return the settings of the model's images, as ``ImageEncoder.settings`` does; None if it reads text only."""
        config = self.model_config
        if not config.is_multimodal_model or not config.get_multimodal_config().get_limit_per_prompt("image"):
            return None
        processor = MULTIMODAL_REGISTRY.create_processor(config).info.get_hf_processor().image_processor
        layers = get_layers_from_vllm_config(self.vllm_config, Attention).values()
        sees_whole = config.is_mm_prefix_lm and all(layer.attn_backend.supports_mm_prefix() for layer in layers)
        return processor_settings(processor, sees_whole)

    def announce_weight_update(self, version: int, verify: bool) -> None:
        """Open the update of a version, whose buckets have checksums if ``verify``."""
        self.weight_transfer_engine.announced = (version, verify)
        self.start_weight_update()

    def check_adapter(self, path: str, expected: str) -> None:
        """Raise RuntimeError unless the checksum of a LoRA adapter's tensors, sorted by name, is the sender's."""
        tensors = load_file(Path(path) / ADAPTER_FILE)
        if (checksum := xxh3([tensors[name] for name in sorted(tensors)])) != expected:
            raise RuntimeError(f"the adapter in {path} is corrupt: its checksum is {checksum}, not {expected}")

    def abort_weight_update(self) -> None:
        """Cancel an open update."""
        self.weight_transfer_engine.abort_update()
        self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False
