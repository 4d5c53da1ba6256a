"""Messages about sharded weights in rollouts, on settings and models as the engines leave them."""

from types import SimpleNamespace

import torch

from safe_trainers import tiny
from safe_trainers.rollout.alignment import RolloutAlignment
from safe_trainers.rollout.truncation import TruncationCorrection


def test_a_sharded_head_cannot_renormalise_truncated_samples():
    args = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, top_k=10, top_p=1.0,
        deepspeed_plugin=SimpleNamespace(zero_stage=3),
        fsdp=None, parallel_mode=None, generation_kwargs=None,
    )  # fmt: skip
    run = SimpleNamespace(args=args, trainer=SimpleNamespace(vllm_generation=None, tools=None))
    found = list(TruncationCorrection(run).check(tiny.build_model("text")))
    assert [problem.id for problem in found] == ["truncation-cannot-be-corrected"]
    assert "shards the head" in found[0].why


def test_a_sharded_reference_in_another_dtype_is_reported():
    warned = []
    trainer = SimpleNamespace(is_fsdp_enabled=True, is_deepspeed_enabled=False)
    run = SimpleNamespace(
        model=tiny.build_model("text").to(torch.bfloat16), trainer=trainer, warn_once=warned.append,
        reference_is_live=False,
    )  # fmt: skip
    RolloutAlignment(run)._align_reference(tiny.build_model("text"))
    assert [problem.id for problem in warned] == ["reference-in-another-dtype"]
    assert "float32" in warned[0].why
