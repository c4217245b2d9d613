"""Every name of Lightning that this package leans on, in one place: if one moves, one test and one file tell."""

from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.fabric.strategies import ParallelStrategy as FabricParallelStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from lightning.fabric.wrappers import _FabricModule as FabricModule
from lightning.fabric.wrappers import _unwrap_objects as unwrap_objects
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from lightning.pytorch.plugins.precision import Precision as PytorchPrecision
from lightning.pytorch.strategies import ModelParallelStrategy as PytorchModelParallelStrategy
from lightning.pytorch.strategies import ParallelStrategy as PytorchParallelStrategy
from lightning.pytorch.strategies import StrategyRegistry as PYTORCH_REGISTRY
from lightning.pytorch.strategies.strategy import Strategy as PytorchStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = [
    "FABRIC_REGISTRY",
    "PYTORCH_REGISTRY",
    "BackwardSyncControl",
    "Callback",
    "CheckpointCallback",
    "FabricModelParallelStrategy",
    "FabricModule",
    "FabricParallelStrategy",
    "FabricPrecision",
    "FabricStrategy",
    "LightningModule",
    "PytorchModelParallelStrategy",
    "PytorchParallelStrategy",
    "PytorchPrecision",
    "PytorchStrategy",
    "SIGTERMException",
    "StochasticWeightAveraging",
    "Trainer",
    "TrainerFn",
    "WeightAveraging",
    "optimizers_to_device",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "unwrap_objects",
]
