"""Export of a finished run: the model card, the merged adapter, and the upload, to a stand-in of the hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from torchrl_rloo.cli.main import main
from torchrl_rloo.diagnostics.model_card import write_model_card
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.modules import add_adapter, save_model

TOKEN = "hf_secretsecretsecret"


class Hub(BaseHTTPRequestHandler):
    """Answers the calls of an upload; ``files`` has what arrived, and ``status`` other than 200 refuses everything."""

    files: dict[str, bytes] = {}
    large: dict[str, bytes] = {}  # by hash
    created: list[dict] = []
    status = 200

    def log_message(self, *_) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, value: dict) -> None:
        text = json.dumps(value).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_PUT(self) -> None:
        self.large[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        body, here = self.body(), f"http://{self.headers['Host']}"
        if self.status != 200:
            return self.answer({"error": "no"})
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer({})
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer({"url": f"{here}/me/mine", "name": "me/mine"})
        elif self.path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith("safetensors") else "regular" for path in files}
            self.answer({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{**o, "actions": {"upload": {"href": f"{here}/put/{o['oid']}"}}} for o in objects]
            self.answer({"transfer": "basic", "objects": actions})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.large[value["oid"]]
            self.answer({"commitUrl": f"{here}/me/mine/commit/1", "commitOid": "1", "success": True})
        else:  # checks of the card
            self.answer({"warnings": [], "errors": []})

    do_GET = do_POST


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("FreshHub", (Hub,), {"files": {}, "large": {}, "created": []}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server.RequestHandlerClass
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder of a run that trained an adapter, with its card."""
    tokenizer, run = build_tokenizer(), tmp_path / "run"
    save_model(build_model(tokenizer, seed=0), tokenizer, tmp_path / "base")
    model = add_adapter(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), {"r": 2, "target_modules": "all-linear"}
    )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    save_model(model, tokenizer, run / "model")
    defaults = {"algorithm": "rloo_trl", "seed": 0, "output_dir": "", "model": {"name": "embedded", "dtype": "float32"}}
    defaults |= {"data": {"source": None}, "task": {"name": "addition"}, "reward": {"functions": None}}
    model_settings = {"name": "me/base", "dtype": "float32", "kwargs": {"token": TOKEN}}
    own = {"model": model_settings, "task": {"name": "gsm8k"}, "reward": {"functions": ["/srv/me/judge|fast"]}}
    settings = {**defaults, **own, "algorithm": "dapo", "output_dir": "/srv/me/run"}
    (run / "settings.json").write_text(json.dumps(settings))
    write_model_card(
        run / "model",
        settings=settings,
        defaults=defaults,
        summary={
            "eval/greedy_before": 0.25,
            "eval/greedy_after": 0.5,
            "kl_before": float("nan"),
            "kl_after": float("nan"),
        },
        history=[{"step": 12, "eval/greedy": 0.5, "eval/greedy_low": 0.4, "eval/greedy_high": 0.6}],
        command=f"torchrl-rloo run rloo model.kwargs.token={TOKEN}",
    )
    return run


def test_the_card_states_what_the_run_recorded(run: Path):
    text = (run / "model" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "me/base", "datasets": ["openai/gsm8k"], "library_name": "peft", "tags": ["torchrl_rloo", "dapo"],
    }  # fmt: skip
    for line in (
        "# dapo on gsm8k",
        "- Base model: me/base, which the adapter needs",
        "- Training: 12 steps of the recipe `rloo` with torchrl_rloo ",
        "- Method: `dapo` (Yu et al. 2025, arXiv 2503.14476)",
        "| `eval/greedy` | 0.25 | 0.5 | 0.4 to 0.6 |\n\n",
        "| `algorithm` | `dapo` |",
        "| `task.name` | `gsm8k` |",
        r"| `reward.functions` | `['judge\|fast']` |",
    ):
        assert line in body, line
    for secret in (TOKEN, "/srv/me", "output_dir", "nan", "`seed`"):
        assert secret not in text, secret


@pytest.mark.parametrize("status", [200, 403])
def test_a_merged_model_is_pushed_with_its_card(run: Path, hub: type[Hub], capfd: pytest.CaptureFixture, status: int):
    hub.status = status
    settings = json.loads((run / "settings.json").read_text())
    settings["model"]["kwargs"]["token"] = "***"  # as a run writes it
    (run / "settings.json").write_text(json.dumps(settings))
    if status == 200:
        main(["export", str(run), "--merge", "--push", "me/mine", "--private"])
    else:
        with pytest.raises(SystemExit):
            main(["export", str(run), "--merge", "--push", "me/mine", "--private"])
    out, err = capfd.readouterr()
    assert TOKEN not in out + err
    assert str(run / "merged") in out
    tuned = AutoModelForCausalLM.from_pretrained(run / "model")
    ids = torch.arange(5, 25)[None]
    expected = tuned(ids).logits
    assert torch.allclose(AutoModelForCausalLM.from_pretrained(run / "merged")(ids).logits, expected, atol=1e-5)
    assert not torch.allclose(
        AutoModelForCausalLM.from_pretrained(run.parent / "base")(ids).logits, expected, atol=1e-2
    )
    if status == 403:
        assert "the hub refused me/mine" in err.splitlines()[-1] and not hub.files
        return
    assert out.splitlines()[-1].endswith("/me/mine")
    assert (hub.created[0]["name"], hub.created[0]["organization"]) == ("mine", "me")
    assert "private" in (hub.created[0].get("visibility"), *hub.created[0])
    sent = {file.name: file.read_bytes() for file in (run / "merged").iterdir()}
    assert hub.files == sent and b"library_name: transformers" in sent["README.md"]
    assert b"with the trained adapter merged into its weights" in sent["README.md"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "has no trained model in"),
        (["--private"], "--private has no effect without --push"),
        (["--push", "me/mine"], "which only this machine has; add --merge"),
    ],
)
def test_what_cannot_be_exported_is_refused(run: Path, capsys: pytest.CaptureFixture, options: list[str], message: str):
    with pytest.raises(SystemExit):
        main(["export", str(run if options else run.parent), *options])
    assert message in capsys.readouterr().err
