"""Full compilation for an H200 on any machine, and what the compiler did.

Needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt (no CUDA libraries, no driver) and `ptxas`.
"""

import contextlib
import functools
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax

from experiments import ahead

SHARED_MEMORY_PER_SM = 233472
REGISTERS_PER_SM = 65536


class Compiled(NamedTuple):
  """Of the Mosaic kernels in a program, the largest of each; of the program, its buffers and what
  it launches, copies among it."""

  registers: int
  spilled: int
  shared_memory: int
  aliased: int
  temporary: int
  copies: int
  launches: int

  def resident(self, threads: int) -> int:
    """Blocks of that many threads that fit a multiprocessor."""
    registers = -(-self.registers // 8) * 8 * threads
    shared_memory = -(-(self.shared_memory + 1024) // 128) * 128
    return min(REGISTERS_PER_SM // registers, SHARED_MEMORY_PER_SM // shared_memory)


@functools.cache
def why_not() -> str:
  """Empty where compilation works and says something new, else the reason."""
  if jax.default_backend() == "gpu":
    return "a GPU is here, and the kernels run on it"
  if shutil.which("ptxas") is None:
    return "no ptxas on PATH"
  try:
    ahead.mesh()
  except Exception as error:  # whatever a missing or broken plugin raises
    return f"no compile-only CUDA plugin: {type(error).__name__}"
  return ""


@contextlib.contextmanager
def dumped():
  """A folder that Mosaic writes what ptxas said to."""
  before = os.environ.get("MOSAIC_GPU_DUMP_TO")
  with tempfile.TemporaryDirectory() as folder:
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    try:
      yield Path(folder)
    finally:
      os.environ.pop("MOSAIC_GPU_DUMP_TO")
      if before is not None:
        os.environ["MOSAIC_GPU_DUMP_TO"] = before


def compiled(f, *args, donate: tuple[int, ...] = ()) -> Compiled:
  """f for arguments given as arrays or ShapeDtypeStructs."""
  with dumped() as folder:
    program = ahead.lowered(f, *args, donate=donate).compile(
      compiler_options={"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    )
    logs = [p.read_text() for p in folder.glob("*.ptxas")]
    resources = [p.read_text() for p in folder.glob("*.resources.txt")]
    thunks = "".join(p.read_text() for p in folder.glob("*thunk_sequence.txt"))
  largest = lambda pattern, texts: max(
    (int(n) for text in texts for n in re.findall(pattern, text)), default=-1
  )
  barriers = r"num_barriers=(\d+)[^()]*\): (\d+)"  # eight bytes each, behind everything else
  shared = lambda text: (
    largest(r"smem_scratch_bytes=(\d+)", [text])
    + sum(8 * int(n) * int(times) for n, times in re.findall(barriers, text))
  )
  memory = program.memory_analysis()
  return Compiled(
    registers=largest(r"Used (\d+) registers", logs),
    spilled=largest(r"(\d+) bytes spill stores", logs),
    shared_memory=max(map(shared, resources), default=-1),
    aliased=memory.alias_size_in_bytes,
    temporary=memory.temp_size_in_bytes,
    copies=len(re.findall(r"kCopy\b", thunks)) // 2,
    launches=len(re.findall(r"^\d+: k", thunks, re.MULTILINE)),
  )
