"""Engine around a running SGLang server over its native HTTP API, with weights as files.

Its protocol is that of SGLang's documents (native API, sampling parameters, "SGLang for RL systems"). It was tested
with a stand-in that speaks it, and never with SGLang itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from torchrl_rloo.engines.base import EngineDeadError, EngineError, Request, Sample
from torchrl_rloo.engines.vllm_server import VLLMServer
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.weight_update.protocol import OpenUpdate, read_frozen, read_manifest
from torchrl_rloo.weight_update.transport import Receiver, open_receiver

# Settings that replace the model's defaults
_PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_PLAIN |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}


class SGLangServer(VLLMServer):
    """Engine that samples with a running SGLang server, for one trainer at a time.

    Start the server with ``--enable-deterministic-inference``, without which it ignores seeds. Its log-probs are those
    of the temperature alone, so other settings of the distribution are refused. This process receives the weights, and
    writes them to files that the server loads. SGLang names the weights of a turn but not of a token, so
    ``in_flight="continue"`` is refused.

    Args:
        url: URL of the server, e.g. ``"http://127.0.0.1:30000"``.
        folder: directory for weights that the server can read. None takes one for temporary files.
        **options: further arguments of :class:`VLLMServer`; ``api_key`` is the server's, by default none.

    Raises:
        EngineError: if the server ignores seeds, or returns log-probs without the temperature.

    Example::

        with SGLangServer("http://127.0.0.1:30000") as engine:
            (sample,) = engine.generate([Request(prompt=[1, 2, 3], limit=16, seed=0)])
    """

    in_process = True  # for transports, which send the weights to this process
    image_settings = None

    def __init__(self, url: str, *, folder: str | None = None, **options: Any):
        self._folder = TemporaryDirectory(prefix="torchrl_rloo_sglang_", dir=folder)
        self._files = os.path.join(self._folder.name, "weights")
        self._receiver: Receiver | None = None
        self._report: dict[str, Any] = {"rank": 0, "checksums": []}
        super().__init__(url, **options)

    @staticmethod
    def _authorize(url: str, api_key: str | None) -> dict[str, str]:
        return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def _greet(self) -> int:
        await self._wait_for_server()
        info = await self._http.get("/get_server_info", self.connect_timeout)
        if not info.get("enable_deterministic_inference"):
            raise EngineError(f"the server at {self.url} ignores seeds; start it with --enable-deterministic-inference")
        self.context_length = info.get("context_length")
        self._take_version(await self._server_version())
        await self._name_weights(self.version)
        await self._resume_engine()
        # Half the temperature must double the differences of log-probs
        gaps = []
        for temperature in (1.0, 0.5):
            settings = {"max_new_tokens": 1, "temperature": temperature}
            top = (await self._ask([1, 2, 3], settings, top_logprobs_num=2))["output_top_logprobs"][0]
            gaps.append(abs(top[0][0] - top[1][0]))
        if abs(gaps[1] - 2 * gaps[0]) > 0.1 * gaps[0]:
            raise EngineError(
                f"the server at {self.url} returns log-probs without the temperature; start it without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        return 1

    async def _server_version(self) -> str:
        return str((await self._http.get("/get_model_info", self.request_timeout)).get("weight_version"))

    async def _ask(self, ids: Sequence[int], settings: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Return what the server says of the tokens that it sampled after ids."""
        body = {"input_ids": list(ids), "sampling_params": _PLAIN | settings, "return_logprob": True, **more}
        return (await self._http.post("/generate", None, body, repeat=True))["meta_info"]

    async def _sample(self, request: Request) -> Sample:
        d = request.distribution
        if replace(d, temperature=1.0) != (plain := SamplingDistribution()):
            other = sorted(name for name in vars(d).keys() - {"temperature"} if vars(d)[name] != vars(plain)[name])
            raise EngineError(f"SGLang's log-probs are of the temperature alone; remove {', '.join(other)}")
        settings = {
            "max_new_tokens": request.limit,
            "temperature": d.temperature,
            "sampling_seed": request.seed % 2**31,
            "stop": list(request.stop_strings),
            "stop_token_ids": list(request.stop_ids),
            "ignore_eos": True,  # stop_ids has all ids that end a turn
            "skip_special_tokens": False,  # a stop string may be a special token
        }
        meta = await self._ask(request.prompt, settings)
        tokens = [token for _, token, *_ in meta["output_token_logprobs"]]
        log_probs = [0.0 if d.temperature == 0 else value for value, *_ in meta["output_token_logprobs"]]
        if not (name := str(meta["weight_version"])).isdecimal():
            if name == "default":
                raise EngineDeadError("the server was restarted, with the weights of its checkpoint; call restart()")
            raise EngineError(f"another client named the server's weights {name!r}; push weights again")
        self._tokens += len(tokens)
        return Sample(tokens, log_probs, meta["finish_reason"]["type"], [int(name)] * len(tokens))

    async def _score(self, row: Sequence[int], arguments: dict[str, Any]) -> list[float]:
        meta = await self._ask(row, {"max_new_tokens": 1, "temperature": 0.0}, logprob_start_len=0)
        return [0.0, *(entry[0] for entry in meta["input_token_logprobs"][1:])]

    async def _pause_engine(self, mode: str) -> None:
        if mode == "keep":
            raise EngineError("SGLang does not tell which weights sampled a token; set in_flight to finish or abort")
        while mode == "wait" and self._in_engine:
            await asyncio.sleep(0.01)
        await self._http.post("/pause_generation", None, {"mode": "abort"})

    async def _resume_engine(self) -> None:
        await self._http.post("/continue_generation", self.request_timeout, {})

    async def _name_weights(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._http.post("/update_weight_version", self.request_timeout, body)
        await self._http.post("/flush_cache", self.request_timeout)

    async def _collective(self, method: str, args: tuple, timeout: float) -> list:
        """Do a step of an update in this process; the server loads the files in the last one."""
        try:
            await asyncio.to_thread(self._write, method, *args)
        except Exception as error:
            raise EngineError(f"{method} failed: {type(error).__name__}: {error}") from error
        if method == "finish_weight_update":
            body = {"model_path": self._files, "weight_version": str(self._report["version"]), "flush_cache": True}
            reply = await self._http.post("/update_weights_from_disk", timeout, body)
            if not reply["success"]:
                raise EngineError(f"the server at {self.url} did not load the weights: {reply['message']}")
            rmtree(self._files)
        name = await self._server_version() if method == "weight_report" else "0"
        return [self._report | {"version": int(name) if name.isdecimal() else None}]

    def _write(self, method: str, *args: Any) -> None:
        """Receive weights, and write them to files."""
        if method == "init_weight_transfer_engine":
            (info,) = args
            if read_frozen(info):
                raise EngineError("SGLang cannot compare frozen weights; send all of them")
            self._receiver = open_receiver(info, torch.device("cpu"), 0)
            self._manifest, self._checksum = read_manifest(info), info.get("checksum", "xxh3")
        elif method == "announce_weight_update":
            rmtree(self._files, ignore_errors=True)
            os.mkdir(self._files)
            self._update = OpenUpdate(self._manifest, args[0], verify=args[1], kind=self._checksum)
        elif method == "update_weights":
            tensors = self._update.take(args[0], self._receiver).items()
            path = os.path.join(self._files, f"model-{args[0]['bucket']:05d}.safetensors")
            save_file({name: tensor.cpu().clone() for name, tensor in tensors}, path)
        elif method == "finish_weight_update":
            self._update.complete()
            self._report |= self._update.report()
        elif method == "check_adapter":
            raise EngineError("SGLangServer loads no adapters; send the merged model with WeightPublisher")

    def close(self) -> None:
        super().close()
        self._folder.cleanup()
