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
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""
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
    mesh()
  except Exception as error:  # whatever a missing or broken plugin raises
    return f"no compile-only CUDA plugin: {type(error).__name__}"
  return ""


@functools.cache
def mesh() -> Mesh:
  description = topologies.get_topology_desc(
    platform="cuda", target_config=TARGET, topology="1x1x1"
  )
  return Mesh(np.array(description.devices), ("d",))


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
  whole = NamedSharding(mesh(), PartitionSpec())
  avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
  with dumped() as folder:
    with use_abstract_mesh(mesh().abstract_mesh):
      lowered = jax.jit(f, donate_argnums=donate).trace(*avals).lower()
    program = lowered.compile(
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
