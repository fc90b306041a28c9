"""The cost gate: which rounds draft, how far, and which are plain, by measured times."""

from pillarattn.decoding.cost_gate.choice import (
    REASONS,
    Choice,
    Gate,
    GateDecision,
    ObservedRound,
)
from pillarattn.decoding.cost_gate.gate import FIRST_S, MAX_K, SS, CostGate

__all__ = [
    "FIRST_S",
    "MAX_K",
    "REASONS",
    "SS",
    "Choice",
    "CostGate",
    "Gate",
    "GateDecision",
    "ObservedRound",
]
