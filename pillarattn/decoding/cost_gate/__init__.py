"""The cost gate: which rounds draft, how far, and which are plain, by measured times."""

from pillarattn.decoding.cost_gate.choice import (
    REASONS,
    Choice,
    Gate,
    GateDecision,
    ObservedRound,
)
from pillarattn.decoding.cost_gate.gate import FIRST_S, MAX_K, SS, CostGate
from pillarattn.decoding.cost_gate.memory import GateMemory
from pillarattn.decoding.cost_gate.outlook import Outlook
from pillarattn.decoding.cost_gate.pace import Pace
from pillarattn.decoding.cost_gate.round_clock import RoundClock

__all__ = [
    "FIRST_S",
    "MAX_K",
    "REASONS",
    "SS",
    "Choice",
    "CostGate",
    "Gate",
    "GateDecision",
    "GateMemory",
    "ObservedRound",
    "Outlook",
    "Pace",
    "RoundClock",
]
