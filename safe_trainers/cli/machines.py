"""The machines of a launch: which ones there are, and which of them this is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import RecipeError
from ..recipes.ranges import RANGES


FLAGS = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
"""The options of a launch over several machines, under accelerate's names."""
PORT = 29500
"""The default of `main_process_port` for several machines: accelerate's."""


@dataclass(frozen=True)
class Machines:
    """The machines of a launch.

    Attributes:
        count: How many there are.
        rank: The number of this one, from 0.
        address: Name or IP address of machine 0; `None` for a single machine.
        port: The port on machine 0 on which all processes meet; 0 for any free one of a single machine.
    """

    count: int = 1
    rank: int = 0
    address: str | None = None
    port: int = 0

    def options(self) -> list[str]:
        """Returns the options of accelerate's launcher."""
        options = ["--num_machines", str(self.count), "--machine_rank", str(self.rank)]
        options += ["--main_process_port", str(self.port)]
        return options if self.address is None else [*options, "--main_process_ip", self.address]

    def share(self, processes: int) -> int:
        """Returns how many processes run on each machine.

        Args:
            processes: The processes of all machines.

        Raises:
            RecipeError: If the machines cannot have equal shares.
        """
        each, left = divmod(processes, self.count)
        if left:
            raise RecipeError(
                f"num_processes is the total of all machines, and {processes} cannot be divided among {self.count}. "
                f"Write: --num_processes {max(each, 1) * self.count}"
            )
        return each


def read_machines(given: Mapping[str, Any], config: Mapping[str, Any], name: str) -> Machines:
    """Reads the machines of a launch from its options and its config.

    Args:
        given: The options that were written, by name.
        config: The content of the accelerate config, which has the values of options that were not written.
        name: The name of the config.

    Raises:
        RecipeError: If a value is missing, out of range, or contradicts the config.
    """
    found = {flag: given[flag] if given.get(flag) is not None else config.get(flag) for flag in FLAGS}
    for flag in ("num_machines", "machine_rank", "main_process_port"):
        value = found[flag]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value not in RANGES[flag]):
            raise RecipeError(f"{flag} must be {RANGES[flag]}, got {value}. Write: --{flag} {_EXAMPLES[flag]}")
    asked, configured = given.get("num_machines"), config.get("num_machines")
    if asked is not None and configured is not None and asked != configured:
        raise RecipeError(
            f"--num_machines {asked} contradicts num_machines: {configured} of {name}. Write: --num_machines "
            f"{configured}, or num_machines: {asked} in the config"
        )
    count, rank = found["num_machines"] or 1, found["machine_rank"]
    address, port = found["main_process_ip"], found["main_process_port"]
    if rank is not None and rank >= count:
        last = f"from 0 to {count - 1}" if count > 1 else "0 with one machine"
        more = "" if count > 1 else f". Write: --num_machines {rank + 1}"
        raise RecipeError(f"machine_rank must be {last}, got {rank}{more}")
    if count == 1:
        return Machines(port=port or 0)
    if rank is None:
        raise RecipeError(
            f"{count} machines need machine_rank, which is different on each of them. Write: --machine_rank 0 on the "
            "first one"
        )
    if not address:
        raise RecipeError(
            f"{count} machines need main_process_ip, the address of machine 0. Write: --main_process_ip "
            f"{_EXAMPLES['main_process_ip']}"
        )
    return Machines(count, rank, str(address), port or PORT)


_EXAMPLES = {"num_machines": "2", "machine_rank": "0", "main_process_ip": "10.0.0.1", "main_process_port": str(PORT)}
