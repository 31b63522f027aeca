"""Every table and figure: a configuration gives rows, rows give a figure.

    python -m experiments list
    python -m experiments run NAME [--config PRESET] [--field value ...] [--out DIR]
    python -m experiments figure NAME [--out DIR]       again from the rows, nothing is measured
    python -m experiments table NAME [--csv | --markdown] [--out DIR]

A module of this package that defines `CONFIGS` is an experiment. Its docstring's first line is what
`list` shows. It defines

    Config                      a frozen dataclass; its `__post_init__` raises a ValueError that
                                names the field, its value and what is allowed. `model` is the
                                path of a checkpoint (experiments/target.py, experiments/models.py)
    CONFIGS                     presets by name; the first is the default
    run(config, record)         measures; every row goes to `record(column=value, ...)`
    figure(rows)                a matplotlib Figure, a pure function of the rows
    table(rows)     optional    what rich prints after a run; otherwise every row
    CLOCK           optional    how times were measured, for meta.json

`run` walks over `record.parts(items)`, which skips what an interrupted run of the same
configuration has finished. Inside a long part it calls `record.advance(fraction)`, before the
parts `record.say(what)`:

    def run(config: Config, record: Record) -> None:
      streams = capture(config)
      for scheme in record.parts(config.schemes):
        for token, error in drift(streams, scheme):
          record(scheme=scheme, token=token, state_error=error)

`parts(items, seconds=..., limit=...)` ends a run in time, with the rows so far, and a part that
hangs; both times the same command goes on.

A module with `derived_rows()` and no CONFIGS is a table worked out from the rows of others: it has
`figure` and `table`, and nothing to run.

All rows have the same columns: one measurement a row, units in the column's name. A row is on
disk when `record` returns, in results/NAME/partial/; rows.csv, meta.json, figure.png and figure.pdf
appear when the run is complete. `figure` and `table` get rows as dicts of int, float, bool, str or
None.
"""

import os

# Threads inside a dot cost more than they give: dots here are small and come in batches of heads.
# Measured on two cores: a delta_cache window takes a tenth of the time without them.
if "xla_cpu_multi_thread_eigen" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
