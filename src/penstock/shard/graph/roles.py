"""Infer the role of each input of a step, "parameters", "optimizer", "batch" or "other", and the batch dimensions of its graph.

The roles are read from data flow: the results that an input influences, and its first use. Names are not considered. The
dimensions of inputs, as the components of the graph connect them, distinguish a batch from weights that are not trained:

- The *rows* are the dimension that is carried through the most FLOPs of products. Products keep the rows, and sum over the
  features of a network.
- An input is *frozen* if its first dimension is contracted or looked up, or is a feature that such an input makes. It is also
  frozen if it meets the rows without having them, as a bias does that is added to every row.
- An input that is only looked up is a batch all the same, if it is beside leaves of a batch of as many rows.

The rows also tell parameters from the state of an optimizer. The forward pass combines parameters with values that have rows. A
gradient has none, since it is summed over them, and an optimizer combines its state with gradients and parameters alone.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax

from penstock.shard.graph.axis_groups import SELECT_ELEMENTS, FirstUse, find_uses
from penstock.shard.graph.decisions import Graph
from penstock.shard.graph.step_model import StepModel
from penstock.shard.trace.flat_program import CONTRACTIONS, FlatProgram, Op, find_dependencies, find_dependents, reachable


def infer_roles(model: StepModel, state: Mapping[int, int], arguments: Sequence[int]) -> list[str]:
    """Return the role of each input.

    - "parameters": state that the forward pass reads (`find_parameters`).
    - "optimizer": the other state, such as moments, averages of parameters, statistics of a batch normalisation, and scalars.
    - "batch": an input that is not state, whose first dimension is connected with no dimension of the state, and that is not
      frozen. Keys of random numbers are a batch if they share the first dimension of other batch inputs.
    - "other": the other inputs, such as frozen weights and learning rates. Keys of random numbers are "other" in the state too.

    Args:
      state: index of each output that replaces an input → index of that input.
      arguments: for each input, the number of the argument that it belongs to.
    """
    program = model.program
    replaced = set(state.values())
    keys = find_keys(program)
    reached = find_dependencies(program, [output for output in program.outputs if output is not None])
    used = {index for index, value in enumerate(program.inputs) if value in reached}
    batch = find_batch(model, replaced, keys, used, arguments)
    parameters = find_parameters(model, state, batch)
    roles = []
    for index, value in enumerate(program.inputs):
        if index in replaced and index not in keys:
            roles.append("parameters" if index in parameters and program.values[value].shape else "optimizer")
        else:
            roles.append("batch" if index in batch else "other")
    return roles


def find_parameters(model: StepModel, state: Mapping[int, int], batch: Iterable[int]) -> set[int]:
    """Return the indices of the state that the forward pass reads.

    This is the state from which values with rows are computed, before it gets its new value. A head that reads the mean over the
    rows meets none; it is found because the gradients of all these leaves depend on it. If there is another result that depends
    on all of them, such as the loss, so it must on the head.

    In a step without rows, arrays that products and lookups make take the place of values with rows. Without these too, state on
    which other results depend is a parameter; all is, if there are none.

    Args:
      batch: the indices of the inputs that are a batch.
    """
    program, inputs = model.program, model.program.inputs
    arrays = {value for value, each in enumerate(program.values) if math.prod(each.shape) > 1}
    new = {program.outputs[output] for output in state} - set(inputs)
    dims = find_batch_dims(model.graph, [model.inputs[index] for index in batch])
    rows = {model.graph.components[node, dim] for node, each in dims.items() for dim in each}
    components = _Flow(model).components
    with_rows = {value for value in arrays if rows & components(value)}
    products = {result for op in program.ops if op.primitive in _PRODUCTS_AND_LOOKUPS for result in op.results} & arrays
    following = _find_following(program)
    sources: defaultdict[int, list[int]] = defaultdict(list)
    for value, results in following.items():
        for result in results:
            sources[result].append(value)
    # Another forward pass in the same step may read the new parameters.
    before = {value: each for value, each in sources.items() if value not in new}
    forward = _state_among(reachable(before, with_rows), model, state)
    forward = forward or _state_among(reachable(before, products), model, state)
    others = [output for index, output in enumerate(program.outputs) if index not in state and output is not None]
    if not forward:
        return _state_among(find_dependencies(program, others) if others else set(inputs), model, state)
    dependencies = [_state_among(reachable(sources, [other]), model, state) for other in others]
    # The norm of updates depends on moments, too; the loss depends on less.
    of_loss = min((each for each in dependencies if each >= forward), key=len, default=set(state.values()))
    trained = {program.outputs[output] for output, index in state.items() if index in forward} & new
    # All updates depend on all moments where they are scaled by one number, such as their norm.
    to_arrays = {value: arrays.intersection(results) for value, results in following.items() if value not in trained}
    heads = [index for index in of_loss - forward if len(trained) > 1 and trained <= reachable(to_arrays, [inputs[index]])]
    return forward.union(heads)


def _state_among(values: set[int], model: StepModel, state: Mapping[int, int]) -> set[int]:
    """Return the indices of the state among some values."""
    return {index for index in state.values() if model.program.inputs[index] in values}


def _find_following(program: FlatProgram) -> dict[int, list[int]]:
    """Return, for each value, the values computed from it. An iteration of a loop does not lead to the next."""
    pairs: list[tuple[int | None, int | None]] = []
    for op in program.ops:
        pairs += [(operand, result) for operand in op.operands for result in op.results]
    for loop in program.loops:
        pairs += [*loop.slices, *loop.stacks]
        for carry in loop.carries:
            pairs += [(carry.initial, carry.before), (carry.after, carry.result)]
    pairs += [(inside, outside) for each in program.conditionals for inside, outside, _ in each.results]
    following: defaultdict[int, list[int]] = defaultdict(list)
    for value, result in pairs:
        if value is not None and result is not None:
            following[value].append(result)
    return following


_PRODUCTS_AND_LOOKUPS = (*CONTRACTIONS, "gather")


def find_batch(model: StepModel, replaced: set[int], keys: set[int], used: set[int], arguments: Sequence[int]) -> set[int]:
    """Return the indices of the inputs that are a batch.

    Args:
      replaced: the indices of the state.
      keys: the indices of keys of random numbers. They are a batch where they share the first dimension of other batch inputs.
      used: the indices of the inputs on which results of the step depend.
      arguments: for each input, the number of the argument that it belongs to.
    """
    components, program = model.graph.components, model.program
    state_nodes = {model.inputs[index] for index in replaced}
    state_components = {component for (node, _), component in components.items() if node in state_nodes}
    first: dict[int, int] = {}
    for index, value in enumerate(program.inputs):
        if index not in replaced and program.values[value].shape:
            node = model.inputs[index]
            component = components[node, first_shardable_dim(model.graph, node)]
            if component not in state_components:
                first[index] = component
    uses = find_uses(program, model.groups).first
    batch = _without_frozen(model, uses, {index: first[index] for index in first if index in used - keys})
    rows = {first[index] for index in batch}
    batch |= {index for index in keys & used if first.get(index) in rows}
    batch |= _looked_up_beside(model, uses, batch, (used - keys - replaced) & set(first), arguments)
    # Unused labels differ from the unused optimizer of an evaluation only in their size, and in the leaves beside them.
    others = {arguments[index] for index in used - batch if program.values[program.inputs[index]].shape}
    sizes = {program.values[program.inputs[index]].shape[0] for index in batch}
    unused = (index for index in set(first) - used - keys if arguments[index] not in others)
    return batch | {index for index in unused if program.values[program.inputs[index]].shape[0] in sizes}


def _looked_up_beside(
    model: StepModel, uses: Mapping[int, FirstUse], batch: set[int], inputs: set[int], arguments: Sequence[int]
) -> set[int]:
    """Return the inputs that are only looked up, in arguments whose other leaves are a batch of as many rows.

    The positions of the atoms of molecules are an example: edges look them up, as they do the rows of an embedding.
    """
    program = model.program
    rows = {index: program.values[program.inputs[index]].shape[0] for index in inputs}
    first = {index: uses.get(program.inputs[index]) for index in inputs}
    looked_up = {index for index, use in first.items() if use is not None and use.op.primitive == "gather"}
    found: set[int] = set()
    for argument in {arguments[index] for index in batch}:
        others = {index for index in inputs - batch if arguments[index] == argument}
        sizes = {rows[index] for index in batch & inputs if arguments[index] == argument}
        if others <= looked_up and all(rows[index] in sizes for index in others):
            found |= others
    return found


def _without_frozen(model: StepModel, uses: Mapping[int, FirstUse], first: dict[int, int]) -> set[int]:
    """Return the inputs that are not frozen.

    Args:
      first: index of each input to consider → the component of its first dimension.
    """
    inputs, flow = model.program.inputs, _Flow(model)
    summed, features = set(), set()
    for index in first:
        node, use = model.inputs[index], uses.get(inputs[index])
        if use is None or use.op.primitive not in _PRODUCTS_AND_LOOKUPS:
            continue
        if use.sums_over(first_shardable_dim(model.graph, node)):
            summed.add(index)
            kept = {factor for result in use.op.rule.results for factor in result if factor is not None}
            dims = range(len(model.graph.nodes[node].sizes))
            features |= {model.graph.components[node, dim] for dim in dims if use.factor(dim) in kept}
    carried = {index for index, component in first.items() if index not in summed and flow.carries(inputs[index], component)}
    features -= {first[index] for index in carried}
    dims_of_carried = {component for index in carried for component in flow.components(inputs[index])}
    rows = _most_computed(model, dims_of_carried & set(first.values()) - features)
    data = find_dependents(model.program, (inputs[index] for index in carried))
    unlike_weights = {index for index, component in first.items() if index not in summed and component not in features}
    frozen = {index for index in unlike_weights if flow.meets(inputs[index], rows, data)}
    return {index for index, component in first.items() if component in rows} | (unlike_weights - frozen)


def _most_computed(model: StepModel, candidates: set[int]) -> set[int]:
    """Return the components, among some, that the most FLOPs of products keep and do not sum over; several if they are equal."""
    flops = dict.fromkeys(candidates, 0.0)
    for node, op in zip(model.graph.op, model.groups.non_elementwise, strict=True):
        if op.primitive in CONTRACTIONS:
            kept = {factor for result in op.rule.results for factor in result}
            by_kept: dict[bool, set[int]] = {True: set(), False: set()}
            for factor in range(len(op.rule.sizes)):
                by_kept[factor in kept].add(model.graph.components[node, factor])
            for component in (by_kept[True] - by_kept[False]) & candidates:
                flops[component] += op.flops * op.count
    most = max(flops.values(), default=0.0)
    return {component for component, each in flops.items() if each >= most * (1 - 1e-9)}


class _Flow:
    """The operations and values that values go to."""

    def __init__(self, model: StepModel):
        self._model = model
        self._readers: dict[int, list[Op]] = defaultdict(list)
        self._inside: dict[int, list[int]] = defaultdict(list)
        for op in model.program.ops:
            for operand in {value for value in op.operands if value is not None}:
                self._readers[operand].append(op)
        for pair in model.program.same_sharding:
            self._inside[pair.outer].append(pair.inner)
        self.components = functools.cache(self._find_components)

    def carries(self, value: int, component: int) -> bool:
        """Return whether a product or lookup that reads an input, perhaps after elementwise operations, keeps a dimension."""
        return any(
            op.primitive in _PRODUCTS_AND_LOOKUPS and component in self.components(op.results[0])
            for op in self._follow(value, self._same_elements(value))
        )

    def meets(self, value: int, rows: set[int], data: set[int]) -> bool:
        """Return whether an input without rows is combined with a value that has them.

        Operations that do not read data may come before, such as the normalisation of a weight. For an input that is data
        itself, only elementwise operations may.
        """
        if not rows or rows & self.components(value):
            return False
        same = self._same_elements(value)

        def goes_on(op: Op, result: int) -> bool:
            return not rows & self.components(result) and (same(op, result) if value in data else result not in data)

        return any(
            (op.rule.identity or op.primitive in (*CONTRACTIONS, "broadcast_in_dim"))
            and any(rows & self.components(result) for result in op.results)
            for op in self._follow(value, goes_on)
        )

    def _same_elements(self, value: int) -> Callable[[Op, int], bool]:
        """Return a predicate: whether an operation makes its result of single elements, without a new dimension."""
        rank = self._rank(value)
        return lambda op, result: (op.rule.identity or op.primitive in SELECT_ELEMENTS) and self._rank(result) <= rank

    def _follow(self, value: int, goes_on: Callable[[Op, int], bool]) -> Iterator[Op]:
        """Yield all operations that read a value, or a result of another of them that satisfies `goes_on`."""
        seen, queue = {value}, deque([value])
        while queue:
            reached = queue.popleft()
            following = set(self._inside[reached])
            for op in self._readers[reached]:
                yield op
                following |= {result for result in op.results if goes_on(op, result)}
            queue += following - seen
            seen |= following

    def _rank(self, value: int) -> int:
        """Return the number of dimensions of a value that are larger than one."""
        return sum(size > 1 for size in self._model.program.values[value].shape)

    def _find_components(self, value: int) -> frozenset[int]:
        """Return the components of the dimensions of a value."""
        graph, groups = self._model.graph, self._model.groups
        if value in graph.leaf:
            node = graph.leaf[value]
            return frozenset(graph.components[node, dim] for dim in range(len(graph.nodes[node].sizes)))
        return frozenset(graph.components[graph.group[value], dim] for dim in groups.dims[value] if dim is not None)


_KEY_OPERANDS = {"random_wrap": 1, "threefry2x32": 2}
"""Primitives that read raw keys → how many of their first operands are keys."""

_MOVES: dict[str, int | None] = {
    **dict.fromkeys(("slice", "dynamic_slice", "gather", "squeeze", "reshape", "broadcast_in_dim", "transpose", "copy"), 1),
    **dict.fromkeys(("concatenate", "select_n", "split", "unstack", "optimization_barrier")),
}
"""Primitives that only select or move elements → how many of their first operands hold these; None for all."""

_RAW_SHAPES = ((2,), (4,))
"""Shapes of raw keys of one generator: of threefry2x32, and of rbg and unsafe_rbg."""


def find_keys(program: FlatProgram) -> set[int]:
    """Return the indices of the inputs that are keys of random numbers."""
    sources: defaultdict[int, list[int]] = defaultdict(list)
    keys: set[int] = set()
    for op in program.ops:
        if op.primitive in _KEY_OPERANDS:
            keys.update(value for value in op.operands[: _KEY_OPERANDS[op.primitive]] if value is not None)
        elif op.primitive in _MOVES:
            for result in op.results:
                sources[result] += [value for value in op.operands[: _MOVES[op.primitive]] if value is not None]
    for pair in program.same_sharding:
        sources[pair.inner].append(pair.outer)
    read = {value for op in program.ops for value in op.operands} | {pair.outer for pair in program.same_sharding}
    keys |= {value for value in program.inputs if value not in read and program.values[value].shape in _RAW_SHAPES}
    keys = reachable(sources, keys)
    return {
        index
        for index, value in enumerate(program.inputs)
        if jax.numpy.issubdtype(program.values[value].dtype, jax.dtypes.prng_key)
        or (value in keys and program.values[value].dtype == "uint32")
    }


# Batch dimensions


def find_batch_dims(graph: Graph, batch: Iterable[int]) -> dict[int, list[int]]:
    """Return, for each node, the dimensions reachable from the first dimension of the batch inputs.

    If the first dimension of an input is replicated where the input is used, the next dimension counts instead. The same holds
    for the parts into which a reshape splits a batch dimension. An example is a step that accumulates gradients: it splits its
    batch, [B] → [microbatches, rows], and loops over the microbatches, so that the rows are the batch dimension from there on.

    Args:
      batch: indices of the nodes of the batch inputs.
    """
    components = graph.components
    found = {components[node, first_shardable_dim(graph, node)] for node in batch if graph.nodes[node].sizes}
    looped: set[tuple[int, int]] = set()
    size = -1
    while size != len(found):  # a part may be split again
        size = len(found)
        for factor, ((node, major), following) in graph.splits.items():
            if components[factor] in found and graph.nodes[node].sizes[major] == 1:
                found.add(components[following])
                looped.add(factor)
    dims: dict[int, list[int]] = {}
    for (node, dim), component in components.items():
        if component in found and (node, dim) not in looped:
            dims.setdefault(node, []).append(dim)
    return dims


def find_state_work(graph: Graph, batch: Iterable[int], batch_dims: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the nodes that update or cast the state: nodes that no batch reaches, and elementwise operations on new state.

    State with a batch dimension, such as the state of a recurrent network, does not count. Without a batch, none does. `batch`
    and `batch_dims` are the argument and the result of `find_batch_dims`.
    """
    following: defaultdict[int, list[int]] = defaultdict(list)
    for edge in graph.edges:
        if edge.kind != "store":
            following[edge.a].append(edge.b)
    reached = reachable(following, batch)
    stored = {edge.a for edge in graph.edges if edge.kind == "store" and graph.nodes[edge.a].kind == "group"}
    return (stored | (set(range(len(graph.nodes))) - reached)) - set(batch_dims) if batch_dims else set()


def first_shardable_dim(graph: Graph, leaf: int) -> int:
    """Return the first dimension of an input that may be sharded where the input is used; 0 if there is none."""
    replicated = {
        a
        for edge in graph.edges
        if edge.kind == "use" and edge.a == leaf
        for a, b in zip(edge.source, edge.target, strict=True)
        if a is not None and (b is None or graph.nodes[edge.b].sizes[b] == 1)
    }
    return next((dim for dim in range(len(graph.nodes[leaf].sizes)) if dim not in replicated), 0)
