"""Devices that a cost is turned into a time for: their peaks, as the makers state them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Device(NamedTuple):
  """`bandwidth` GB/s at peak, `memory` GB, `launch` microseconds from kernel to kernel.

  Of a Mac the memory is unified, sold in several sizes: the largest, all of it.
  A launch on an H200 is measured (`experiments.roofline` fits it); on other NVIDIA devices it is
  taken to be the same, on Apple's an assumption, wide on purpose. `tflops` are of dense bfloat16
  products, least and most: NVIDIA states them. Apple states 2.6 for the M1, 3.6 for the M2, 10.4
  for the M1 Max, and that an M5 computes more than 4 times as fast as an M4 where its matrix units
  are used. Others are 128 multiply-adds a core and clock (philipturner/metal-benchmarks, by which
  16 bits are no faster than 32) times cores and 1.4 to 1.8 GHz, which Apple does not state.
  """

  bandwidth: float
  memory: float
  tflops: tuple[float, float]
  source: str
  launch: tuple[float, float] | None = None


METAL = (2.0, 20.0)
APPLE = "Apple, newsroom and technical specifications, "
NVIDIA = "NVIDIA, data sheet of the "


def cores(n: int, matrix: float = 1.0) -> tuple[float, float]:
  """TFLOPS of a GPU of n cores, at most `matrix` times as many where it has matrix units."""
  return n * 0.256 * 1.4, n * 0.256 * 1.8 * matrix


def stated(tflops: float) -> tuple[float, float]:
  return tflops, tflops


DEVICES: Mapping[str, Device] = MappingProxyType(
  {
    "M1": Device(68.25, 16, stated(2.6), APPLE + "2020", METAL),
    "M2": Device(100, 24, stated(3.6), APPLE + "2022", METAL),
    "M4": Device(120, 32, cores(10), APPLE + "2024", METAL),
    "M5": Device(153, 32, cores(10, 4), APPLE + "2025", METAL),
    "M4 Pro": Device(273, 64, cores(20), APPLE + "2024", METAL),
    "M5 Pro": Device(307, 64, cores(20, 4), APPLE + "2026", METAL),
    "M1 Max": Device(400, 64, stated(10.4), APPLE + "2021", METAL),
    "M4 Max": Device(546, 128, cores(40), APPLE + "2024", METAL),
    "M5 Max": Device(614, 128, cores(40, 4), APPLE + "2026", METAL),
    "M3 Ultra": Device(819, 512, cores(80), APPLE + "2025", METAL),
    "A100 80GB": Device(2039, 80, stated(312), NVIDIA + "A100 SXM"),
    "H20": Device(4000, 96, stated(148), NVIDIA + "H20"),
    "H200": Device(4800, 141, stated(989), NVIDIA + "H200 SXM"),
    "B200": Device(8000, 180, stated(2250), NVIDIA + "DGX B200, an eighth"),
  }
)
