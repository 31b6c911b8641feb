"""Engine around a running vLLM server over HTTP, and the command that starts one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import weakref
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from os import PathLike
from time import monotonic
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch

from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineLoad, EngineTimeoutError, Request, Sample
from torchrl_rloo.engines.vllm_access import KEY, MIDDLEWARE, client_key, server_key
from torchrl_rloo.engines.vllm_api import (
    SERVER_VARIABLES,
    UNIPROC,
    complete_arguments,
    load_images,
    process_variables,
    prompt_scores,
    sample_from_reply,
    sampling_arguments,
    short_prompt,
)
from torchrl_rloo.engines.vllm_base import CLOSED, NOT_RESTARTED, LoopEngine, LoopThread
from torchrl_rloo.runtime.http import ENCODINGS, Redactor, ReplyError, decode, plain_json, read_body

_POLL_PERIOD_S = 0.5  # time between two attempts to reach a server that is starting
_ANSWER_TIMEOUT_S = 10.0  # time for a server to show that it is alive
_MINUS_INFINITY = -9999.0  # minus infinity in the server's replies


def server_command(
    model: str | PathLike,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str = "auto",
    tensor_parallel_size: int = 1,
    **arguments: Any,
) -> list[str]:
    """Return the command that starts a server for :class:`VLLMServer`. Run it in :func:`server_environment`.

    All routes but health checks require the key of :func:`server_environment`, control routes included. The requests
    and replies are not encrypted, so bind the server to the loopback interface or to a private network. Further
    arguments are those of vLLM's engine. ``max_model_len=4096`` becomes ``--max-model-len 4096``, True and False become
    ``--flag`` and ``--no-flag``, and dicts and lists become JSON.
    """
    if "api_key" in arguments:
        raise ValueError(f"api_key cannot be on a command line, which all users can read; set {KEY} instead")
    arguments |= {"dtype": dtype, "tensor_parallel_size": tensor_parallel_size}
    flags = complete_arguments(arguments) | {"enable_scale_out": True, "disable_uvicorn_access_log": True}
    if not torch.cuda.is_available() and tensor_parallel_size == 1:
        flags.setdefault("distributed_executor_backend", UNIPROC)
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", os.fspath(model)]
    words += ["--host", host, "--port", str(port)]
    if not flags["disable_log_stats"]:
        del flags["disable_log_stats"]  # vLLM has no flag for False
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return [*words, "--middleware", MIDDLEWARE]  # the last one is asked first


def server_environment(threads: int | None = 1) -> dict[str, str]:
    """Return the environment of a server: this process's variables, those that vLLM requires, and the key for clients.

    ``threads`` is the number of OpenMP threads of the server; None leaves it to torch.
    """
    variables = process_variables(own_process=True, threads=threads) | SERVER_VARIABLES
    return dict(os.environ) | variables | {KEY: server_key()}


class VLLMServer(LoopEngine):
    """Engine that samples with a running server of :func:`server_command`, for one trainer at a time.

    Closing the engine leaves the server running. The server reads LoRA adapters from a directory that both processes
    must be able to access.

    Args:
        url: URL of the server, e.g. ``"http://127.0.0.1:8000"``.
        request_timeout: seconds of sampling that a request may take; time in a pause does not count.
        connect_timeout: maximum time in seconds to wait for a server that is starting.
        api_key: key that is sent as a bearer token. None takes that of
            :func:`~torchrl_rloo.engines.vllm_access.client_key`. A server of :func:`server_command` on this machine has
            the same.
        max_bytes: maximum size of a reply.

    Raises:
        ValueError: if the URL is invalid, if a time is not above 0, or if a server on another machine needs a key.
        EngineDeadError: if no server answers in time.
        EngineError: if the server was started without an option that :func:`server_command` sets.

    Example::

        server = subprocess.Popen(server_command("my-model", port=8000), env=server_environment())
        with VLLMServer("http://127.0.0.1:8000", connect_timeout=300.0) as engine:
            (sample,) = engine.generate([Request(prompt=[1, 2, 3], limit=16, seed=0)])
        server.terminate()
    """

    counts_running_tokens = False
    _replaces_adapter = False  # each adapter has a new name

    def __init__(
        self,
        url: str,
        *,
        request_timeout: float = 600.0,
        connect_timeout: float = 60.0,
        api_key: str | None = None,
        max_bytes: int = 1 << 28,
    ):
        super().__init__(request_timeout)
        if connect_timeout <= 0:
            raise ValueError(f"connect_timeout={connect_timeout} must be above 0 seconds")
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"url={Redactor(url, {})(url)!r} must be like 'http://127.0.0.1:8000'")
        self.url, self.connect_timeout = url.rstrip("/"), connect_timeout
        self._tokens = 0  # of finished requests
        self._headers = self._authorize(url, api_key)
        self._max_bytes = max_bytes
        self._connect()

    @staticmethod
    def _authorize(url: str, api_key: str | None) -> dict[str, str]:
        """Return the headers of all requests."""
        return {"Authorization": f"Bearer {api_key or client_key(url)}"}

    def _connect(self) -> None:
        self._loop = LoopThread("engine-server")
        self._http = _Http(self.url, self._headers, self.connect_timeout, self._max_bytes)
        self._finalizer = weakref.finalize(self, _close, self._loop, self._http, CLOSED)
        try:
            limit = self.connect_timeout + self.request_timeout
            self._world_size = self._loop.call(self._greet(), limit, f"connecting to {self._http.redact(self.url)}")
        except BaseException:
            self._disconnect(NOT_RESTARTED)
            raise

    def _disconnect(self, error: EngineError) -> None:
        """Close the connection. A restart may follow."""
        self._finalizer.detach()  # otherwise it would keep the closed loop
        _close(self._loop, self._http, error)

    async def _greet(self) -> int:
        """Wait for the server, abort an update that a previous trainer left open, and check the server's options."""
        await self._wait_for_server()
        self._take_version((await self._http.get("/weight_info", self.connect_timeout))["weight_version"])
        await self._collective("abort_weight_update", (), self.request_timeout)
        await self._name_weights(self.version)
        await self._resume_engine()
        if not await self._returns_processed():
            raise EngineError(
                f"the server at {self._http.redact(self.url)} returns log-probs of the plain softmax, not of the "
                "sampled distribution; start it with --logprobs-mode processed_logprobs, as server_command does"
            )
        models = await self._http.get("/v1/models", self.request_timeout)
        self.context_length = models["data"][0]["max_model_len"]
        return (await self._http.get("/get_world_size", self.request_timeout))["world_size"]

    async def _wait_for_server(self) -> None:
        """Wait for a server that is starting."""
        deadline = monotonic() + self.connect_timeout
        while True:
            try:
                await self._http.get("/health", self.connect_timeout)
                break
            except EngineDeadError:
                if monotonic() + _POLL_PERIOD_S > deadline:
                    raise
                await asyncio.sleep(_POLL_PERIOD_S)

    def _take_version(self, name: str) -> None:
        """Take over the version of the server's weights, whose initial name is not a number."""
        self._has_version = name.isdecimal()
        self.version = int(name) if self._has_version else 0

    async def _returns_processed(self) -> bool:
        """Return whether log-probs are of the truncated softmax, which gives minus infinity to tokens outside top-k.

        It samples two tokens, since all logits after a single padding token may be equal.
        """
        settings = {"max_tokens": 2, "top_k": 1, "logprobs": 2, "ignore_eos": True, "seed": 0}
        body = {"token_ids": [0], "sampling_params": settings}
        reply = await self._http.post("/inference/v1/generate", self.request_timeout, body)
        entries = [top["logprob"] for e in reply["choices"][0]["logprobs"]["content"] for top in e["top_logprobs"]]
        return min(entries) <= _MINUS_INFINITY

    @property
    def world_size(self) -> int:
        return self._world_size

    def check_health(self, timeout: float = 10.0) -> None:
        """Call all workers over HTTP. A lost connection is no death if the server answers the next call."""
        try:
            super().check_health(timeout)
        except EngineDeadError:
            raise
        except EngineError:
            super().check_health(timeout)

    def load(self) -> EngineLoad:
        """Return this client's requests, and the tokens of those that finished."""
        self._check()
        return EngineLoad(self._in_engine, tokens=self._tokens)

    def close(self) -> None:
        self.closed = True
        self._disconnect(CLOSED)

    def restart(self) -> None:
        """Connect again to a server that was restarted, or that still runs with its weights."""
        self._check()
        self._disconnect(NOT_RESTARTED)
        self._connect()
        state = (self.version, self.failed_version, self._adapter) if self._has_version else (0, None, None)
        self._finish_restart()
        self.version, self.failed_version, self._adapter = state

    async def _sample(self, request: Request) -> Sample:
        body = {"token_ids": short_prompt(request), "sampling_params": sampling_arguments(request)}
        if request.images:
            body |= {"content_parts": await asyncio.to_thread(_image_parts, request), "return_token_ids": True}
        if self._adapter is not None:
            body["model"] = self._adapter
        reply = await self._http.post("/inference/v1/generate", None, body, repeat=True)
        sample = sample_from_reply(request, reply)
        self._tokens += len(sample.tokens)
        return sample

    async def _score(self, row: Sequence[int], arguments: dict[str, Any]) -> list[float]:
        body = {"token_ids": list(row), "sampling_params": arguments}
        if self._adapter is not None:
            body["model"] = self._adapter
        reply = await self._http.post("/inference/v1/generate", None, body, repeat=True)
        return prompt_scores(row, reply["prompt_logprobs"])

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
            raise EngineError("the server did not drop its prefix cache, so samples may be of old weights; restart it")

    async def _sleep_engine(self) -> None:
        await self._http.post("/sleep", self.request_timeout, params={"level": "1", "mode": "wait"})

    async def _wake_engine(self) -> None:
        await self._http.post("/wake_up", self.request_timeout)

    async def _load(self, path: str, name: str, timeout: float) -> None:
        await self._http.post("/v1/load_lora_adapter", timeout, {"lora_name": name, "lora_path": path})
        if self._adapter is not None:
            await self._http.post("/v1/unload_lora_adapter", timeout, {"lora_name": self._adapter})

    def _load_adapter(self, path: str, version: int, timeout: float) -> None:
        name = f"policy-{version}-{uuid4().hex[:8]}"  # a previous trainer may have used the name
        self._loop.call(self._load(path, name, timeout), timeout, "loading an adapter")
        self._adapter = name


