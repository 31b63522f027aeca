"""A folder of a small Qwen3.5 with experts that a test may change; two loads that are equal."""

from pathlib import Path

import numpy as np
import pytest

from gdn.checkpoint import names
from tests import parity

SINGLE = "model.safetensors"


@pytest.fixture
def folder(tmp_path) -> Path:
  return parity.write(parity.read("qwen3_5_experts"), tmp_path / "model")


def equal(a, b) -> None:
  a, b = names(a), names(b)
  assert set(a) == set(b)
  for path, x in a.items():
    assert x.dtype == b[path].dtype, path
    np.testing.assert_array_equal(x, b[path], err_msg=path)
