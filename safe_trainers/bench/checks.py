"""The names of the checks. torch is not imported, so that the command line can list them quickly."""

from collections.abc import Mapping
from dataclasses import dataclass


TIME_LIMIT = 600.0
"""Seconds after which a bench ends, by default."""


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        summary: What is checked, in one line.
        place: The module in this package and the function, which takes a `Workshop` and yields rows.
        stand_in: Whether runs with `fp16=True` on a CPU use stand-ins for autocast and the loss scaler of CUDA.
    """

    summary: str
    place: str
    stand_in: bool = False


CHECKS: Mapping[str, Check] = {
    "matrix": Check(
        "text and image models, full, LoRA and 4-bit, in three load dtypes and three precisions", "cells:matrix", True
    ),
    "media": Check("images have the dtype that their tower computes in", "cells:media", True),
    "adapters": Check("LoRA adapters keep the updates of a learning rate of 1e-5", "cells:adapters"),
    "scaler": Check("trainable weights under a loss scaler are float32", "cells:scaler", True),
    "rollout-dtype": Check("rollout, scoring and training compute in the same dtype", "cells:rollout_dtype"),
    "prompt-ids": Check("scoring and training see the tokens that were sampled", "tokens:prompt_ids"),
    "truncation": Check(
        "truncation does what its settings are documented to do, and cuts no image", "tokens:truncation"
    ),
    "resume": Check("a resumed run ends with the weights of an uninterrupted one", "steps:resume"),
    "skipped-steps": Check("the learning-rate schedule waits in steps that fp16 skips", "steps:skipped_steps", True),
    "nan": Check("a run with one NaN does not end as if it had trained", "not_finite:nan"),
}
"""The checks, in the order in which they run."""
