"""Architecture rules: imports point down, files stay small, imports have no side effects."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchrl_rloo"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 600

# Top to bottom: a folder imports only from later ones
FOLDERS = (
    "cli",
    "embedded",
    "agents",
    "ray",
    "run",
    "evaluation",
    "diagnostics",
    "collectors",
    "envs",
    "training",
    "replay",
    "objectives",
    "modules",
    "engines",
    "weight_update",
    "rewards",
    "data",
    "sandbox",
    "functional",
    "images",
    "runtime",
)


def below(folder: str) -> set[str]:
    """Return the folders that ``folder`` may import from, except itself."""
    few = {"run": {"runtime", "images"}, "sandbox": {"runtime"}}
    return few.get(folder, set(FOLDERS[FOLDERS.index(folder) + 1 :]))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Return the dotted names of all imports of a file; relative ones keep their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module == PACKAGE.name:  # `from torchrl_rloo import envs` imports a folder, not the root
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def arrow_faults(tree: ast.AST, folder: str) -> list[str]:
    faults = []
    for module in imported_modules(tree):
        top, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if module.startswith("."):
            faults.append(f"relative import of {module}")
        elif top == PACKAGE.name and target in FOLDERS and target != folder and target not in below(folder):
            faults.append(f"{folder} imports {module}, which is not below it")
        elif folder == "functional" and top not in {PACKAGE.name, "torch"} | sys.stdlib_module_names:
            faults.append(f"functional imports {module}; torch is the only package it may")
        elif folder == "sandbox" and top not in {PACKAGE.name} | sys.stdlib_module_names:
            faults.append(f"sandbox imports {module}; it may import no package but the standard library")
    return faults


def style_faults(tree: ast.AST) -> list[str]:
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            faults.append(f"line {node.lineno}: star import")
        elif isinstance(node, ast.ExceptHandler) and is_swallow(node):
            faults.append(f"line {node.lineno}: every exception swallowed")
    return faults


def is_swallow(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches every exception and ignores it."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(c is None or isinstance(c, ast.Name) and c.id in ("Exception", "BaseException") for c in caught)
    idle = (ast.Pass, ast.Continue)
    return broad and all(
        isinstance(s, idle) or isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in handler.body
    )


def init_faults(tree: ast.Module) -> list[str]:
    """Return statements of an ``__init__.py`` other than docstring, imports, ``__all__`` and ``__version__``."""

    def allowed(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return all(isinstance(t, ast.Name) and t.id in ("__all__", "__version__") for t in node.targets)
        docstring = isinstance(node, ast.Expr) and node is tree.body[0] and ast.get_docstring(tree) is not None
        return docstring or isinstance(node, (ast.Import, ast.ImportFrom))

    return [f"line {node.lineno}: {type(node).__name__} in an __init__.py" for node in tree.body if not allowed(node)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_file_keeps_the_rules(path: Path):
    text = path.read_text()
    tree = ast.parse(text)
    faults = style_faults(tree)
    if path.parent != PACKAGE:
        faults += arrow_faults(tree, path.relative_to(PACKAGE).parts[0])
    if path.name == "__init__.py":
        faults += init_faults(tree)
    if (lines := len(text.splitlines())) > MAX_LINES:
        faults.append(f"{lines} lines, more than {MAX_LINES}: split it by topic")
    assert not faults


def test_every_folder_has_its_place():
    assert {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(FOLDERS)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("data", "from torchrl_rloo.envs import ChatEnv"),
        ("data", "from torchrl_rloo import envs"),
        ("rewards", "def f():\n    import torchrl_rloo.modules.policy"),
        ("run", "from torchrl_rloo.data import keys"),
        ("envs", "from .transforms import KL"),
        ("functional", "import numpy"),
        ("sandbox", "import torch"),
    ],
)
def test_an_arrow_that_points_up_is_found(folder: str, source: str):
    assert len(arrow_faults(ast.parse(source), folder)) == 1


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("envs", "from torchrl_rloo.data import keys\nimport transformers"),
        ("envs", "from torchrl_rloo.envs.transforms import KL"),
        ("embedded", "from torchrl_rloo.run import checkpoint"),
        ("functional", "import math\nimport torch.nn.functional as F\nfrom torchrl_rloo.functional.kl import k1"),
        ("run", "from torchrl_rloo import __version__"),
    ],
)
def test_an_arrow_that_points_down_is_not(folder: str, source: str):
    assert arrow_faults(ast.parse(source), folder) == []


def test_style_faults_are_found():
    for handler in ("except Exception:\n    pass", "except:\n    ...", "except (OSError, BaseException):\n    pass"):
        assert len(style_faults(ast.parse(f"try:\n    f()\n{handler}"))) == 1
    assert style_faults(ast.parse("try:\n    f()\nexcept OSError:\n    pass")) == []
    assert len(style_faults(ast.parse("from math import *"))) == 1
    assert init_faults(ast.parse('"""Doc."""\nfrom a import b\n__all__ = ["b"]')) == []
    assert len(init_faults(ast.parse("import a\na.setup()\nx = 1"))) == 2


MACHINE_PATH = re.compile(r"/(?:home|root|work|farm|opt|tmp|Users)/\w")


def test_no_tracked_line_names_a_path_of_one_machine():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    if not files:
        pytest.skip("not a git checkout")
    faults = []
    for path in files:
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
                if MACHINE_PATH.search(line):
                    faults.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not faults


IMPORT_EVERYTHING = """
import importlib, logging, pkgutil, random, sys, threading

