"""The runs in bf16, fp16 and fp32: the variance of the gradient, the models, and the rule of the page."""

from types import SimpleNamespace

import benchmark_modules
import fp16_rl_page
import pytest
import torch


@pytest.fixture
def fp16_rl(monkeypatch):
    return benchmark_modules.load(monkeypatch, "fp16_rl")


# ---- the benchmark ----


class FakeTrainer:
    """Adds planted gradients, scaled like a loss scaler does."""

    def __init__(self, gradients, scale=None):
        self.model = torch.nn.Linear(2, 1, bias=False)
        self.args = SimpleNamespace(gradient_accumulation_steps=len(gradients[0]))
        scaler = None if scale is None else SimpleNamespace(get_scale=lambda: scale)
        self.accelerator = SimpleNamespace(scaler=scaler)
        self._gradients, self._scale = [g for step in gradients for g in step], scale or 1.0
        self._micro = 0

    def training_step(self):
        n, weight = self.args.gradient_accumulation_steps, self.model.weight
        if self._micro % n == 0:
            weight.grad = torch.zeros_like(weight)
        weight.grad += self._scale * torch.tensor([self._gradients[self._micro]]) / n
        self._micro += 1


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_variance_is_that_of_the_gradients_of_the_micro_batches(fp16_rl, scale):
    steps = [[[1.0, 0.0], [3.0, 2.0], [2.0, 4.0], [0.0, 1.0]], [[1.0, 1.0]] * 4]
    trainer = FakeTrainer(steps, scale)
    recorded = fp16_rl.Variance(trainer)
    for _ in range(8):
        trainer.training_step()
    planted = torch.tensor(steps)
    assert recorded.variance == pytest.approx(planted.var(1).sum(-1).tolist())
    assert recorded.variance[1] == 0
    assert recorded.square == pytest.approx(planted.mean(1).square().sum(-1).tolist())


def logps(fp16_rl, offset, root, dtype=torch.float32):
    folder = fp16_rl.make_model(offset, 0, root)
    model = fp16_rl.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.arange(96).view(2, 48)
    with torch.no_grad():
        return model(input_ids=ids).logits.float().log_softmax(-1)


def test_the_offset_changes_only_what_is_rounded(fp16_rl, tmp_path):
    models = [logps(fp16_rl, offset, tmp_path) for offset in (0, 32, 128)]
    for other in models[1:]:
        assert (other - models[0]).abs().max() < 1e-3
    errors = [
        (logps(fp16_rl, offset, tmp_path, torch.bfloat16) - model).abs().mean()
        for offset, model in zip((0, 32, 128), models, strict=True)
    ]
    assert errors[2] > 2 * errors[1] > 4 * errors[0]


