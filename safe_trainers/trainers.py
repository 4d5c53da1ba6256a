"""The drop-in trainers, one for each stable trainer of TRL."""

import trl
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer

from . import config
from .config import SafeDPOConfig, SafeGRPOConfig, SafeRewardConfig, SafeRLOOConfig, SafeSFTConfig
from .core.versions import absent_names
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


class SafeDPOTrainer(PrecisionMixin, DPOTrainer, PrecisionBase):
    """`trl.DPOTrainer` that trains at the right precision or fails at construction. It takes the same arguments."""

    config_class = SafeDPOConfig


if "SafeKTOTrainer" not in absent_names():

    class SafeKTOTrainer(PrecisionMixin, trl.KTOTrainer, PrecisionBase):
        """`trl.KTOTrainer` that trains at the right precision or fails at construction. It takes the same arguments.

        It needs TRL 1.8.
        """

        config_class = config.SafeKTOConfig


if "SafeDistillationTrainer" not in absent_names():

    class SafeDistillationTrainer(PrecisionMixin, trl.DistillationTrainer, PrecisionBase):
        """`trl.DistillationTrainer` that trains at the right precision or fails at construction.

        It takes the same arguments, and needs TRL 1.10.
        """

        config_class = config.SafeDistillationConfig
