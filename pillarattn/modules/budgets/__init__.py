"""How many keys a draft step may read."""

from pillarattn.modules.budgets.ratio import RatioBudget

__all__ = ["RatioBudget"]
