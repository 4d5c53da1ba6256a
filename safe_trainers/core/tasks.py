"""The tasks: TRL's stable trainers, each with a drop-in trainer and a command. Plain values; nothing is imported."""

from collections.abc import Mapping
from dataclasses import dataclass


Columns = tuple[tuple[str, ...], ...]

PREFERENCES: Columns = (("chosen", "rejected"),)
PROMPTS: Columns = (("prompt",),)


@dataclass(frozen=True)
class Task:
    """One algorithm.

    Attributes:
        algorithm: Its name in TRL's classes: `GRPO` of `GRPOTrainer`.
        columns: The columns that a dataset needs: one of these groups.
        trains: What the command trains, for its help.
        since: The first release of TRL in which the trainer is stable.
    """

    algorithm: str
    columns: Columns
    trains: str = ""
    since: str = "0.29"

    @property
    def trainer(self) -> str:
        """The name of the drop-in trainer."""
        return f"Safe{self.algorithm}Trainer"

    @property
    def config(self) -> str:
        """The name of its config."""
        return f"Safe{self.algorithm}Config"


TASKS: Mapping[str, Task] = {
    "grpo": Task("GRPO", PROMPTS),
    "rloo": Task("RLOO", PROMPTS),
    "sft": Task("SFT", (("messages",), ("conversations",), ("prompt", "completion"), ("text",), ("input_ids",))),
    "reward": Task("Reward", (*PREFERENCES, ("chosen_ids", "rejected_ids")), trains="a reward model"),
    "dpo": Task("DPO", PREFERENCES),
    "kto": Task("KTO", (("prompt", "completion", "label"), *PREFERENCES), since="1.8"),
    "distillation": Task("Distillation", PROMPTS, trains="a student of a teacher", since="1.10"),
}
"""The tasks by command, in the order of the help."""


EXPERIMENTAL: Mapping[str, str] = {
    "a2po": "A2PO",
    "async_distillation": "AsyncDistillation",
    "async_grpo": "AsyncGRPO",
    "bco": "BCO",
    "cpo": "CPO",
    "gfpo": "GFPO",
    "gkd": "GKD",
    "gmpo": "GMPO",
    "gold": "GOLD",
    "grpo_with_replay_buffer": "GRPOWithReplayBuffer",
    "iw_opd": "IWOPD",
    "minillm": "MiniLLM",
    "nash_md": "NashMD",
    "online_dpo": "OnlineDPO",
    "orpo": "ORPO",
    "papo": "PAPO",
    "ppo": "PPO",
    "prm": "PRM",
    "sdft": "SDFT",
    "sdpo": "SDPO",
    "server_distillation": "ServerDistillation",
    "tpo": "TPO",
    "xpo": "XPO",
}
"""TRL's experimental trainers without a task, in any supported release: the module in `trl.experimental`, and the name
in its classes, `PPO` of `PPOTrainer`."""


def task_of(name: str) -> Task | None:
    """The task of a drop-in trainer or config.

    Args:
        name: The name of a class, such as `SafeKTOTrainer`.

    Returns:
        The task; `None` if the name is not one of these classes.
    """
    return next((task for task in TASKS.values() if name in (task.trainer, task.config)), None)