class _Http:
    """HTTP client of one server: aiohttp, on which datasets depends, keeps hundreds of requests open on a thread."""

    def __init__(self, url: str, headers: Mapping[str, str], connect_timeout: float, max_bytes: int):
        self.url, self.headers, self.connect_timeout, self.max_bytes = url, headers, connect_timeout, max_bytes
        self.redact = Redactor(url, headers)
        self.session: Any = None

    async def get(self, path: str, timeout: float | None) -> Any:
        return await self._send("GET", path, timeout)

    async def post(
        self,
        path: str,
        timeout: float | None,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        repeat: bool = False,
    ) -> Any:
        """Send a body, once more with ``repeat`` if the connection was lost and the server still answers."""
        try:
            return await self._send("POST", path, timeout, json=body, params=params)
        except EngineDeadError:
            raise
        except EngineError as error:
            if not repeat or not isinstance(error.__cause__, ConnectionError):
                raise
        return await self._send("POST", path, timeout, json=body, params=params)

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    async def _send(self, method: str, path: str, timeout: float | None, **content: Any) -> Any:
        import aiohttp

        # Do not reuse connections: the server may close an idle one at the moment of its next request
        if self.session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            headers = {**self.headers, "Accept-Encoding": ENCODINGS}
            self.session = aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=False)
        # Convert time-outs, connection errors and error replies to an EngineError, without aiohttp's, which has the key
        limits, lost = aiohttp.ClientTimeout(total=timeout, sock_connect=self.connect_timeout), ""
        place = f"{method} {self.redact(self.url)}{path}"
        try:
            async with self.session.request(
                method, self.url + path, timeout=limits, allow_redirects=False, **content
            ) as reply:
                body = await read_body(reply, self.max_bytes)
            is_json = reply.content_type == "application/json" and reply.status < 300
            value = await decode(body, plain_json) if is_json else body.decode(errors="replace")
        except asyncio.TimeoutError as error:
            raise EngineTimeoutError(f"{place} took longer than {timeout} s") from error
        except ReplyError as error:
            raise EngineError(f"{place}: {self.redact(str(error))}") from None
        except aiohttp.ClientError as error:
            lost = self.redact.line(f"{type(error).__name__}: {error}")
        if lost:
            if path == "/health" or not await self._answers():
                raise EngineDeadError(f"no server answers at {self.redact(self.url)}: {lost}")
            raise EngineError(f"{place} lost its connection: {lost}; the server answers others") from ConnectionError(
                lost
            )
        if reply.status >= 300:
            hint = _HINTS.get((path, reply.status), "")
            kind = EngineDeadError if reply.status == 503 else EngineError
            raise kind(self.redact(f"{place}: {reply.status} {reply.reason}: {_message(value)}") + hint)
        return value

    async def _answers(self) -> bool:
        """Return whether the server still answers, after another call lost its connection."""
        for _ in range(2):  # a connection may be lost by chance
            with suppress(EngineError):
                await self.get("/health", _ANSWER_TIMEOUT_S)
                return True
        return False


_HINTS = {
    ("/weight_info", 404): "; start the server with VLLM_SERVER_DEV_MODE=1, as server_environment does",
    ("/inference/v1/generate", 403): "; start the server with --enable-scale-out, as server_command does",
    ("/v1/load_lora_adapter", 404): (
        "; start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, as server_environment does"
    ),
}


def _image_parts(request: Request) -> list[dict[str, str]]:
    """Return a request's images as ``content_parts`` of the server, without loss."""
    parts = []
    for image in load_images(request):
        image.save(file := BytesIO(), "PNG", compress_level=1)
        parts.append({"type": "image_url", "url": "data:image/png;base64," + b64encode(file.getvalue()).decode()})
    return parts


def _message(text: str) -> str:
    """Return the server's message in the body of an error."""
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        return text[:2000]


def _close(loop: LoopThread, http: _Http, error: EngineError) -> None:
    with suppress(EngineError):  # the loop may be closed already
        loop.call(http.close(), 5.0, "closing connections")
    loop.close(error)
