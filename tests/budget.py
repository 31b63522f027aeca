"""How wrong a result may be, derived from the arithmetic and never tuned.

At most SLACK times the error of the plain recurrence in the same dtypes, plus one rounding of the
answer for inputs that the recurrence happens to get exactly right, plus, where a scheme solves, the
forward bound of substitution.
"""

import numpy as np

SLACK = 2.0


def rms(x):
  return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def check(name, got, oracle, plain, *, eps, bound=0.0):
  __tracebackhide__ = True
  got = np.asarray(got, np.float64)
  assert np.isfinite(got).all(), f"{name}: not finite"
  error = rms(got - oracle)
  allowed = SLACK * rms(np.asarray(plain, np.float64) - oracle) + eps * rms(oracle) + rms(bound)
  assert error <= allowed, f"{name}: rms error {error:.3e} > allowed {allowed:.3e}"
