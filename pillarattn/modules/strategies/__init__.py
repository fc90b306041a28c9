"""The strategies: importing this package registers all of them."""

from pillarattn.modules.strategies.base import (
    STRATEGIES,
    SelectionRequest,
    Strategy,
    register_strategy,
)
from pillarattn.modules.strategies.full import FullStrategy
from pillarattn.modules.strategies.oracle import OracleStrategy
from pillarattn.modules.strategies.pillar import PillarStrategy
from pillarattn.modules.strategies.streaming import StreamingStrategy
from pillarattn.modules.strategies.uniform import UniformStrategy

__all__ = [
    "STRATEGIES",
    "FullStrategy",
    "OracleStrategy",
    "PillarStrategy",
    "SelectionRequest",
    "Strategy",
    "StreamingStrategy",
    "UniformStrategy",
    "register_strategy",
]
