"""The alphabet: every dimension letter, every array alias and every tuple of arrays.

    B  decode slots in one call   N  rows of a pool             T  nodes of one window
    Hk key (and query) heads      H  value heads, H = r Hk      E  decay channels: 1 GDN, K KDA
    K  key dim                    V  value dim                  R  ring slots
    P  accepted path, padded      W  conv taps                  C  conv channels

    q, k  after the convolution; the layer L2-normalises both, q also carries 1/sqrt(K)
    beta  write strength in (0, 1), or (0, 2) where negative eigenvalues are allowed
    g     log decay <= 0, per head (E = 1) or per key channel (E = K)
    S     recurrent state [V, K], K contiguous
    u     pseudo-value  beta (v - e^g S k);  S_t = e^g S + u k';  o = S_t q

Formulas are written for one head of one sequence and lifted with `jax.vmap`; everything that acts
on a batch of decode slots says so with a leading B or N.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

# One head of one sequence.
State = Float[Array, "V K"]
Key = Float[Array, "K"]
Value = Float[Array, "V"]
Scalar = Float[Array, ""]
Decay = Float[Array, "E"]
Keys = Float[Array, "T K"]
Values = Float[Array, "T V"]
Betas = Float[Array, "T"]
Decays = Float[Array, "T E"]
Parents = Int[Array, "T"]
Ancestors = Bool[Array, "T T"]

# A batch of decode slots.
Pool = Float[Array, "N H V K"]
States = Float[Array, "B H V K"]
Slots = Int[Array, "B"]
Mask = Bool[Array, "B"]
Lengths = Int[Array, "B"]
Paths = Int[Array, "B P"]
Outputs = Float[Array, "B T H V"]


class Tokens(NamedTuple):
  """What the rule reads for T tokens of one head: normalised q and k, all float32.

  A tuple and not five arguments, because beta and g of a GDN layer have the same shape.
  """

  q: Keys
  k: Keys
  v: Values
  beta: Betas
  g: Decays


class Raw(NamedTuple):
  """A window's inputs after the convolution and before norms and gates, in the activation dtype."""

  q: Float[Array, "B T Hk K"]
  k: Float[Array, "B T Hk K"]
  v: Float[Array, "B T H V"]
  a: Float[Array, "B T H E"]
  b: Float[Array, "B T H"]


class GateParams(NamedTuple):
  """Per-head gate parameters, float32. `beta_max` is 1, or 2 with negative eigenvalues."""

  A_log: Float[Array, "H"]
  dt_bias: Float[Array, "H E"]
  beta_max: Scalar


class Window(NamedTuple):
  """One verify window per decode slot. Node 0 is the anchor, the last step's bonus token.

  parents  -1 is the committed state; parents come before children; a chain has parent t - 1
  nodes    how many of the T rows are real; later rows are never read
  slots    row of the state pool; -1 is padding: its outputs are zero and the pool is untouched
  """

  raw: Raw
  parents: Int[Array, "B T"]
  nodes: Int[Array, "B"]
  slots: Slots


class Accepted(NamedTuple):
  """The accepted root path: the first `length` entries of `path`; later ones are never read."""

  path: Paths
  length: Lengths


class Pending(NamedTuple):
  """Tokens that are committed but not yet in the state: positions in a pool of records, in order.

  row     row of the record pool that belongs to this decode slot; -1 has nothing pending
  path    positions in that row; entries past `length` are never read
  length  how many
  """

  row: Slots
  path: Paths
  length: Lengths


class Records(NamedTuple):
  """Raw inputs that replay to the state bit for bit: k before its norm, gates in float32."""

  k: Float[Array, "N R Hk K"]
  v: Float[Array, "N R H V"]
  beta: Float[Array, "N R H"]
  g: Float[Array, "N R H E"]


class Rows(NamedTuple):
  """Rank-one writes: normalised keys, pseudo-values, log decay of each token (not cumulated).

  `k` and `u` hold one array, or a pair hi, lo of bfloat16 arrays whose float32 sum is the value.
  """

  k: tuple[Float[Array, "N R Hk K"], ...]
  u: tuple[Float[Array, "N R H V"], ...]
  g: Float[Array, "N R H E"]
