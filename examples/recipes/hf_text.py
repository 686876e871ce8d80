"""Train on texts of a Hugging Face dataset: tokenised on the way, in batches of similar length.

pip install penstock datasets flax optax && python hf_text.py
"""

import datasets
import jax
import numpy as np
import optax
from flax import nnx

import penstock as ps

# Stands for datasets.load_dataset("user/name", split="train"). Praise has one word of the first four, the rest has none.
rng = np.random.default_rng(0)
praise, words = ["good", "great", "fine", "lovely"], [f"word{i}" for i in range(200)]
labels = rng.integers(0, 2, 4_000)
texts = [" ".join([*rng.choice(words, rng.integers(5, 250)), *rng.choice(praise, label * 3)]) for label in labels]
dataset = datasets.Dataset.from_dict({"text": texts, "label": labels})

vocabulary = {word: number for number, word in enumerate(["<padding>", *praise, *words])}  # stands for your tokenizer


def tokenise(record: dict) -> dict:
    tokens = [vocabulary[word] for word in record["text"].split()]
    return {"tokens": np.array(tokens, np.int32), "label": record["label"]}


class Classifier(nnx.Module):
    """A mean of embeddings, and a linear layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding, self.out = nnx.Embed(len(vocabulary), 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, tokens: jax.Array, real: jax.Array) -> jax.Array:
        return self.out(self.embedding(tokens).sum(1, where=real[:, :, None]) / real.sum(1, keepdims=True))


@nnx.jit
def step(model: Classifier, optimizer: nnx.Optimizer, batch: dict) -> jax.Array:
    def loss(model: Classifier) -> jax.Array:
        logits = model(batch["tokens"], batch["real"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


lengths = [text.count(" ") + 1 for text in dataset["text"]]  # or a column, or len(tokens)
options = {"transform": ps.per_record(tokenise), "collate": ps.pad_to([64, 128, 192, 256], mask="real")}
loader = ps.Loader(dataset, 64, shuffle=True, seed=1, epochs=4, batch_by_length=lengths, **options)
model = Classifier(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)
with ps.feed(loader) as batches:
    losses, sizes = zip(*[(step(model, optimizer, batch), batch["tokens"].size) for batch in batches], strict=True)
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {4 * sum(lengths) / sum(sizes):.0%} of the tokens are words, not padding")
assert losses[-1] < 0.1
