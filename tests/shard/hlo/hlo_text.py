"""Short programs in HLO text, as the compiler prints it."""

from penstock.shard.hlo.collectives import find_collectives

MESH = {"data": 2, "model": 4}

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def program(body, *, before="", parameters="%p = f32[8,16]{1,0} parameter(0)"):
    lines = "\n".join(f"  {line.strip()}" for line in (parameters + "\n" + body).strip().splitlines())
    return f"HloModule m, num_partitions=8\n{ADD}{before}\nENTRY %main (p: f32[8,16]) -> f32[8,16] {{\n{lines}\n}}\n"


def only(text, mesh=MESH):
    found = find_collectives(text, mesh)
    assert len(found) == 1, found
    return found[0]
