"""The comparisons of tests/test_parity.py and tests/test_dflash.py on fresh weights, beside a
transformers or a DFlash that is installed.

    python -m tests.goldens.live [--torch PYTHON] [--dflash PYTHON] [--seed N]

PYTHON is the interpreter of an environment that make.py or make_dflash.py can run in (jax and torch
need not share one). Printed for each case: the largest float32 difference over the largest number,
and the worst bfloat16 error over the reference's own. Exit code 1: one of them is beyond its limit,
or a drafter's loop drafts or keeps other tokens.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gdn.huggingface import load
from tests import parity
from tests.budget import SLACK, rms
from tests.goldens import cases
from tests.test_parity import FLOAT32


class Row(NamedTuple):
  """Largest float32 difference, largest ratio of bfloat16 errors, versions, equal tokens."""

  name: str
  worst: float
  ratio: float
  versions: dict[str, str]
  same: bool = True

  @property
  def agrees(self) -> bool:
    return self.same and self.worst <= FLOAT32 and self.ratio <= SLACK


def over_its_own(x: np.ndarray, single: np.ndarray, own: np.ndarray) -> float:
  """A bfloat16 error over the reference's own."""
  return rms(x - single) / (rms(own - single) + 2.0**-8 / SLACK * rms(single))


def compare(name: str, folder: Path) -> Row:
  golden = parity.read(name, folder)
  model = parity.write(golden, folder / name)
  ids = golden.arrays["ids"]
  want = lambda dtype, key, x: parity.reference(golden, dtype, key, x)
  exact = parity.run(*load(model), ids)
  worst = max(parity.largest(x, want("float32", key, x)) for key, x in exact.items())
  ratios = [
    over_its_own(x, want("float32", key, x), want("bfloat16", key, x))
    for key, x in parity.run(*load(model, dtype=jnp.bfloat16), ids).items()
  ]
  return Row(name, worst, max(ratios), golden.about["versions"])


def compare_drafter(name: str, folder: Path) -> Row:
  golden = parity.read(name, folder)
  loaded = parity.drafter_pair(golden, folder / name)
  hidden = lambda dtype: parity.drafter_hidden(*loaded(dtype), golden.about["seed"])
  exact, own = (golden.arrays[f"{dtype}.hidden"] for dtype in ("float32", "bfloat16"))
  worst = parity.largest(hidden(jnp.float32), exact)
  ratio = over_its_own(hidden(jnp.bfloat16), exact, own)
  got = parity.drafted(*loaded(jnp.float32), golden)
  same = all(np.array_equal(got[key], golden.arrays[key]) for key in ("blocks", "kept"))
  return Row(name, worst, ratio, golden.about["versions"], same)


def made(python: str, script: str, folder: Path, seed: int) -> Path:
  command = [python, str(Path(__file__).parent / script), str(folder), str(seed)]
  subprocess.run(command, check=True, capture_output=True)
  return folder


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("--torch", help="an interpreter that has torch, transformers")
  parser.add_argument("--dflash", help="an interpreter that has torch, transformers, dflash")
  parser.add_argument("--seed", type=int, default=1)
  args = parser.parse_args()
  if not (args.torch or args.dflash):
    parser.error("--torch, --dflash or both are needed")
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    if args.torch:
      there = made(args.torch, "make.py", Path(folder) / "models", args.seed)
      rows += [compare(name, there) for name in track(cases.CASES, "comparing")]
    if args.dflash:
      there = made(args.dflash, "make_dflash.py", Path(folder) / "dflash", args.seed)
      rows += [compare_drafter(name, there) for name in track(cases.DFLASH_CASES, "comparing")]
  table = Table("case", "float32", "bfloat16 / its own", "agrees")
  for row in rows:
    table.add_row(row.name, f"{row.worst:.1e}", f"{row.ratio:.2f}", str(row.agrees))
  Console().print(table)
  for versions in {json.dumps(row.versions) for row in rows}:
    print(json.dumps({"seed": args.seed, **json.loads(versions)}))
  return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
  sys.exit(main())
