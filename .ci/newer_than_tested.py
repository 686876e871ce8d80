"""Print the newest versions, and which of them the table of tested versions does not have yet."""

from penstock._versions import JAX, KERAS, installed

for supported in (JAX, KERAS):
    version = installed(supported.distribution)
    remedy = "" if version in supported.tested else ": add it to `tested` in src/penstock/_versions.py"
    print(f"{supported.name} {version}{remedy}")
print(*(f"{name} {installed(name)}" for name in ("flax", "grain", "torch", "tensorflow")), sep=", ")
