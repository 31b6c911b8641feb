"""Agents in containers: a real engine where there is one, and refusals."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from torchrl_rloo.agents import AgentContext, ContainerAgent, agent_env
from torchrl_rloo.agents.agents import ENGINES, LABEL
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.modules import vLLMWrapper

ASK = """
row="$(cat)"; body='{"model": "m", "messages": [{"role": "user", "content": "abc"}]}'
wget -qO- --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
  --post-data "$body" "$OPENAI_BASE_URL/chat/completions" > /dev/null || exit 1
echo "{\\"reward\\": 2, \\"metrics\\": {\\"row\\": ${#row}, \\"pid\\": $$}}"
"""


def is_there(engine: str) -> bool:
    found = shutil.which(engine)
    return found is not None and not subprocess.run([found, "version"], capture_output=True, timeout=60).returncode


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> tuple[str, str]:
    """Return a container engine and the name of an image with a shell, or skip if there is none."""
    engine, busybox = next(filter(is_there, ENGINES), None), shutil.which("busybox")
    if engine is None or busybox is None:
        pytest.skip("requires podman or docker that answers, and a static busybox for its image")
    folder = tmp_path_factory.mktemp("image")
    (folder / "tmp").mkdir()
    with tarfile.open(folder / "root.tar", "w") as root:
        root.add(busybox, "bin/busybox")
        root.add(folder / "tmp", "tmp")
        for name in ("sh", "cat", "wget", "sleep", "head", "tail"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            root.addfile(link)
    name = "torchrl-rloo-test:1"
    subprocess.run([engine, "import", folder / "root.tar", name], check=True, capture_output=True, timeout=60)
    return engine, name


def left(engine: str) -> list[str]:
    listed = [engine, "ps", "--all", "--quiet", "--filter", f"label={LABEL}"]
    return subprocess.run(listed, check=True, capture_output=True, text=True, timeout=60).stdout.split()


def test_an_agent_in_a_container_is_trained_and_removed(bpe, image):
    engine, name = image
    agent = ContainerAgent(name, ["sh", "-c", ASK], engine=engine, memory=2**26)
    prompts = load_prompts([{"query": [{"role": "user", "content": f"{i}: abc?"}]} for i in range(4)])
    env = agent_env(agent, bpe, dataset=prompts, prompts_per_batch=4)
    with ScriptedEngine(lambda request, index: ScriptedTurn([40, 41])) as sampler:
        policy = vLLMWrapper(sampler, tokenizer=bpe, generate_kwargs={"max_new_tokens": 50, "seed": 0})
        rows = LLMCollector(env, policy).collect()
    env.close()
    assert [float(row[keys.REWARD]) for row in rows.unbind(0)] == [2.0] * 4
    assert all(int(row[keys.NUM_TURNS]) == 1 and row["next", "log_extra"]["row"] > 20 for row in rows.unbind(0))
    assert all(row["next", "log_extra"]["pid"] < 10 for row in rows.unbind(0))  # its processes are its own
    assert not left(engine)


def test_a_container_ends_at_its_limits(image, tmp_path):
    engine, name = image

    def run(code: str, seconds: float = 60, **settings) -> None:
        agent = ContainerAgent(name, ["sh", "-c", code], engine=engine, **settings)
        call = agent(AgentContext("http://127.0.0.1:1/v1", "k"), {})
        return asyncio.run(asyncio.wait_for(call, seconds))

    with pytest.raises(TimeoutError):
        run("trap '' TERM; (trap '' TERM; sleep 1000) & sleep 1000", 1.0, grace=0.1)
    assert not left(engine)
    with pytest.raises(RuntimeError, match=f"container of {name} exited with code 3: lost"):
        run("echo lost >&2; exit 3")
    with pytest.raises(RuntimeError, match="exited with code"):
        run("set -e; x=$(head -c 100000000 /dev/zero | tail -c 90000000); echo '{\"reward\": 1}'", memory=2**25)
    assert run(f"[ -e {tmp_path} ] || echo '{{\"reward\": 1}}'") == {"reward": 1}  # no files of this machine
    assert not left(engine)


def stand_in(folder: Path, code: str) -> str:
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\n{code}\n")
    program.chmod(0o755)
    return str(program)


def test_what_cannot_run_is_refused_at_once(tmp_path, monkeypatch):
    asked = stand_in(tmp_path, '[ "$1" = version ] || { echo "Error: no such image" >&2; exit 1; }')
    with pytest.raises(FileNotFoundError, match=r"image='x:1' is not there \(Error: no such image\); run docker pull"):
        ContainerAgent("x:1", engine=asked)
    asked = stand_in(tmp_path, 'echo "Cannot connect to the Docker daemon" >&2; exit 1')
    with pytest.raises(RuntimeError, match=r"engine='docker' does not answer \(Cannot connect .*\); start it"):
        ContainerAgent("x:1", engine=asked)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="engine=None: there is no podman or docker; install one"):
        ContainerAgent("x:1")
    for settings, message in (
        ({"command": "ls"}, "command='ls' must be a list"),
        ({"memory": 1}, "memory=1 must be at least"),
        ({"processes": 0}, "processes=0 must be"),
        ({"grace": -1}, "grace=-1 must be"),
    ):
        with pytest.raises(ValueError, match=message):
            ContainerAgent("x:1", **settings)


def test_the_command_line_has_limits_and_no_keys(tmp_path):
    """A stand-in for the engine notes its arguments and variables, and that the container is removed."""
    notes = tmp_path / "notes"
    code = f'echo "$*" >> {notes}; [ "$1" = run ] && echo "$OPENAI_API_KEY $FOO" >> {notes} && exit 5; exit 0'
    agent = ContainerAgent(
        "x:1",
        ["a", "b"],
        engine=stand_in(tmp_path, code),
        environment={"FOO": "bar"},
        memory=2**30,
        options=["--volume=/a:/b"],
    )
    with pytest.raises(RuntimeError, match="container of x:1 exited with code 5"):
        asyncio.run(agent(AgentContext("http://127.0.0.1:1/v1", "secret"), {}))
    version, inspect, run, variables, remove = notes.read_text().splitlines()
    assert (version, inspect, variables) == ("version", "image inspect x:1", "secret bar")
    name = remove.removeprefix("rm --force ")
    assert run.endswith(" --volume=/a:/b x:1 a b") and f"--name={name} " in run and "secret" not in run
    for option in ("cap-drop=ALL", "memory=1073741824", "memory-swap=1073741824", "pids-limit=512", "network=host"):
        assert f" --{option} " in run
    assert " --env=FOO " in run and " --env=OPENAI_API_KEY " in run and " --rm " in run
