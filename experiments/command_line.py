"""list, run, figure and table of experiments. Bad input is a `BadInput`, before anything runs."""

import ast
import dataclasses
import importlib
import json
import sys
from argparse import ArgumentParser
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console
from rich.table import Table

from experiments import figures, narrow, provenance, record, remeasure
from experiments.record import BadInput

HERE = Path(__file__).parent
ELSEWHERE = provenance.ROOT / "build" / "results"
USAGE = (
  "usage: python -m experiments list | run NAME [--config PRESET] [--field value ...] "
  "| figure NAME [NAME ...] | table NAME [--csv | --markdown] | remeasure [NAME ...] "
  "  (each with --out DIR)"
)


@cache
def modules(defines: str) -> dict[str, str]:
  """Name and first docstring line of every module that defines a name, without importing it."""
  found = {}
  for path in sorted(HERE.glob("*.py")):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [x.name for x in tree.body if isinstance(x, ast.FunctionDef)]
    targets = [t for x in tree.body if isinstance(x, ast.Assign) for t in x.targets]
    targets += [x.target for x in tree.body if isinstance(x, ast.AnnAssign)]
    if defines in names + [t.id for t in targets if isinstance(t, ast.Name)]:
      found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
  return found


def experiments() -> dict[str, str]:
  """Everything that `run` knows."""
  return modules("CONFIGS")


def derived() -> dict[str, str]:
  """Tables worked out from other rows: a module with `derived_rows()` and nothing to run."""
  return {name: line for name, line in modules("derived_rows").items() if name not in experiments()}


def load(name: str, known: dict[str, str] | None = None) -> Any:
  """The module of an experiment. BadInput: there is none of this name."""
  known = known or experiments()
  if name not in known:
    raise BadInput(f"experiment {name!r}, allowed: {', '.join(known)}")
  return importlib.import_module(f"experiments.{name}")


def alike(config: Any) -> None:
  """What holds of every configuration. BadInput: a seed that is none, a value that is twice in a
  list of values to go through; `accept` is a distribution."""
  for name, kind in get_type_hints(type(config)).items():
    value = getattr(config, name)
    if name == "seed" and not 0 <= value < 2**32:
      raise BadInput(f"seed = {value}, allowed: 0 to {2**32 - 1}")
    several = get_origin(kind) is tuple and Ellipsis in get_args(kind) and name != "accept"
    if several and len(set(value)) < len(value):
      raise BadInput(f"{name} = {value}, allowed: each at most once")


def configured(experiment: Any, name: str, args: list[str]) -> tuple[Any, Path]:
  """The configuration that the arguments of `run` describe, and the results folder."""
  first = ArgumentParser(add_help=False, allow_abbrev=False)
  first.add_argument("--config", nargs="?")
  preset = first.parse_known_args(args)[0].config or next(iter(experiment.CONFIGS))
  if preset not in experiment.CONFIGS:
    raise BadInput(f"--config {preset}, allowed: {', '.join(experiment.CONFIGS)}")
  # tyro reads these annotations; which presets and fields there are is known only now.
  Fields: Any = Annotated[experiment.Config, tyro.conf.arg(name="")]
  Preset: Any = Literal[tuple(experiment.CONFIGS)]

  def run(
    fields: Fields = experiment.CONFIGS[preset],
    config: Preset = preset,
    out: Path = provenance.RESULTS,
  ):
    return fields, out

  run.__doc__ = experiment.__doc__
  prog = f"python -m experiments run {name}"
  try:
    (config, out), unknown = tyro.cli(run, args=args, prog=prog, return_unknown_args=True)
  except ValueError as e:  # of the configuration's own validation
    raise BadInput(e) from e
  if unknown:
    fields = ", ".join(f"--{x.replace('_', '-')}" for x in experiment.Config.__dataclass_fields__)
    raise BadInput(f"{' '.join(unknown)}, allowed: --config, --out, {fields}")
  alike(config)
  model = lambda config: getattr(config, "model", None)
  if out == provenance.RESULTS and model(config) not in map(model, experiment.CONFIGS.values()):
    out = ELSEWHERE  # what is committed is of the models of the presets
  return config, out


