"""The fused operations of a bottleneck as cuDNN graphs over channels_last tensors; plans.py makes them run.

Inputs and outputs are fp16, statistics and sums fp32, and so is all arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sightline.kernels.cudnn.backend import Attribute, DataType, Descriptor, Kind, Library, Type

ALIGNMENT = 16  # bytes; tensors of torch have more
ADD, MULTIPLY, SUBTRACT, RELU, RELU_BACKWARD = 0, 1, 9, 100, 200  # modes of pointwise operations
CROSS_CORRELATION = 1
# Kind of the operation, then the attributes: convolution, its two inputs and the output, alpha, beta.
CONVOLUTIONS = {
    "forward": (Kind.CONVOLUTION_FORWARD, 702, (704, 703, 705), 700, 701),  # x, weight -> y
    "dgrad": (Kind.CONVOLUTION_DGRAD, 708, (711, 709, 710), 706, 707),  # dy, weight -> dx
    "wgrad": (Kind.CONVOLUTION_WGRAD, 714, (716, 717, 715), 712, 713),  # x, dy -> dweight
}


@dataclass(frozen=True)
class Convolution:
    """Shape of a convolution with a square kernel, padded by half of it."""

    batch: int
    channels_in: int
    channels_out: int
    kernel: int
    stride: int
    height: int
    width: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, stride: int) -> Convolution:
        """Return the shape of the convolution of `x` (batch, channels, height, width) with `weight`."""
        batch, channels, height, width = x.shape
        return cls(batch, channels, weight.shape[0], weight.shape[2], stride, height, width)

    @property
    def input(self) -> list[int]:
        return [self.batch, self.channels_in, self.height, self.width]

    @property
    def weight(self) -> list[int]:
        return [self.channels_out, self.channels_in, self.kernel, self.kernel]

    @property
    def output(self) -> list[int]:
        sides = [(side + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1 for side in (self.height, self.width)]
        return [self.batch, self.channels_out, *sides]

    def __str__(self) -> str:
        shape = f"{self.channels_in}>{self.channels_out} {self.kernel}x{self.kernel}/{self.stride}"
        return f"{shape} of {self.batch}x{self.height}x{self.width}"


@dataclass(frozen=True)
class Node:
    """A tensor of a graph."""

    descriptor: Descriptor
    shape: list[int]


class Graph:
    """Operations that are under construction; `numbers` names the tensors that need memory."""

    def __init__(self, library: Library):
        self.library = library
        self.operations: list[Descriptor] = []
        self.numbers: dict[str, int] = {}
        self.built: Descriptor | None = None
        self._made = 0

    def tensor(self, shape: list[int], dtype: DataType, name: str = "") -> Node:
        """Add a tensor; without a name it exists only inside the fused kernel."""
        self._made += 1
        _, channels, height, width = shape
        made = Descriptor(self.library, Kind.TENSOR)
        made.set(Attribute(906, Type.INT64), self._made).set(Attribute(901, Type.DATA_TYPE), int(dtype))
        made.set(Attribute(902, Type.INT64), shape)
        made.set(Attribute(903, Type.INT64), [height * width * channels, 1, width * channels, channels])
        made.set(Attribute(900, Type.INT64), ALIGNMENT)
        if name:
            self.numbers[name] = self._made
        else:
            made.set(Attribute(907, Type.BOOLEAN), True)
        return Node(made.finalize(f"tensor {name}"), shape)

    def per_channel(self, channels: int, dtype: DataType, name: str) -> Node:
        """Add a tensor with one number per channel."""
        return self.tensor([1, channels, 1, 1], dtype, name)

    def pointwise(self, mode: int, x: Node, other: Node | None, dtype: DataType) -> Node:
        """Add an operation on `x` and, where it takes two, `other`; return its result, which needs no memory."""
        y = self.tensor(x.shape, dtype)
        operation = self._pointwise(mode).set(Attribute(751, Type.DESCRIPTOR), x.descriptor)
        operation.set(Attribute(753, Type.DESCRIPTOR), y.descriptor)
        if other is not None:
            operation.set(Attribute(752, Type.DESCRIPTOR), other.descriptor)
        self.operations.append(operation.finalize(f"pointwise {mode}"))
        return y

    def relu_backward(self, x: Node, gradient: Node, dtype: DataType, name: str) -> Node:
        """Add the gradient of ReLU(x), into memory."""
        dx = self.tensor(x.shape, dtype, name)
        operation = self._pointwise(RELU_BACKWARD).set(Attribute(751, Type.DESCRIPTOR), x.descriptor)
        operation.set(Attribute(757, Type.DESCRIPTOR), gradient.descriptor)
        operation.set(Attribute(756, Type.DESCRIPTOR), dx.descriptor)
        self.operations.append(operation.finalize("gradient of ReLU"))
        return dx

    def _pointwise(self, mode: int) -> Descriptor:
        kind = Descriptor(self.library, Kind.POINTWISE).set(Attribute(0, Type.POINTWISE_MODE), mode)
        kind.set(Attribute(1, Type.DATA_TYPE), int(DataType.FLOAT)).finalize("pointwise")
        return Descriptor(self.library, Kind.POINTWISE_OPERATION).set(Attribute(750, Type.DESCRIPTOR), kind)

    def convolve(
        self, direction: str, convolution: Convolution, given: tuple[Node, Node], result: Node, adds: bool = False
    ) -> None:
        """Add a convolution or one of its gradients; CONVOLUTIONS says what it is given. `adds`: to the result."""
        kind, about, places, alpha, beta = CONVOLUTIONS[direction]
        padding, stride = [convolution.kernel // 2] * 2, [convolution.stride] * 2
        shape = Descriptor(self.library, Kind.CONVOLUTION).set(Attribute(100, Type.DATA_TYPE), int(DataType.FLOAT))
        shape.set(Attribute(101, Type.CONVOLUTION_MODE), CROSS_CORRELATION).set(Attribute(106, Type.INT64), 2)
        for number, value in ((102, [1, 1]), (103, stride), (104, padding), (105, padding)):
            shape.set(Attribute(number, Type.INT64), value)
        operation = Descriptor(self.library, kind)
        operation.set(Attribute(about, Type.DESCRIPTOR), shape.finalize("convolution"))
        for number, node in zip(places, (*given, result), strict=True):
            operation.set(Attribute(number, Type.DESCRIPTOR), node.descriptor)
        operation.set(Attribute(alpha, Type.FLOAT), 1.0).set(Attribute(beta, Type.FLOAT), float(adds))
        self.operations.append(operation.finalize(direction))

    def sums(self, y: Node) -> None:
        """Add the sum and the sum of squares of every channel, as `sum` and `squares`."""
        operation = Descriptor(self.library, Kind.STATISTICS).set(Attribute(770, Type.GENSTATS_MODE), 0)
        operation.set(Attribute(771, Type.DATA_TYPE), int(DataType.FLOAT))
        found = [self.per_channel(y.shape[1], DataType.FLOAT, name) for name in ("sum", "squares")]
        for number, node in zip((772, 773, 774), (y, *found), strict=True):
            operation.set(Attribute(number, Type.DESCRIPTOR), node.descriptor)
        self.operations.append(operation.finalize("statistics"))

    def norm_backward(self, gradient: Node, x: Node, mean: Node, rstd: Node, gamma: Node) -> None:
        """Add the gradients of a batch norm's gamma and beta, as `dgamma` and `dbeta`."""
        names = ("dgamma", "dbeta", "of_gradient", "of_x", "constant")  # the last three: factors that we compute too
        found = [self.per_channel(x.shape[1], DataType.FLOAT, name) for name in names]
        operation = Descriptor(self.library, Kind.NORM_BACKWARD)
        operation.set(Attribute(1620, Type.DATA_TYPE), int(DataType.FLOAT))
        for number, node in enumerate((mean, rstd, gamma, x, gradient, *found), 1621):
            operation.set(Attribute(number, Type.DESCRIPTOR), node.descriptor)
        self.operations.append(operation.finalize("gradients of a batch norm"))

    def build(self) -> Descriptor:
        """Close the graph."""
        if self.built is None:
            graph = Descriptor(self.library, Kind.GRAPH).set(Attribute(801, Type.DESCRIPTOR), self.operations)
            if self.library.handle:
                graph.set(Attribute(800, Type.HANDLE), self.library.handle)
            self.built = graph.finalize("graph")
        return self.built


