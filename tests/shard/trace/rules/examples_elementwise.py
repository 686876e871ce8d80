"""Examples of elementwise operations without a rule of their own: their arrays have the same shape."""

from __future__ import annotations

from hypothesis import strategies as st
from jax import lax
from tests.shard.trace.rules.examples import even, example, examples, integers, numbers

UNARY = [
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "cos", "cosh"),
    *("digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "is_finite", "lgamma", "log", "log1p", "logistic"),
    *("neg", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh"),
]
SPECIAL = {"igamma": 2, "igamma_grad_a": 2, "igammac": 2, "polygamma": 2, "zeta": 2, "regularized_incomplete_beta": 3}
OF_INTEGERS = {"clz": lax.clz, "population_count": lax.population_count, "not": lax.bitwise_not}
OF_COMPLEX = {"real": lax.real, "imag": lax.imag, "conj": lax.conj}
CHANGED = {
    "convert_element_type": lambda x: x.astype("bfloat16"),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 2),
}


def apply_all(x, i):
    return (
        [getattr(lax, name)(x / 16) for name in UNARY],
        [getattr(lax, f"{name}_p").bind(*[x] * arity) for name, arity in SPECIAL.items()],
        [function(i) for function in OF_INTEGERS.values()],
        [function(lax.complex(x, x)) for function in OF_COMPLEX.values()],
        [function(x) for function in CHANGED.values()],
    )


@examples(*UNARY, *SPECIAL, *OF_INTEGERS, *OF_COMPLEX, *CHANGED)
@st.composite
def functions_of_elements(draw):
    shape = (draw(even), draw(even))
    return example(apply_all, numbers(shape), integers(shape, 100))
