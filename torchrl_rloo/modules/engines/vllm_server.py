"""A vLLM server that somebody else started, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from time import monotonic
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch

from torchrl_rloo.modules.engines.base import EngineDeadError, EngineError, EngineTimeoutError, Request, Sample
from torchrl_rloo.modules.engines.vllm_api import (
    SERVER_VARIABLES,
    UNIPROC,
    plain_arguments,
    process_variables,
    sample_of_reply,
    sampling_arguments,
)
from torchrl_rloo.modules.engines.vllm_loop import CLOSED, NOT_RESTARTED, LoopEngine, LoopThread

_POLL = 0.5  # seconds between two looks for a server that is starting
_MINUS_INFINITY = -9999.0  # in the server's replies


def server_command(model: str | PathLike, *, host: str = "127.0.0.1", port: int = 8000, **arguments: Any) -> list[str]:
    """The command that starts a server for :class:`VLLMServer`, in the environment of :func:`server_environment`.

    Its control routes have no password: bind it to the loopback or to a private network alone.

    Args:
        model: a local directory or a hub id, in Hugging Face format.
        host: address to listen at.
        port: port to listen at.
        **arguments: of vLLM's engine, as for :class:`~torchrl_rloo.modules.engines.vllm_async.AsyncVLLMEngine`.

    Raises:
        ValueError: for an argument that the toolkit sets itself.

    Example:
        >>> server_command("my-model", dtype="float32")[1:5]
        ['-m', 'vllm.entrypoints.openai.api_server', '--model', 'my-model']
    """
    flags = plain_arguments(arguments) | {"enable_scale_out": True, "disable_uvicorn_access_log": True}
    if not torch.cuda.is_available() and flags.get("tensor_parallel_size", 1) == 1:
        flags.setdefault("distributed_executor_backend", UNIPROC)
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", os.fspath(model)]
    words += ["--host", host, "--port", str(port)]
    if not flags["disable_log_stats"]:
        del flags["disable_log_stats"]  # its flag has no opposite
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words


def server_environment(threads: int | None = 1) -> dict[str, str]:
    """Environment variables that a server needs, beside those of the shell; the caller's own values stay.

    Args:
        threads: OpenMP threads of the server; None leaves it to torch.
    """
    return dict(os.environ) | process_variables(own_process=True, threads=threads) | SERVER_VARIABLES


class VLLMServer(LoopEngine):
    """A running server of :func:`server_command`, for one trainer at a time. Closing it leaves the server running.

    A LoRA adapter is read by the server: its directory has to be one that both sides see.

    Args:
        url: of the server, as in ``"http://127.0.0.1:8000"``.
        request_timeout: seconds that a request may take.
        connect_timeout: seconds to wait for the server to answer, while it starts.
        api_key: sent as a bearer token.

    Raises:
        ValueError: for an url that is none, or a time of 0 or less.
        EngineDeadError: if no server answers in time.
        EngineError: if the server lacks something that :func:`server_command` gives it.
    """

    def __init__(
        self, url: str, *, request_timeout: float = 600.0, connect_timeout: float = 60.0, api_key: str | None = None
    ):
        super().__init__(request_timeout)
        if connect_timeout <= 0:
            raise ValueError(f"connect_timeout={connect_timeout} must be above 0 seconds")
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"url={url!r} must be like 'http://127.0.0.1:8000'")
        self.url, self.connect_timeout = url.rstrip("/"), connect_timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connect()

    def _connect(self) -> None:
        self._loop = LoopThread("vllm-server")
        self._http = _Http(self.url, self._headers, self.connect_timeout)
        self._finalizer = weakref.finalize(self, _close, self._loop, self._http, CLOSED)
        try:
            limit = self.connect_timeout + self.request_timeout
            self._world_size = self._loop.call(self._greet(), limit, f"connecting to {self.url}")
        except BaseException:
            _close(self._loop, self._http, NOT_RESTARTED)
            raise

    async def _greet(self) -> int:
        """Waits for the server, ends what a trainer before may have left open, and checks how it was started."""
        until = monotonic() + self.connect_timeout
        while True:
            try:
                await self._http.get("/health", self.connect_timeout)
                break
            except EngineDeadError:
                if monotonic() + _POLL > until:
                    raise
                await asyncio.sleep(_POLL)
        name = (await self._http.get("/weight_info", self.connect_timeout))["weight_version"]
        self._lives_on = name.isdecimal()  # a new server's weights have another name
        self.version = int(name) if self._lives_on else 0  # a trainer before may have sent it
        await self._collective("abort_weight_update", (), self.request_timeout)
        await self._name_weights(self.version)
        await self._resume_engine()
        if not await self._returns_processed():
            raise EngineError(
                f"the server at {self.url} returns log-probs of the plain softmax, not of what it samples: start it "
                "with --logprobs-mode processed_logprobs, as server_command does"
            )
        return (await self._http.get("/get_world_size", self.request_timeout))["world_size"]

    async def _returns_processed(self) -> bool:
        """Whether log-probs are of the truncated softmax: those of tokens that top-k cut off are minus infinity then.

        Of two tokens, as the logits after a padding token alone may all be the same.
        """
        settings = {"max_tokens": 2, "top_k": 1, "logprobs": 2, "ignore_eos": True, "seed": 0}
        body = {"token_ids": [0], "sampling_params": settings}
        reply = await self._http.post("/inference/v1/generate", self.request_timeout, body)
        entries = [top["logprob"] for e in reply["choices"][0]["logprobs"]["content"] for top in e["top_logprobs"]]
        return min(entries) <= _MINUS_INFINITY

    @property
    def world_size(self) -> int:
        return self._world_size

    def check_health(self) -> None:
        self._check()
        self._loop.call(self._http.get("/health", self.connect_timeout), self.request_timeout, "check_health()")

    def close(self) -> None:
        self.closed = True
        self._finalizer()

    def restart(self) -> None:
        """Connects to the server anew, once somebody has started it again; one that lives on keeps what it has."""
        _close(self._loop, self._http, NOT_RESTARTED)
        self._connect()
        kept = (self.version, self.torn, self._adapter) if self._lives_on else (0, None, None)
        self._start_again()
        self.version, self.torn, self._adapter = kept

    async def _sample(self, request: Request) -> Sample:
        body = {"token_ids": list(request.prompt), "sampling_params": sampling_arguments(request)}
        if self._adapter is not None:
            body["model"] = self._adapter
        reply = await self._http.post("/inference/v1/generate", self.request_timeout, body)
        return sample_of_reply(request, reply["choices"][0])

    async def _pause_engine(self, mode: str) -> None:
        await self._http.post("/pause", None, params={"mode": mode, "clear_cache": "true"})

    async def _resume_engine(self) -> None:
        await self._http.post("/resume", self.request_timeout)

    async def _collective(self, method: str, args: tuple, timeout: float) -> list:
        reply = await self._http.post("/collective_rpc", timeout, {"method": method, "args": args, "timeout": timeout})
        return reply["results"]

    async def _name_weights(self, version: int) -> None:
        await self._http.post("/update_weight_version", self.request_timeout, {"new_version": str(version)})
        params = {"reset_running_requests": "true"}
        if not (await self._http.post("/reset_prefix_cache", self.request_timeout, params=params))["success"]:
            raise EngineError("the server did not drop its prefix cache, so that samples may be of old weights")

    async def _sleep_engine(self) -> None:
        await self._http.post("/sleep", self.request_timeout, params={"level": "1", "mode": "wait"})

    async def _wake_engine(self) -> None:
        await self._http.post("/wake_up", self.request_timeout)

    async def _load(self, path: str, name: str, timeout: float) -> None:
        if self._inside:  # the server can replace an adapter under its name only by loading it again at every step
            raise EngineError(
                f"{self._inside} requests were frozen by pause('continue') and would go on with the adapter before: "
                "pause with 'finish' or 'abort' before an adapter is loaded"
            )
        await self._http.post("/v1/load_lora_adapter", timeout, {"lora_name": name, "lora_path": path})
        if self._adapter is not None:
            await self._http.post("/v1/unload_lora_adapter", timeout, {"lora_name": self._adapter})

    def _load_adapter(self, path: str, version: int, timeout: float) -> None:
        name = f"policy-{version}-{uuid4().hex[:8]}"  # names of a trainer before may be taken
        self._loop.call(self._load(path, name, timeout), timeout, "loading an adapter")
        self._adapter = name


class _Http:
    """Requests to one server. aiohttp holds hundreds of them open on one thread, and datasets brings it."""

    def __init__(self, url: str, headers: Mapping[str, str], connect_timeout: float):
        self.url, self.headers, self.connect_timeout = url, headers, connect_timeout
        self.session: Any = None

    async def get(self, path: str, timeout: float | None) -> Any:
        return await self._send("GET", path, timeout)

    async def post(
        self, path: str, timeout: float | None, body: Any = None, params: Mapping[str, str] | None = None
    ) -> Any:
        return await self._send("POST", path, timeout, json=body, params=params)

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    async def _send(self, method: str, path: str, timeout: float | None, **content: Any) -> Any:
        import aiohttp

        if self.session is None:
            # a server may close an idle connection at the instant that it is used again, so none is
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self.session = aiohttp.ClientSession(connector=connector, headers=self.headers)
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=self.connect_timeout)
        try:
            async with self.session.request(method, self.url + path, timeout=limits, **content) as reply:
                text = await reply.text()
        except asyncio.TimeoutError as error:
            raise EngineTimeoutError(f"{method} {self.url}{path} took longer than {timeout} s") from error
        except aiohttp.ClientError as error:
            raise EngineDeadError(f"no server answers at {self.url}: {type(error).__name__}: {error}") from error
        if reply.status >= 400:
            hint = _HINTS.get((path, reply.status), "")
            kind = EngineDeadError if reply.status == 503 else EngineError
            raise kind(f"{method} {self.url}{path}: {reply.status} {reply.reason}: {_message(text)}{hint}")
        return json.loads(text) if reply.content_type == "application/json" else text


_HINTS = {
    ("/weight_info", 404): ": start it with VLLM_SERVER_DEV_MODE=1, as server_environment does",
    ("/inference/v1/generate", 403): ": start it with --enable-scale-out, as server_command does",
    ("/v1/load_lora_adapter", 404): ": start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, as server_environment does",
}


def _message(text: str) -> str:
    """The server's own words in the body of an error."""
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return text[:2000]


def _close(loop: LoopThread, http: _Http, error: EngineError) -> None:
    with suppress(EngineError):  # of a loop that is closed already
        loop.call(http.close(), 5.0, "closing connections")
    loop.close(error)
