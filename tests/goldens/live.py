"""The comparison of tests/test_parity.py on fresh weights, beside a transformers that is installed.

    python -m tests.goldens.live --torch PYTHON [--seed N]

PYTHON is the interpreter of an environment that make.py can run in (jax and torch need not share
one). Printed for each case: the largest float32 difference over the largest number, and the worst
bfloat16 error over the reference's own. Exit code 1: one of them is beyond its limit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gdn.huggingface import load
from tests import parity
from tests.budget import SLACK, rms
from tests.goldens import cases
from tests.test_parity import FLOAT32


def compare(name: str, folder: Path) -> tuple[float, float, dict[str, str]]:
  """Largest float32 difference, largest ratio of bfloat16 errors, versions."""
  golden = parity.read(name, folder)
  model = parity.write(golden, folder / name)
  ids = golden.arrays["ids"]
  want = lambda dtype, key, x: parity.reference(golden, dtype, key, x)
  exact = parity.run(*load(model), ids)
  worst = max(parity.largest(x, want("float32", key, x)) for key, x in exact.items())
  ratios = []
  for key, x in parity.run(*load(model, dtype=jnp.bfloat16), ids).items():
    single, own = want("float32", key, x), want("bfloat16", key, x)
    ratios.append(rms(x - single) / (rms(own - single) + 2.0**-8 / SLACK * rms(single)))
  return worst, max(ratios), golden.about["versions"]


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("--torch", required=True, help="an interpreter that has torch, transformers")
  parser.add_argument("--seed", type=int, default=1)
  args = parser.parse_args()
  table = Table("case", "float32", "bfloat16 / its own", "agrees")
  agreed = True
  with tempfile.TemporaryDirectory() as folder:
    make = Path(__file__).parent / "make.py"
    subprocess.run([args.torch, str(make), folder, str(args.seed)], check=True, capture_output=True)
    for name in track(cases.CASES, "comparing"):
      worst, ratio, versions = compare(name, Path(folder))
      agrees = worst <= FLOAT32 and ratio <= SLACK
      agreed &= agrees
      table.add_row(name, f"{worst:.1e}", f"{ratio:.2f}", str(agrees))
  Console().print(table)
  print(json.dumps({"seed": args.seed, **versions}))
  return 0 if agreed else 1


if __name__ == "__main__":
  sys.exit(main())
