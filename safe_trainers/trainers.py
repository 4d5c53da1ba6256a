"""The four drop-in trainers."""

from trl import GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer

from .config import SafeGRPOConfig, SafeRewardConfig, SafeRLOOConfig, SafeSFTConfig
from .trainer.base import PrecisionBase
from .trainer.mixin import PrecisionMixin


class SafeGRPOTrainer(PrecisionMixin, GRPOTrainer, PrecisionBase):
    """`trl.GRPOTrainer` that trains at the right precision or fails at construction. It takes the same arguments."""

    config_class = SafeGRPOConfig


class SafeRLOOTrainer(PrecisionMixin, RLOOTrainer, PrecisionBase):
    """`trl.RLOOTrainer` that trains at the right precision or fails at construction. It takes the same arguments."""

    config_class = SafeRLOOConfig


class SafeSFTTrainer(PrecisionMixin, SFTTrainer, PrecisionBase):
    """`trl.SFTTrainer` that trains at the right precision or fails at construction. It takes the same arguments."""

    config_class = SafeSFTConfig


class SafeRewardTrainer(PrecisionMixin, RewardTrainer, PrecisionBase):
    """`trl.RewardTrainer` that trains at the right precision or fails at construction. It takes the same arguments."""

    config_class = SafeRewardConfig
