"""From bytes and FLOPs to seconds: two ceilings, and how close real code comes to them."""

from __future__ import annotations

from dataclasses import dataclass

from pillarattn.errors import UnknownNameError
from pillarattn.theory.hardware import Hardware
from pillarattn.theory.model_shape import ModelShape
from pillarattn.theory.traffic import Traffic


@dataclass(frozen=True)
class Efficiency:
    """Shares of the ceilings that the parts of a pass reach, and costs that no ceiling has.

    Attributes:
        name: how to ask for it.
        weights: share of the bandwidth in matrix products of few rows.
        matrix: share of the matrix rate in products of many rows.
        attention: share of the bandwidth in attention over keys in order.
        gather: share of the bandwidth in attention over index lists.
        layer_seconds: small kernels and gaps of one layer, per pass.
        pass_seconds: sampling, bookkeeping and launches of one pass.
        source: where the numbers come from.
    """

    name: str = "ideal"
    weights: float = 1.0
    matrix: float = 1.0
    attention: float = 1.0
    gather: float = 1.0
    layer_seconds: float = 0.0
    pass_seconds: float = 0.0
    source: str = "no loss anywhere: the ceiling"

    def __post_init__(self) -> None:
        for field in ("weights", "matrix", "attention", "gather"):
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(
                    f"{field} of efficiency {self.name!r} must be within 0 < x <= 1, "
                    f"got {getattr(self, field)}"
                )
        if self.layer_seconds < 0 or self.pass_seconds < 0:
            raise ValueError(f"efficiency {self.name!r} has a negative cost in seconds")


IDEAL = Efficiency()
_CARD = "of 4.657 TB/s and 788 TFLOP/s on one H200, Qwen3-8B shape"
KERNELS = Efficiency(
    name="kernels",
    weights=0.77,
    matrix=0.75,
    attention=0.96,
    gather=0.70,
    source=f"measured kernels {_CARD}: fused linear layers in a CUDA graph, attention with 1 or 9 "
    "rows, gather of 5 % of the tokens; nothing between the kernels",
)
COMPILED = Efficiency(
    name="compiled",
    weights=0.66,
    matrix=0.75,
    attention=0.96,
    gather=0.70,
    layer_seconds=21e-6,
    source=f"measured {_CARD}: torch.compile and one CUDA graph around the Hugging Face layers",
)
HF_GRAPH = Efficiency(
    name="hf-graph",
    weights=0.66,
    matrix=0.75,
    attention=0.96,
    gather=0.70,
    layer_seconds=115e-6,
    source=f"measured {_CARD}: unfused Hugging Face layers in one CUDA graph",
)
EFFICIENCIES = {e.name: e for e in (IDEAL, KERNELS, COMPILED, HF_GRAPH)}


def efficiency_named(name: str) -> Efficiency:
    """Return a preset; an unknown name raises `UnknownNameError` with the choices."""
    try:
        return EFFICIENCIES[name]
    except KeyError:
        raise UnknownNameError(
            f"unknown efficiency {name!r}; choose one of {', '.join(EFFICIENCIES)}"
        ) from None


@dataclass(frozen=True)
class Seconds:
    """Seconds of a phase by part; `total` is their sum, since the parts run one after another."""

    gemm: float
    attention: float
    selection: float
    fixed: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.gemm + self.attention + self.selection + self.fixed


def roofline_seconds(
    traffic: Traffic,
    hardware: Hardware,
    efficiency: Efficiency = IDEAL,
    *,
    layers: int = 0,
    passes: float = 1,
) -> Seconds:
    """Return the time of a phase: each part at the slower of its two ceilings.

    Args:
        traffic: what the phase moves and computes.
        hardware: the two ceilings.
        efficiency: what share of them is reached.
        layers: layers of the model, for the cost of small kernels.
        passes: forward passes in `traffic`, for the fixed costs.
    """
    bandwidth, flops = hardware.bandwidth, hardware.flops
    gemm = max(
        traffic.weights / (bandwidth * efficiency.weights),
        traffic.gemm_flops / (flops * efficiency.matrix),
    )
    moved = (traffic.kv_read + traffic.kv_written) / (bandwidth * efficiency.attention)
    moved += (traffic.kv_gathered + traffic.indices) / (bandwidth * efficiency.gather)
    attention = max(moved, traffic.attention_flops / (flops * efficiency.matrix))
    attention += traffic.state / bandwidth
    fixed = passes * (layers * efficiency.layer_seconds + efficiency.pass_seconds)
    return Seconds(gemm, attention, traffic.scores / bandwidth, fixed)


def pass_seconds(
    traffic: Traffic, shape: ModelShape, hardware: Hardware, efficiency: Efficiency = IDEAL
) -> Seconds:
    """Return the time of one forward pass of a model."""
    return roofline_seconds(traffic, hardware, efficiency, layers=len(shape.layers))
