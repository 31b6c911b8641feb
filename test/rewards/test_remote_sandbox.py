"""RemoteSandbox against a stand-in for SandboxFusion, which runs programs in subprocesses and speaks its protocol."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from aiohttp import web

from torchrl_rloo.envs.tools import RemotePython, ToolError, ToolHostError
from torchrl_rloo.rewards import CodeTests, RemoteSandbox, RewardBatch, RewardRunner, load_reward
from torchrl_rloo.rewards.remote_sandbox import make_sandbox

SQUARE = "```python\ndef square(x):\n    return x * x\n```"
READS = "```python\nprint(int(input()) * 2)\n```"
FUNCTION = {"fn_name": "square", "inputs": [[2], [3]], "outputs": [4, [9]]}
PAIRS = {"inputs": ["1", "4"], "outputs": ["2", "8"]}
CHECK = "def check(candidate):\n    assert candidate(2) == 4"
KEY = "verysecretkey"


async def fusion(n, request, body):
    """Answer as ``POST /run_code`` does (github.com/bytedance/SandboxFusion, documented fields)."""
    assert request.path == "/run_code" and body["language"] == "python"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", body["code"], stdin=-1, stdout=-1, stderr=-1
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(body["stdin"].encode()), body["run_timeout"])
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        run = {"status": "TimeLimitExceeded", "execution_time": None, "return_code": None, "stdout": "", "stderr": ""}
        return {"status": "Failed", "message": "", "compile_result": None, "run_result": run, "files": {}}
    run = {"status": "Finished", "execution_time": 0.1, "return_code": process.returncode}
    run |= {"stdout": out.decode(), "stderr": err.decode()}
    return {"status": "Failed" if process.returncode else "Success", "message": "", "run_result": run, "files": {}}


@pytest.fixture
def url(serve) -> str:
    return serve(fusion).url + "/run_code"


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    "text, tests, score, share",
    [
        (READS, PAIRS, 1, 1),
        (READS, PAIRS | {"outputs": ["2", "9"]}, 0, 0.5),
        (SQUARE, FUNCTION, 1, 1),
        (SQUARE, FUNCTION | {"outputs": [5, 9]}, 0, 0.5),
        (SQUARE, ["assert square(2) == 4", "assert math.sqrt(square(3)) == 3"], 1, 1),
        (SQUARE, ["assert square(2) == 5", "assert square(3) == 9"], 0, 0.5),
        ("```python\nimport os\nos._exit(0)\n```", ["assert square(2) == 4"], 0, 0),
        ("```python\nprint('[true, null]')\n```", FUNCTION, 0, 0),
        ("```python\nwhile True: pass\n```", ["assert square(2) == 4"], 0, 0),
        ("```python\ndef square(x):\n    return object()\n```", FUNCTION, 0, 0),
        (SQUARE, ["assert square(2) =="], None, None),
    ],
)
def test_programs_score_as_in_the_local_sandbox(url, text, tests, score, share, partial):
    tests = ["import math\n" + test for test in tests] if isinstance(tests, list) else tests
    reward = CodeTests(partial=partial, sandbox={"url": url, "timeout": 1.0})
    assert reward(["?"], [text], [[1]], tests=[tests]) == [share if partial else score]


def test_the_function_under_test_is_called_by_check(url):
    scores = CodeTests(sandbox=url)(
        ["?"] * 2, [SQUARE, READS], [[1]] * 2, tests=[[CHECK]] * 2, entry_point=["square"] * 2
    )
    assert scores == [1, 0]


def test_expected_results_of_functions_and_pairs_are_not_sent(serve):
    service = serve(fusion)
    tests = [FUNCTION | {"outputs": [4, 97531]}, {"inputs": ["1"], "outputs": ["97531"]}]
    CodeTests(sandbox=service.url + "/run_code", partial=True)(["?"] * 2, [SQUARE, READS], [[1]] * 2, tests=tests)
    assert service.bodies and "97531" not in json.dumps(service.bodies)


@pytest.mark.parametrize("fault", ["error", "status", "shape", "refused"])
def test_a_fault_of_the_server_is_counted_and_abstains_alone(serve, monkeypatch, caplog, fault):
    monkeypatch.setenv("SANDBOX_KEY", KEY)

    async def answer(n, request, body):
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        if body["stdin"] != "4":
            return await fusion(n, request, body)
        if fault == "refused":
            return web.Response(status=403, text=f"not allowed: {KEY}")
        if fault == "shape":
            return ["no", KEY]
        status = "Error" if fault == "status" else "Finished"
        run = {"status": status, "return_code": 0, "stdout": "8", "stderr": KEY}
        return {"status": "SandboxError" if fault == "error" else "Success", "message": KEY, "run_result": run}

    settings = {"url": serve(answer).url + "/run_code", "api_key_env": "SANDBOX_KEY", "retries": 0}
    runner = RewardRunner(load_reward({"_target_": "code_tests", "sandbox": settings}))
    tests = [{"inputs": [given], "outputs": [str(2 * int(given))]} for given in ("1", "4")]
    scored = runner(RewardBatch(["?"] * 2, [READS] * 2, [[1], [2]], {"tests": tests}))
    assert scored.scores == [[1, None]] and runner.counts["code_tests/not_finite"] == 1
    assert "the sandbox failed" in scored.extra["code_tests_reason"][1]
    assert KEY not in caplog.text + str(scored.extra) + repr(runner.functions[0].sandbox.endpoint)


def test_the_tool_runs_programs_and_a_fault_of_its_server_is_no_fault_of_the_policy(url, serve):
    def call(tool: RemotePython, code: str) -> str:
        return asyncio.run(tool.call(None, code=code))

    tool = RemotePython({"url": url, "timeout": 1.0})
    assert call(tool, "print(6 * 7)") == "42" and call(tool, "1") == "(no output)"
    for code, message in (("1 / 0", "ZeroDivisionError"), ("while True: pass", "longer than 1 s")):
        with pytest.raises(ToolError, match=message):
            call(tool, code)

    async def broken(n, request, body):
        return web.Response(status=500)

    with pytest.raises(ToolHostError):
        call(RemotePython({"url": serve(broken).url, "retries": 0}), "1")


def test_a_mapping_without_url_sets_the_limits_of_the_local_sandbox():
    assert make_sandbox({"timeout": 3.0}).policy.timeout == 3 and isinstance(make_sandbox("http://a"), RemoteSandbox)


@pytest.mark.parametrize(
    "settings", [{"url": "ftp://a"}, {"url": "http://a", "timeout": 0}, {"url": "http://a", "memory": 5}]
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError):
        make_sandbox(settings)