def parser(command: str, names: str | int) -> ArgumentParser:
  """Of a command that takes so many names and a results folder."""
  found = ArgumentParser(prog=f"python -m experiments {command}", allow_abbrev=False)
  found.add_argument("names", nargs=names, metavar="NAME")
  found.add_argument("--out", type=Path, default=provenance.RESULTS)
  return found


def stored(name: str, experiment: Any, out: Path) -> list[dict[str, Any]]:
  """Rows of a finished run, or those worked out from others. BadInput: there are none."""
  if hasattr(experiment, "derived_rows"):
    return experiment.derived_rows()
  path = out / name / "rows.csv"
  try:
    return record.read_rows(path)
  except OSError as e:
    raise BadInput(f"{path}: {e.strerror}; `run {name}` writes it") from e


def every_row(rows: list[dict[str, Any]]) -> Table:
  """What `table` shows of an experiment that does not say."""
  table = Table(*rows[0] if rows else ())
  for row in rows:
    table.add_row(*("" if x is None else str(x) for x in row.values()))
  return table


def show(experiment: Any, rows: list[dict[str, Any]], kind: str = "rich") -> None:
  """BadInput: this experiment has no markdown."""
  if kind != "rich":  # for a file, whatever the terminal's encoding is
    getattr(sys.stdout, "reconfigure", lambda **_: None)(encoding="utf-8")
  if kind == "csv":
    print(record.rows_csv(rows).decode(), end="")
  elif kind == "markdown":
    if not hasattr(experiment, "markdown"):
      raise BadInput("--markdown, allowed: for published")
    print(experiment.markdown(rows), end="")
  else:
    narrow.show(getattr(experiment, "table", every_row)(rows))


def caption(experiment: Any, rows: list[dict[str, Any]], folder: Path) -> str:
  """Under a figure: configuration, commit, device and number of its rows. BadInput: meta.json says
  nothing of the kind."""
  if hasattr(experiment, "derived_rows"):
    return f"{len(rows)} rows, worked out from the committed ones"
  path = folder / "meta.json"
  try:
    meta = json.loads(path.read_text())
    meta["config"], meta["commit"]
  except FileNotFoundError:
    return f"{len(rows)} rows of unknown origin: there is no meta.json"
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise BadInput(f"{path} does not say where its rows come from: {type(e).__name__}: {e}") from e
  other = []
  if "rows" in meta and meta["rows"] != provenance.digest((folder / "rows.csv").read_bytes()):
    other = ["rows.csv is not the one of meta.json"]
  commits = {(x.get("commit") or "unknown")[:10] for x in (meta, *meta.get("resumed", ()))}
  more = f" and {len(commits) - 1} before" if len(commits) > 1 else ""
  read = [f"rows of {name}: {origin(x)}" for name, x in meta.get("read", {}).items()]
  config = f"config {preset(experiment, meta)}"
  return " · ".join([config, origin(meta, more), f"{len(rows)} rows", *read, *other])


def origin(meta: dict[str, Any], more: str = "") -> str:
  """Commit, state of the tree and device."""
  commit = (meta.get("commit") or "unknown")[:10]
  states = {True: ", changed tree", False: "", None: ", state of the tree unknown"}
  state = states[meta.get("dirty")]
  return f"commit {commit}{more}{state} · {meta.get('device')}"


def preset(experiment: Any, meta: dict[str, Any]) -> str:
  """The name of the configuration that rows were measured with; if it is no preset, of the nearest
  one, and which fields are others.

  A field that the rows are older than had its default.
  """
  given = lambda config: json.loads(json.dumps(dataclasses.asdict(config), default=record.as_json))
  presets = {n: given(c) for n, c in getattr(experiment, "CONFIGS", {}).items()}
  if not presets:
    return "in meta.json"
  measured = given(experiment.Config()) | meta["config"]
  others = lambda name: [k for k in measured if measured[k] != presets[name].get(k)]
  name = min(presets, key=lambda name: len(others(name)))
  return f"{name}, but {', '.join(some)}" if (some := others(name)) else name


