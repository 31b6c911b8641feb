"""HTTP server that speaks the documented part of SGLang's native API, with a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from torchrl_rloo.engines import EngineError, Request, TransformersEngine
from torchrl_rloo.functional import SamplingDistribution


class StandIn:
    """State of a server, and a method for each of its routes."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, info: dict[str, Any]):
        self.model, self.engine, self.info = model, TransformersEngine(model, tokenizer), info
        self.version, self.raw, self.broken = "default", False, ""  # raw: log-probs without the temperature
        self.changed = Condition()
        self.paused, self.calls = False, []

    def health(self, body: dict) -> str:
        return ""

    def get_server_info(self, body: dict) -> dict:
        return self.info

    def get_model_info(self, body: dict) -> dict:
        return {"model_path": "here", "weight_version": self.version}

    def flush_cache(self, body: dict) -> str:
        return "Cache flushed."

    def update_weight_version(self, body: dict) -> dict:
        self.version = body["new_version"]
        return {"success": True, "message": ""}

    def pause_generation(self, body: dict) -> dict:
        assert body["mode"] in ("abort", "retract", "in_place")
        self.paused = True
        return {"status": "ok"}

    def continue_generation(self, body: dict) -> dict:
        with self.changed:
            self.paused = False
            self.changed.notify_all()
        return {"status": "ok"}

    def update_weights_from_disk(self, body: dict) -> dict:
        assert self.paused and body["flush_cache"]
        if self.broken:
            return {"success": False, "message": self.broken}
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self.model.load_state_dict(weights, strict=False)
        self.version = body["weight_version"]
        return {"success": True, "message": "", "num_paused_requests": 0}

    def generate(self, body: dict) -> dict:
        with self.changed:
            self.changed.wait_for(lambda: not self.paused)
        settings, ids = body["sampling_params"], body["input_ids"]
        distribution = SamplingDistribution(settings["temperature"])
        request = Request(
            ids,
            settings["max_new_tokens"],
            settings.get("sampling_seed", 0),
            distribution,
            tuple(settings.get("stop_token_ids", ())),
            tuple(settings.get("stop", ())),
        )
        (sample,) = self.engine.generate([request])
        meta = {"id": "1", "weight_version": self.version, "completion_tokens": len(sample.tokens)}
        meta["finish_reason"] = {"type": sample.finish}
        meta["output_token_logprobs"] = [[p, t, None] for p, t in zip(sample.log_probs, sample.tokens, strict=True)]
        if body.get("top_logprobs_num"):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1] / (1 if self.raw else distribution.temperature)
            top = logits.log_softmax(-1).topk(body["top_logprobs_num"])
            meta["output_top_logprobs"] = [[[p, i, None] for p, i in zip(*map(torch.Tensor.tolist, top), strict=True)]]
        if body.get("logprob_start_len") == 0:
            scores = self.engine.score([ids])[0]
            meta["input_token_logprobs"] = [
                [p if n else None, i, None] for n, (p, i) in enumerate(zip(scores, ids, strict=True))
            ]
        return {"text": "", "output_ids": sample.tokens, "meta_info": meta}


@contextmanager
def serve(state: StandIn) -> Iterator[str]:
    """Serve a stand-in within the context, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or "null") or {}
            state.calls.append((self.path, body, self.headers.get("Authorization")))
            try:
                reply, status = getattr(state, self.path.strip("/"))(body), 200
            except EngineError as error:
                reply, status = {"error": {"message": str(error)}}, 400
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if isinstance(reply, dict) else "text/plain")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
