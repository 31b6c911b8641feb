"""Models in Hugging Face files: saved whole, merged, or tensor by tensor from shards; loaded shard by shard.

No rank ever has the whole of a sharded model. Its saving and loading are collective calls: all ranks make them.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule

from torchrl_rloo.engines.root import replica_of
from torchrl_rloo.images.encoder import encoder_of
from torchrl_rloo.modules.policies import adapter_disabled
from torchrl_rloo.runtime.files import atomic_write, explained, make_folder, write_text
from torchrl_rloo.runtime.ranks import RankError
from torchrl_rloo.weight_update.shards import gather, is_sender, is_sharded, reshard
from torchrl_rloo.weight_update.source import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


MAX_FILE_SIZE = "50GB"  # as Transformers has it
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def is_collective(model: nn.Module) -> bool:
    """Return whether saving a model needs all ranks: it is sharded, or equal on all of them."""
    return is_sharded(model) or replica_of(model) is not None


def save_on_all(model: nn.Module, folder: Path, save_rest: Callable[[], Any], *, max_size: str = MAX_FILE_SIZE) -> None:
    """Save a model from all ranks, as ``model.save_pretrained`` of one process would; rank 0 writes.

    A sharded model is gathered and written tensor by tensor. An adapter is gathered whole, because it is small.
    """
    if is_sharded(model):
        reshard(model)
    state = {} if not is_sharded(model) else model.state_dict()
    if hasattr(model, "peft_config"):
        state = {name: tensor for name, tensor in state.items() if "lora_" in name or "modules_to_save" in name}
    files = _plan_files(model, state, max_size) if state and not hasattr(model, "peft_config") else None
    whole = _gathered(state, files)
    error = None
    if is_sender():
        try:
            save_rest()
            if files is not None:
                model.save_pretrained(folder, state_dict={})  # only configurations
                _write_files(model, folder, state, files, whole)
            elif state:
                model.save_pretrained(folder, state_dict=dict(whole), max_shard_size=max_size)
            else:
                model.save_pretrained(folder, max_shard_size=max_size)
        except Exception as raised:  # reported on all ranks
            error = raised
    for _ in whole:  # each gather needs all ranks, even if rank 0 has failed
        pass
    message = [None if error is None else f"{type(error).__name__}: {error}"]
    distributed.broadcast_object_list(message, src=0)
    if error is not None:
        raise error
    if message[0] is not None:
        raise RankError(f"rank 0 failed: {message[0]}")


def load_shards(
    model: nn.Module, name: str | os.PathLike, *, device: str | torch.device = "cpu", **kwargs: Any
) -> None:
    """Load the weights of a model on the meta device, of which each rank reads only its shards.

    Args:
        model: model of ``load_model(..., meta=True)`` or its LoRA adapter, usually sharded since. Its weights and
            buffers become equal to those of :func:`~torchrl_rloo.modules.load_model`.
        name: hub id or local directory of safetensors files.
        device: device of the weights.
        **kwargs: arguments that locate a model on the hub (``revision=``, ...).

    Raises:
        ValueError: if a weight is missing in the files, has another shape there, or a buffer cannot be computed.

    Example::

        model, tokenizer = load_model(name, meta=True)
        shard_model(model, ranks, "fsdp")
        load_shards(model, name, device=ranks.device)
    """
    from torch.distributed import checkpoint as dcp

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    _compute_buffers(base, device)
    # One new tensor for each on the meta device; tied ones stay tied
    reader = dcp.HuggingFaceStorageReader(str(_folder(name, **kwargs)))
    saved = reader.read_metadata().state_dict_metadata
    new: dict[int, torch.Tensor] = {}
    filled, assigned = {}, {}
    for key, tensor in base.state_dict(keep_vars=True).items():
        if tensor.is_meta:
            if id(tensor) not in new:
                local = torch.empty_like(tensor, device=device, requires_grad=False)
                trained = isinstance(tensor, nn.Parameter)
                new[id(tensor)] = nn.Parameter(local, requires_grad=tensor.requires_grad) if trained else local
            assigned[key] = new[id(tensor)]
            if (file_key := key.replace(".base_layer.", ".")) in saved:
                filled[file_key] = new[id(tensor)].detach()
    _check_complete(base, filled, saved, set(map(id, new.values())), assigned)
    dcp.load(filled, storage_reader=reader, no_dist=True)
    base.load_state_dict(assigned, strict=False, assign=True)


def _plan_files(model: nn.Module, state: dict[str, torch.Tensor], max_size: str) -> dict[str, list[str]] | None:
    """Return the tensors of each file, without aliases; None if the files need other tensors than the model has."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = model._keys_to_ignore_on_save or ()
    meta = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in state.items()
        if name not in ignored
    }
    meta = remove_tied_weights_from_state_dict(meta, model)
    if revert_weight_conversion(model, dict(meta)).keys() != meta.keys():
        return None
    split = split_torch_state_dict_into_shards(
        meta, filename_pattern="model{suffix}.safetensors", max_shard_size=max_size
    )
    return {
        file: sorted(names, key=lambda n: (-meta[n].itemsize, n)) for file, names in split.filename_to_tensors.items()
    }


