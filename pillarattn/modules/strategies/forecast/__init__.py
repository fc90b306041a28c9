"""The forecast strategy: what each key will be attended to, learnt while decoding."""

from pillarattn.kernels.key_forecast import FEATURES
from pillarattn.modules.strategies.forecast.ridge import OnlineRidge
from pillarattn.modules.strategies.forecast.strategy import ForecastStrategy

__all__ = ["FEATURES", "ForecastStrategy", "OnlineRidge"]
