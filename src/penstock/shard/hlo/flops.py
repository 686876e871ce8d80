"""Count the FLOPs of one device in one run of a compiled program, and describe the costs that they leave out.

The conventions are XLA's (`HloCostAnalysis`), except that loops are multiplied by their trip count.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable

from penstock.shard.hlo.parse import Array, Computation, HloProgram, Instruction, parse_hlo
from penstock.shard.wording import about_loops, about_operations

# One FLOP per element of the result. XLA counts exp, log, tanh, rsqrt and others separately, as `transcendentals`.
# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "add", "and", "bitcast-convert", "ceil", "clamp", "clz", "compare", "complex", "convert", "count-leading-zeros",
    "divide", "floor", "imag", "is-finite", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "real",
    "reduce-precision", "remainder", "round-nearest-afz", "round-nearest-even", "select", "shift-left",
    "shift-right-arithmetic", "shift-right-logical", "sign", "stochastic-convert", "subtract", "xor", "all-reduce",
    "all-reduce-start", "reduce-scatter",
))
_FREE = frozenset((
    # They move or create elements, or order other instructions.
    "add-dependency", "after-all", "bitcast", "broadcast", "concatenate", "constant", "copy", "domain", "dynamic-reshape",
    "dynamic-slice", "dynamic-update-slice", "gather", "get-dimension-size", "get-tuple-element", "infeed", "iota",
    "opt-barrier", "optimization-barrier", "outfeed", "pad", "parameter", "partition-id", "replica-id", "reshape",
    "recv", "reverse", "send", "set-dimension-size", "slice", "topk", "transpose", "tuple", "rng", "rng-bit-generator",
    "rng-get-and-update-state",
    # Transcendental functions.
    "acos", "acosh", "asin", "asinh", "atan2", "atanh", "cbrt", "cosh", "cosine", "erf", "exponential",
    "exponential-minus-one", "log", "log-plus-one", "logistic", "power", "rsqrt", "sine", "sinh", "sqrt", "tan", "tanh",
    # Collectives without a reduction.
    "all-gather", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
))
# Custom calls that only annotate, move or compare elements.
_FREE_TARGETS = frozenset((
    "AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart", "ConcatBitcast",
    "CreateBuffer", "GatherScatterIndicesBitpacked", "LayoutConstraint", "MoveToDevice", "MoveToHost", "PadToStatic",
    "PinToDevice", "PinToDeviceSram", "SPMDFullToShardShape", "SPMDShardToFullShape", "Sharding", "SliceId", "SliceToDynamic",
    "TopK", "X64Combine", "X64SplitHigh", "X64SplitLow", "annotate_device_placement", "xla.sdy.FuncResultSharding",
    "ZeroCrop", "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape", "xla.sdy.PropagationBarrier", "xla.sdy.ShardingGroup",
))
# fmt: on


def count_flops(text: str) -> float:
    """Return the FLOPs of one device in one run of a program.

    They equal `compiled.cost_analysis()["flops"]`, except that the body of a loop counts as often as it runs
    (`HloProgram.counted_trips`). A matrix product has 2·M·N·K. A convolution has 2 for each multiplication outside of the
    padding. Arithmetic, comparisons and conversions have 1 an element. Transcendental functions and data movement have none.
    For a conditional, the branch with the most FLOPs counts. `describe_unknown_costs` says which costs this leaves out.
    """
    return _counted(text).total


def describe_unknown_costs(text: str) -> tuple[str, ...]:
    """Return sentences about costs that the program does not show: loops of unknown length, and library calls.

    The numbers in them count places in the program, and not how often these run. There are none if all costs are known.
    """
    counted = _counted(text)
    return (*about_loops(counted.loops), *about_operations(counted.operations, "nothing"))


class _Flops:
    """The FLOPs of a program, and the costs that they leave out.

    Attributes:
      total: FLOPs of one run.
      loops: the number of places with a loop of unknown length.
      operations: opcode, or target of a custom call, whose cost is unknown → number of places with one.
    """

    def __init__(self, program: HloProgram) -> None:
        self.program = program
        self.loops = 0
        self.operations: Counter[str] = Counter()
        self.of = functools.cache(self._computation)  # each computation is read once: `loops` and `operations` count places
        self.total = self.of(program.entry.name)

    def _computation(self, name: str) -> float:
        """Return the FLOPs of one run of a computation."""
        where = self.program.computations[name]
        return float(sum(self._instruction(where, instruction) for instruction in where))

    def _instruction(self, where: Computation, instruction: Instruction) -> float:
        """Return the FLOPs of an instruction and of the computations that it runs."""
        opcode = instruction.opcode
        if opcode == "while":
            self.loops += self.program.trip_count(where, instruction) is None
            once = sum(self.of(part.name) for part in self.program.loop_computations(instruction))
            return once * self.program.counted_trips(where, instruction)
        if instruction.branches:
            return max(map(self.of, instruction.branches))
        if instruction.called:
            return sum(map(self.of, instruction.called))
        if opcode in _ELEMENTWISE:
            return instruction.elements
        if opcode.removesuffix("-start") in _FREE or opcode.endswith(("-done", "-update")):  # its start counts
            return 0
        if opcode == "reduce-scatter-start":  # its result begins with the operands
            return sum(array.elements for array in instruction.arrays[len(instruction.operands) :])
        if opcode == "custom-call":
            return self._custom_call(where, instruction)
        if opcode in ("dot", "ragged-dot"):
            return _dot(instruction, where.operand(instruction).arrays[0], instruction.numbers("lhs_contracting_dims"))
        if opcode == "convolution":
            return _convolution(instruction, where.operand(instruction).arrays[0], instruction.arrays[0])
        if opcode == "fft":
            logarithms = (n.bit_length() - 1 for n in instruction.numbers("fft_length"))
            return 8 * where.operand(instruction).elements * math.prod(logarithms)
        if opcode == "sort":
            elements = where.operand(instruction).elements
            return elements * math.ceil(math.log2(elements)) if elements > 1 else 0
        function = instruction.attribute(r"to_apply=%([\w.\-]+)") or instruction.attribute(r"scatter=%([\w.\-]+)")
        applications = _applications(where, instruction)
        if function is None or applications is None:
            self.operations[opcode] += 1
            return 0
        return self.of(function) * applications

    def _custom_call(self, where: Computation, instruction: Instruction) -> int:
        """Return the FLOPs of a custom call; if they are unknown, record that and return 0."""
        target = instruction.attribute(r'custom_call_target="([^"]*)"') or "custom-call"
        if target in _FREE_TARGETS:
            return 0
        flops = _library_call(target, where, instruction)
        if flops is None:
            self.operations[target] += 1
        return flops or 0


@functools.lru_cache(maxsize=2)  # both public functions are called with the same text
def _counted(text: str) -> _Flops:
    """Parse a program and count its FLOPs."""
    return _Flops(parse_hlo(text))


def _applications(where: Computation, instruction: Instruction) -> int | None:
    """Return how often an instruction applies the function that it names; None if this is unknown."""
    opcode = instruction.opcode
    if opcode == "reduce":
        return where.operand(instruction).elements - instruction.arrays[0].elements
    if opcode == "reduce-window":
        return _window_applications(instruction, where.operand(instruction).arrays[0])
    if opcode == "select-and-scatter":
        return where.operand(instruction, 1).elements
    if opcode == "scatter":
        return where.operand(instruction, len(instruction.operands) - 1).elements
    return instruction.elements if opcode == "map" else None


def _window_applications(instruction: Instruction, image: Array) -> int:
    """Return how often a `reduce-window` applies its function: for each result, one less than the elements of its window.

    The TPU compiler writes a reduction whose result is broadcast to the shape of its operand, such as the maximum of a softmax,
    as a window that always covers the whole dimension: 2·N − 1 elements, with N − 1 of padding. It runs as a reduction.
    """
    result, window = instruction.arrays[0], _window(instruction)
    wide = [(size, low, image.dims[axis]) for axis, (size, _, low, _, _) in enumerate(window) if size > 1]
    if result.dims == image.dims and all((size, low) == (2 * length - 1, length - 1) for size, low, length in wide):
        return image.elements - image.elements // math.prod(length for _, _, length in wide)
    return result.elements * (math.prod(size for size, *_ in window) - 1)


def _dot(instruction: Instruction, left: Array, contracted: Iterable[int]) -> int:
    """Return the FLOPs of a matrix product, given the contracted dimensions of its left operand."""
    return 2 * instruction.arrays[0].elements * math.prod(left.dims[dimension] for dimension in contracted)


def _library_call(target: str, where: Computation, instruction: Instruction) -> int | None:
    """Return the FLOPs of a matrix product or convolution that a library computes: cuBLAS, cuDNN or oneDNN.

    Returns None if it is another call, or if the text does not give its dimensions. Its result includes a workspace. A gradient
    has the window and labels of the forward convolution, which has as many multiplications.
    """
    if any(name in target for name in ("$gemm", "$lt$matmul", "onednn$matmul")):
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^]]*)\]', instruction.attributes)
        if contracted is None:
            return None
        return _dot(instruction, where.operand(instruction).arrays[0], map(int, re.findall(r"\d+", contracted[1])))
    if not target.startswith("__cudnn$conv") or "dim_labels=" not in instruction.attributes:
        return None
    first, second = (where.operand(instruction, position).arrays[0] for position in (0, 1))
    result = instruction.arrays[0]
    if "BackwardInput" in target:
        return _convolution(instruction, result, first)
    return _convolution(instruction, first, second if "BackwardFilter" in target else result)


def _convolution(instruction: Instruction, image: Array, result: Array) -> int:
    """Return the FLOPs of a convolution.

    The TPU compiler also writes matrix products as convolutions: without a window, or with one over their batch dimension.
    """
    image_labels, _, result_labels = re.split(r"_|->", instruction.attribute(r"dim_labels=(\S+?)(?:,|$)") or "")
    image_groups = int(instruction.attribute(r"feature_group_count=(\d+)") or 1)
    batch_groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    total = image.dims[image_labels.index("f")] // image_groups * image.dims[image_labels.index("b")] // batch_groups
    total *= result.dims[result_labels.index("f")]
    for spatial, (size, stride, low, image_dilation, kernel_dilation) in enumerate(_window(instruction)):
        limits = (image.dims[image_labels.index(str(spatial))], result.dims[result_labels.index(str(spatial))])
        total *= _valid_positions(size, stride, low, image_dilation, kernel_dilation, *limits)
    return 2 * total


def _window(instruction: Instruction) -> list[tuple[int, int, int, int, int]]:
    """Return for each spatial dimension of a window: size, stride, low padding, image dilation, kernel dilation."""
    text = instruction.attribute(r"window=\{([^}]*)\}") or ""
    parts = {name: values.split("x") for name, values in (part.split("=") for part in text.split())}
    sizes = parts.get("size", [])
    ones = ["1"] * len(sizes)
    columns = [sizes, parts.get("stride", ones), [low.split("_")[0] for low in parts.get("pad", ["0"] * len(sizes))]]
    columns += [parts.get("lhs_dilate", ones), parts.get("rhs_dilate", ones)]
    return [tuple(map(int, row)) for row in zip(*columns, strict=True)]  # type: ignore[misc]  # five columns


def _valid_positions(size: int, stride: int, low: int, image_dilation: int, kernel_dilation: int, image: int, result: int) -> int:
    """Count the pairs of a kernel position and a result position that read an element of the image, and no padding.

    >>> _valid_positions(size=3, stride=1, low=1, image_dilation=1, kernel_dilation=1, image=8, result=8)
    22
    """
    count = 0
    for kernel in range(size):
        offset = kernel * kernel_dilation - low
        if stride == 1 and image_dilation == 1:
            count += max(0, min(image - offset, result) - max(-offset, 0))
            continue
        for position in range(offset, offset + stride * result, stride):
            count += position % image_dilation == 0 and 0 <= position // image_dilation < image
    return count
