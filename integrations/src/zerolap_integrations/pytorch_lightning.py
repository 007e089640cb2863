"""zerolap as a strategy of ``pytorch_lightning``, which is Lightning under its other name: ``Trainer(strategy=ZeroLapStrategy())``, or ``strategy="zerolap"`` once this is imported."""

from __future__ import annotations

from zerolap_integrations._frameworks import need
from zerolap_integrations._lightning import LiveLook, ShardingStrategy

need("pytorch_lightning")

from pytorch_lightning.callbacks import Callback  # noqa: E402
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry  # noqa: E402

__all__ = ["ZeroLapMonitor", "ZeroLapStrategy"]


class ZeroLapStrategy(ShardingStrategy, DDPStrategy):
    __doc__ = f"Lightning's DDPStrategy, with sharded optimizers.{(ShardingStrategy.__doc__ or '').partition('.')[2]}"

    strategy_name = "zerolap"

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistry) -> None:
        """Under a name of its own, and not under those of DDP."""


class ZeroLapMonitor(LiveLook, Callback):
    __doc__ = f"A callback that{(LiveLook.__doc__ or '').partition(':')[2]}"


for _name, _sharded in (("zerolap", "full"), ("zerolap_sharded", "sharded")):
    StrategyRegistry.register(
        _name,
        ZeroLapStrategy,
        description=f"DDP with sharded optimizers, {_sharded} checkpoints",
        override=True,
        checkpoint=_sharded,
    )
