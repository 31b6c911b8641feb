"""Supervised warm start of the embedded model, built once.

The sloppy teacher of each task makes the model like a base model: able but unreliable. On held-out addition problems
0-6 % of its greedy and 20-27 % of its sampled answers are correct, and on held-out pictures 1-7 % and 31-32 %.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from torchrl_rloo.data.rows import pad
from torchrl_rloo.data.templates import encode_conversation
from torchrl_rloo.embedded.addition import addition_demonstrations
from torchrl_rloo.embedded.calculator import calculator_demonstrations
from torchrl_rloo.embedded.guessing import guessing_demonstrations
from torchrl_rloo.embedded.model import build_model, build_processor, build_vision_model
from torchrl_rloo.embedded.shapes import shapes_demonstrations
from torchrl_rloo.embedded.tokenizer import build_tokenizer
from torchrl_rloo.images import ImageStore
from torchrl_rloo.images.encoder import ImageEncoder, encoder_of
from torchrl_rloo.images.parts import image_paths, place_images
from torchrl_rloo.modules.model_files import save_tokenizer
from torchrl_rloo.runtime.files import cache_folder
from torchrl_rloo.training import make_schedule

STEPS = {"shapes": 1400}  # of a task; others take 500
DEMONSTRATIONS = {"shapes": 4096}  # others take 2048
BATCH_SIZE = 32
PEAK_LR = 3e-3
LR_WARMUP_STEPS = 40
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
LOG_EVERY = 50
TEACHERS = {
    "addition": addition_demonstrations,
    "calculator": calculator_demonstrations,
    "guessing": guessing_demonstrations,
    "shapes": shapes_demonstrations,
}
VISION_TASKS = {"shapes"}  # tasks whose model sees pictures


def warm_start(
    seed: int = 0,
    task: str = "addition",
    *,
    steps: int | None = None,
    clean: bool = False,
    cache_dir: Path | str | None = None,
    log: Callable[[str], None] | None = None,
) -> Path:
    """Build the warm-started model and its tokenizer on the first call, and return their directory.

    A build takes 20 to 60 seconds of one CPU core. It runs in one thread and leaves the caller's number of threads and
    the global random state unchanged. The same seed gives bit-identical weights on the same kind of CPU. The directory
    appears atomically: a killed build leaves no partial result, and of concurrent builds the first to finish wins.

    Args:
        seed: seed of the initial weights, the demonstrations and their order.
        task: task of the demonstrations, a key of ``TEACHERS``.
        steps: number of optimizer steps; fewer steps give a worse model sooner. None takes the task's.
        clean: True for a teacher without errors. After about 200 steps the model still makes errors, and it can improve
            beyond choosing the better demonstrations.
        cache_dir: directory of the results. None is ``$TORCHRL_RLOO_CACHE``, else ``$XDG_CACHE_HOME/torchrl_rloo``,
            else ``~/.cache/torchrl_rloo``. A result's name contains the task, the seed and a fingerprint. The
            fingerprint covers the source of ``torchrl_rloo.embedded``, ``steps``, ``clean`` and the versions of torch,
            transformers and tokenizers.
        log: function called every ``LOG_EVERY`` steps, and after the last, with a line of progress. None is silent.

    Returns:
        Directory in Hugging Face format, ready for ``from_pretrained``.

    Raises:
        ValueError: if ``steps`` is below 1, or the task has no teacher.
    """
    if task not in TEACHERS:
        raise ValueError(f"task={task!r} has no teacher: use one of {sorted(TEACHERS)}")
    steps = STEPS.get(task, 500) if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    cache = Path(cache_dir) if cache_dir is not None else cache_folder()
    target = cache / f"warm-start-{task}-seed{seed}-{_fingerprint(steps, clean)}"
    if target.is_dir():
        return target

    # Train in one thread, which makes the weights reproducible
    cache.mkdir(parents=True, exist_ok=True)
    with _one_thread(), torch.device("cpu"):
        model, tokenizer = build_untrained(task, seed, cache / "images")
        _train(model, tokenizer, task, seed, steps, clean, log or (lambda line: None))

    # Rename the finished directory, so that no other process sees a partial one
    with tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as building:
        built = Path(building) / target.name
        model.save_pretrained(built)
        save_tokenizer(tokenizer, built)
        try:
            built.rename(target)
        except OSError:  # another build finished first, with the same result
            if not target.is_dir():
                raise
    return target


def build_untrained(
    task: str, seed: int, images: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Build a task's model and tokenizer, with an image encoder over the folder ``images`` if it has pictures."""
    if task not in VISION_TASKS:
        tokenizer = build_tokenizer()
        return build_model(tokenizer, seed), tokenizer
    tokenizer = build_tokenizer(images=True)
    model = build_vision_model(tokenizer, seed)
    tokenizer.images = ImageEncoder(model.config, build_processor(), tokenizer, ImageStore(images))
    return model, tokenizer


@torch.enable_grad()
def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    seed: int,
    steps: int,
    clean: bool,
    log: Callable[[str], None],
) -> None:
    ids, mask, paths = _encode_demonstrations(tokenizer, task, seed, clean)
    encoder, shown = encoder_of(tokenizer), {}
    pictures = [encoder.tensors(path) for path in paths]
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = make_schedule(optimizer, steps, warmup_steps=min(LR_WARMUP_STEPS, steps), final_fraction=0.0)
    for step in range(1, steps + 1):
        batch = torch.randint(len(ids), (BATCH_SIZE,), generator=generator)
        if pictures:
            shown = encoder.family.arguments([pictures[i] for i in batch.tolist()])
        loss = _assistant_loss(model, ids[batch], mask[batch], **shown)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % LOG_EVERY == 0 or step == steps:
            log(f"warm start: step {step}/{steps}, loss {loss.item():.3f}")


def _encode_demonstrations(
    tokenizer: PreTrainedTokenizerFast, task: str, seed: int, clean: bool
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return ids and assistant masks of all demonstrations, both ``[N, T]`` and padded on the right, and their images.

    Demonstrations of a task with pictures have one each.
    """
    demonstrations = TEACHERS[task](DEMONSTRATIONS.get(task, 2048), seed, clean=clean)
    if (encoder := encoder_of(tokenizer)) is not None:
        demonstrations = [
            place_images(messages, (), encoder.store.add, "a demonstration") for messages in demonstrations
        ]
    rows = [encode_conversation(tokenizer, messages) for messages in demonstrations]
    ids = pad([torch.tensor(row) for row, _ in rows], tokenizer.pad_token_id)
    mask = pad([torch.tensor(mask) for _, mask in rows], False)
    return ids, mask, image_paths(chain.from_iterable(demonstrations))


def _assistant_loss(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **shown: torch.Tensor
) -> torch.Tensor:
    """Return the mean cross entropy (nats) of the assistant tokens in ``ids`` and ``mask``, both ``[B, T]``.

    ``shown`` are the model's arguments for images. It cuts off what follows the batch's last assistant token. No
    attention mask is needed: attention is causal and the padding is on the right, so no assistant token sees it.
    """
    end = int(mask.any(0).nonzero()[-1]) + 1
    ids, mask = ids[:, :end], mask[:, 1:end]
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False, **shown).last_hidden_state
    return F.cross_entropy(model.lm_head(hidden[mask]), ids[:, 1:][mask])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread within the context: splitting sums over threads can change their last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fingerprint(steps: int, clean: bool) -> str:
    versions = torch.__version__, transformers.__version__, tokenizers.__version__
    digest = hashlib.sha256(repr((steps, clean, *versions)).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]
