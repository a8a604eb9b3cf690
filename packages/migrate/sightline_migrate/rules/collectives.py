"""Collectives as NCCL does them, where the target's process groups are gloo's.

NCCL compares numbers of elements, gloo shapes. NCCL also gathers uneven tensors, scales before a sum, averages
integers, coalesces calls and is unseen by autograd. The methods of ProcessGroup are replaced, below
torch.distributed's functions, which dynamo knows by identity.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Rule, dressed

if TYPE_CHECKING:
    from sightline_migrate.session import Session

AS_NCCL = "on gloo as nccl does it"
TAG = 0x6E63636C  # of messages in place of one all_to_all; scripts that tag their own count from zero


def rules() -> Iterator[Rule]:
    for name in (*CHANGES, *COALESCED):
        if hasattr(dist.ProcessGroup, name):  # torch 2.15 has gather_single, and new names for three
            yield Rule(f"torch.distributed.ProcessGroup.{name}", "exact", dressed(_make_method), AS_NCCL)
    for owner in ("torch.distributed", "torch.distributed.distributed_c10d"):
        yield Rule(f"{owner}._coalescing_manager", "exact", dressed(_make_manager), "waits for all calls at its end")


def _is_gloo(group: Any) -> bool:
    return "cpu:gloo" in dist.distributed_c10d._world.pg_backend_config.get(group, "")


def _make_method(rule: Rule, original: Any, session: Session) -> Any:
    if session.target.collective != "gloo":
        return original
    change = CHANGES.get(rule.name.rpartition(".")[2])

    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_gloo(group):
            return original(group, *args, **kwargs)
        args = _without_graph(args)
        # torch.distributed's functions pass options last; calls of another form are left to gloo.
        if change is not None and args and type(args[-1]).__name__.endswith("Options"):
            work = change(Call(rule, original, group), *args)
        else:
            work = original(group, *args, **kwargs)
        manager = _open.get(group)
        return work if manager is None else manager.holds(work)

    return method


def _without_graph(value: Any) -> Any:
    """Return tensors as memory: autograd does not see what nccl writes, but some of gloo's own copies."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    return type(value)(map(_without_graph, value)) if isinstance(value, list | tuple) else value


class Call:
    """One call of a group's method; calling it calls the method that was replaced."""

    def __init__(self, rule: Rule, original: Any, group: Any) -> None:
        self.rule, self.original, self.group = rule, original, group
        self.size, self.rank = group.size(), group.rank()

    def __call__(self, *args: Any) -> Any:
        return self.original(self.group, *args)

    def note(self, what: str) -> None:
        record.hit(self.rule, (), None, f"{AS_NCCL}: {what}")


class Works(dist.Work):
    """Several works as one; `finish` runs once, when all are done. Only a future without theirs tells `outputs`."""

    is_done = False

    def __init__(
        self,
        works: Sequence[Any],
        finish: Callable[[], Any] | None = None,
        manager: Coalescing | None = None,
        outputs: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.works, self.finish, self.manager, self.outputs = works, finish, manager, outputs

    def wait(self, *timeout: Any) -> bool:
        if self.manager is not None and self.manager.is_open:
            return True  # the manager waits, after the last call: others may depend on one that follows
        if not self.is_done:  # a message of gloo that is waited for twice never comes
            self.is_done = all([work.wait(*timeout) for work in self.works])  # noqa: C419 none is left out
        self._end()
        return self.is_done

    def _end(self) -> None:
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        return self.is_done or (all(work.is_completed() for work in self.works) and self.wait())

    def get_future(self) -> Any:
        def end(done: Any) -> list[Tensor]:
            self._end()
            return [each for one in done.value() for each in one.value()]

        try:
            futures = [work.get_future() for work in self.works]
        except RuntimeError:  # gloo's messages have none
            self.wait()
            future: Any = torch.futures.Future()
            future.set_result(list(self.outputs))
            return future
        return torch.futures.collect_all(futures).then(end)


# coalescing


class Coalescing(dist.distributed_c10d._CoalescingManager):
    """Calls inside `with _coalescing_manager()`: each starts at once, none is waited for before the end."""

    is_open = True

    def holds(self, work: Any) -> Works:
        held = Works([work], manager=self)
        self.append(held)
        return held


_open: dict[Any, Coalescing] = {}
"""managers that calls of a group are inside of"""


def _make_manager(rule: Rule, original: Any, session: Session) -> Any:
    if session.target.collective != "gloo":
        return original

    @contextlib.contextmanager
    def _coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        group = group or dist.group.WORLD
        if not _is_gloo(group):
            with original(group, device, async_ops) as manager:
                yield manager
            return
        record.hit(rule, (), {"async_ops": async_ops})
        manager = _open[group] = Coalescing()
        try:
            yield manager
        finally:
            del _open[group]
            manager.is_open = False
        if not async_ops:
            manager.wait()

    return _coalescing_manager


# shapes


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"nccl takes contiguous tensors, but got strides {tensor.stride()}; use .contiguous()")
    return tensor.view(-1)


