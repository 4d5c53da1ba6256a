"""Two processes replay the experts of their own rollouts, and log the flips of both."""

import json
from pathlib import Path

import moe_models
import pytest
from two_processes import run_in_two_processes


SCRIPT = """
import json, sys
from pathlib import Path
sys.path.append(sys.argv[2])
import test_expert_runs as runs

folder, found = Path(sys.argv[1]), {}
for replay in ("off", "rollout"):
    trainer = runs.trainer_of(folder / "out", router_replay=replay, max_steps=1, ddp_backend="gloo")
    watch = runs.Watch(trainer.model)
    trainer.train()
    rank = trainer.accelerator.process_index
    log = trainer.state.log_history[0] if rank == 0 else {}
    found[replay] = {"flips": watch.flips, "seen": watch.seen, "log": log}
(folder / f"rank-{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.skipif(not moe_models.FUSED, reason="the experts of transformers 4 are lists of layers")
def test_each_process_replays_its_own_rollouts(tmp_path):
    run_in_two_processes(SCRIPT, tmp_path, str(Path(__file__).parent.parent / "integration"), beside=__file__)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert all(rank["off"]["seen"] > 100 for rank in ranks)
    assert sum(rank["off"]["flips"] for rank in ranks) > 0
    assert [rank["rollout"]["flips"] for rank in ranks] == [0, 0]
    off, on = (ranks[0][replay]["log"] for replay in ("off", "rollout"))
    assert off["precision/router_flip_any_frac"] > 0
    assert on["precision/router_flip_frac"] == 0 < on["precision/router_replayed_frac"]
