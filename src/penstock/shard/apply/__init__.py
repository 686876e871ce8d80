"""Turn an assignment into layouts that JAX takes: partition specs of arguments and results, and sharding constraints."""
