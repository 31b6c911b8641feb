"""Secrets in settings and commands: none is shown or written, wherever it stands, and nothing else is masked."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

import pytest

from torchrl_rloo.cli.rloo_config import RLOOConfig
from torchrl_rloo.cli.rloo_sections import EvalConfig
from torchrl_rloo.diagnostics import write_report
from torchrl_rloo.diagnostics.report import write_launch
from torchrl_rloo.run import Run, check_resumable
from torchrl_rloo.run.state import read_state
from torchrl_rloo.runtime.masking import mask_command, mask_settings, mask_text

SECRET = "s3cret-Value"
NAMES = [
    *(
        "api_key",
        "apiKey",
        "API-KEY",
        "X-Api-Key",
        "apikey",
        "OPENAI_API_KEY",
        "key",
        "private_key",
        "sshKey",
        "accessKey",
    ),
    *("token", "HF_TOKEN", "authToken", "hftoken", "auth", "x_auth", "Authorization", "proxy-authorization", "bearer"),
    *(
        "Cookie",
        "cookies",
        "password",
        "passwd",
        "db_pwd",
        "passphrase",
        "secret",
        "client_secret",
        "secret_id",
        "secrets",
    ),
    *("credential", "aws_credentials", "password_hash", "tokens", "api_keys", "signature", "accessKey", "secrets"),
]
HARMLESS = [
    *(
        "max_tokens",
        "tokenizer",
        "eos_token",
        "pad_token_id",
        "token_ids",
        "monkey",
        "keyboard",
        "author",
        "api_key_env",
    ),
    *(
        "password_file",
        "keys_column",
        "stop_tokens",
        "max_token",
        "turkey",
        "authors",
        "tokenizer_kwargs",
        "min_tokens",
    ),
]
PLACES = {
    "nested": lambda name: {"a": [{"b": {name: SECRET}}]},
    "list": lambda name: {name: [SECRET, {"x": SECRET}]},
    "mapping": lambda name: {name: {"x": SECRET}},
    "flag": lambda name: {"command": ["run", f"--{name}", SECRET]},
    "assigned": lambda name: {"command": ["run", f"--{name}={SECRET}", "-v"]},
    "text": lambda name: {"command": f"run --x=1 {name}={SECRET}"},
}
SETTINGS = [
    {"headers": {"X": SECRET, "Y": [SECRET]}},
    {"http": {"extra_headers": [f"X: {SECRET}"], "Headers": [f"X: {SECRET}"]}}
    | {"http": {"Headers": [f"X: {SECRET}"]}},
    {"environment": {"FOO": SECRET, "BAR": 12}},
    {"tools": {"servers": [{"command": ["x"], "env": {"PLAIN": SECRET}}]}},
    {"url": f"https://me:{SECRET}@host/path"},
    {"url": f"https://{SECRET}@host"},
    {"url": f"see https://host/path?a=1&sig={SECRET} there"},
    {"tracking_uri": f"postgresql+psycopg://u:{SECRET}@[::1]:5432/db"},
    {"url": f"https://host/#access_token={SECRET}"},
    {"args": ["curl", "-H", f"X-A: {SECRET}"]},
    {f"x{i}": value for i, value in enumerate([f"//u:{SECRET}@h", f"wss://h?{SECRET}"])},
]
COMMANDS = [
    f"--token {SECRET}",
    f"--api-key '{SECRET} {SECRET}'",
    f"--apiKey={SECRET}",
    f"a.password=1,{SECRET},2",
    f'a.password="{SECRET},two {SECRET}"',
    f"a.token=x\\ {SECRET}",
    f"+reward.headers.Authorization='Bearer {SECRET}'",
    f"+reward.headers.Authorization=Bearer {SECRET}",
    f"reward.headers={{Authorization:Bearer {SECRET}}}",
    f"'+reward.headers={{X: {SECRET}, Y: {SECRET}}}'",
    f"'reward.functions=[{{_target_: a.B, headers: {{X: {SECRET}}}, api_key: {SECRET}}}]'",
    f"'reward.functions=[{{_target_:a.B,headers:{{X:[{SECRET}]}},token:\"{SECRET}\"}}]'",
    f"reward.url=https://u:{SECRET}@h/?k={SECRET}",
    f"reward.executor.environment={{FOO:{SECRET}}}",
    f"curl -H 'X: {SECRET}' --header=X:{SECRET}",
    f"'a.token={SECRET}",
]


@pytest.mark.parametrize("name", NAMES)
def test_values_of_secret_names_are_masked(name: str) -> None:
    for place, make in PLACES.items():
        masked = mask_settings(make(name))
        assert SECRET not in json.dumps(masked), (place, masked)
        assert mask_settings(masked) == masked
    for command in (f"run a.{name}={SECRET} b=1", f"run --{name} {SECRET} b=1", f"{name}={SECRET} run b=1"):
        shown = mask_command(command)
        assert SECRET not in shown and "run" in shown and ("b=1" in shown) and mask_command(shown) == shown
    assert SECRET not in mask_text(f"[{{'{name}': '{SECRET}', 'b': 1}}]")


@pytest.mark.parametrize("name", HARMLESS)
def test_other_names_are_shown(name: str) -> None:
    settings = {name: "value", "n": {name: 7, "x": [True, None, 0.5]}}
    assert mask_settings(settings) == settings
    assert mask_command(f"run {name}=value a.{name}=[1,2] --{name} 7") == f"run {name}=value a.{name}=[1,2] --{name} 7"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_headers_urls_and_variables_are_masked(settings: dict) -> None:
    masked = mask_settings({"a": [settings], "kept": "https://host/path"})
    assert (
        SECRET not in json.dumps(masked) and masked["kept"] == "https://host/path" and mask_settings(masked) == masked
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_masked(command: str) -> None:
    shown = mask_command(f"torchrl-rloo run rloo {command} plan.steps=3")
    assert SECRET not in shown and shown.startswith("torchrl-rloo run rloo ") and mask_command(shown) == shown
    assert shown.endswith("plan.steps=3") or command.startswith("'a.token")  # quotes that are not closed


def test_templates_and_maps_of_columns_stay_comparable() -> None:
    settings = {"chat_template": "{% set key = 'x' %}{{ y }}", "column_map": {"answer_key": "target"}}
    masked = mask_settings(settings)
    assert masked["column_map"] == settings["column_map"] and mask_settings(masked) == masked


@pytest.mark.parametrize("config", [RLOOConfig, EvalConfig])
def test_no_setting_of_a_recipe_is_taken_for_a_secret(config: type) -> None:
    settings = asdict(config())
    assert mask_settings(settings) == settings


def test_no_file_page_log_or_error_of_a_run_has_a_secret_and_resume_needs_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = {"a": 1, "list": SETTINGS, **{name: SECRET for name in NAMES}}
    arguments = {"defaults": {}, "resume": "auto"}
    with Run(tmp_path, 1, {}, loggers=["tensorboard"], settings=settings, **arguments) as run:
        for step in run.steps():
            run.log({"reward": float(step)})
    command = " ".join(["run", *COMMANDS])
    write_launch(tmp_path, command)
    write_report(tmp_path, history=run.logger.history, summary={}, settings=settings, command=command)
    shown = [caplog.text]
    shown += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(shown) > 6 and not [text[:99] for text in shown if SECRET in text]
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.pt")
    assert read_state(checkpoint)["settings"]["a"] == 1
    # A new secret is no other setting, and a folder of an older version has the old one
    changed = json.loads(json.dumps(settings).replace(SECRET, "another"))
    check_resumable(tmp_path, settings=changed, **arguments)
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    check_resumable(tmp_path, settings=changed, **arguments)
    with pytest.raises(ValueError, match="a: 1 -> 2") as caught:
        check_resumable(tmp_path, settings=changed | {"a": 2}, **arguments)
    assert SECRET not in str(caught.value)
