"""Named devices: memory, bandwidth and matrix rate, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from pillarattn.errors import UnknownNameError

TERA, GIGA, MIB = 1e12, 1e9, 2**20


@dataclass(frozen=True)
class Hardware:
    """One device as a roofline sees it.

    Attributes:
        name: how to ask for it.
        memory: bytes of device memory.
        bandwidth: bytes per second between memory and cores.
        flops: dense bf16 matrix FLOPs per second, accumulated in fp32.
        source: where the numbers come from.
        measured: True for reached ceilings, False for a vendor's peak, which no kernel reaches.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    source: str
    measured: bool = False

    def __post_init__(self) -> None:
        for field in ("memory", "bandwidth", "flops"):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise ValueError(f"{field} of hardware {self.name!r} must be positive, got {value}")

    @property
    def balance_rows(self) -> float:
        """Rows of 2-byte weights above which a matrix product is limited by arithmetic."""
        return self.flops / self.bandwidth


_DATASHEET = "NVIDIA {} datasheet; bf16 dense is half of the rate printed with sparsity"
_NAMED = (
    Hardware(
        "H200-measured",
        143771 * MIB,
        4.657 * TERA,
        788 * TERA,
        "measured on one H200 SXM (700 W, 1980 MHz): read-only Triton sum over 8 GB, cuBLAS bf16 "
        "8192^3, memory by nvidia-smi; torch 2.11 + CUDA 13.0, 2026-11-29",
        measured=True,
    ),
    Hardware("H200", 141 * GIGA, 4.8 * TERA, 989.4 * TERA, _DATASHEET.format("H200 SXM")),
    Hardware("H100-SXM", 80 * GIGA, 3.35 * TERA, 989.4 * TERA, _DATASHEET.format("H100 SXM5")),
    Hardware("H100-PCIe", 80 * GIGA, 2.0 * TERA, 756 * TERA, _DATASHEET.format("H100 PCIe")),
    Hardware("A100-40GB", 40 * GIGA, 1.555 * TERA, 312 * TERA, "NVIDIA A100 SXM4 40GB datasheet"),
    Hardware("A100-80GB", 80 * GIGA, 2.039 * TERA, 312 * TERA, "NVIDIA A100 SXM4 80GB datasheet"),
    Hardware(
        "B200",
        180 * GIGA,
        8.0 * TERA,
        2250 * TERA,
        "NVIDIA HGX B200 datasheet, per GPU at 1000 W; bf16 dense is half of 4.5 PFLOP/s sparse",
    ),
    Hardware("L40S", 48 * GIGA, 0.864 * TERA, 362.05 * TERA, "NVIDIA L40S datasheet"),
    Hardware(
        "RTX-4090",
        24 * GIGA,
        1.008 * TERA,
        165.2 * TERA,
        "NVIDIA Ada GPU architecture whitepaper: bf16 with fp32 accumulation, no sparsity",
    ),
)
HARDWARE = {hardware.name: hardware for hardware in _NAMED}


def hardware_named(name: str) -> Hardware:
    """Return a named device; case, spaces and dashes do not matter ("rtx 4090", "h100_sxm").

    Raises:
        UnknownNameError: no such name; the message lists them.
    """
    wanted = _plain(name)
    for hardware in _NAMED:
        if _plain(hardware.name) == wanted:
            return hardware
    raise UnknownNameError(
        f"unknown hardware {name!r}; choose one of {', '.join(HARDWARE)}, or describe your own "
        "with bandwidth, flops and memory"
    )


def custom_hardware(name: str, *, bandwidth: float, flops: float, memory: float) -> Hardware:
    """Describe any device, a CPU for instance, by what you measured on it.

    Args:
        name: for people.
        bandwidth: bytes per second that one pass over a large array reaches.
        flops: FLOPs per second of a large matrix product in the dtype that you use.
        memory: bytes that may be used.
    """
    return Hardware(name, memory, bandwidth, flops, "given by the user", measured=True)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
