"""Programs for a GPU that is not there, and for one that another process holds.

The compiler needs a description of the device and no device. To trace and lower a kernel is Python,
so the threads of one process take turns at it; other processes compile beside it, and it loads what
they have made in no time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

H200 = "NVIDIA H200"
DESCRIBED = {
  H200: """
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
}


@functools.cache
def mesh(kind: str = H200) -> Mesh:
  """Of one device that is described and not there. Any error of a plugin that is missing."""
  found = topologies.get_topology_desc(
    platform="cuda", target_config=DESCRIBED[kind], topology="1x1x1"
  )
  return Mesh(np.array(found.devices), ("d",))


def lowered(f: Callable[..., Any], *args: Any, donate: Any = (), kind: str = H200) -> Any:
  """f for arguments given as arrays or ShapeDtypeStructs, on a device of that kind."""
  devices = mesh(kind)
  whole = NamedSharding(devices, PartitionSpec())
  avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
  with use_abstract_mesh(devices.abstract_mesh):
    return jax.jit(f, donate_argnums=donate).trace(*avals).lower()


Packed = tuple[bytes, Any, Any]  # the program, what it takes, what it gives


def packed(program: jax.stages.Compiled) -> Packed:
  """What another process can load."""
  return serialize_executable.serialize(program)


def unpacked(program: Packed) -> jax.stages.Compiled:
  """On the first device."""
  # Registers what a Mosaic kernel calls at run time.
  from jax.experimental.pallas import mosaic_gpu  # noqa: F401

  return serialize_executable.deserialize_and_load(*program, execution_devices=jax.devices()[:1])
