"""One optimizer update as one callable that owns its buffers: nothing in it waits for the device.

finish (normalise) -> forward and loss -> backward, per accumulation part; then norm, clip, update, totals, EMA.
A step whose loss or gradients are not finite changes nothing but its count; the host learns of it one step later.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sightline.engine.compile_cache import keep_compiled_code
from sightline.errors import UsageError
from sightline.hardware import early_cuda
from sightline.hardware.devices import Device
from sightline.hardware.precision import DTYPES, autocast
from sightline.hardware.reduce import reduce_by_host
from sightline.hardware.world import World
from sightline.parts import Batch, Bound
from sightline.recipe.recipe import Recipe, Run
from sightline.train.state import TrainState
from sightline.train.torch_optimizer import set_rate, update

TORCH_BUCKET_MB = 25
GRAPH_WARMUP_STEPS = 3  # compile, autotune and allocate before capture
SMALLEST_LOSS_SCALE = 2.0**-10  # fp16: below this it is not overflow but divergence
FIXED_TOTALS = ("loss", "samples", "bad_steps", "grad_norm", "steps")
BAD_STEPS = FIXED_TOTALS.index("bad_steps")
LossOf = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]


def build_step(
    recipe: Recipe, run: Run, device: Device, world: World, state: TrainState, bound: Bound, head_steps: int = 0
) -> Step:
    """Build the step of this recipe on this device: compiled and captured where asked for, or where that is faster.
    In the first `head_steps` steps of the run the trunk is frozen."""
    compiled = run.compile == "on" or (run.compile == "auto" and device.compile_auto)
    # A captured step would also capture the collectives of DDP's reducer, which it does not allow.
    graphed = device.has_graphs and world.size == 1 and run.graph != "off"
    if run.graph == "on" and not graphed:
        raise UsageError(f"--run.graph on needs one CUDA device, here are {world.size} {device.kind}; use auto or off")
    if run.compile == "on" and not device.compile_backend:
        raise UsageError(f"--run.compile on: there is no compiler for {device.kind}; use auto or off")
    task, finish, dtype = recipe.task.build(), bound.finish, DTYPES[recipe.train.precision]

    def build_loss(compiles: bool) -> tuple[nn.Module, LossOf]:
        network = _distributed(recipe, run, device, world, state) if world.size > 1 else state.model

        def loss_of(part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            with autocast(device, recipe.train.precision):
                loss = task.loss(network, finish(part, dtype))
            return loss.total, loss.sums

        return network, _compiled(loss_of, device, recipe.train.deterministic) if compiles else loss_of

    step = Step(recipe, state, build_loss, compiled, bound.samples_per_item, device, world, head_steps)
    if graphed:
        step.capture_on_first_call()
    return step


def _distributed(recipe: Recipe, run: Run, device: Device, world: World, state: TrainState) -> DistributedDataParallel:
    """Wrap the model so that gradients are averaged over ranks during the backward pass."""
    # torch 2.15 renamed the option; buffers are ours to share, see loop.py.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    option: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    network = DistributedDataParallel(
        state.model,
        [device.index] if device.kind == "cuda" else None,
        gradient_as_bucket_view=True,
        # Named, torch would also make the first bucket as large, which is 1 MiB by itself so as to leave early.
        bucket_cap_mb=None if run.bucket_mb == TORCH_BUCKET_MB else run.bucket_mb,
        # Every step uses the same parameters in the same order. But its first backward pass must not be one that holds
        # gradients back (no_sync), as all parts but the last do: torch 2.11 to 2.15 end with an internal assertion.
        static_graph=recipe.train.accumulation == 1,
        **option,
    )
    if run.reduce == "hierarchical":
        state.notes.append(reduce_by_host(network, world, device))
    return network


def _compiled(loss_of: LossOf, device: Device, deterministic: bool) -> LossOf:
    """Compile with timed tile sizes: 2 % of a ResNet-50 step (batch 256, bf16, H200) for 10 s of compilation.

    Other tiles sum in another order, so not where bits must be equal between runs.
    """
    keep_compiled_code()
    tuned = device.compile_backend == "inductor" and device.kind == "cuda" and not deterministic
    options: dict[str, Any] = {"options": {"max_autotune_pointwise": True}} if tuned else {}
    return torch.compile(loss_of, dynamic=False, backend=device.compile_backend, **options)


class Step:
    """Call it with a batch and a learning rate; read its totals at log time and take_bad_steps() after each call."""

    def __init__(
        self,
        recipe: Recipe,
        state: TrainState,
        build_loss: Callable[[bool], tuple[nn.Module, LossOf]],
        compiled: bool,
        samples_per_item: int,
        device: Device,
        world: World,
        head_steps: int,
    ):
        self.state = state
        self.parts = recipe.train.accumulation
        self.samples_per_item = samples_per_item
        self.clip = recipe.train.clip
        self.seed = (recipe.train.seed, world.rank)
        self._skips_by_itself = recipe.optimizer.skips_by_itself
        self.device = device
        self.world = world
        self._build_loss = build_loss
        self._compiled = compiled
        self._head_steps = head_steps
        self._is_head_only: bool | None = None  # None before the first choice
        self._network: nn.Module
        self._loss_of: LossOf
        self._parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
        self._names: list[str] | None = None  # of what the task shows, known after the first call
        self._totals = torch.zeros(len(FIXED_TOTALS), device=device.torch_device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = self._wants_graph = False
        self._static: Batch = {}
        self._finite = torch.ones((), dtype=torch.bool, device=device.torch_device)  # whether the last step was
        self._bad_known = 0  # by the host: on devices with streams all but the last step's
        self._bad_taken = 0
        self.last_bad_step = -1
        self._bad_on_host = torch.zeros(1).pin_memory() if device.has_streams and device.can_pin else torch.zeros(1)
        self._copied: Any = None  # event after the copy of the bad-step count, and the step it belongs to
        # Batch norm writes its statistics in the forward pass, before anyone knows whether the step is finite;
        # optimizers without fused kernels cannot skip a step by themselves.
        guarded = list(state.model.buffers())
        if not self._skips_by_itself:
            guarded += [*self._parameters, *(t for t in state.tensors()["optimizer"].values())]
        self._guarded = _by_kind(_apart([_bits(tensor) for tensor in guarded]))
        self._kept = [torch.cat(tensors) for tensors in self._guarded]
        self._choose_what_learns(state.progress.step)
        # torch.manual_seed also keeps the seed, with the formatted stack, for every kind of device not in use.
        self._seed = torch.default_generator.manual_seed if device.kind == "cpu" else torch.manual_seed

    def __call__(self, batch: Batch, step: int, lr: float) -> None:
        """Make update number `step` of the run."""
        if not self.state.model.training:
            self.state.model.train()
        self._choose_what_learns(step)
        set_rate(self.state.optimizer, lr)
        if self._wants_graph:
            self._capture(batch)
        # Dropout is a function of (seed, rank, step): a resumed run draws the same masks; after warm-up,
        # which draws too.
        self._seed(_mixed(*self.seed, step))
        self._run(batch)
        if self.state.ema:
            self.state.ema.update(step, self._finite)
        self._read_bad_steps(step)

    def capture_on_first_call(self) -> None:
        """Capture the step as one CUDA graph once the shapes of a batch are known."""
        self._captures = self._wants_graph = True

    def _choose_what_learns(self, step: int) -> None:
        """Freeze the trunk up to `head_steps`, and free it from there on.

        Without gradients it takes no update, no decay and no momentum. DDP's buckets, a compiled and a captured step
        know what learns, so they are made again.
        """
        is_head_only = step < self._head_steps
        if is_head_only == self._is_head_only:
            return
        self._is_head_only = is_head_only
        if self._head_steps:
            for parameter in self.state.trunk:
                parameter.requires_grad_(not is_head_only)
            torch.compiler.reset()  # a compiled loss may be found again that gives no gradients of the trunk
        self._build()

    @property
    def is_head_only(self) -> bool:
        """Whether the trunk is frozen now."""
        return bool(self._is_head_only)

    def compile(self, batch: Batch) -> None:
        """Compile from the next step on. All that takes long happens here, on a batch whose update is undone."""
        self._compiled = True
        with self._undone():  # DDP gives every rank the batch-norm statistics of rank 0 when it is made
            self._build()
        gc.collect()  # the captured step, and DDP's buffers, may be part of cycles
        self.device.free_cached_memory()
        self.warm_up(batch, 1)

    def _build(self) -> None:
        self._network, self._loss_of = self._build_loss(self._compiled)
        self._graph, self._wants_graph = None, self._captures

    def warm_up(self, batch: Batch, steps: int) -> None:
        """Run `steps` updates and undo them, so that the first one that counts is as fast as the rest."""
        self.state.model.train()
        if self._wants_graph:
            self._capture(batch)
        with self._undone():
            for _ in range(steps):
                self._run(batch)

    def take_bad_steps(self, waits: bool = False) -> int:
        """Return how many steps were not finite since the last call; `last_bad_step` is the latest. A device with
        streams is asked about the last step only with `waits`: where no next step follows, or a log line waits too."""
        if waits:
            self._read_copied()
        new, self._bad_taken = self._bad_known - self._bad_taken, self._bad_known
        return new

    def read_totals(self, world: World, restarts: bool = True) -> dict[str, float]:
        """Return sums over ranks since the last reading. The one synchronisation with the device per log interval."""
        values = world.sum(self._totals.clone()).tolist()
        if restarts:
            keep = torch.arange(len(values), device=self._totals.device) == BAD_STEPS  # that one counts over the run
            self._totals *= keep
        return dict(zip((*FIXED_TOTALS, *(self._names or ())), values, strict=True))

    def _run(self, batch: Batch) -> None:
        if self._graph is None:
            self._update(batch)
            return
        for key, value in batch.items():
            self._static[key].copy_(value, non_blocking=True)
        self._graph.replay()

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """Restore, to the bit, everything that the updates inside change."""
        tensors = [t for named in self.state.tensors().values() for t in named.values()]
        saved, totals = [tensor.clone() for tensor in tensors], self._totals.clone()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(tensors, saved)
                self._totals.zero_()
                if len(totals) == len(self._totals):  # else the updates were the first, which decide what is shown
                    self._totals.copy_(totals)

    def _update(self, batch: Batch) -> None:
        for tensors, kept in zip(self._guarded, self._kept, strict=True):
            # One launch for many; a foreach copy is one for each, half a percent of a ResNet-50 step.
            torch.cat(tensors, out=kept)
        for parameter in self._parameters:
            parameter.grad = None
        loss, shown = self._accumulate(batch)
        with torch.no_grad():
            self._apply(loss, shown, len(batch["index"]) * self.samples_per_item)

    def _accumulate(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute gradients of the mean loss over all parts; the first part decides which sums are shown."""
        losses: list[Tensor] = []
        shown: list[dict[str, Tensor]] = []
        scale = self.state.loss_scale.scale / self.parts
        for number, part in enumerate(_split(batch, self.parts)):
            last = number == self.parts - 1
            # Ranks exchange gradients once per update, with the last part.
            hold = contextlib.nullcontext() if last else _no_sync(self._network)
            with hold:
                total, sums = self._loss_of(part)
                (total * scale).backward()
            losses.append(total.detach())
            shown.append(sums)
        return torch.stack(losses).mean(), {name: sum(s[name] for s in shown) for name in shown[0]}  # type: ignore[misc]

    def _apply(self, loss: Tensor, shown: dict[str, Tensor], samples: int) -> None:
        scaling = self.state.loss_scale
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if scaling.enabled:
            torch._foreach_mul_(gradients, 1 / scaling.scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        # Gradients are those of all ranks, a loss is this rank's: ranks must not differ about a step.
        loss_is_finite = self.world.sum(loss.clone()).isfinite()
        finite = self._finite = norm.isfinite() & loss_is_finite
        if self.clip:
            torch._foreach_mul_(gradients, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        if self._skips_by_itself:
            self.state.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # fused kernels read it
        update(self.state.optimizer)
        self._restore_unless(finite)
        scaling.update(finite)
        # fp16 overflows now and then by design; there only the loss itself, or a vanished scale, is bad.
        bad = ~loss_is_finite | (scaling.scale < SMALLEST_LOSS_SCALE) if scaling.enabled else ~finite
        if self._names is None:
            self._names = list(shown)
            self._totals = torch.zeros(len(FIXED_TOTALS) + len(shown), device=loss.device)
        one = torch.ones_like(loss)
        row = torch.stack([loss * samples, one * samples, bad.float(), norm, one, *(v.float() for v in shown.values())])
        self._totals += torch.where(finite | (torch.arange(len(row), device=row.device) == BAD_STEPS), row, 0.0)

    def _restore_unless(self, finite: Tensor) -> None:
        """Restore what was kept unless `finite`, on the bits as integers, because NaN * 0 is NaN; in a few launches."""
        for tensors, kept in zip(self._guarded, self._kept, strict=True):
            old = kept.split([len(tensor) for tensor in tensors])
            torch._foreach_mul_(tensors, finite.to(kept.device, kept.dtype))
            torch._foreach_mul_(old, (~finite).to(kept.device, kept.dtype))
            torch._foreach_add_(tensors, old)

    def _read_bad_steps(self, step: int) -> None:
        """Read the count of the step before and start to copy this one's, so that the host never waits for it."""
        if not self.device.has_streams:
            self._note_bad_steps(int(self._totals[BAD_STEPS]), step)
            return
        self._read_copied()
        self._bad_on_host.copy_(self._totals[BAD_STEPS : BAD_STEPS + 1], non_blocking=True)
        self._copied = (self.device.api.Event(), step)
        self._copied[0].record()

    def _read_copied(self) -> None:
        if self._copied is not None:
            event, step = self._copied
            event.synchronize()
            self._note_bad_steps(int(self._bad_on_host), step)

    def _note_bad_steps(self, count: int, step: int) -> None:
        if count > self._bad_known:
            self._bad_known, self.last_bad_step = count, step

    def _capture(self, batch: Batch) -> None:
        """Warm up and capture. Both run the step for real, so everything it changes is restored."""
        self._wants_graph = False
        early_cuda.wait()
        self._static = {key: value.clone() for key, value in batch.items()}
        with self._undone():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(GRAPH_WARMUP_STEPS):
                    self._update(self._static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Threads that decode ahead of the step may allocate and wait meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._update(self._static)
        self._graph = graph


def _split(batch: Batch, parts: int) -> list[Batch]:
    """Split the batch into `parts` equal parts; numbers of the whole batch go to each."""
    if parts == 1:
        return [batch]
    size = len(batch["index"]) // parts
    return [{k: v[i * size : (i + 1) * size] if v.ndim else v for k, v in batch.items()} for i in range(parts)]


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Group tensors by type and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def _bits(tensor: Tensor) -> Tensor:
    """View the tensor's memory as a row of integers, in its own order."""
    assert tensor.numel() == sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    integers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    return integers.as_strided((tensor.numel(),), (1,))


def _apart(rows: list[Tensor]) -> list[Tensor]:
    """Drop rows that lie in the memory of another, as views of one buffer do: they would be restored twice."""
    apart: list[Tensor] = []
    for row in sorted(rows, key=lambda row: (str(row.device), row.data_ptr(), -row.nbytes)):
        last = apart[-1] if apart and apart[-1].device == row.device else None
        if last is None or row.data_ptr() >= last.data_ptr() + last.nbytes:
            apart.append(row)
        else:
            inside = row.data_ptr() + row.nbytes <= last.data_ptr() + last.nbytes
            assert inside, "two buffers or parameters of the model share a part of their memory: give each its own"
    return apart


def _mixed(seed: int, rank: int, step: int) -> int:
    digest = hashlib.blake2b(f"{seed} {rank} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _no_sync(network: nn.Module) -> contextlib.AbstractContextManager[None]:
    return network.no_sync() if isinstance(network, DistributedDataParallel) else contextlib.nullcontext()
