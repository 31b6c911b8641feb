"""Engine around a Hugging Face model, with the scorer's distribution and in-place weight updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Any

import torch
from torch import nn

from torchrl_rloo.data.rows import pad
from torchrl_rloo.engines.base import (
    Engine,
    EngineError,
    EngineTimeoutError,
    InFlight,
    Request,
    Sample,
    WeightStep,
    check_in_flight,
)
from torchrl_rloo.engines.generation import generate, model_stop_ids
from torchrl_rloo.engines.head import current_head, find_head, score_positions
from torchrl_rloo.functional.products import fast_layers
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.images.encoder import encoder_of
from torchrl_rloo.weight_update.protocol import (
    OpenUpdate,
    StaleStepError,
    check_frozen,
    read_frozen,
    read_manifest,
    require_open,
    xxh3,
)
from torchrl_rloo.weight_update.rotary import context_length, fix_frequencies
from torchrl_rloo.weight_update.source import checkpoint_names
from torchrl_rloo.weight_update.transport import Receiver, open_receiver


class TransformersEngine(Engine):
    """Engine that samples with a Hugging Face model in this process, on the model's device.

    Requests with the same distribution and stops are sampled in one batch. A request's tokens do not depend on its
    batch. Calls from several threads run one after the other. For any ``in_flight``, :meth:`pause` waits for the
    running batch, so no turn has two versions.

    Updates require all tensors of the model's ``state_dict`` except frozen ones, tied ones under at least one name, and
    cast them to its dtypes. With ``staged``, nothing is written before the last bucket has arrived.

    Args:
        model: causal language model. The engine does not change its train/eval mode, so call ``model.eval()`` to
            sample. Updates write into it, so it must be a copy of the training model.
        tokenizer: tokenizer that decodes turns for stop strings; required only with them.
        request_timeout: maximum time in seconds that :meth:`generate` waits for other calls and pauses.

    Raises:
        ValueError: if ``request_timeout`` is not above 0.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> tokenizer = build_tokenizer()
        >>> engine = TransformersEngine(build_model(tokenizer, seed=0).eval(), tokenizer)
        >>> sample, = engine.generate([Request(prompt=tokenizer("2+3=")["input_ids"], limit=4, seed=0)])
        >>> len(sample.tokens), sample.versions
        (4, [0, 0, 0, 0])
    """

    in_process = True

    def __init__(self, model: nn.Module, tokenizer: Any = None, *, request_timeout: float = 600.0):
        if request_timeout <= 0:
            raise ValueError(f"request_timeout={request_timeout} must be above 0 seconds")
        self.model, self.tokenizer, self.request_timeout = model, tokenizer, request_timeout
        fix_frequencies(model)
        self.head = find_head(model, warn=False)
        self.context_length, self.stop_ids = context_length(model), model_stop_ids(model)
        self._turn = Condition()
        self._busy = self._paused = False
        self._device: torch.device | None = None  # device of the model before it slept
        self._receiver: Receiver | None = None
        self._names: dict[str, str] = {}  # in the checkpoint, if they differ there
        self._abort()

    @property
    def image_settings(self) -> dict[str, Any] | None:
        """Settings with which the engine's tokenizer reads images."""
        encoder = encoder_of(self.tokenizer)
        return None if encoder is None else encoder.settings()

    @property
    def vocab_size(self) -> int:
        """Number of ids of the model's input."""
        return self.model.get_input_embeddings().num_embeddings

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample all requests, after the end of a pause or of another call; see :meth:`Sampler.generate`."""
        for number, request in enumerate(requests):
            self._check_request(number, request)
        # Batch the requests that share distribution and stops
        batches: dict[tuple, list[int]] = {}
        for number, r in enumerate(requests):
            batches.setdefault((r.distribution, frozenset(r.stop_ids), tuple(r.stop_strings)), []).append(number)
        samples: dict[int, Sample] = {}
        with self._exclusive(self.request_timeout):
            self._check(ready=True)
            for numbers in batches.values():
                samples.update(zip(numbers, self._sample([requests[n] for n in numbers]), strict=True))
        return [samples[n] for n in range(len(requests))]

    def _check_request(self, number: int, request: Request) -> None:
        if request.limit < 1:
            raise EngineError(f"limit={request.limit} of request {number} must be at least 1")
        if not request.prompt:
            raise EngineError(f"the prompt of request {number} is empty; pass at least one id")
        # On a GPU an invalid id would make CUDA unusable in this process
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.vocab_size:
            raise EngineError(
                f"the prompt of request {number} has ids from {min(request.prompt)} to {max(request.prompt)}, but the "
                f"model has ids from 0 to {self.vocab_size - 1}"
            )
        needs = request.stop_strings or request.distribution.bad_words or request.distribution.structured
        if needs and self.tokenizer is None:
            raise EngineError(
                f"stop_strings, bad_words and structured of request {number} require a tokenizer; use "
                "TransformersEngine(model, tokenizer)"
            )

    def _sample(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample requests that share distribution and stops."""
        # Draw random numbers from each request's seed, so that tokens do not depend on the batch
        limits = torch.tensor([r.limit for r in requests])
        uniforms = torch.zeros(len(requests), int(limits.max()))
        for row, r in zip(uniforms, requests, strict=True):
            row[: r.limit] = torch.rand(r.limit, generator=torch.Generator().manual_seed(r.seed))
        try:
            self.head = current_head(self.model, self.head, warn=False)
            turns = generate(
                self.model,
                [torch.tensor(r.prompt) for r in requests],
                requests[0].distribution,
                uniforms=uniforms,
                limits=limits,
                stop_ids=requests[0].stop_ids,
                stop_strings=requests[0].stop_strings,
                tokenizer=self.tokenizer,
                head=self.head,
                images=[[image.path for image in r.images] for r in requests],
            )
        except Exception as error:
            raise EngineError(
                f"the model failed on a batch of {len(requests)} requests: {type(error).__name__}: {error}"
            ) from error
        finish = {True: "length", False: "stop"}
        return [
            Sample(t.tokens.tolist(), t.log_probs.tolist(), finish[t.truncated], [self.version] * len(t.tokens))
            for t in turns
        ]

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        for number, row in enumerate(rows):
            self._check_request(number, Request(row, 1, 0))
        scored = [torch.arange(len(row)) > 0 for row in rows]
        with self._exclusive(self.request_timeout), fast_layers(self.model):
            self._check(ready=True)
            self.head = current_head(self.model, self.head, warn=False)
            ids, positions = (pad(part).to(self.model.device) for part in ([torch.tensor(r) for r in rows], scored))
            distribution = SamplingDistribution(temperature)
            found = score_positions(self.model, self.head, ids, positions, distribution, entropy=False).log_probs
        return [[0.0, *values.tolist()] for values in found.cpu().split([len(row) - 1 for row in rows])]

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Do one step of a weight update, as :meth:`WeightTarget.update_weights` describes; adapters are refused.

        A failed step aborts its update. A late step has no effect on a newer update. After a failure the model has its
        old weights, unless ``failed_version`` is set.
        """
        steps = {
            "connect": self._connect,
            "start": self._start,
            "bucket": self._take,
            "finish": self._finish,
            "abort": lambda info: self._abort(),
            "adapter": _refuse_adapter,
        }
        # Run the step between two batches, even while sampling is paused
        with self._exclusive(timeout, even_paused=True):
            self._check()
            try:
                with torch.no_grad():
                    report = steps[step](info or {})
            except StaleStepError:
                # A late step must not abort the newer update
                raise
            except Exception as error:
                self._abort()
                if isinstance(error, EngineError):
                    raise
                raise EngineError(f"{step} of an update failed: {type(error).__name__}: {error}") from error
        return [{"rank": 0, **(report or {})}]

    def _connect(self, info: Mapping[str, Any]) -> None:
        self._disconnect()
        # Check that the manifest has the names and shapes of the model
        manifest, staged, frozen = read_manifest(info), info["staged"], read_frozen(info)
        self._names = checkpoint_names(self.model, self.model.state_dict())
        tensors = self._tensors()
        for name, _, shape in [*manifest, *(one for one, _ in frozen)]:
            if name not in tensors:
                raise EngineError(
                    f"the engine's model has no tensor {name}; it has {', '.join(list(tensors)[:3])}, ..."
                )
            if shape != tuple(tensors[name].shape):
                raise EngineError(
                    f"the engine's {name} has shape {list(tensors[name].shape)}, but {list(shape)} is to come"
                )
        check_frozen(frozen, tensors.__getitem__)
        # Check that it covers the model. Tied tensors may come under one or several names
        first_name = {id(tensors[i.name]): i.name for i in reversed(manifest)}
        kept = {id(tensors[one.name]) for one, _ in frozen}
        if missing := [name for name, tensor in tensors.items() if id(tensor) not in first_name.keys() | kept]:
            raise EngineError(
                f"{len(missing)} of the engine's tensors would keep their old weights, the first is {missing[0]}; send "
                "the whole model"
            )
        # Connect, and remember the further names of tied tensors
        aliases = ((i.name, first_name[id(tensors[i.name])]) for i in manifest)
        self._aliases = {name: first for name, first in aliases if name != first}
        self._receiver = open_receiver(info, self.model.device, 0)
        self._manifest, self._staged = manifest, staged
        self._checksum = info.get("checksum", "xxh3")

    def _start(self, info: Mapping[str, Any]) -> None:
        if self._receiver is None:
            raise EngineError("no transport is connected; connect before start")
        self._abort()
        verify = info.get("verify", True)
        self._update = OpenUpdate(self._manifest, info["version"], verify=verify, kind=self._checksum)

    def _take(self, info: Mapping[str, Any]) -> None:
        weights = require_open(self._update, info).take(info, self._receiver)
        if self._staged:
            self._staging |= {name: tensor.cpu() for name, tensor in weights.items()}
        else:
            self.failed_version = info["version"]
            self._load(weights)

    def _finish(self, info: Mapping[str, Any]) -> dict[str, Any]:
        update, version = require_open(self._update, info), info["version"]
        update.complete()
        if self._staged:
            for name, first in self._aliases.items():
                self._check_alias(name, self._staging[name], self._staging[first])
            self.failed_version = version
            self._load(self._staging)
        self.version, self.failed_version = version, None
        self._abort()
        return update.report()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors by the names that are sent; tied ones are one object."""
        tensors = self.model.state_dict(keep_vars=True)
        return {self._names.get(name, name): tensor for name, tensor in tensors.items()}

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        tensors = self._tensors()
        for name, tensor in weights.items():
            if name in self._aliases:  # its first name arrived before
                self._check_alias(name, tensor, tensors[name])
            else:
                tensors[name].copy_(tensor)

    def _check_alias(self, name: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
        if xxh3([tensor.to(other)]) != xxh3([other]):  # compare bytes, since NaN differs from itself
            raise EngineError(
                f"{name} and {self._aliases[name]} are one tensor in the engine's model but differ in the update; "
                "untie them in the engine's model or tie them in the training model"
            )

    def _abort(self) -> None:
        self._update: OpenUpdate | None = None
        self._staging: dict[str, torch.Tensor] = {}

    def _disconnect(self) -> None:
        self._abort()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        """Stop sampling once the running batch has ended, for any ``in_flight``, unless that takes too long."""
        check_in_flight(in_flight)
        with self._turn:
            self._check()
            self._paused = True
            if not self._turn.wait_for(lambda: not self._busy, timeout):
                self._paused = False
                self._turn.notify_all()
                raise EngineTimeoutError(
                    f"the running batch did not end within timeout={timeout} s; the engine is not paused"
                )

    def resume(self) -> None:
        with self._turn:
            self._paused = False
            self._turn.notify_all()

    @contextmanager
    def _exclusive(self, timeout: float, even_paused: bool = False) -> Iterator[None]:
        """Wait until no other call uses the model, and keep others from using it within the context."""
        with self._turn:
            is_free = lambda: not self._busy and (even_paused or not self._paused or self.closed)  # noqa: E731
            if not self._turn.wait_for(is_free, timeout):
                reason = "another call is running" if self._busy else "the engine is paused; call resume()"
                raise EngineTimeoutError(f"the model was not free within {timeout} s: {reason}")
            self._busy = True
        try:
            yield
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def sleep(self) -> None:
        """Move a model on the GPU to host memory."""
        with self._exclusive(self.request_timeout, even_paused=True):
            self._check()
            if self.model.device.type == "cuda":
                self._device = self.model.device
                self.model.to("cpu")
                torch.cuda.empty_cache()
            self.asleep = True

    def wake(self) -> None:
        """Move the model back to its device."""
        with self._exclusive(self.request_timeout, even_paused=True):
            self._check()
            if self._device is not None:
                self.model.to(self._device)
                self._device = None
            self.asleep = False

    def check_health(self, timeout: float = 10.0) -> None:
        """Raise an ``EngineError`` if the engine is closed. An engine in this process cannot die."""
        self._check()

    def close(self) -> None:
        """Refuse all further calls. The caller keeps the model."""
        with self._turn:
            if not self.closed:
                self.closed = True
                self._disconnect()
            self._turn.notify_all()


def _refuse_adapter(info: Mapping[str, Any]) -> None:
    raise EngineError(
        "TransformersEngine cannot load adapters; send the merged model with WeightPublisher, or use a vLLM engine "
        "with enable_lora=True"
    )
