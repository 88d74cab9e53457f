"""The training loop: data -> TreeStep -> clip -> optimizer -> schedule -> log -> checkpoint.

The same code runs on a laptop, one GPU and N GPUs. A run writes into one folder: config.toml (as resolved),
metrics.csv, tensorboard/, checkpoints/, and on request hf/ and profiling/.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_tree.build import (
    build_activations,
    build_dataset,
    build_loss,
    build_lr_schedulers,
    build_optimizers,
    build_parallel_model,
    build_partitioner,
    build_profiler,
    build_router_bias,
    build_router_loss,
    build_tokenizer,
)
from titan_tree.checkpoint import Checkpoints, Progress
from titan_tree.components.moe import RouterBias
from titan_tree.config import Config
from titan_tree.config.toml import dump_config
from titan_tree.data.dataset import TreeDataset
from titan_tree.distributed import ao, titan
from titan_tree.distributed.parallelize import init_distributed
from titan_tree.engine.records import StepCounts, StepInput
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.metrics import Loggers, StepReport, step_values
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf import save_pretrained
from titan_tree.registry import LOGGERS

logger = logging.getLogger(__name__)


class Trainer:
    """Trains what ``config`` describes, from the newest checkpoint on if there is one.

    Makes the process group, as torchrun describes it; ``close`` ends it.
    """

    # where it runs
    config: Config
    mesh: DeviceMesh
    device: torch.device

    # what is trained, and how
    model: Decoder
    optimizers: titan.OptimizersContainer
    lr_schedulers: titan.LRSchedulersContainer
    tree_step: TreeStep
    router_bias: RouterBias | None

    # how far it is
    dataset: TreeDataset
    progress: Progress
    checkpoints: Checkpoints
    history: list[StepCounts]  # of this process's steps
    loggers: Loggers | None  # of rank 0

    def __init__(self, config: Config) -> None:
        self.config = config
        self.mesh, self.device = init_distributed()
        if config.training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
            torch.use_deterministic_algorithms(True)

        for name in config.metrics.loggers:
            LOGGERS[name]  # a missing package raises an error here, before weights are read
        loss = build_loss(config.loss)
        if config.optimizer.name == "adamw8bit":
            ao.adamw_8bit()  # if it is missing, that is said before weights are read
        self.model = build_parallel_model(config.model, config.training, config.parallel, self.mesh)
        self.optimizers = build_optimizers(config.optimizer, self.model)
        self.lr_schedulers = build_lr_schedulers(config.lr_scheduler, self.optimizers, config.training.steps)
        self.router_bias = build_router_bias(config.router_bias, self.model)
        partitioner = build_partitioner(config.partition, config.data.max_tokens)
        self.tree_step = TreeStep(
            self.model,
            loss,
            self.device,
            partitioner,
            build_activations(config.partition, self.device),
            config.parallel.reduce_gradients,
            config.parallel.reshard_after_forward,
            build_router_loss(config.router_loss),
        )

        tokenizer = build_tokenizer(config.data, config.model.hf_path)
        self.dataset = build_dataset(
            config.data, tokenizer, self.model, self.mesh, allow_larger=partitioner is not None
        )
        self.progress, self.history = Progress(), []
        folder = Path(config.folder)
        self.checkpoints = Checkpoints(
            config.checkpoint,
            folder / config.checkpoint.folder,
            model=self.model,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            progress=self.progress,
            architecture=self._architecture(),
        )
        self.checkpoints.resume()
        if self.progress.step:
            self.dataset.load_state_dict(self.progress.data)

        self.loggers = None
        if dist.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "config.toml").write_text(dump_config(config))
            except OSError as error:
                raise UserError(f"folder = {config.folder}: cannot be written: {error.strerror}") from None
            self.loggers = Loggers(config.metrics, folder, self.progress.step, config.training.steps)

    def train(self) -> None:
        """All steps that are left, then the last checkpoint, the export and a summary."""
        steps = self.config.training.steps
        self._log_introduction()
        inputs = self._inputs()
        profiler_context = build_profiler(self.config.profiler, self.config.folder, self.progress.step)
        with self.loggers or nullcontext(), profiler_context as profiler:
            while self.progress.step < steps:
                self.train_step(inputs)
                self.checkpoints.save(last=self.progress.step == steps)
                profiler.step()
        self.checkpoints.close()
        self._log_summary()
        if self.config.checkpoint.export_hf:
            self.export(Path(self.config.folder) / "hf")

    def close(self) -> None:
        """After training: ends the process group."""
        dist.destroy_process_group()

    def train_step(self, inputs: Iterator[tuple[StepInput, dict[str, Any]]]) -> None:
        """One optimizer step."""
        started = time.perf_counter()
        step_input, position = next(inputs)
        step = self.progress.step + 1
        # A step's random numbers depend on nothing before it: no generator's state to save and restore.
        torch.manual_seed(hash((self.config.training.seed, step, dist.get_rank())))

        result = self.tree_step.run(step_input)
        grad_norm = clip_and_step(self.optimizers, result.loss, self.config.optimizer.max_grad_norm)
        self.optimizers.zero_grad()
        loss, norm = result.loss.item(), grad_norm.item()  # waits for the device
        self._check_finite(step, {"loss": loss, "grad_norm": norm})
        if self.router_bias:
            assert result.routing is not None
            assert self.model.experts is not None
            self.router_bias.update(self.model.experts.router_biases().values(), result.routing)

        lr = float(self.lr_schedulers.schedulers[0].get_last_lr()[0])
        self.lr_schedulers.step()
        self.progress.step, self.progress.data = step, position

        seconds = time.perf_counter() - started
        self.history.append(result.counts)
        if self.loggers:
            self.loggers.advance(step)
            if step % self.config.metrics.log_interval == 0 or step == self.config.training.steps:
                report = StepReport(result, seconds, dist.get_world_size(), self.device, loss, norm, lr)
                self.loggers.log(step, step_values(report))

    def _architecture(self) -> dict[str, Any]:
        """What checkpoints are of, and what a run that resumes must have too."""
        c = self.config
        found = {"name": c.model.name, "optimizer": c.optimizer.name, **vars(self.model.config)}
        if self.model.experts and self.model.experts.router_biases():
            found["router_bias"] = True
        # Ranks that share an expert shard its rows, and torchao cuts 8-bit states along their first dim only.
        sharing = self.mesh.size() // c.parallel.expert_parallel
        if c.optimizer.name == "adamw8bit" and 1 < sharing < self.mesh.size():
            found["ranks_that_share_an_expert"] = sharing
        return found

    def _inputs(self) -> Iterator[tuple[StepInput, dict[str, Any]]]:
        """The input of each step left, and the dataset's state after it.

        Made one step ahead in a thread: reading, tokenising and packing hide behind the device's work. The
        state travels with its step, so a checkpoint counts no data that was not trained on.
        """
        stream = iter(self.dataset)

        def produce() -> tuple[StepInput, dict[str, Any]]:
            return self.tree_step.prepare(next(stream)), self.dataset.state_dict()

        with ThreadPoolExecutor(1, thread_name_prefix="data") as ahead:
            upcoming = ahead.submit(produce)
            for steps_left in range(self.config.training.steps - self.progress.step, 0, -1):
                current = upcoming.result()
                if steps_left > 1:
                    upcoming = ahead.submit(produce)
                yield current

    def _check_finite(self, step: int, values: dict[str, float]) -> None:
        """All ranks see the same values, so all stop. ``clip_and_step`` left the weights as they were."""
        for name, value in values.items():
            if not math.isfinite(value):
                self.checkpoints.wait()
                newest = self.checkpoints.newest()
                raise UserError(
                    f"step {step}: {name} is {value}; stopped before it reached the weights (newest "
                    f"checkpoint: {newest or 'none'}); lower optimizer.lr, or look for bad values in the data"
                )

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face snapshot in the dtype of the computation. Collective."""
        dtype = getattr(torch, self.config.training.dtype)
        weights: dict[str, Tensor] = {}
        for name, value in self.model.state_dict().items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                weights[name] = full.to("cpu", dtype)
        if dist.get_rank() == 0:
            if folder.exists():
                shutil.rmtree(folder)  # of an earlier run in this run's folder
            save_pretrained(self.model, folder, weights, source=self.config.model.hf_path)
            logger.info("Hugging Face snapshot: %s", folder)
        dist.barrier()

    def _log_introduction(self) -> None:
        c = self.config
        done = f", {self.progress.step} of them done" if self.progress.step else ""
        logger.info(
            "%s, %s parameters, on %d x %s in %s; %d steps%s; %s",
            f"{c.model.name} {c.model.flavor or c.model.hf_path}",
            f"{self.model.num_parameters():,}",
            dist.get_world_size(),
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            c.training.dtype,
            c.training.steps,
            done,
            c.folder,
        )

    def _log_summary(self) -> None:
        """What this process has trained on, and where its last checkpoint is."""
        if self.history:
            total = StepCounts(*map(sum, zip(*map(dataclasses.astuple, self.history), strict=True)))
            logger.info(
                "trained %d steps on %s trees of %s paths: "
                "%s logical tokens, %s executed (POR %.1f%%, %.2fx fewer)",
                len(self.history),
                f"{total.num_trees:,}",
                f"{total.num_paths:,}",
                f"{total.logical_tokens:,}",
                f"{total.executed_tokens:,}",
                100 * total.por,
                total.logical_tokens / total.executed_tokens,
            )
        else:
            logger.info(
                "nothing left to train: raise training.steps to go on, or name a new folder to start anew"
            )
        logger.info("checkpoint: %s", self.checkpoints.newest() or "none (checkpoint.interval = 0)")
        if "csv" in self.config.metrics.loggers:
            logger.info("curves: %s/metrics.csv", self.config.folder)