def forward(library: Library, shape: Convolution, normed: bool) -> Graph:
    """Return y = convolution(x) with its sums; `normed`: of relu(x * scale + bias) instead."""
    graph = Graph(library)
    x = graph.tensor(shape.input, DataType.HALF, "x")
    weight = graph.tensor(shape.weight, DataType.HALF, "weight")
    y = graph.tensor(shape.output, DataType.HALF, "y")
    graph.convolve("forward", shape, (_normed(graph, x) if normed else x, weight), y)
    graph.sums(y)
    return graph


def wgrad(library: Library, shape: Convolution) -> Graph:
    """Return the gradient of the weight of convolution(relu(x * scale + bias))."""
    graph = Graph(library)
    x = graph.tensor(shape.input, DataType.HALF, "x")
    dweight = graph.tensor(shape.weight, DataType.HALF, "dweight")
    dy = graph.tensor(shape.output, DataType.HALF, "dy")
    graph.convolve("wgrad", shape, (_normed(graph, x), dy), dweight)
    return graph


def added_dgrad(library: Library, shape: Convolution) -> Graph:
    """Return the gradient of a convolution's input added to `dx`, in place."""
    graph = Graph(library)
    dy = graph.tensor(shape.output, DataType.HALF, "dy")
    weight = graph.tensor(shape.weight, DataType.HALF, "weight")
    dx = graph.tensor(shape.input, DataType.HALF, "dx")
    graph.convolve("dgrad", shape, (dy, weight), dx, adds=True)
    return graph


def dgrad(library: Library, shape: Convolution) -> Graph:
    """Return the gradient of relu(batch_norm(x)) below a convolution, behind the ReLU, with those of gamma and beta."""
    graph, channels = Graph(library), shape.channels_in
    dy = graph.tensor(shape.output, DataType.HALF, "dy")
    weight = graph.tensor(shape.weight, DataType.HALF, "weight")
    dz = graph.tensor(shape.input, DataType.FLOAT)
    graph.convolve("dgrad", shape, (dy, weight), dz)
    x = graph.tensor(shape.input, DataType.HALF, "x")
    names = ("mean", "rstd", "gamma", "beta")
    mean, rstd, gamma, beta = (graph.per_channel(channels, DataType.FLOAT, name) for name in names)
    z = graph.pointwise(SUBTRACT, x, mean, DataType.FLOAT)
    for mode, other in ((MULTIPLY, rstd), (MULTIPLY, gamma), (ADD, beta)):
        z = graph.pointwise(mode, z, other, DataType.FLOAT)
    gradient = graph.relu_backward(z, dz, DataType.HALF, "gradient")
    graph.norm_backward(gradient, x, mean, rstd, gamma)
    return graph


def _normed(graph: Graph, x: Node) -> Node:
    for mode, name in ((MULTIPLY, "scale"), (ADD, "bias")):
        x = graph.pointwise(mode, x, graph.per_channel(x.shape[1], DataType.HALF, name), DataType.HALF)
    return graph.pointwise(RELU, x, None, DataType.HALF)
