"""An equivariant force field in the form of NequIP (Batzner et al. 2022, arXiv:2101.03164), of e3nn's operations and layers.

The forces are gradients of the energy, so that the gradient of their loss is a second derivative. Features, layers and radial
network have the size of NequIP's published models of small molecules, which have few parameters.
"""

from __future__ import annotations

from typing import Any

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import Array

from penstock_bench.suites.shard.zoo.model import Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, init_state, train_step

_MOLECULES, _ATOMS, _SPECIES = 16, 16, 4
_CUTOFF, _RADIAL = 4.0, 8
_GATED = e3nn.Irreps("192x0e + 64x1o + 64x2e")  # 64 scalars, and a gate for each vector and each tensor
_LAYERS = 3


class _Energies(nn.Module):
    """Positions [N, 3], species [N] and edges [E] → the energy of each atom [N]."""

    @nn.compact
    def __call__(self, positions: Array, species: Array, senders: Array, receivers: Array) -> Array:
        vectors = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
        distances = jnp.sqrt(jnp.sum(vectors.array**2, axis=-1))
        radial = e3nn.bessel(distances, _RADIAL, _CUTOFF) * e3nn.poly_envelope(5, 2, _CUTOFF)(distances)[:, None]
        directions = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, normalize=True)
        nodes = e3nn.IrrepsArray("64x0e", nn.Embed(_SPECIES, 64)(species))
        for _ in range(_LAYERS):
            nodes = _Interaction()(nodes, directions, radial, senders, receivers)
        return e3nn.flax.Linear("0e")(nodes).array[:, 0]


class _Interaction(nn.Module):
    """Features of the atoms, [N, irreps] → the same, after each has heard from its neighbours."""

    @nn.compact
    def __call__(
        self, nodes: e3nn.IrrepsArray, directions: e3nn.IrrepsArray, radial: Array, senders: Array, receivers: Array
    ) -> e3nn.IrrepsArray:
        messages = e3nn.tensor_product(e3nn.flax.Linear(nodes.irreps)(nodes)[senders], directions, filter_ir_out="0e + 1o + 2e")
        mlp = e3nn.flax.MultiLayerPerceptron((64, 64, messages.irreps.num_irreps), jax.nn.silu, output_activation=False)
        received = e3nn.scatter_sum(messages * mlp(radial), dst=receivers, output_size=len(nodes.array))
        kept = e3nn.flax.Linear(_GATED, force_irreps_out=True)(nodes)
        heard = e3nn.flax.Linear(_GATED, force_irreps_out=True)(received / _ATOMS**0.5)
        return e3nn.gate(kept + heard)


def force_field() -> Model:
    module, optimizer = _Energies(), optax.adam(1e-3)

    def init() -> PyTree:
        batch = _batch(SEED)
        params = module.init(jax.random.key(SEED), *(batch[name] for name in ("positions", "species", "senders", "receivers")))
        return init_state(params, optimizer)

    def loss(params: PyTree, batch: PyTree) -> Array:
        def total(positions: Array) -> tuple[Array, Array]:
            energies: Any = module.apply(params, positions, batch["species"], batch["senders"], batch["receivers"])
            by_molecule = jax.ops.segment_sum(energies, batch["molecule"], num_segments=_MOLECULES)
            return by_molecule.sum(), by_molecule

        gradient, energies = jax.grad(total, has_aux=True)(batch["positions"])
        return optax.l2_loss(energies, batch["energies"]).mean() + 10 * optax.l2_loss(-gradient, batch["forces"]).mean()

    return Model("e3nn-force-field", "Linen", init, _batch, train_step(loss, optimizer))


def _batch(seed: int) -> PyTree:
    """Return molecules in which each atom is the neighbour of all others; the cutoff decides which of them it hears."""
    rng = np.random.default_rng(seed)
    atoms = _MOLECULES * _ATOMS
    senders, receivers = np.nonzero(~np.eye(_ATOMS, dtype=bool))
    offsets = _ATOMS * np.arange(_MOLECULES)[:, None]
    grid = np.stack(np.meshgrid(np.arange(4.0), np.arange(2.0), np.arange(2.0)), axis=-1).reshape(1, _ATOMS, 3)
    positions = 1.5 * grid + 0.2 * rng.standard_normal((_MOLECULES, _ATOMS, 3))
    return {
        "positions": positions.reshape(atoms, 3).astype(np.float32),
        "species": rng.integers(_SPECIES, size=atoms, dtype=np.int32),
        "molecule": np.repeat(np.arange(_MOLECULES, dtype=np.int32), _ATOMS),
        "senders": (senders + offsets).reshape(-1).astype(np.int32),
        "receivers": (receivers + offsets).reshape(-1).astype(np.int32),
        "energies": rng.standard_normal(_MOLECULES, np.float32),
        "forces": rng.standard_normal((atoms, 3), np.float32),
    }
