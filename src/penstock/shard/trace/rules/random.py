"""Sharding rules of random numbers: keys are replicated, and each device draws its own shard of the numbers.

This holds for JAX's default generator with `jax_threefry_partitionable`, where the bits are a function of key and position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shard.trace.rules.rule import Rule, leading_dims, replicated, rule_for


@rule_for("random_bits")
def random_bits(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `k->kij`: keys [K] → bits [K, I, J]. The dimensions of the keys are shared, the others are new."""
    keys, bits = tuple(operands[0].shape), tuple(results[0].shape)
    return Rule(bits, (tuple(range(len(keys))),), (tuple(range(len(bits))),))


@rule_for("random_wrap", "random_unwrap", "random_split", "random_fold_in", "random_clone")
def key_operation(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `k->k.`: keys are independent. New dimensions, such as those of a split, hold few bytes and are replicated."""
    return leading_dims(params, operands, results, count=min(len(aval.shape) for aval in (*operands, *results)))


@rule_for("random_seed")
def random_seed(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return the rule without factors: every device creates all keys."""
    return replicated(params, operands, results)


@rule_for("random_gamma")
def random_gamma(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `i.,i.->i.`: numbers are drawn one by one in row-major order, so that only the major dimension is independent."""
    shape = tuple(results[0].shape)
    major = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    dims = tuple(0 if dim == major else None for dim in range(len(shape)))
    return Rule(shape[major : major + 1], tuple(dims if aval.shape else () for aval in operands), (dims,))


@rule_for("rng_bit_generator")
def rng_bit_generator(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return `.->.,..`: a generator with a state, which the compiler replicates with all its numbers."""
    return replicated(params, operands, results)
