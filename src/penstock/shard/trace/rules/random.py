"""Rules of random numbers: keys are everywhere, and each device draws its own part of the numbers.

It holds for JAX's default generator since `jax_threefry_partitionable` is on: bits are a function of key and position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, leading, replicated, rule_for


@rule_for("random_bits")
def random_bits(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """bits[..., *shape] of keys[...]: the dimensions of the keys are shared, the others are new."""
    keys, bits = tuple(operands[0].shape), tuple(results[0].shape)
    return Rule(bits, (tuple(range(len(keys))),), (tuple(range(len(bits))),))


@rule_for("random_wrap", "random_unwrap", "random_split", "random_fold_in", "random_clone")
def of_keys(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Keys are independent of each other; what is new, the parts of a split among them, is few bytes and made everywhere."""
    return leading(params, operands, results, count=min(len(each.shape) for each in (*operands, *results)))


@rule_for("random_seed")
def random_seed(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    return replicated(params, operands, results)


@rule_for("random_gamma")
def random_gamma(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Drawn one by one in the order in which they lie, so that only the major dimension is free."""
    shape = tuple(results[0].shape)
    major = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    dims = tuple(0 if dim == major else None for dim in range(len(shape)))
    return Rule(shape[major : major + 1], tuple(dims if each.shape else () for each in operands), (dims,))


@rule_for("rng_bit_generator")
def rng_bit_generator(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """A generator with a state that goes on: the compiler gives every device all of it."""
    return replicated(params, operands, results)
