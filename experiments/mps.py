"""One GPU for several processes at once, by NVIDIA's multi-process service (MPS).

Without it they take turns by slices of time, and whoever waits for a small operation waits for the
slices of all others.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PROBE = "import jax; jax.numpy.ones(1).block_until_ready()"


@contextmanager
def shared_gpu(seconds: float = 60.0) -> Iterator[Mapping[str, str]]:
  """The environment of processes that are to share the GPU; empty where that is not to be had.

  Only processes that are started with it take part. A service of somebody else's is left alone.
  """
  if shutil.which(CONTROL) is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
    yield {}
    return
  with tempfile.TemporaryDirectory(prefix="mps-") as folder:
    env = {f"CUDA_MPS_{x}_DIRECTORY": str(Path(folder) / x.lower()) for x in ("PIPE", "LOG")}
    for path in env.values():
      Path(path).mkdir()

    def done(*args: str, told: str = "") -> bool:
      try:
        return not subprocess.run(
          args, env=os.environ | env, input=told, text=True, capture_output=True, timeout=seconds
        ).returncode
      except (OSError, subprocess.TimeoutExpired):
        return False

    try:
      works = done(CONTROL, "-d") and done(sys.executable, "-c", PROBE)
      yield env if works else {}
    finally:
      done(CONTROL, told="quit\n")
