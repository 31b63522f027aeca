"""Devices that a cost is turned into a time for: their peaks, as the makers state them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Device(NamedTuple):
  """`bandwidth` GB/s at peak, `memory` GB at most, `launch` microseconds from kernel to kernel.

  A launch on an H200 is measured (`experiments.roofline` fits it); on other NVIDIA devices it is
  taken to be the same, on Apple's an assumption, wide on purpose. `tflops` are of dense bfloat16
  products; Apple states none, and there products are taken to be free.
  """

  bandwidth: float
  memory: float
  source: str
  launch: tuple[float, float] | None = None
  tflops: float | None = None


METAL = (2.0, 20.0)
APPLE = "Apple, newsroom and technical specifications, "
NVIDIA = "NVIDIA, data sheet of the "

DEVICES: Mapping[str, Device] = MappingProxyType(
  {
    "M1": Device(68.25, 16, APPLE + "2020", METAL),
    "M2": Device(100, 24, APPLE + "2022", METAL),
    "M4": Device(120, 32, APPLE + "2024", METAL),
    "M5": Device(153, 32, APPLE + "2025", METAL),
    "M4 Pro": Device(273, 64, APPLE + "2024", METAL),
    "M5 Pro": Device(307, 64, APPLE + "2026", METAL),
    "M1 Max": Device(400, 64, APPLE + "2021", METAL),
    "M4 Max": Device(546, 128, APPLE + "2024", METAL),
    "M5 Max": Device(614, 128, APPLE + "2026", METAL),
    "M3 Ultra": Device(819, 512, APPLE + "2025", METAL),
    "A100 80GB": Device(2039, 80, NVIDIA + "A100 SXM", tflops=312),
    "H20": Device(4000, 96, NVIDIA + "H20", tflops=148),
    "H200": Device(4800, 141, NVIDIA + "H200 SXM", tflops=989),
    "B200": Device(8000, 180, NVIDIA + "DGX B200, an eighth", tflops=2250),
  }
)
