"""How every test runs: no silent promotion of dtype or rank, the same examples everywhere."""

import os
import tempfile
from pathlib import Path

# Two test processes share one GPU. Without one, the CUDA plugin only compiles: say so before jax is
# imported, or it looks for a driver, complains, and does not even compile.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# One XLA thread for each test process: the threads of two would wait for each other at every op.
os.environ.setdefault("NPROC", "1")
if not any(Path("/dev").glob("nvidia*")):
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Most of the time goes into compiling, half of it into programs that another test or the other
# process compiles as well. They share them for one session, as do the commands that tests start. A
# program is looked up by all of its operations, so a planted bug is another one. The processes of
# xdist find the folder in their environment.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  compiled = tempfile.TemporaryDirectory(prefix="compiled-")
  os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import hypothesis
import jax
import pytest

import experiments  # noqa: F401, before jax: sets the flags of its CPU backend

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The first example of a property compiles, so neither a deadline nor a health check on time says
# anything. HYPOTHESIS_PROFILE=deep looks further, and at other examples each time.
_JIT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", derandomize=True, max_examples=20, **_JIT)
hypothesis.settings.register_profile("deep", max_examples=500, print_blob=True, **_JIT)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def quick_compiles():
  """Compiles without most optimisations: for small models, where compiling is most of the time and
  no law of bits is at stake."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  if config.pluginmanager.hasplugin("xdist"):
    # For --dist loadgroup: laws of one scheme run the same programs, which one process compiles.
    for item in items:
      of = getattr(item, "callspec", None)
      if of and isinstance(of.params.get("name"), str):
        group = "-".join(str(of.params[x]) for x in ("name", "decay") if x in of.params)
        item.add_marker(pytest.mark.xdist_group(group))
  on_gpu = [item for item in items if item.get_closest_marker("gpu")]
  if on_gpu and (backend := jax.default_backend()) != "gpu":
    skip = pytest.mark.skip(reason=f"needs a GPU; jax runs on {backend} here")
    for item in on_gpu:
      item.add_marker(skip)
  if int(os.environ["NPROC"]) < 4:
    for item in items:
      if item.get_closest_marker("warpgroups"):
        item.add_marker(
          pytest.mark.skip(reason="tests/test_warpgroups.py runs it, with more threads")
        )
