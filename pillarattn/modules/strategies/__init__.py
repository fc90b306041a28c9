"""The strategies: importing this package registers all of them."""

from pillarattn.modules.strategies.base import (
    STRATEGIES,
    LayerState,
    RankedStrategy,
    SelectionRequest,
    Strategy,
    register_strategy,
)
from pillarattn.modules.strategies.forecast import ForecastStrategy
from pillarattn.modules.strategies.full import FullStrategy
from pillarattn.modules.strategies.h2o import HeavyHitterStrategy
from pillarattn.modules.strategies.history import PositionHistory
from pillarattn.modules.strategies.key_blocks import KeyBlocks
from pillarattn.modules.strategies.oracle import OracleStrategy
from pillarattn.modules.strategies.pillar import PillarStrategy
from pillarattn.modules.strategies.quest import QuestStrategy
from pillarattn.modules.strategies.snapkv import SnapKVStrategy
from pillarattn.modules.strategies.streaming import StreamingStrategy
from pillarattn.modules.strategies.triforce import TriForceStrategy
from pillarattn.modules.strategies.uniform import UniformStrategy
from pillarattn.modules.strategies.union import UnionStrategy
from pillarattn.modules.strategies.value_aware import ValueAwareStrategy
from pillarattn.modules.strategies.vegas import VegasStrategy

__all__ = [
    "STRATEGIES",
    "ForecastStrategy",
    "FullStrategy",
    "HeavyHitterStrategy",
    "KeyBlocks",
    "LayerState",
    "OracleStrategy",
    "PillarStrategy",
    "PositionHistory",
    "QuestStrategy",
    "RankedStrategy",
    "SelectionRequest",
    "SnapKVStrategy",
    "Strategy",
    "StreamingStrategy",
    "TriForceStrategy",
    "UniformStrategy",
    "UnionStrategy",
    "ValueAwareStrategy",
    "VegasStrategy",
    "register_strategy",
]
