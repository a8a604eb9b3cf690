"""Plans of a graph: the engines that cuDNN proposes, one of them built again from its number and knobs, and its run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sightline.kernels.cudnn.backend import Attribute, CudnnError, Descriptor, Kind, Type
from sightline.kernels.cudnn.graphs import ALIGNMENT, Graph

MODE_A = 3  # cuDNN's heuristics with the best guess first
COMPILED_AT_RUN_TIME = 0  # a behaviour note: such engines compile for seconds and were 4 to 8 times slower
MOST_KNOBS = 64  # there are 44 kinds
MOST_WORKSPACE = 512 << 20  # bytes
_running = threading.Lock()  # a handle has one stream at a time; backward runs in a thread of its own


@dataclass(frozen=True)
class Engine:
    """How a plan was made: cuDNN's number of the engine, and its knobs by number."""

    number: int
    knobs: dict[int, int] = field(default_factory=dict)


class Plan:
    """A built plan of a graph."""

    def __init__(self, graph: Graph, config: Descriptor, engine: Engine):
        self.graph = graph
        self.engine = engine
        library = graph.library
        self.built = Descriptor(library, Kind.PLAN).set(Attribute(401, Type.DESCRIPTOR), config)
        if library.handle:
            self.built.set(Attribute(400, Type.HANDLE), library.handle)
        elif library.device:
            self.built.set(Attribute(407, Type.DESCRIPTOR), library.device)
        self.built.finalize(f"plan of engine {engine.number}")
        self.workspace: int = self.built.get(Attribute(402, Type.INT64))[0]
        if self.workspace > MOST_WORKSPACE:
            raise CudnnError(f"engine {engine.number} wants {self.workspace >> 20} MiB of workspace")

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Run on the current stream; `tensors` by the names of the graph, all of them dense and aligned."""
        numbers, library = self.graph.numbers, self.graph.library
        places = [tensor.data_ptr() for tensor in tensors.values()]
        if any(place % ALIGNMENT for place in places):  # parameters that are parts of a larger tensor
            raise CudnnError(f"a tensor does not start at a multiple of {ALIGNMENT} bytes")
        device = next(iter(tensors.values())).device
        workspace = torch.empty(max(self.workspace, 1), dtype=torch.uint8, device=device)
        pack = Descriptor(library, Kind.VARIANT_PACK)
        pack.set(Attribute(1000, Type.INT64), [numbers[name] for name in tensors])
        pack.set(Attribute(1001, Type.VOID_PTR), places)
        pack.set(Attribute(1003, Type.VOID_PTR), workspace.data_ptr()).finalize("variant pack")
        assert tensors.keys() == numbers.keys(), f"{sorted(tensors)} given, {sorted(numbers)} needed"
        with _running:
            library.use_stream(torch.cuda.current_stream(device).cuda_stream)
            status = library.calls.cudnnBackendExecute(library.handle, self.built.pointer, pack.pointer)
        library.check(status, f"engine {self.engine.number}")


def candidates(graph: Graph, most: int) -> list[Plan]:
    """Return plans in the order in which cuDNN proposes them, without those it would compile; CudnnError if none."""
    heuristics = Descriptor(graph.library, Kind.HEURISTICS).set(Attribute(201, Type.DESCRIPTOR), graph.build())
    heuristics.set(Attribute(200, Type.HEUR_MODE), MODE_A)
    if graph.library.device:
        heuristics.set(Attribute(204, Type.DESCRIPTOR), graph.library.device)
    heuristics.finalize("heuristics")
    plans: list[Plan] = []
    why = "cuDNN proposes no engine"
    for config in heuristics.get_descriptors(Attribute(202, Type.DESCRIPTOR), Kind.ENGINE_CONFIG):
        if len(plans) == most:
            break
        try:
            engine = config.get_descriptors(Attribute(300, Type.DESCRIPTOR), Kind.ENGINE)[0]
            if COMPILED_AT_RUN_TIME in engine.get(Attribute(1305, Type.BEHAVIOR_NOTE), 8):
                continue
            plans.append(Plan(graph, config, _describe(config, engine)))
        except CudnnError as error:
            why = str(error)
    if not plans:
        raise CudnnError(why)
    return plans


def _describe(config: Descriptor, engine: Descriptor) -> Engine:
    choices = config.get_descriptors(Attribute(302, Type.DESCRIPTOR), Kind.KNOB_CHOICE, MOST_KNOBS)
    knobs = {
        choice.get(Attribute(600, Type.KNOB_TYPE))[0]: choice.get(Attribute(601, Type.INT64))[0] for choice in choices
    }
    return Engine(engine.get(Attribute(1301, Type.INT64))[0], knobs)


def rebuild(graph: Graph, engine: Engine) -> Plan:
    """Build the plan of a known engine; CudnnError if this cuDNN does not have it."""
    made = Descriptor(graph.library, Kind.ENGINE).set(Attribute(1300, Type.DESCRIPTOR), graph.build())
    made.set(Attribute(1301, Type.INT64), engine.number)
    if graph.library.device:
        made.set(Attribute(1307, Type.DESCRIPTOR), graph.library.device)
    made.finalize(f"engine {engine.number}")
    config = Descriptor(graph.library, Kind.ENGINE_CONFIG).set(Attribute(300, Type.DESCRIPTOR), made)
    knobs = []
    for kind, value in engine.knobs.items():
        knob = Descriptor(graph.library, Kind.KNOB_CHOICE).set(Attribute(600, Type.KNOB_TYPE), kind)
        knobs.append(knob.set(Attribute(601, Type.INT64), value).finalize(f"knob {kind}"))
    if knobs:
        config.set(Attribute(302, Type.DESCRIPTOR), knobs)
    return Plan(graph, config.finalize(f"engine {engine.number}"), engine)