def clip_and_step(optimizers: titan.OptimizersContainer, loss: Tensor, max_norm: float) -> Tensor:
    """Step on gradients scaled down to a norm of ``max_norm``; returns the norm they had, 0-dim.

    Where loss or norm is not finite, weights and states stay as they are. The fused AdamW does both inside
    of its kernel, by what it offers to gradient scalers: no pass over the gradients, no waiting for the
    device. For others gradients are scaled first, and the host waits for the norm.
    """
    parameters = [p for group in optimizers.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    own = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    norm = torch.nn.utils.get_total_norm(own, foreach=True)
    if isinstance(gradients[0], DTensor):  # then each is, and each number of theirs is on one rank
        square = norm.square()
        dist.all_reduce(square)
        norm = square.sqrt()
    divisor, finite = (norm / max_norm).clamp_min(1.0), (loss + norm).isfinite()
    if not all(isinstance(optimizer, torch.optim.AdamW) for optimizer in optimizers):
        if finite:
            torch._foreach_div_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], divisor)
            optimizers.step()
        return norm
    for optimizer in optimizers:
        optimizer.grad_scale = divisor
        optimizer.found_inf = 1.0 - finite.float()  # 1: the kernel does nothing
    optimizers.step()
    for optimizer in optimizers:
        del optimizer.grad_scale, optimizer.found_inf
    return norm
