"""The four drop-in trainers."""

from trl import GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer

from .arguments import SafeGRPOConfig, SafeRewardConfig, SafeRLOOConfig, SafeSFTConfig
from .mixin import PrecisionBase, PrecisionMixin


class SafeGRPOTrainer(PrecisionMixin, GRPOTrainer, PrecisionBase):
    """`trl.GRPOTrainer`, right in precision or stopped at construction; takes what it takes."""

    config_class = SafeGRPOConfig


class SafeRLOOTrainer(PrecisionMixin, RLOOTrainer, PrecisionBase):
    """`trl.RLOOTrainer`, right in precision or stopped at construction; takes what it takes."""

    config_class = SafeRLOOConfig


class SafeSFTTrainer(PrecisionMixin, SFTTrainer, PrecisionBase):
    """`trl.SFTTrainer`, right in precision or stopped at construction; takes what it takes."""

    config_class = SafeSFTConfig


class SafeRewardTrainer(PrecisionMixin, RewardTrainer, PrecisionBase):
    """`trl.RewardTrainer`, right in precision or stopped at construction; takes what it takes."""

    config_class = SafeRewardConfig
