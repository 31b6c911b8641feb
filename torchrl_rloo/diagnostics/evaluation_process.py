"""Evaluation of saved models in a separate process, while training continues."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from torchrl_rloo.diagnostics.evaluation_result import EvaluationResult
from torchrl_rloo.runtime.processes import Guard

Evaluate: TypeAlias = Callable[[Path, int], Mapping[str, EvaluationResult]]

_ATTEMPTS = 2  # processes that may die over one model
_STOP_SECONDS = 5.0
_STEP, _MODEL, _MAIN, _SET = re.compile(r"step_(\d{6,})"), "model", "held_out", "set_"


class EvaluationProcess:
    """Process that evaluates saved models, one at a time, while training continues.

    A model is saved in :meth:`model_folder` and evaluated after :meth:`start`. Its results stay in the folder of its
    step, as :meth:`EvaluationResult.save` writes them; the weights are removed. A run that was interrupted calls
    :meth:`rewind`, which evaluates a model again whose results it lacks.

    If the process dies, another one evaluates the model again; the second death raises. It ends with this process.

    Args:
        make: function that the process calls once, importable as for :mod:`multiprocessing` with ``spawn``. It returns
            the function that evaluates a model, given its folder and step. That one returns results by the name of the
            set, ``""`` for the run's own prompts.
        directory: directory of the folders of the steps.
        timeout: seconds that one model may take.

    Raises:
        ValueError: if ``timeout`` is not positive.

    Example::

        process = EvaluationProcess(make_evaluate, run.directory / "evaluations")
        save_model(model, tokenizer, process.model_folder(step))
        process.start(step)
        ...  # train
        if (found := process.take()) is not None:
            step, results = found
            run.log(results[""].metrics, step=step)
    """

    def __init__(self, make: Callable[[], Evaluate], directory: Path, *, timeout: float = 3600.0):
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be above 0 s")
        self.directory, self.timeout, self.pending = Path(directory), timeout, None
        self._make, self._attempts, self._guard = make, 0, None
        self._process: Any = None
        self._connection: Connection | None = None

    def model_folder(self, step: int) -> Path:
        """Return where the model of a step must be saved."""
        return step_folder(self.directory, step) / _MODEL

    def start(self, step: int) -> None:
        """Evaluate the saved model of a step.

        Raises:
            RuntimeError: if the results of another step were not yet taken.
        """
        if self.pending is not None:
            raise RuntimeError(f"step={step} cannot be evaluated before the results of step {self.pending}; take them")
        self.pending, self._attempts = step, 0
        self._send()

    def take(self, *, wait: bool = False) -> tuple[int, dict[str, EvaluationResult]] | None:
        """Return the step and its results by set, once; None if there are none yet.

        Args:
            wait: wait for the results of the model that is evaluated.

        Raises:
            RuntimeError: if the evaluation fails, or two processes die over it.
            TimeoutError: if it takes more than ``timeout``.
        """
        while self.pending is not None:
            if not self._connection.poll(self.timeout if wait else 0):
                if wait:
                    self.close()
                    raise TimeoutError(
                        f"the evaluation of step {self.pending} took more than timeout={self.timeout} s; raise it, or "
                        "evaluate fewer prompts"
                    )
                return None
            try:
                failure = self._connection.recv()
            except (EOFError, OSError):
                self._restart()
                continue
            step, self.pending = self.pending, None
            if failure is not None:
                raise RuntimeError(f"the evaluation of step {step} failed:\n{failure}")
            return step, self._load(step)
        return None

    def rewind(self, step: int, logged: Iterable[int]) -> None:
        """Continue after a step: remove what is of later ones, and evaluate the newest model again if need be.

        Args:
            step: last step of the run; -1 for a new one, which removes everything.
            logged: steps whose results the run has.
        """
        found = sorted(int(match[1]) for path in self.directory.glob("step_*") if (match := _STEP.fullmatch(path.name)))
        for late in (s for s in found if s > step):
            shutil.rmtree(step_folder(self.directory, late))
        kept = [s for s in found if s <= step and s not in set(logged)]
        if kept:
            self.start(kept[-1])

    def close(self) -> None:
        """End the process. Its model is evaluated again after :meth:`rewind`."""
        if self._process is None:
            return
        self._connection.close()
        if self.pending is not None:  # otherwise it ends by itself
            self._process.terminate()
        self._process.join(_STOP_SECONDS)
        self._process.kill()
        self._process.join()
        self._guard.unwatch(self._process.pid)
        self._process = self._connection = None

    def _restart(self) -> None:
        self._attempts += 1
        self._process.join()  # its end of the connection is closed, so it has died
        code = self._process.exitcode
        self.close()
        if self._attempts == _ATTEMPTS:
            raise RuntimeError(
                f"the process that evaluated step {self.pending} died twice (exit code {code}); give it more memory, "
                "lower its batch_size, or evaluate in the training process"
            )
        self._send()

    def _send(self) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._make, theirs), daemon=True)
            self._process.start()
            theirs.close()
            self._guard = Guard.shared()
            self._guard.watch(self._process.pid)
        try:
            self._connection.send((self.pending, step_folder(self.directory, self.pending)))
        except OSError:
            self._restart()

    def _load(self, step: int) -> dict[str, EvaluationResult]:
        folders = sorted(path for path in step_folder(self.directory, step).iterdir() if path.is_dir())
        return {"" if f.name == _MAIN else f.name.removeprefix(_SET): EvaluationResult.load(f) for f in folders}


def step_folder(directory: Path, step: int) -> Path:
    """Return the folder of a step."""
    return directory / f"step_{step:06d}"


def _serve(make: Callable[[], Evaluate], connection: Connection) -> None:
    """Evaluate the models that the connection names, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which stops after its step
    evaluate = None
    while True:
        try:
            step, folder = connection.recv()
        except EOFError:
            return
        failure = None
        try:
            if (folder / _MODEL).is_dir():  # otherwise the results are complete
                evaluate = evaluate or make()
                for name, result in evaluate(folder / _MODEL, step).items():
                    result.save(folder / (_SET + name if name else _MAIN))
                shutil.rmtree(folder / _MODEL)
        except Exception:
            failure = traceback.format_exc()
        connection.send(failure)
