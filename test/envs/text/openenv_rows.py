"""Program of an environment with openenv: rows of its template's echo environment, from a server on this machine."""

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from support.environment_rows import collect
from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.envs.tasks import load_task
from torchrl_rloo.envs.text.adapters import EnvSession
from torchrl_rloo.envs.text.packages import OpenEnv, import_package

FIELDS = {"action": "message", "observation": "echoed_message"}


def serve(folder: Path) -> tuple[subprocess.Popen, str]:
    """Write the echo environment with openenv's own command, for many sessions, and serve it."""
    make = [sys.executable, "-m", "openenv.cli", "init", "echo_env"]
    subprocess.run(make, cwd=folder, check=True, capture_output=True)
    app = folder / "echo_env" / "server" / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=64"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--port", str(port), "--log-level", "warning", "server.app:app"]
    server, url = subprocess.Popen(command, cwd=app.parent.parent), f"http://127.0.0.1:{port}"
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return server, url
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server exited with {server.returncode}")


async def reject(row: dict) -> None:
    """Play actions as JSON: what the server rejects is answered, and takes no step."""
    session = EnvSession(OpenEnv())
    await session.reset(row)
    for text, reward in (("no object", 0.0), ('{"massage": "Hi"}', 0.0), ('{"message": "Hi"}', 0.2)):
        outcome = await session.step(text)
        assert outcome.reward == reward and outcome.feedback and not outcome.terminated, (text, outcome)
    await session.close()


def main() -> None:
    import_package("openenv", "openenv")
    with tempfile.TemporaryDirectory() as folder:
        server, url = serve(Path(folder))
        try:
            task = load_task("openenv")
            train, held_out = task.load(url, eval_size=2, limit=4, system_prompt="Speak.", arguments=FIELDS)
            assert {row["env_seed"] for row in train.rows}.isdisjoint(row["env_seed"] for row in held_out.rows)
            turns = 0
            for row in collect(task, train, max_turns=3).unbind(0):
                said = [m["content"] for m in row["completion"] if m["role"] == "assistant"]
                echoed = [m["content"] for m in row["completion"] if m["role"] == "user"]
                assert row["query"][0] == {"role": "system", "content": "Speak."}
                assert row["query"][1]["content"] == "Echo Env environment ready!" and echoed == said[: len(echoed)]
                # A turn cut off by its token limit does not reach the environment
                heard = said[:-1] if stop_reason(row) == "turn_tokens" else said
                earned = sum(min(len(text) * 0.1, 1.0) for text in heard)
                assert abs(float(row[keys.REWARD]) - earned) < 1e-5, (said, float(row[keys.REWARD]))
                turns += len(said)
            assert turns > 8, "no conversation had several turns"
            asyncio.run(reject(task.load(url, eval_size=2, limit=4, arguments=FIELDS | {"action": None})[0][0]))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
