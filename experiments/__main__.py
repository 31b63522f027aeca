"""`python -m experiments`: bad input is one line and status 2, an interrupt one line and 130."""

import errno
import os
import signal
import sys

SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
KEPT = "finished parts are kept, the same command goes on"
NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


def interrupted(*_) -> None:
  """Ends at once: rows are on disk as they are measured, and files appear whole or not at all.

  An exception would often be lost: a long call ends in garbage collection, and what is raised in
  jax's callback there is ignored.
  """
  shown = SHOW_CURSOR if sys.stderr.isatty() else ""
  text = f"{shown}\ninterrupted: {KEPT}\n"
  os.write(sys.stderr.fileno(), text.encode())
  os._exit(130)


if __name__ == "__main__":
  for stream in (sys.stdout, sys.stderr):  # a terminal that has no µ shows another character
    stream.reconfigure(errors="replace")  # type: ignore[union-attr]
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is to be ignored
    signal.signal(signal.SIGINT, interrupted)
  from experiments import command_line  # takes seconds
  from experiments.record import BadInput, Unwritable

  try:
    command_line.main(sys.argv[1:])
  except (BadInput, Unwritable) as e:
    print(f"experiments: {e}", file=sys.stderr)
    sys.exit(2)
  except OSError as e:  # of other kinds, who calls the system knows more
    if e.errno not in NO_ROOM:
      raise
    print(f"experiments: {e.strerror}: {KEPT}", file=sys.stderr)
    sys.exit(2)
