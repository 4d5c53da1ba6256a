"""`safe-trainers bench`: each check finds a fault that is planted in a subclass, and nothing in a healthy trainer.

Runs with `fp16=True` use stand-ins for autocast and the loss scaler of CUDA (`safe_trainers.testing.fp16_on_cpu`).
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import transformers
import trl
from transformers import Trainer, TrainerCallback, TrainingArguments

import safe_trainers
from safe_trainers.bench import cells, judges, not_finite, run, steps, tokens
from safe_trainers.bench.build import Setup, Workshop, quiet
from safe_trainers.bench.checks import CHECKS
from safe_trainers.bench.outcome import Bench, Result, Row
from safe_trainers.bench.rules import rules
from safe_trainers.bench.run import bench_trainer
from safe_trainers.bench.subject import describe
from safe_trainers.cli.main import main
from upstream import needs_epoch_after_skip


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")

SFT, GRPO = safe_trainers.SafeSFTTrainer, safe_trainers.SafeGRPOTrainer


def shop(trainer_class, tmp_path, **args):
    return Workshop(describe(trainer_class, args=args), tmp_path)


def statuses(rows):
    return {row.run: row.status for row in rows}


# --- planted faults -------------------------------------------------------------------------------------------------


class RoundsPixels(SFT):
    def _prepare_inputs(self, inputs):
        made = super()._prepare_inputs(inputs)
        if self.args.fp16:
            made["pixel_values"] = made["pixel_values"].bfloat16()
        return made


class RoundsAdapters(SFT):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.args.bf16:
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.bfloat16()


class HalfUnderScaler(SFT):
    """One trainable half weight without a gradient: the scaler does not fail on it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.args.fp16:
            self.model.register_parameter("extra", torch.nn.Parameter(torch.ones(2, dtype=torch.float16)))


class SamplesWithoutAutocast(GRPO):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        generate = self.model.generate

        def plain(*args, **kwargs):
            with torch.autocast("cpu", enabled=False):
                return generate(*args, **kwargs)

        self.model.generate = plain


class NoisyUnderAutocast(SFT):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model.lm_head.register_forward_hook(
            lambda module, args, out: out * 1.5 if torch.is_autocast_enabled("cpu") else out
        )


