"""The experts that a colocated vLLM chose, which it returns with its completions if it is asked to."""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from ..core.patches import replace
from ..model.routers import Routers, unknown


ARGUMENT = "enable_return_routed_experts"
"""The argument of an engine, from vLLM 0.14 on."""


def why_not(args: Any, routers: Routers) -> str | None:
    """Why a run cannot get the experts from vLLM; `None` if it can.

    Args:
        args: The training arguments.
        routers: The routers of the model.
    """
    if getattr(args, "vllm_mode", None) != "colocate":
        return "TRL's client of a vLLM server does not pass them on"
    if getattr(args, "vllm_tensor_parallel_size", 1) > 1:
        return "with `vllm_tensor_parallel_size` above 1, an engine has the sequences of several processes"
    if getattr(args, "vllm_enable_sleep_mode", False):
        return "`vllm_enable_sleep_mode=True` discards the buffer of the engine"
    if not returns_experts():
        return f"this vLLM has no `{ARGUMENT}`"
    if not _has_runner():
        return "vLLM returns them only with Triton, which it does not find here"
    grouped = next((router.name for router in routers.found if len(router.counts) > 1), None)
    if grouped is not None:
        return f"vLLM does not return the groups of experts that {grouped} chooses from"
    layers = [layer_of(router.name) for router in routers.found]
    if None in layers or len(set(layers)) < len(layers) or len({router.chosen for router in routers.found}) > 1:
        return "vLLM returns one choice for each layer, and the routers of the model are others"
    return None


def returns_experts() -> bool:
    """Whether the engines of the installed vLLM have `ARGUMENT`."""
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError:
        return False
    return ARGUMENT in getattr(EngineArgs, "__dataclass_fields__", {})


def _has_runner() -> bool:
    """Whether the installed vLLM has the model runner that returns experts; later releases need Triton for it."""
    if find_spec("vllm.config.aux_output") is None:
        return True
    from vllm.triton_utils import HAS_TRITON

    return bool(HAS_TRITON)


def layer_of(name: str) -> int | None:
    """Returns the number of the layer that a module is in; `None` for a name without one."""
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found[1])


class EngineRoutes:
    """Keeps the experts that an engine returns.

    Args:
        llm: The engine, a `vllm.LLM` in this process.
        routers: The routers of the model.
    """

    def __init__(self, llm: Any, routers: Routers) -> None:
        self._routers = routers
        self._outputs: Sequence[Any] = ()
        original = llm.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            self._outputs = original(*args, **kwargs)
            return self._outputs

        replace("returned-experts", llm, "generate", generate)

    def record(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> torch.Tensor | None:
        """Returns the record of the last call of the engine, left-padded like the prompts.

        Args:
            prompts: Token ids of each prompt.
            completions: Token ids of each completion.

        Returns:
            The record, (B, P + T - 1, K), where the longest prompt has P and the longest completion T tokens; `None`
            if the engine did not return the experts of all tokens.
        """
        outputs, self._outputs = self._outputs, ()
        layers = [layer_of(router.name) for router in self._routers.found]
        kept = [getattr(part, "routed_experts", None) for output in outputs for part in output.outputs]
        chosen_by_row = [part for part in kept if part is not None]  # arrays of NumPy, (S, layers, k)
        if len(chosen_by_row) != len(prompts):
            return None
        longest = max(map(len, prompts))
        width = longest + max(map(len, completions)) - 1
        dtype = self._routers.dtype
        record = torch.full((len(prompts), width, self._routers.width), unknown(dtype), dtype=dtype)
        for row, (prompt, completion, part) in enumerate(zip(prompts, completions, chosen_by_row, strict=True)):
            chosen = torch.from_numpy(part.astype("int64"))[:, layers].flatten(1)  # (S, K)
            if chosen.shape != (len(prompt) + len(completion) - 1, self._routers.width):
                return None
            start = longest - len(prompt)
            record[row, start : start + len(chosen)] = chosen.to(dtype)
        return record


def engine_kwargs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an engine that returns the experts."""
    return {**arguments, ARGUMENT: True}