def _all_gather_single(call: Call, output: Tensor, given: Tensor, opts: Any) -> Any:
    if given.dim() and output.shape == (len(given) * call.size, *given.shape[1:]):
        return call(output, given, opts)
    call.note(f"{list(given.shape)} of each rank into {list(output.shape)}")
    return call(_flat(output), _flat(given), opts)


def _all_gather(call: Call, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
    (into,), (given,) = outputs, inputs
    if all(each.shape == given.shape for each in into):
        return call(outputs, inputs, opts)
    call.note(f"into {[list(each.shape) for each in into]}")
    flat, mine = [_flat(each) for each in into], _flat(given)
    if all(each.shape == mine.shape for each in flat):
        return call([flat], [mine], opts)
    flat[call.rank].copy_(mine)
    works = []
    for rank, each in enumerate(flat):
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = rank, True
        works.append(call.group.broadcast([each], options))
    return Works(works)


def _gather_single(call: Call, output: Tensor, given: Tensor, opts: Any) -> Any:
    call.note("as a list")
    into = [list(_flat(output).chunk(call.size))] if opts.rootRank == call.rank else []
    return call.group.gather(into, [_flat(given)], opts)


def _all_to_all(call: Call, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
    """Send each part by itself: parts may differ in size, and gloo of torch 2.11 has no all_to_all."""
    call.note("one message for each other rank")
    _flat(outputs[call.rank]).copy_(_flat(inputs[call.rank]))
    works = []
    for rank, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
        if rank != call.rank and given.numel():
            works.append(call.group.send([_flat(given)], rank, TAG))
        if rank != call.rank and output.numel():
            works.append(call.group.recv([_flat(output)], rank, TAG))
    return Works(works, outputs=outputs)


def _all_to_all_single(call: Call, output: Tensor, given: Tensor, to: list[int], of: list[int], opts: Any) -> Any:
    if to or of or (output.shape == given.shape and given.dim() and len(given) % call.size == 0):
        return call(output, given, to, of, opts)
    call.note(f"{list(given.shape)} of each rank into {list(output.shape)}")
    return call(_flat(output), _flat(given), to, of, opts)


# sums


@contextlib.contextmanager
def _plan(call: Call, opts: Any, tensors: list[Tensor], outputs: list[Tensor]) -> Iterator[tuple[list[Tensor], Any]]:
    """Ask for an operation that gloo has, for one call; give the tensors to reduce, and what finishes outputs."""
    asked: Any = copy.copy(opts.reduceOp)
    finish: Any = None
    if asked == dist.ReduceOp.PREMUL_SUM:
        if not tensors[0].is_floating_point():
            raise TypeError(f"PREMUL_SUM takes floating point tensors, as with nccl, but got {tensors[0].dtype}")
        call.note("scaled, then summed")
        factor = asked.__getstate__()[1]
        opts.reduceOp = dist.ReduceOp.SUM
        tensors = [torch.mul(each, factor).to(each.dtype) for each in tensors]
    elif asked == dist.ReduceOp.AVG and outputs[0].dtype in INTEGERS:
        call.note("summed, then divided")
        opts.reduceOp = dist.ReduceOp.SUM

        finish = functools.partial(_divide, outputs, call.size)
    try:
        yield tensors, finish
    finally:
        opts.reduceOp = asked  # the caller may use its options again


def _divide(tensors: list[Tensor], count: int) -> None:
    for each in tensors:
        each.div_(count, rounding_mode="trunc")


def _then(work: Any, finish: Any) -> Any:
    return work if finish is None else Works([work], finish)


def _all_reduce(call: Call, tensors: list[Tensor], opts: Any) -> Any:
    with _plan(call, opts, tensors, tensors) as (summed, finish):
        if summed is not tensors:
            torch._foreach_copy_(tensors, summed)
        return _then(call(tensors, opts), finish)


def _reduce(call: Call, tensors: list[Tensor], opts: Any) -> Any:
    """Reduce copies on the other ranks: gloo leaves partial sums in their tensors."""
    if opts.rootRank != call.rank:
        tensors = [each.clone() for each in tensors]
    return _all_reduce(call, tensors, opts)


def _reduce_scatter(call: Call, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
    (output,), (given,) = outputs, inputs
    if any(each.shape != output.shape for each in given):
        call.note(f"{[list(each.shape) for each in given]} into {list(output.shape)}")
        output, given = _flat(output), [_flat(each) for each in given]
    with _plan(call, opts, given, [output]) as (given, finish):
        return _then(call([output], [given], opts), finish)


def _reduce_scatter_single(call: Call, output: Tensor, given: Tensor, opts: Any) -> Any:
    if not output.dim() or given.shape != (len(output) * call.size, *output.shape[1:]):
        call.note(f"{list(given.shape)} of each rank into {list(output.shape)}")
        output, given = _flat(output), _flat(given)
    with _plan(call, opts, [given], [output]) as ((given,), finish):
        return _then(call(output, given, opts), finish)


INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
CHANGES: dict[str, Callable[..., Any]] = {
    "allgather": _all_gather,
    "_allgather_base": _all_gather_single,
    "all_gather_single": _all_gather_single,
    "gather_single": _gather_single,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
}
COALESCED = ("broadcast", "gather", "scatter", "send", "recv")
"""methods that do the same on gloo, but may be called inside a coalescing manager"""
