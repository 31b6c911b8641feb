"""RLOO, synchronous: sample completions, score them, train on them, update the sampler, repeat.

python rloo_sync.py                                        the embedded task and model, on CPU cores
python rloo_sync.py task=gsm8k model.name=...              a standard task, any model
python rloo_sync.py data.source=... reward.functions=[...] a dataset and rewards of your own
python rloo_sync.py --help                                 all settings; config/rloo_sync.yaml explains them
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from contextlib import closing, nullcontext
from math import inf
from pathlib import Path
from types import SimpleNamespace

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from rloo_checks import check_settings
from rloo_parts import build  # the file beside this one: what is made from the settings
from tensordict import TensorDictBase
from torch.nn.utils import clip_grad_norm_

from torchrl_rloo.data import tensor_rows
from torchrl_rloo.diagnostics import DEFINITIONS, completion_table, write_report
from torchrl_rloo.modules.engines import asleep
from torchrl_rloo.objectives import merge_outputs
from torchrl_rloo.run import StepTimer, StopSignal, cpu_seconds, run_state


def main(cfg: DictConfig) -> None:
    settings, output, timer = OmegaConf.to_container(cfg, resolve=True), Path(cfg.output_dir), StepTimer()
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    if cfg.resume not in ("auto", "never"):
        raise ValueError(f"resume={cfg.resume!r} must be 'auto' or 'never'")
    check_settings(settings)
    run = build(copy.deepcopy(settings), output)
    gc.collect()
    gc.freeze()  # prompts and libraries stay; the collector need not sweep them at every step
    start, cpu_before = 0, 0.0
    state = run.checkpoints.load() if cfg.resume == "auto" else run.checkpoints.clear()
    if state is not None:
        start, cpu_before = run_state.restore(state, settings, run.stateful)
        if run.engine is not None:
            run.collector.weight_updater.updaters[-1].push_weights(run.collector.policy_version)
        print(f"resumed after step {start} from {run.checkpoints.directory}", flush=True)
    run.quarantine.rewind(start)  # steps that come again will write their bad samples again

    def due(step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    def evaluate(step: int) -> dict[str, float]:
        with timer("eval"):
            metrics, table = run.evaluate()
        run.logger.log_table(step, "held-out completions", table[: cfg.log.samples])
        return metrics

    def train(rows: TensorDictBase | None, step: int) -> dict[str, float]:
        """Leave-one-out advantages as the rows enter the buffer, then one or more passes over it."""
        if rows is None:  # no group had a signal
            return {}
        outputs, norms = [], []
        recorded, parity = run.record(tensor_rows(rows), parity=due(step, cfg.inference.parity_every))
        run.buffer.extend(recorded)
        for _ in range(run.plan.passes):
            for batch in run.buffer:
                counts = run.loss_fn.count(batch)
                for micro in run.micro_batches(batch):
                    out = run.loss_fn(micro, counts)
                    out.loss.backward()
                    outputs.append(out.detach())
                norms.append(clip_grad_norm_(run.model.parameters(), cfg.max_grad_norm or inf, error_if_nonfinite=True))
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
        run.buffer.empty()
        metrics = merge_outputs(outputs, num_updates=len(norms)) | parity
        metrics["grad_norm"] = float(torch.stack(norms).mean())
        return metrics

    with run.engine or nullcontext(), closing(run.rewards), StopSignal() as stop, run.logger:
        if start == 0:
            run.logger.log(0, evaluate(0), timings=timer.take())
        for step in range(start + 1, run.plan.steps + 1):
            # sample: whole groups of finished trajectories, with rewards
            with timer("collect"):
                run.report_progress(step - 1)
                rows, sampled = run.collect()
            metrics = run.describe(sampled)
            metrics["staleness"] = run.staleness(sampled if rows is None else rows)
            with timer("train"), asleep(run.engine if cfg.inference.sleep else None):
                metrics |= train(rows, step)
            metrics |= run.adapt(metrics, len(sampled))
            metrics |= {"learning_rate": run.scheduler.get_last_lr()[0], "num_tokens": run.collector.num_tokens}
            metrics |= {f"count/{name}": n for part in run.counted for name, n in part.counts.items()}

            # update the sampler
            with timer("sync"):
                if due(step, cfg.sampler.sync_every):
                    run.collector.update_policy_weights_()

            last = step == run.plan.steps
            if due(step, cfg.eval.every) or last:
                metrics |= evaluate(step)
            if due(step, cfg.log.samples_every):
                run.logger.log_table(step, "training completions", completion_table(sampled, cfg.log.samples))
            timings = timer.take() | run.reward_seconds() | {"cpu_seconds": cpu_before + cpu_seconds()}
            timings["tokens_per_second"] = metrics["completions/mean_length"] * len(sampled) / timings["time/collect"]
            run.logger.log(step, metrics, timings=timings)
            if due(step, cfg.checkpoint.every) or last or stop.requested:
                cpu = cpu_before + cpu_seconds()
                run.checkpoints.save(step, run_state.gather(step, cpu, settings, run.stateful))
            if stop.requested and not last:
                print(f"stopped after step {step}; the same command goes on from there", flush=True)
                return
    finish(run, settings, output, cpu_before + cpu_seconds())


def finish(run: SimpleNamespace, settings: dict, output: Path, cpu: float) -> None:
    """Saves the model, writes the report, and prints the result as one line of JSON."""
    run.model.save_pretrained(output / "model")
    run.tokenizer.save_pretrained(output / "model")
    evaluations = [record for record in run.logger.history if "eval/greedy" in record]
    before, after = evaluations[0], evaluations[-1]
    result = {"held_out_accuracy_before": before["eval/greedy"], "held_out_accuracy_after": after["eval/greedy"]}
    if "eval/sampled" in after:
        result |= {"held_out_sampled_before": before["eval/sampled"], "held_out_sampled_after": after["eval/sampled"]}
    result["cpu_seconds"] = round(cpu, 1)
    report = write_report(
        output,
        history=run.logger.history,
        summary=result | {"plan": str(run.plan)},
        tables=run.logger.tables,
        definitions=DEFINITIONS,
        settings=settings,
    )
    print(json.dumps(result | {"report": str(report.resolve()), "model": str((output / "model").resolve())}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))  # so that a user's own rewards are found by their dotted path
    hydra.main(version_base="1.3", config_path="config", config_name="rloo_sync")(main)()