class LossIsNaN(trl.SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * torch.nan if self.args.bf16 and self.state.global_step else loss


class TrainsNothing(trl.SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return torch.zeros((), requires_grad=True) if self.args.bf16 else loss


@pytest.mark.parametrize(
    ("trainer_class", "setup", "rule"),
    [
        (RoundsPixels, Setup(cells.UNCAST, "fp32", "fp16"), "media-dtype"),
        (RoundsAdapters, Setup("text", "fp32", "bf16", "lora"), "adapters-rounded"),
        (HalfUnderScaler, Setup("text", "fp32", "fp16"), "half-under-scaler"),
        (SamplesWithoutAutocast, Setup("text", "fp32", "bf16", "lora"), "phases-differ"),
        (NoisyUnderAutocast, Setup("text", "fp32", "bf16"), "log-probabilities"),
        (LossIsNaN, Setup("text", "fp32", "bf16"), "finite"),
        (TrainsNothing, Setup("text", "fp32", "bf16"), "gradients"),
    ],
)
def test_a_planted_fault_of_a_whole_run_is_found_and_its_base_passes(trainer_class, setup, rule, tmp_path):
    found = cells.judged(shop(trainer_class, tmp_path), setup, None, "trains")
    assert (found.status, found.rule) == ("fault", rule), found
    healthy = cells.judged(shop(trainer_class.__mro__[1], tmp_path), setup, None, "trains")
    assert healthy.status == "passed", healthy


def changed(key, change):
    """A trainer that changes a tensor of the scored batch."""

    class ChangesTokens(GRPO):
        def _generate_and_score_completions(self, inputs):
            made = super()._generate_and_score_completions(inputs)
            made[key] = change(made[key].clone())
            return made

    return ChangesTokens


def other_last(ids):
    ids[:, -1] = 9
    return ids


def other_first(ids):
    ids[:, 0] = 9
    return ids


@pytest.mark.parametrize(("key", "change"), [("prompt_ids", other_last), ("completion_ids", other_first)])
def test_other_tokens_than_the_sampled_ones_are_found(key, change, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "FAMILIES", ("llava",))
    (found,) = tokens.prompt_ids(shop(changed(key, change), tmp_path))
    assert (found.status, found.rule) == ("fault", "other-ids"), found


def test_image_placeholders_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "FAMILIES", ("llava",))
    (healthy,) = tokens.prompt_ids(shop(GRPO, tmp_path))
    assert healthy.status == "passed"
    assert "16 image tokens" in healthy.detail


class IgnoresTheMask(GRPO):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mask_truncated_completions = False


class IgnoresMaxLength(SFT):
    def __init__(self, model, args=None, **kwargs):
        args.max_length = None
        super().__init__(model, args=args, **kwargs)


class DropsImages(SFT):
    """Trains on the text of a row whose image does not fit, as `truncation_mode="keep_end"` once did."""

    def __init__(self, model, args=None, **kwargs):
        self.drops, args.max_length = args.max_length is not None, None
        super().__init__(model, args=args, **kwargs)

    def _prepare_inputs(self, inputs):
        made = super()._prepare_inputs(inputs)
        if self.drops:
            made.pop("pixel_values")
            for key in ("input_ids", "attention_mask", "labels"):
                made[key] = made[key][:, -4:]
        return made


def test_completions_that_are_not_masked_are_found(tmp_path):
    (found,) = tokens.truncation(shop(IgnoresTheMask, tmp_path))
    assert (found.status, found.rule) == ("fault", "masked-completions"), found
    (healthy,) = tokens.truncation(shop(GRPO, tmp_path))
    assert healthy.status == "passed", healthy


def test_rows_that_are_not_cut_and_images_that_are_dropped_are_found(tmp_path):
    text, _ = tokens.truncation(shop(IgnoresMaxLength, tmp_path))
    assert (text.status, text.rule) == ("fault", "longer-than-max-length"), text
    _, image = tokens.truncation(shop(DropsImages, tmp_path))
    assert (image.status, image.rule) == ("fault", "image-tokens-cut"), image
    for row in tokens.truncation(shop(SFT, tmp_path)):
        assert row.status == "passed", row


class ForgetsTheOptimizer(SFT):
    def _load_optimizer_and_scheduler(self, checkpoint):
        pass


class TrainsAnotherWayEachTime(SFT):
    """Scales its loss by a number that does not depend on the seed."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * (1 + os.urandom(1)[0] / 256)


@pytest.mark.parametrize(
    ("trainer_class", "status"),
    [
        (ForgetsTheOptimizer, "fault"),
        (TrainsAnotherWayEachTime, "could not run"),
        pytest.param(SFT, "passed", marks=needs_epoch_after_skip),
    ],
)
def test_a_run_that_resumes_without_its_optimizer_is_found(trainer_class, status, tmp_path):
    setup = Setup(steps=steps.STEPS, changes={"learning_rate": 1e-3})
    with quiet():
        assert steps._resumed(shop(trainer_class, tmp_path), setup, "").status == status


class StepsTheSchedule(SFT):
    """Steps the learning-rate schedule once more in each step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

        class Steps(TrainerCallback):
            def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
                getattr(lr_scheduler, "scheduler", lr_scheduler).step()

        self.add_callback(Steps())


def test_a_schedule_that_goes_on_in_a_skipped_step_is_found(tmp_path):
    for trainer_class, expected in ((StepsTheSchedule, {"fault"}), (SFT, {"passed"})):
        made = shop(trainer_class, tmp_path, lr_scheduler_type="constant")
        assert {row.status for row in steps.skipped_steps(made)} == expected


class StopsAtNaN(trl.SFTTrainer):
    def training_step(self, model, *args, **kwargs):
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            raise FloatingPointError("weights are not finite")
        return super().training_step(model, *args, **kwargs)


def test_a_nan_that_ends_as_a_normal_run_is_found(tmp_path):
    found = statuses(not_finite.nan(shop(StopsAtNaN, tmp_path)))
    assert found == {
        "gradient, fp32": "passed",
        "gradient of the last step, fp32": "fault",  # after the last step the subclass does not look
        "gradient, bf16 autocast": "passed",
        "weight, fp32": "passed",
        "pixel, fp32": "passed",
    }
    assert set(statuses(not_finite.nan(shop(SFT, tmp_path))).values()) == {"passed"}


# --- stock trainers -------------------------------------------------------------------------------------------------


STOCK_FAULTS = {
    "adapters": {"text, 4-bit LoRA, bf16 weights, bf16", "text, 4-bit LoRA, fp32 weights, bf16"},
    "scaler": {"text, full, fp16 weights, fp16", "text, 4-bit LoRA, fp16 weights, fp16"},
    "skipped-steps": {"adamw_torch_fused"},
}


@pytest.mark.parametrize("check", STOCK_FAULTS)
def test_stock_sft_has_the_faults_that_are_known(check):
    pytest.importorskip("bitsandbytes")
    result = bench_trainer(trl.SFTTrainer, only=[check], isolate=False)[check]
    assert {row.run for row in result.rows if row.status in ("fault", "crashed")} == STOCK_FAULTS[check]
    assert "could not run" not in result.counts


def test_stock_grpo_samples_in_another_dtype_and_safe_does_not(tmp_path):
    setup = Setup("text", "fp32", "bf16", "lora")
    for trainer_class, status in ((trl.GRPOTrainer, "fault"), (GRPO, "passed")):
        assert cells.judged(shop(trainer_class, tmp_path), setup, ("phases-differ",), "trains").status == status


def test_stock_crashes_on_pixels_and_safe_does_not(tmp_path):
    setup = Setup(cells.UNCAST, "bf16", "none")
    for trainer_class, status in ((trl.SFTTrainer, "crashed"), (SFT, "passed")):
        assert cells.judged(shop(trainer_class, tmp_path), setup, None, "media-trains").status == status


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["trl:SFTTrainer", "trl:GRPOTrainer"])
def test_the_whole_bench_of_stock_finds_faults_within_ten_minutes(name):
    start = time.monotonic()
    found = bench_trainer(name)
    assert time.monotonic() - start < 600
    assert found.exit_status == 1
    assert {found[check].status for check in ("adapters", "scaler", "skipped-steps", "nan")} <= {"fault", "crashed"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trainer_class", [SFT, GRPO])
def test_the_whole_bench_of_ours_finds_nothing(trainer_class):
    found = bench_trainer(trainer_class)
    assert found.exit_status == 0, [result.to_dict() for result in found.results if result.wrong]


# --- isolation, the control, and the command ------------------------------------------------------------------------


class Broken(SFT):
    def compute_loss(self, *args, **kwargs):
        raise RuntimeError("broken in every precision")


class TakesOtherArguments(SFT):
    def __init__(self, net, config, rows):
        super().__init__(net, args=config, train_dataset=rows)


class Refuses(SFT):
    def __init__(self, model, args=None, **kwargs):
        if args.bf16:
            raise ValueError("this trainer does not support bf16")
        super().__init__(model, args=args, **kwargs)


class Dies(SFT):
    def training_step(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(SFT):
    def training_step(self, *args, **kwargs):
        time.sleep(600)


def test_a_trainer_that_is_broken_in_float32_could_not_be_checked(tmp_path):
    row = cells.judged(shop(Broken, tmp_path), Setup("text", "fp32", "bf16"), None, "trains")
    assert row.status == "could not run"
    assert "broken in every precision" in row.detail
    assert Bench("", "", {}, (Result("matrix", (row,)),)).exit_status == 1


def test_a_family_whose_processor_cannot_be_loaded_is_not_measured(tmp_path, monkeypatch):
    made = shop(SFT, tmp_path)
    assert made.why_not_built("llava") == ""

    def fails(*args, **kwargs):
        raise ImportError("requires\ntorchvision")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", fails)
    row = cells.judged(made, Setup("llava", "fp32", "bf16"), None, "trains")
    assert row.status == "not applicable"
    assert row.detail.endswith("cannot build llava: ImportError: requires torchvision")


def test_a_refusal_is_neither_a_crash_nor_a_fault(tmp_path):
    row = cells.judged(shop(Refuses, tmp_path), Setup("text", "fp32", "bf16"), None, "trains")
    assert (row.status, row.detail) == ("refused", "ValueError: this trainer does not support bf16")
    assert Bench("", "", {}, (Result("matrix", (row,)),)).exit_status == 0


@pytest.mark.skipif(not run.can_fork(), reason="needs fork")
@pytest.mark.parametrize(
    ("trainer_class", "status", "text"), [(Dies, "crashed", "by signal 9"), (Hangs, "could not run", "time limit")]
)
def test_a_process_that_dies_or_hangs_ends_only_its_check(trainer_class, status, text):
    lines = []
    limit = 8 if trainer_class is Hangs else 60
    found = bench_trainer(trainer_class, only=["skipped-steps", "media"], time_limit=limit, progress=lines.append)
    assert [result.status for result in found.results] == [status, status if status == "crashed" else "could not run"]
    assert text in found.results[0].detail
    if trainer_class is Hangs:
        assert found.results[1].detail == "the time limit of 8 s had passed"  # it is not started
    assert len(lines) == 4


@pytest.mark.skipif(not run.can_fork(), reason="needs fork")
def test_an_interrupt_ends_the_process_of_the_check_at_once(capfd, monkeypatch):
    def interrupted(connection, limit):
        time.sleep(1)  # the check is running
        os.kill(process_of_check(), signal.SIGINT)  # as the terminal does with Ctrl-C
        time.sleep(1)
        assert process_of_check() is not None
        raise KeyboardInterrupt

    def process_of_check():
        return next((child.pid for child in multiprocessing.active_children()), None)

    started = time.monotonic()
    monkeypatch.setattr(multiprocessing.connection.Connection, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run_isolated(describe(Hangs), "skipped-steps", 60)
    assert time.monotonic() - started < 20
    assert process_of_check() is None
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("trainer_class", [Broken, TakesOtherArguments])
def test_truncation_is_not_judged_if_the_control_fails(trainer_class):
    result = bench_trainer(trainer_class, only=["truncation"], isolate=False)["truncation"]
    assert {row.status for row in result.rows} == {"could not run"}
    assert "text, max_length" in {row.run for row in result.rows}


def test_a_check_that_fails_itself_could_not_run(monkeypatch):
    monkeypatch.setitem(CHECKS, "nan", replace(CHECKS["nan"], place="not_finite:absent"))
    result = bench_trainer(SFT, only=["nan"], isolate=False)["nan"]
    assert result.status == "could not run"
    assert "absent" in result.detail


def test_the_worst_run_decides():
    def of(*found):
        return Result("matrix", tuple(Row(str(number), status) for number, status in enumerate(found))).status

    assert of("passed", "refused", "fault", "crashed") == "fault"
    assert of("passed", "could not run") == "could not run"
    assert of("not applicable", "passed") == "passed"
    assert of() == of("not applicable") == "not applicable"


class Plain(Trainer):
    pass


class Typed(Trainer):
    def __init__(self, model=None, args: TrainingArguments | None = None, **kwargs):
        super().__init__(model=model, args=args, **kwargs)


@pytest.mark.parametrize(
    ("trainer_class", "task", "config", "generates", "images"),
    [
        (trl.GRPOTrainer, "grpo", trl.GRPOConfig, True, True),
        (GRPO, "grpo", safe_trainers.SafeGRPOConfig, True, True),
        (IgnoresTheMask, "grpo", safe_trainers.SafeGRPOConfig, True, True),
        (trl.DPOTrainer, "dpo", trl.DPOConfig, False, True),
        (SFT, "sft", safe_trainers.SafeSFTConfig, False, True),
        (trl.RewardTrainer, "reward", trl.RewardConfig, False, False),
        (Plain, "trainer", TrainingArguments, False, False),
        (Typed, "trainer", TrainingArguments, False, False),
    ],
)
def test_the_task_is_found_from_the_class(trainer_class, task, config, generates, images):
    found = describe(trainer_class)
    assert (found.task, found.config_class, found.generates, found.takes_images) == (task, config, generates, images)


def test_an_experimental_trainer_is_found_by_its_arguments():
    cpo = pytest.importorskip("trl.experimental.cpo")
    found = describe(cpo.CPOTrainer)
    assert (found.task, found.config_class, found.takes_images) == ("dpo", cpo.CPOConfig, False)


def test_a_plain_trainer_of_transformers_is_checked():
    result = bench_trainer(Plain, only=["media", "adapters", "truncation", "nan"], isolate=False)
    assert [found.status for found in result.results] == ["not applicable"] * 3 + ["fault"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "write the class: safe-trainers bench --trainer MODULE:CLASS"),
        (["--trainer", "trl.GRPOTrainer"], "--trainer must be MODULE:CLASS, such as trl:GRPOTrainer"),
        (["--trainer", "absent_module:X"], "absent_module cannot be imported: ModuleNotFoundError"),
        (["--trainer", "trl:GRPOTraner"], "trl has no class 'GRPOTraner'; did you mean 'GRPOTrainer'?"),
        (["--trainer", "trl:GRPOConfig"], "does not extend transformers.Trainer"),
        (["--trainer", "json:dumps"], "does not extend transformers.Trainer"),
        (["--trainer", "trl:SFTTrainer", "--only", "rsume"], "no check 'rsume'; did you mean 'resume'?"),
        (["--trainer", "trl:SFTTrainer", "--args", "beta"], "--args must be KEY=VALUE"),
        (["--trainer", "trl:SFTTrainer", "--args", "a=[1"], "--args a: the value is not valid YAML"),
        (["--trainer", "trl:SFTTrainer", "--args", "weight_decai=1"], "did you mean 'weight_decay'?"),
        (["--trainer", "trl:SFTTrainer", "--args", "bf16=true"], "the checks set bf16 themselves"),
        (["--trainer", "trl:SFTTrainer", "--json", "absent/a.json"], "the folder absent of --json"),
        (["--trainer", "trl:SFTTrainer", "--json", "."], "--json . is a folder. Write the name of a file in it"),
        (["--trainer", "trl:SFTTrainer", "--json", "/proc/a.json"], "--json /proc/a.json cannot be written"),
        (["--trainer", "trl:SFTTrainer", "--time_limit", "0"], "--time_limit must be a number of seconds above 0"),
        (["--trainer", "pkg/mine.py:X"], "not the name of a module. Write its dotted name from the current folder: "
         "--trainer pkg.mine:X"),
        (["--trainer", ".mine:X"], "--trainer mine:X"),
        (["--trainer", "a_script:X"], "a_script cannot be imported: SystemExit: 2"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(words, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_script.py").write_text("import sys\n\nsys.exit(2)\n")
    assert main(["bench", *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert text in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("trainer", ["trl:SFTTrainer", trl.SFTTrainer])
def test_a_written_task_replaces_the_detected_one(trainer):
    assert bench_trainer(trainer, only=[]).task == "sft"
    assert bench_trainer(trainer, task="reward", only=[]).task == "reward"


def test_the_command_passes_the_written_task_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--trainer", "trl:SFTTrainer", "--task", "reward", "--only", "prompt-ids", "--json", "bench.json"]
    main(["bench", *words])
    assert json.loads((tmp_path / "bench.json").read_text())["task"] == "reward"


def test_the_command_prints_a_table_and_writes_json(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_trainers.py").write_text("import trl\n\n\nclass Mine(trl.SFTTrainer):\n    pass\n")
    words = ["--trainer", "my_trainers:Mine", "--only", "skipped-steps, prompt-ids", "--json", "bench.json"]
    assert main(["bench", *words, "--args", "weight_decay=0.1", "warmup_steps=0"]) == 1
    shown = capsys.readouterr()
    assert "[1/2] prompt-ids" in shown.err
    assert "not applicable" in shown.out
    assert "fault (stand-in)" in shown.out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (found["task"], found["exit_status"], found["args"]) == ("sft", 1, {"weight_decay": 0.1, "warmup_steps": 0})
    prompt_ids, skipped = found["checks"]
    assert prompt_ids["status"] == "not applicable"
    assert [(row["run"], row["status"]) for row in skipped["rows"]] == [
        ("adamw_torch_fused", "fault"),
        ("adamw_torch", "passed"),
    ]
    assert skipped["rows"][0]["rule"] == "scheduler-ahead"
    assert found["versions"]["trl"] == trl.__version__


def test_the_checks_are_listed(capsys):
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in CHECKS if name not in shown] == []


# --- rules ----------------------------------------------------------------------------------------------------------


def test_every_rule_belongs_to_a_check_and_has_a_reference():
    assert {rule.check for rule in rules().values()} == set(CHECKS)
    assert [rule.id for rule in rules().values() if not rule.reference.startswith("https://")] == []


def test_the_limits_of_the_judges_are_those_of_the_rules():
    assert judges.LOST_LIMIT == 0.01
    assert {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6} == judges.LOGP_LIMIT


def test_the_slice_has_every_pair():
    made = cells.matrix_setups(with_images=True)
    for one, two, count in (
        ("weights", "flag", 9), ("weights", "kind", 9), ("flag", "kind", 9), ("family", "kind", 6),
        ("family", "flag", 6), ("family", "weights", 6),
    ):  # fmt: skip
        assert len({(getattr(setup, one), getattr(setup, two)) for setup in made}) == count
