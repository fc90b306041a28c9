"""Links between devices and to the host: what a transfer or a collective takes."""

from __future__ import annotations

from dataclasses import dataclass

from pillarattn.errors import UnknownNameError
from pillarattn.theory.hardware import GIGA


@dataclass(frozen=True)
class Link:
    """A way for bytes from one device to another, or to the host.

    Attributes:
        name: how to ask for it.
        bandwidth: bytes per second that one device sends while it receives as many.
        latency: seconds of a transfer or a collective of few bytes.
        source: where the numbers come from.
    """

    name: str
    bandwidth: float
    latency: float
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < float("inf") or not 0 <= self.latency < float("inf"):
            raise ValueError(
                f"link {self.name!r} needs a positive bandwidth and a latency >= 0, "
                f"got {self.bandwidth} and {self.latency}"
            )

    def send(self, moved: float) -> float:
        """Seconds in which `moved` bytes go over."""
        return self.latency + moved / self.bandwidth if moved else 0.0

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of a sum over `ranks` devices of `size` bytes on each: a ring moves 2 (r - 1)/r.

        The latency is that of the whole collective.
        """
        return self._collective(2 * size, ranks)

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds until each of `ranks` devices has all `size` bytes, of which it had 1/r."""
        return self._collective(size, ranks)

    def _collective(self, size: float, ranks: int) -> float:
        if ranks < 2 or not size:
            return 0.0
        return self.latency + size * (ranks - 1) / ranks / self.bandwidth


_ASSUMED = "the latency of a small collective is assumed, not measured"
_NAMED = (
    Link("none", 1e30, 0.0, "free: the ceiling"),
    Link("NVLink-3", 300 * GIGA, 15e-6, f"half of 600 GB/s, NVIDIA A100 datasheet; {_ASSUMED}"),
    Link("NVLink-4", 450 * GIGA, 15e-6, f"half of 900 GB/s, NVIDIA H100, H200 sheet; {_ASSUMED}"),
    Link("NVLink-5", 900 * GIGA, 15e-6, f"half of 1.8 TB/s, NVIDIA HGX B200 sheet; {_ASSUMED}"),
    Link("PCIe-4", 32 * GIGA, 20e-6, f"16 lanes, one direction, before protocol; {_ASSUMED}"),
    Link("PCIe-5", 64 * GIGA, 20e-6, f"16 lanes, one direction, before protocol; {_ASSUMED}"),
)
LINKS = {link.name: link for link in _NAMED}


def link_named(name: str) -> Link:
    """Return a named link; an unknown name raises `UnknownNameError` with the choices."""
    try:
        return LINKS[name]
    except KeyError:
        raise UnknownNameError(
            f"unknown link {name!r}; choose one of {', '.join(LINKS)}, or make a Link of what you "
            "measured"
        ) from None
