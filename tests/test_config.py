"""The Safe configs see what the user left unset, before upstream decides it."""

import dataclasses

import cells
import pytest
import trl
from transformers import HfArgumentParser

from safe_trainers import (
    PrecisionArguments,
    PrecisionError,
    SafeGRPOConfig,
    SafeSFTConfig,
)
from safe_trainers import (
    config as arguments,
)
from safe_trainers.core.device import Device


CONFIGS = list(cells.SAFE_CONFIG.values())
T4 = Device("cuda", "Tesla T4", (7, 5), unscalable_dtypes=frozenset({"bfloat16", "float16"}))
A100 = Device("cuda", "A100", (8, 0), unscalable_dtypes=frozenset({"bfloat16", "float16"}))


@pytest.mark.parametrize("config", CONFIGS)
def test_nothing_set_works_on_a_cpu_where_a_plain_config_refuses_itself(config, tmp_path):
    made = config(str(tmp_path))
    assert (made.bf16, made.fp16) == (False, False)
    plain = getattr(trl, config.__name__.removeprefix("Safe"))
    with pytest.raises(ValueError, match="doesn't support bf16/gpu"):
        plain(str(tmp_path))


@pytest.mark.parametrize("config", CONFIGS)
def test_the_config_is_trls_with_the_precision_settings(config):
    plain = getattr(trl, config.__name__.removeprefix("Safe"))
    assert issubclass(config, plain)
    added = {f.name for f in dataclasses.fields(config)} - {f.name for f in dataclasses.fields(plain)}
    assert added == {f.name for f in dataclasses.fields(PrecisionArguments)} == {
        "precision", "rollout_compute", "adapter_dtype", "upcast_trainables", "fp32_modules", "save_dtype",
        "loss_scale_init", "loss_scale_growth_interval", "loss_scale_growth_factor", "loss_scale_backoff_factor",
        "max_consecutive_skips", "overflow_probe_steps", "keep_frozen_casts", "media_trial", "precision_metrics",
        "sync_lost_limit", "record_steps",
        "precision_report", "profile", "adapter_sync", "rollout_correction", "old_logps", "share_media_features",
        "router_replay", "compile_decode",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "bf16", "fp16"),
    [
        ({"bf16": True}, True, False),
        ({"fp16": True}, False, True),
        ({"bf16": False}, False, False),
        ({"precision": "bf16"}, True, False),
        ({"precision": "torch.bfloat16"}, True, False),
        ({"precision": "fp16"}, False, True),
        ({"precision": "fp32"}, False, False),
        ({"precision": "auto"}, False, False),
        ({"precision": "fp16", "fp16": True}, False, True),
    ],
)
def test_precision_and_flags(settings, bf16, fp16, tmp_path):
    made = SafeSFTConfig(str(tmp_path), use_cpu=True, **settings)
    assert (made.bf16, made.fp16) == (bf16, fp16)
    # Copying a config decides the same again.
    copied = dataclasses.replace(made)
    assert (copied.bf16, copied.fp16, copied.precision) == (bf16, fp16, made.precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("before", ["fp32", "bf16", "fp16", None])
def test_another_precision_is_written_with_the_flags_unset(before, precision, tmp_path):
    made = SafeSFTConfig(str(tmp_path), use_cpu=True, precision=before)
    copied = dataclasses.replace(made, precision=precision, bf16=None, fp16=False)
    assert (copied.precision, copied.bf16, copied.fp16) == (precision, precision == "bf16", precision == "fp16")
    if before == "bf16" != precision:
        with pytest.raises(PrecisionError, match="precision-contradicts-flag"):  # `bf16=True` is passed on
            dataclasses.replace(made, precision=precision)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"precision": "fp16", "bf16": True}, "drop `bf16=True`, or drop `precision='fp16'`"),
        ({"precision": "fp32", "bf16": True}, "drop `bf16=True`, or drop `precision='fp32'`"),
        ({"precision": "bf16", "fp16": True}, "drop `fp16=True`, or drop `precision='bf16'`"),
        ({"precision": "bf16", "bf16": False}, "drop `bf16=False`, or drop `precision='bf16'`"),
        ({"precision": "auto", "bf16": True}, "drop `bf16=True`, or drop `precision='auto'`"),
        ({"precision": "float"}, "precision='float32'"),
    ],
)
def test_contradictions_are_refused_with_the_line_to_drop(settings, fix, tmp_path):
    with pytest.raises(PrecisionError) as caught:
        SafeGRPOConfig(str(tmp_path), use_cpu=True, **settings)
    assert fix in str(caught.value)


@pytest.mark.parametrize(("device", "flags"), [(T4, (False, True)), (A100, (True, False))])
def test_auto_picks_what_the_device_computes(device, flags, tmp_path, monkeypatch):
    """The device is described by hand, as none is here; transformers' own check of bf16 is told to use the CPU."""
    monkeypatch.setattr(arguments, "detect_device", lambda wanted=None: device)
    made = SafeSFTConfig(str(tmp_path), use_cpu=True)
    assert (made.bf16, made.fp16) == flags


def test_the_fields_can_be_given_on_a_command_line(tmp_path):
    argv = ["--output_dir", str(tmp_path), "--precision", "bf16", "--rollout_compute", "stock", "--use_cpu"]
    (made,) = HfArgumentParser(SafeSFTConfig).parse_args_into_dataclasses(argv)
    assert (made.bf16, made.precision, made.rollout_compute) == (True, "bf16", "stock")