def test_the_reward_is_the_share_of_the_rewarded_words(fp16_rl):
    ids = fp16_rl.make_tokenizer()("w0 w7 w8 w93")["input_ids"]
    assert fp16_rl.reward([ids, ids[:2], ids[2:]]) == [0.5, 1, 0]
    assert not set(fp16_rl.prompts(1000, "train 0")) & set(fp16_rl.prompts(fp16_rl.HELD_OUT, "held out"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_records_every_step(fp16_rl, tmp_path, monkeypatch, precision):
    monkeypatch.setattr(fp16_rl, "LENGTH", 8)
    row = fp16_rl.run(32, "none", precision, 0, tmp_path, use_vllm=False, generation_kwargs={}, max_steps=2)
    assert [len(row[key]) for key in ("reward", "mismatch", "ess", "variance", "square")] == [2] * 5
    assert 0 <= row["score"] <= 1
    # Before clipping, the gradient of the step is the mean of the recorded ones.
    assert row["square"] == pytest.approx([norm**2 for norm in row["grad_norm"]], rel=1e-2)
    assert row["variance"][0] > 0


# ---- the page ----


def rows(precision, scores, offset=0, correction="sequence_mask", log_ratio=0.1):
    return [
        {"offset": offset, "correction": correction, "precision": precision, "seed": seed, "score": score,
         "reward": [score / 2] * 6, "variance": [1 + score] * 4 + [100.0] * 2, "log_ratio": [log_ratio] * 6}
        for seed, score in enumerate(scores)
    ]  # fmt: skip


HIGH, LOW, BETWEEN = (0.9, 0.95, 0.92, 0.99, 0.91), (0.1, 0.2, 0.3, 0.4, 0.5), (0.3, 0.6, 0.92, 0.4, 0.5)


@pytest.mark.parametrize("of", fp16_rl_page.MEASURES.values())
@pytest.mark.parametrize(("bf16", "fp16", "expected"), [
    (LOW, HIGH, "fp16 higher"),
    (HIGH, LOW, "bf16 higher"),
    (HIGH, HIGH, "no difference shown"),
    (LOW, BETWEEN, "no difference shown"),
    (BETWEEN, HIGH, "no difference shown"),
    (LOW[:4], HIGH[:4], "too few seeds"),
    (LOW, HIGH[:4], "too few seeds"),
    ((), (), "too few seeds"),
])  # fmt: skip
def test_the_verdict_is_that_of_the_ranges(bf16, fp16, expected, of):
    assert fp16_rl_page.verdict(rows("bf16", bf16), rows("fp16", fp16), of) == expected


def test_seeds_are_counted_in_pairs():
    bf16, fp16 = rows("bf16", (0.1, 0.5, 0.9)), rows("fp16", (0.2, 0.5, 0.8, 1.0))
    assert fp16_rl_page.signs(fp16, bf16, fp16_rl_page.final) == "1/3"
    assert fp16_rl_page.signs(rows("fp16", HIGH), rows("bf16", LOW), fp16_rl_page.final) == "5/5"


def test_the_variance_is_that_at_a_mean_weight_of_one():
    row = rows("bf16", (0.5,))[0]
    assert fp16_rl_page.variance(row) == pytest.approx(1.5)
    assert fp16_rl_page.variance(row | {"weight": [0.5] * 4 + [1.0] * 2}) == pytest.approx(6.0)


def planted(*groups):
    results = fp16_rl_page.Results()
    results.heading = results.heading | {"offsets": [0, 32], "corrections": ["sequence_mask", "none"]}
    results.rows = [row for group in groups for row in group]
    return results


def test_the_threshold_is_between_the_runs_that_differ_from_fp32_and_the_others():
    results = planted(
        rows("fp32", HIGH), rows("bf16", HIGH, log_ratio=0.3), rows("fp16", HIGH, log_ratio=0.1),
        rows("fp32", HIGH, 32), rows("bf16", LOW, 32, log_ratio=3.0), rows("fp16", HIGH, 32, log_ratio=0.5),
    )  # fmt: skip
    found = fp16_rl_page.threshold(results, "sequence_mask", fp16_rl_page.final)
    assert (found[:2], found[2]) == (pytest.approx((0.5, 3.0)), "fp32 higher")
    # The references belong to every correction, the other runs do not.
    assert fp16_rl_page.threshold(results, "none", fp16_rl_page.final) == (None, None, "")
    assert results.cases() == [("sequence_mask", 0), ("sequence_mask", 32)]
    assert results.halves(("sequence_mask", 32), fp16_rl_page.final) == "fp16 higher"
    assert results.halves(("sequence_mask", 0), fp16_rl_page.final) == "no difference shown"


def test_without_a_difference_there_is_none_at_any_mismatch():
    results = planted(rows("fp32", HIGH), rows("bf16", HIGH, log_ratio=0.3), rows("fp16", HIGH))
    assert fp16_rl_page.threshold(results, "sequence_mask", fp16_rl_page.final) == (pytest.approx(0.3), None, "")


def test_every_run_is_committed_in_its_precision(fp16_rl):
    results = fp16_rl_page.Results()
    expected = {(*cell, seed) for cell in fp16_rl.cells() for seed in fp16_rl.SEEDS}
    assert {fp16_rl.key_of(row) for row in results.rows} == expected
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    assert all(row["sampler"] == names[row["precision"]] for row in results.rows)
    assert all(len(row["reward"]) == results.heading["steps"] for row in results.rows)