def check_absent(*names):
    loaded = [name for name in names if name in sys.modules]
    assert not loaded, f"import loaded {loaded}"

import torchrl_rloo.cli, torchrl_rloo.rewards
check_absent("torch", "torchrl", "numpy", "transformers")

import numpy, torch

def state():
    rng = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())
    threads = (torch.get_num_threads(), torch.get_num_interop_threads())
    defaults = (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())
    logger = logging.getLogger()
    return {"rng": rng, "threads": threads, "defaults": defaults, "logging": (logger.level, logger.handlers[:])}

before = state()
# torchrl.data itself imports ray if it is installed
heavy = "vllm", "datasets", "peft", "wandb", "mlflow", "matplotlib", "pandas", "hydra"
for module in pkgutil.iter_modules(torchrl_rloo.__path__, "torchrl_rloo."):
    light = module.name not in ("torchrl_rloo.embedded", "torchrl_rloo.cli")  # these load transformers and hydra
    if module.ispkg and light:
        importlib.import_module(module.name)
check_absent("transformers", *heavy)
for module in pkgutil.walk_packages(torchrl_rloo.__path__, "torchrl_rloo."):
    if module.ispkg and module.name != "torchrl_rloo.cli":
        importlib.import_module(module.name)
check_absent(*heavy)
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, f"import changed the global {changed}"

import torchrl.modules.llm as llm
import torchrl.modules.llm.policies as policies

from torchrl.modules.llm.policies.vllm_wrapper import RequestOutput, vLLMWrapper
assert llm.vLLMWrapper is policies.vLLMWrapper is vLLMWrapper
assert RequestOutput is sys.modules["vllm.outputs"].RequestOutput  # TorchRL has found vLLM
assert callable(llm.make_async_vllm_engine)  # TorchRL's own lookup
assert not hasattr(llm, "nothing") and not hasattr(policies, "nothing")
"""


def run_in_fresh_interpreter(code: str, path: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(path), str(ROOT)))}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_import_is_light_and_has_no_side_effects(tmp_path: Path):
    (tmp_path / "vllm").mkdir()  # a placeholder, so that the test does not import vLLM
    (tmp_path / "vllm" / "__init__.py").touch()
    for module, name in (
        ("outputs", "RequestOutput"),
        ("sampling_params", "SamplingParams"),
        ("inputs", "TokensPrompt"),
    ):
        (tmp_path / "vllm" / f"{module}.py").write_text(f"class {name}: ...")
    result = run_in_fresh_interpreter(IMPORT_EVERYTHING, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Triton" not in result.stdout + result.stderr


IMPORT_IN_TWO_THREADS = """
import sys, threading
import torchrl_rloo

class Interruption:
    def find_spec(self, name, *args):
        if name == "torchrl.modules.llm.late":  # the packages are being imported
            sys.meta_path.remove(self)
            thread.start()

def import_wrapper():
    from torchrl.modules.llm.policies.vllm_wrapper import vLLMWrapper
    wrappers.append(vLLMWrapper)

wrappers, thread = [], threading.Thread(target=import_wrapper)
sys.meta_path.insert(0, Interruption())
finders = sys.meta_path[2:]
import torchrl.modules.llm as llm
thread.join()
assert wrappers == [llm.vLLMWrapper] and wrappers[0].__module__ == "torchrl.modules.llm.policies.vllm_wrapper"
assert sys.meta_path == finders
"""


def test_a_thread_that_asks_for_vllm_in_the_middle_of_an_import_waits(tmp_path: Path):
    llm = tmp_path / "torchrl" / "modules" / "llm"
    (llm / "policies").mkdir(parents=True)
    for package in (llm.parents[1], llm.parent):
        (package / "__init__.py").touch()
    (llm / "__init__.py").write_text("from .policies import vLLMWrapper\nfrom . import late")
    (llm / "late.py").touch()
    (llm / "policies" / "__init__.py").write_text("from .vllm_wrapper import vLLMWrapper")
    (llm / "policies" / "vllm_wrapper.py").write_text("class vLLMWrapper: ...")
    result = run_in_fresh_interpreter(IMPORT_IN_TWO_THREADS, tmp_path)
    assert result.returncode == 0, result.stderr
