"""Kernels of several warpgroups in Mosaic's interpreter: tests marked `warpgroups`, in a process of
their own. A warpgroup that waits at a barrier keeps a thread of XLA's, and tests have one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("absl")  # jax.experimental.pallas.mosaic_gpu imports it


TESTS = Path(__file__).parent


def test_kernels_of_several_warpgroups(request):
  files = [p for p in TESTS.glob("test_*.py") if "pytest.mark.warpgroups" in p.read_text()]
  """Those that this run would take: of `-m 'not slow'` not the slow ones."""
  wanted = request.config.option.markexpr
  which = f"warpgroups and ({wanted})" if wanted else "warpgroups"
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", which, *files],
    cwd=TESTS.parent, text=True, timeout=600, check=False, env=os.environ | {"NPROC": "8"},
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout[-6000:]
  assert " passed" in done.stdout