def of_meta(experiment: Any, meta: dict[str, Any]) -> Any:
  """The configuration that rows were measured with. A field that they are older than has its
  default. BadInput: a field that there is no more."""
  default = experiment.Config()

  def value(x: Any, now: Any) -> Any:
    if dataclasses.is_dataclass(now) and not isinstance(now, type):
      return dataclasses.replace(now, **{k: value(y, getattr(now, k, None)) for k, y in x.items()})
    return tuple(value(y, None) for y in x) if isinstance(x, list) else x

  values = {name: value(x, getattr(default, name, None)) for name, x in meta["config"].items()}
  try:
    return dataclasses.replace(default, **values)
  except (TypeError, ValueError) as e:
    raise BadInput(f"the rows' configuration is of another version: {e}") from e


def measured_again(names: list[str], out: Path, seconds: float | None = None) -> bool:
  """Whether every value lies within its noise. BadInput: a name without committed rows or noise, or
  an experiment that cannot end in `seconds`."""
  good = True
  for name in names or [n for n in remeasure.NOISE if remeasure.here(n)]:
    experiment = load(name, dict.fromkeys(remeasure.NOISE, ""))
    try:
      committed, meta = remeasure.stored(name)
    except OSError as e:
      raise BadInput(f"{name} has no committed rows: {e.strerror}") from e
    config = of_meta(experiment, meta)
    if seconds is not None:
      if not hasattr(config, "seconds"):
        raise BadInput(f"--seconds = {seconds:g}: {name} has no such field, it is measured whole")
      if not seconds >= 0:
        raise BadInput(f"--seconds = {seconds:g}, allowed: at least 0")
      config = dataclasses.replace(config, seconds=seconds)
    rows = record.measure(experiment, config, out / name)
    again = json.loads((out / name / "meta.json").read_text())
    # Of a run that its own time limit has ended, what both came to is compared.
    noise, cut = remeasure.NOISE[name], bool(meta.get("left") or again.get("left"))
    found = remeasure.compare(committed, rows, noise, common=cut)
    narrow.show(remeasure.table(name, found))
    good &= all(d.within for d in found)
  return good


def main(args: list[str]) -> None:
  """BadInput and Unwritable, before anything is measured."""
  match args:
    case ["list"]:
      table = Table("experiment", "what it measures", box=None)
      for name, line in (experiments() | derived()).items():
        table.add_row(name, line)
      Console().print(table)
    case [] | ["-h" | "--help"]:
      print(USAGE)
    case ["run", name, *rest]:
      experiment = load(name)
      config, out = configured(experiment, name, rest)
      rows = record.measure(experiment, config, out / name)
      figures.draw(experiment.figure, rows, out / name, caption(experiment, rows, out / name))
      if hasattr(experiment, "table"):
        show(experiment, rows)
      print(f"{len(rows)} rows and their figure are in {out / name}")
    case ["figure", *rest]:
      given = parser("figure", "+").parse_args(rest)
      for name in given.names:
        experiment, folder = load(name, experiments() | derived()), given.out / name
        rows = stored(name, experiment, given.out)
        record.writable(folder)
        figures.draw(experiment.figure, rows, folder, caption(experiment, rows, folder))
        print(f"{folder / 'figure.png'} and figure.pdf")
    case ["table", *rest]:
      options = parser("table", 1)
      options.set_defaults(kind="rich")
      kinds = options.add_mutually_exclusive_group()
      for kind in ("csv", "markdown"):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind)
      given = options.parse_args(rest)
      [name] = given.names
      experiment = load(name, experiments() | derived())
      show(experiment, stored(name, experiment, given.out), given.kind)
    case ["remeasure", *rest]:
      options = parser("remeasure", "*")
      options.set_defaults(out=remeasure.OUT)
      options.add_argument("--seconds", type=float, help="begin no further row after these")
      given = options.parse_args(rest)
      if not measured_again(given.names, given.out, given.seconds):
        sys.exit(1)
    case [command, *rest]:
      known = "list, run NAME, figure NAME [NAME ...], table NAME, remeasure [NAME ...]"
      raise BadInput(f"command {' '.join([command, *rest])!r}, allowed: {known}")
