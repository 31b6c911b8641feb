"""Single changes of a run's settings that make its memory fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchrl_rloo.diagnostics.fake_model import FakeModel
from torchrl_rloo.diagnostics.memory_plan import MemoryPlan, plan_memory
from torchrl_rloo.diagnostics.memory_settings import MemorySettings, Sampling

MAX_RANKS = 1024


class Change(NamedTuple):
    """One change of a setting.

    Attributes:
        setting: setting and value, as on the command line.
        price: what it costs.
        settings: settings after the change.
    """

    setting: str
    price: str
    settings: MemorySettings


class Advice(NamedTuple):
    """A change and the memory that it leads to.

    Attributes:
        change: change of a setting.
        plan: plan after the change.
    """

    change: Change
    plan: MemoryPlan


def advise(
    model: FakeModel, settings: MemorySettings, *, engine_setting: str | None = None, has_adapter: bool = False
) -> list[Advice]:
    """Try single changes of the settings, and return the best one of each setting that lowers the peak.

    Args:
        model: model of the run.
        settings: settings of the run.
        engine_setting: setting that lets the engine sleep while the model trains. None if there is no such engine.
        has_adapter: whether the run trains an adapter, whose base can be quantized.

    Returns:
        Changes that fit the device first, then by peak. Of a setting with several values it is the least change that
        fits, or the largest one if none does.
    """
    before, best = plan_memory(model, settings), {}
    for change in _changes(settings, engine_setting, has_adapter):
        name = change.setting.partition("=")[0].partition(" ")[0]
        if name in best and best[name].plan.fits:
            continue
        plan = plan_memory(model, change.settings)
        if plan.peak < before.peak:
            best[name] = Advice(change, plan)
    return sorted(best.values(), key=lambda advice: (not advice.plan.fits, advice.plan.peak))


def _changes(settings: MemorySettings, engine_setting: str | None, has_adapter: bool) -> Iterator[Change]:
    """Yield changes of settings, those of one setting from the least to the largest."""

    def change(setting: str, price: str, **values) -> Change:
        return Change(setting, price, replace(settings, **values))

    # Exact changes that cost time
    if not settings.gradient_checkpointing:
        yield change("model.gradient_checkpointing=true", "a third more time to train", gradient_checkpointing=True)
    for tokens in _halves(settings.work.tokens, settings.row_tokens):
        yield change(f"train.micro_batch_tokens={tokens}", "more passes", micro_batch_tokens=tokens)
    for packing in {"none": ("packed", "shared_prefix"), "packed": ("shared_prefix",)}.get(settings.packing, ()):
        yield change(f"train.packing={packing}", "nothing: as exact, and faster", packing=packing)
    if settings.sampling is not None:
        for lines in _halves(settings.sampling.lines, 1):
            sampling = Sampling(lines, min(lines, settings.sampling.prompts), settings.sampling.itemsize)
            yield change(f"collector.max_batch_size={lines}", "slower sampling", sampling=sampling)
    if engine_setting is not None and settings.engine_bytes and not settings.engine_sleeps:
        yield change(engine_setting, "seconds a step to wake the engine", engine_sleeps=True)
    # Changes of the layout over ranks
    if settings.ranks > 1 and settings.parallel != "fsdp":
        yield change("train.parallel=fsdp", "communication in every layer", parallel="fsdp")
    if settings.parallel == "fsdp":
        if settings.shard_size is not None and settings.shard_size < settings.ranks:
            yield change("train.shard_size=null", "communication between nodes", shard_size=None)
        if not settings.load_shards:
            yield change("train.load_shards=true", "nothing", load_shards=True)
        if settings.reduce == "last_pass" and settings.passes > 1:
            yield change("train.reduce=every_pass", "a reduction in every pass", reduce="every_pass")
    if settings.parallel != "none":
        ranks = settings.ranks
        while (ranks := 2 * ranks) <= MAX_RANKS:
            yield change(f"--ranks {ranks}", "more devices", ranks=ranks)
    # Changes of precision and of the optimizer
    if settings.precision == "float32":
        yield change("train.precision=bfloat16", "rounded activations", precision="bfloat16")
    if settings.optimizer == "adamw":
        yield change("optimizer.name=adamw_8bit", "rounded optimizer states", optimizer="adamw_8bit")
    if has_adapter and settings.quantization is None:
        yield change("model.quantization=nf4", "rounded frozen weights", quantization="nf4")
    # Host memory, to which only a GPU is offloaded
    if settings.device == "cuda":
        options = [(*settings.offload, part) for part in ("activations", "optimizer") if part not in settings.offload]
        if settings.parallel == "fsdp":  # offloaded parameters bring the optimizer's states along
            options.append((*(part for part in settings.offload if part != "optimizer"), "parameters"))
        for offload in options:
            if "parameters" not in settings.offload:
                yield change(f"train.offload=[{','.join(offload)}]", "transfers to the host", offload=offload)


def _halves(value: int, least: int) -> Sequence[int]:
    """Return the halves of a number, from the largest to ``least``."""
    found = []
    while value > least:
        value = max(value // 2, least)
        found.append(value)
    return found
