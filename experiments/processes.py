"""Processes that work for this one, and end with it."""

import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from types import MappingProxyType

import jax

OURS: Mapping[str, str] = MappingProxyType({})


def workers(count: int, env: Mapping[str, str] = OURS) -> ProcessPoolExecutor:
  """So many processes, `env` in their environment; each is begun when there is work for it."""
  return ProcessPoolExecutor(
    count, mp_context=get_context("spawn"), initializer=begin, initargs=(dict(env),)
  )


def begin(env: Mapping[str, str]) -> None:
  """In a worker, before jax has asked for a device. An interrupt ends the parent at once, wherever
  it is, and what is left here would hold the device for nobody."""
  os.environ.update(env)
  if "JAX_PLATFORMS" in env:  # jax has read its own variables when it was imported
    jax.config.update("jax_platforms", env["JAX_PLATFORMS"])
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal's, the parent says what is kept
  parent = parent_process()
  assert parent is not None

  def end() -> None:
    parent.join()
    os._exit(130)

  threading.Thread(target=end, daemon=True).start()
