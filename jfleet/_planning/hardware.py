"""Chips by name: memory, rates and networks, from what their makers publish.

Bandwidths are those of one chip in one direction. A number that is not published is
None; whoever needs it is told so.
"""

import dataclasses
import math
from typing import Any

from jfleet._errors import ConfigError, ConfigTypeError, nearest

GIB = 2**30
GB = 10**9
TERA = 10**12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One chip and the networks around it."""

    name: str
    """What people call it."""
    memory_bytes: int
    """Memory of one chip."""
    flops: float
    """Peak rate of bfloat16 products, operations per second, without sparsity."""
    memory_bandwidth: float
    """Bytes per second between the chip and its memory."""
    link_bandwidth: float
    """Bytes per second that a chip sends to others near it, over all its links."""
    torus_dims: int = 0
    """Dims of the torus that the links form; 0: a switch, so every pair is near."""
    near_devices: int = 1
    """Chips that the fast links can connect."""
    far_bandwidth: float | None = None
    """Bytes per second that a chip sends beyond those; None: not published."""
    float32_rate: float = 1.0
    """Rate of float32 products, at JAX's default precision, relative to ``flops``."""
    source: str = "as given"
    """Where the numbers come from."""

    def __post_init__(self):
        for name in ("memory_bytes", "flops", "memory_bandwidth", "link_bandwidth"):
            self._check(name, getattr(self, name))
        if self.far_bandwidth is not None:
            self._check("far_bandwidth", self.far_bandwidth)
        for name, low in (("torus_dims", 0), ("near_devices", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ConfigError(
                    f"Hardware.{name} must be a whole number of at least {low}, got "
                    f"{value!r}"
                )

    def _check(self, name: str, value: Any) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"Hardware.{name} must be above 0, got {value!r}")


_TORUS = "Google Cloud documentation, TPU {}: system architecture"
_NVIDIA = "NVIDIA {} Tensor Core GPU Datasheet; DGX {} Datasheet (network)"

HARDWARE = {
    "v4": Hardware(
        name="TPU v4",
        memory_bytes=32 * GIB,
        flops=275 * TERA,
        memory_bandwidth=1200 * GB,
        link_bandwidth=300 * GB,
        torus_dims=3,
        near_devices=4096,
        source=_TORUS.format("v4")
        + "; Jouppi et al., TPU v4: An Optically Reconfigurable Supercomputer for "
        "Machine Learning with Hardware Support for Embeddings, 2023 (links: 6 x 50 "
        "GB/s)",
    ),
    "v5e": Hardware(
        name="TPU v5e",
        memory_bytes=16 * GIB,
        flops=197 * TERA,
        memory_bandwidth=819 * GB,
        link_bandwidth=200 * GB,
        torus_dims=2,
        near_devices=256,
        far_bandwidth=200e9 / 8 / 8,
        source=_TORUS.format("v5e") + " (2 x 100 Gbit/s for 8 chips)",
    ),
    "v5p": Hardware(
        name="TPU v5p",
        memory_bytes=95 * GIB,
        flops=459 * TERA,
        memory_bandwidth=2765 * GB,
        link_bandwidth=600 * GB,
        torus_dims=3,
        near_devices=8960,
        far_bandwidth=50e9 / 8,
        source=_TORUS.format("v5p") + " (50 Gbit/s per chip)",
    ),
    "v6e": Hardware(
        name="TPU v6e",
        memory_bytes=32 * GIB,
        flops=918 * TERA,
        memory_bandwidth=1638 * GB,
        link_bandwidth=400 * GB,
        torus_dims=2,
        near_devices=256,
        far_bandwidth=800e9 / 8 / 8,
        source=_TORUS.format("v6e") + " (4 x 200 Gbit/s for 8 chips)",
    ),
    "a100": Hardware(
        name="A100 SXM 80GB",
        memory_bytes=80 * GB,
        flops=312 * TERA,
        memory_bandwidth=2039 * GB,
        link_bandwidth=300 * GB,
        near_devices=8,
        far_bandwidth=25 * GB,
        float32_rate=0.5,
        source=_NVIDIA.format("A100", "A100"),
    ),
    "h100": Hardware(
        name="H100 SXM",
        memory_bytes=80 * GB,
        flops=989 * TERA,
        memory_bandwidth=3350 * GB,
        link_bandwidth=450 * GB,
        near_devices=8,
        far_bandwidth=50 * GB,
        float32_rate=0.5,
        source=_NVIDIA.format("H100", "H100"),
    ),
    "h200": Hardware(
        name="H200 SXM",
        memory_bytes=141 * GB,
        flops=989 * TERA,
        memory_bandwidth=4800 * GB,
        link_bandwidth=450 * GB,
        near_devices=8,
        far_bandwidth=50 * GB,
        float32_rate=0.5,
        source=_NVIDIA.format("H200", "H200"),
    ),
}
"""The known chips."""


def hardware_of(value: Any) -> Hardware | None:
    """A chip by name, or the description that was given.

    Args:
        value: a name such as ``"v5e"`` or ``"TPU v5e"``, a ``Hardware``, or None.

    Raises:
        ConfigError: an unknown name.
        ConfigTypeError: something else.

    Example:
        >>> hardware_of("v5e").memory_bytes // 2**30
        16
    """
    if value is None or isinstance(value, Hardware):
        return value
    if not isinstance(value, str):
        raise ConfigTypeError(
            f"hardware must be a name or a jfleet.Hardware, got {type(value).__name__}"
        )
    name = value.lower().removeprefix("tpu").strip(" -_").partition(":")[0]
    if name not in HARDWARE:
        raise ConfigError(
            f"hardware {value!r} is unknown{nearest(name, HARDWARE)}; known are "
            f"{', '.join(HARDWARE)}, or describe your own: jfleet.Hardware("
            "name=.., memory_bytes=.., flops=.., memory_bandwidth=.., "
            "link_bandwidth=..)"
        )
    return HARDWARE[name]