def _gathered(
    state: Mapping[str, torch.Tensor], files: dict[str, list[str]] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each whole tensor in the order of the files; every step is a collective call."""
    for name in [name for names in files.values() for name in names] if files is not None else state:
        whole = gather([state[name].detach()])  # empty on the other ranks
        yield name, whole[0].cpu() if is_sender() else torch.empty(0)


def _write_files(
    model: nn.Module,
    folder: Path,
    state: Mapping[str, torch.Tensor],
    files: dict[str, list[str]],
    whole: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Write safetensors files from a stream of tensors, and their index if there are several."""
    for file_name, names in files.items():
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            end = offset + state[name].numel() * state[name].itemsize
            dtype, shape = _DTYPES[state[name].dtype], list(state[name].shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with atomic_write(folder / file_name) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                tensor_name, tensor = next(whole)
                assert tensor_name == name
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if len(files) > 1:
        total = sum(state[name].numel() * state[name].itemsize for names in files.values() for name in names)
        weight_map = {name: file_name for file_name, names in files.items() for name in names}
        metadata = {"total_parameters": model.num_parameters(), "total_size": total}
        index = {"metadata": metadata, "weight_map": weight_map}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")


def _folder(name: str | os.PathLike, **kwargs: Any) -> Path:
    """Return the local folder of a model's safetensors files, from the hub if necessary."""
    folder = Path(name).expanduser() / kwargs.get("subfolder", "")
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        located = {key: value for key, value in kwargs.items() if key in ("revision", "cache_dir", "token")}
        folder = Path(snapshot_download(str(name), allow_patterns=["*.safetensors"], **located))
        folder /= kwargs.get("subfolder", "")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{name} has no *.safetensors files to read shards from; load the model whole (meta=False)")
    return folder


def _compute_buffers(model: nn.Module, device: str | torch.device) -> None:
    """Compute the buffers that files do not contain, such as rotary frequencies, as ``from_pretrained`` does."""
    for name, module in model.named_modules():
        keys = [key for key in module._non_persistent_buffers_set if module._buffers[key] is not None]
        if not any(module._buffers[key].is_meta for key in keys):
            continue
        for key in keys:
            buffer = module._buffers[key]
            unset = torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min
            module._buffers[key] = torch.full_like(buffer, unset, device=device)
        if not any(True for _ in module.parameters(recurse=False)):
            model._init_weights(module)
        for key in keys:
            buffer = module._buffers[key]
            if (buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min).any():
                raise ValueError(
                    f"{type(module).__name__} cannot compute its buffer {name}.{key} on the meta device; load the "
                    "model whole (meta=False)"
                )


def _check_complete(
    model: nn.Module,
    filled: Mapping[str, torch.Tensor],
    saved: Mapping[str, Any],
    new: set[int],
    assigned: Mapping[str, torch.Tensor],
) -> None:
    """Raise unless the files have each tensor in its shape, and so every new tensor is filled."""
    filled_ids = {id(tensor) for key, tensor in assigned.items() if key.replace(".base_layer.", ".") in filled}
    missing = [key for key, tensor in assigned.items() if id(tensor) not in filled_ids]
    wrong = [key for key, tensor in filled.items() if saved[key].size != tensor.shape]
    if missing or wrong:
        raise ValueError(
            f"the files of {type(model).__name__} have no tensors {missing[:3]} and other shapes of {wrong[:3]}: they "
            "may belong to another model, or need a conversion; load the model whole (meta=False)"
        )


def save_merged(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    *,
    adapter: bool = True,
    dtype: torch.dtype | None = None,
) -> Path:
    """Save the weights that a model computes with: the adapter merged, 4-bit weights dequantized.

    peft's ``merge_and_unload`` rounds merged weights to 4 bits again, which changes the model. This function does not,
    and leaves the model as it is. It needs host memory for the whole float weights.

    Args:
        model: model, with or without adapter. If it is sharded, all ranks must call, and rank 0 saves.
        tokenizer: tokenizer of the model.
        folder: output directory, created if missing, see :func:`~torchrl_rloo.modules.save_model`.
        adapter: whether to merge the adapter. False saves the base model, for engines that receive the adapter.
        dtype: dtype of the saved weights; None keeps that of the model, for 4-bit weights that of their products.

    Returns:
        ``folder`` as a path.

    Raises:
        ValueError: if the adapter cannot be merged, see :class:`~torchrl_rloo.weight_update.WeightSource`.

    Example::

        model, tokenizer = load_model("Qwen/Qwen2.5-1.5B", quantization="nf4")
        model = add_adapter(model, {"r": 16, "target_modules": "all-linear"})
        save_merged(model, tokenizer, "merged")
    """
    with nullcontext() if adapter else adapter_disabled(model):
        source = WeightSource(model, dtype=dtype, for_engines=False)
        state = {}
        for number, info in enumerate(source.manifest()):  # one tensor at a time on the model's device
            (tensor,) = source.tensors(number, number + 1)
            if source.sends:
                state[info.name] = tensor.cpu()
    if not source.sends:
        return Path(folder)
    # A model without memory takes the tensors, under a configuration that no longer names a quantization
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype or config.dtype
    with torch.device("meta"):
        merged = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))(config)
    merged.load_state_dict(state, strict=False, assign=True)
    merged.tie_weights()
    merged.generation_config = base.generation_config
    return save_model(merged, tokenizer, folder)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> Path:
    """Save a model with its tokenizer in Hugging Face format.

    If :func:`~torchrl_rloo.training.shard_model` distributed the model over ranks, all ranks must call this. Rank 0
    writes, and a sharded model is gathered tensor by tensor.

    It first deletes weights in the folder: weights of an earlier model, such as an adapter, would be loaded with these.
    It also deletes symbolic links, through which the files would be written elsewhere.

    Args:
        model: model, or its LoRA adapter.
        tokenizer: tokenizer of the model.
        folder: output directory, created if missing.

    Returns:
        ``folder`` as a path.
    """
    folder = Path(folder)
    if is_collective(model):
        save_on_all(model, folder, lambda: _begin_folder(tokenizer, folder))
        return folder
    _begin_folder(tokenizer, folder)
    with explained(folder):
        model.save_pretrained(folder)
    return folder


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> None:
    """Save a tokenizer with the image processor of its model, if it has one, as vLLM and ``load_tokenizer`` need it."""
    tokenizer.save_pretrained(folder)
    if (encoder := encoder_of(tokenizer)) is not None:
        encoder.save(folder)


def _begin_folder(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer in a folder without weights and links."""
    make_folder(folder)
    for stale in (
        *(path for path in folder.iterdir() if path.is_symlink()),
        *folder.glob("*.safetensors"),
        *folder.glob("*.safetensors.index.json"),
        folder / "adapter_config.json",
    ):
        stale.unlink(missing_ok=True)
    with explained(folder):
        save_tokenizer(tokenizer, folder)
