"""GRPO and RLOO of mixtures of experts: losses use the experts of the rollout if asked to, and stock's never do."""

import importlib.util

import cells
import moe_models
import pytest
import torch
import trl
from cells import fingerprint
from datasets import Dataset
from peft import LoraConfig
from policing import reset_accelerate
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_trainers import (
    PrecisionError,
    SafeGRPOConfig,
    SafeGRPOTrainer,
    SafeRLOOConfig,
    SafeRLOOTrainer,
    SafeSFTConfig,
    SafeSFTTrainer,
    tiny,
)
from safe_trainers.core.coverage import COVERED, UNCOVERED
from safe_trainers.experts.routes import ROUTES_KEY, ExpertRoutes
from safe_trainers.report.run_report import ROUTERS
from safe_trainers.testing import fp16_on_cpu


pytestmark = [
    pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning"),
    pytest.mark.skipif(not moe_models.FUSED, reason="the experts of transformers 4 are lists of layers"),
]
FLIPS, ANY, REPLAYED = (f"precision/router_{name}" for name in ("flip_frac", "flip_any_frac", "replayed_frac"))
WINDOW = {"steps_per_generation": 4, "num_iterations": 2, "gradient_accumulation_steps": 2}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def model(seed=0, **changes):
    """A mixture of 32 experts in three layers, whose vocabulary is that of the tiny tokenizer."""
    tokenizer = tiny.build_tokenizer("text")
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 3,
        "num_local_experts": 32,
        "num_experts_per_tok": 4, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 256,
    }  # fmt: skip
    return moe_models.moe("qwen3_moe", seed, **(sizes | changes))


def prompts(rows=16):
    """Prompts of several lengths, so that they are padded."""
    tokenizer = tiny.build_tokenizer("text")
    ids = [[(7 * row + 3 * place) % (len(tokenizer) - 8) + 4 for place in range(3 + row % 4)] for row in range(rows)]
    return Dataset.from_dict({"prompt": [tokenizer.decode(row) for row in ids]})


def trainer_of(tmp_path, precision="bf16", safe=True, algorithm="GRPO", peft=None, model_of=model, **changes):
    reset_accelerate()
    config = (
        {"GRPO": SafeGRPOConfig, "RLOO": SafeRLOOConfig}[algorithm] if safe else getattr(trl, f"{algorithm}Config")
    )
    args = {
        "output_dir": str(tmp_path), "use_cpu": True, "bf16": precision == "bf16", "fp16": precision == "fp16",
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 32, "max_steps": 2,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-4,
        "seed": 1, "beta": 0.0,
    } | changes  # fmt: skip
    made = (
        {"GRPO": SafeGRPOTrainer, "RLOO": SafeRLOOTrainer}[algorithm] if safe else getattr(trl, f"{algorithm}Trainer")
    )
    made = fp16_on_cpu(made) if precision == "fp16" else made
    torch.manual_seed(0)
    return made(
        model_of(),
        args=config(**args),
        reward_funcs=cells.token_reward,
        train_dataset=prompts(),
        eval_dataset=prompts(8),
        processing_class=tiny.build_tokenizer("text"),
        peft_config=peft,
    )


class Watch:
    """The experts that each token got in its context, in generation and in losses, seen where the experts are."""

    def __init__(self, trained):
        base = trained.get_base_model() if hasattr(trained, "get_base_model") else trained
        self.generated, self.flips, self.seen, self._pad = {}, 0, 0, base.config.pad_token_id
        self._chosen, self._ids = [], None
        base.register_forward_pre_hook(self._begin, with_kwargs=True)
        base.register_forward_hook(self._end, with_kwargs=True)
        for module in base.modules():
            if type(module).__name__.endswith("MoeExperts"):
                module.register_forward_pre_hook(lambda m, args: self._chosen.append(args[1].sort(-1)[0]))

    def _begin(self, module, args, kwargs):
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
        self._ids = ids if ids.shape[1] == mask.shape[1] else torch.cat([self._ids, ids], dim=1)
        self._mask, self._chosen = mask, []

    def _end(self, module, args, kwargs, output):
        rows, length = kwargs["input_ids"].shape
        chosen = torch.stack(self._chosen, dim=1).view(rows, length, -1).tolist()
        for row, (ids, mask) in enumerate(zip(self._ids.tolist(), self._mask.tolist(), strict=True)):
            for place in range(length):
                end = len(ids) - length + place + 1
                if not mask[end - 1]:
                    continue
                context = tuple(i for i, m in zip(ids[:end], mask, strict=False) if m)
                experts = tuple(chosen[row][place])
                if kwargs.get("use_cache") is True or "past_key_values" in kwargs:
                    self.generated.setdefault(context, set()).add(experts)
                elif context in self.generated:
                    self.seen += 1
                    self.flips += experts not in self.generated[context]


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def routes(trainer):
    return trainer.precision[ExpertRoutes]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_use_the_experts_of_the_rollout_and_those_of_stock_do_not(precision, tmp_path):
    counts = {}
    for name, safe, changes in (
        ("stock", False, {}),
        ("off", True, {}),
        ("replayed", True, {"router_replay": "rollout"}),
    ):
        if name == "stock" and precision == "fp16":
            continue  # accelerate does not compute in float16 on a CPU
        trainer = trainer_of(tmp_path, precision, safe, seed=2, **changes)  # with seed 1 some CPUs flip none in fp16
        watch = Watch(trainer.model)
        trainer.train()
        assert watch.seen > 400
        counts[name] = watch.flips
        if safe:
            assert (max(logged(trainer, ANY)) > 0) == (name == "off")
            assert (REPLAYED in trainer.state.log_history[0]) == (name == "replayed")
    assert counts.pop("replayed") == 0
    assert all(count > 0 for count in counts.values())


def test_the_mismatch_of_tokens_with_a_flip_is_larger_and_replay_leaves_that_of_the_others(tmp_path):
    found = {}
    for replay in ("off", "rollout"):
        trainer = trainer_of(tmp_path, router_replay=replay, max_steps=1, per_device_train_batch_size=16)
        trainer.train()
        found[replay] = trainer.state.log_history[0]
    off, on = found["off"], found["rollout"]
    flip, other = off["precision/logp_mismatch_flip"], off["precision/logp_mismatch_no_flip"]
    tokens = off[ANY]
    assert flip > 1.5 * other
    assert off["precision/logp_mismatch_mean"] == pytest.approx(tokens * flip + (1 - tokens) * other, rel=1e-6)
    assert "precision/logp_mismatch_flip" not in on
    assert on["precision/logp_mismatch_mean"] == on["precision/logp_mismatch_no_flip"]
    assert on["precision/logp_mismatch_mean"] < off["precision/logp_mismatch_mean"]
    assert on[FLIPS] == 0 < on[REPLAYED]
    by_router = [value for key, value in off.items() if key.startswith(f"{FLIPS}/")]
    assert sum(by_router) / 3 == pytest.approx(off[FLIPS])


ALIGNED = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
"""A window whose weights do not change before its end."""


@pytest.mark.parametrize("changes", [{}, ALIGNED], ids=["plain", "window"])
def test_in_float32_replay_changes_no_bit_and_neither_does_seeing(changes, tmp_path):
    weights = set()
    for safe, settings in ((False, {}), (True, {}), (True, {"router_replay": "rollout"})):
        trainer = trainer_of(tmp_path, "fp32", safe, max_steps=3, **settings, **changes)
        trainer.train()
        weights.add(fingerprint(trainer.model))
    assert len(weights) == 1
    assert logged(trainer, FLIPS) == pytest.approx([0.0] * len(logged(trainer, FLIPS)))


def test_seeing_changes_no_bit_in_half_precision(tmp_path):
    weights = set()
    for metrics in (True, False):
        trainer = trainer_of(tmp_path, precision_metrics=metrics)
        trainer.train()
        weights.add(fingerprint(trainer.model))
        assert bool(logged(trainer, FLIPS)) == metrics
    assert len(weights) == 1


@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO"])
def test_the_record_goes_with_its_tokens_through_a_generation_window(algorithm, tmp_path):
    trainer = trainer_of(tmp_path, algorithm=algorithm, max_steps=4, router_replay="rollout", **WINDOW)
    watch = Watch(trainer.model)
    losses = []
    compute = trainer.compute_loss

    def compute_loss(wrapped, inputs, *args, **kwargs):
        before = watch.seen, watch.flips
        loss = compute(wrapped, inputs, *args, **kwargs)
        record = inputs[ROUTES_KEY]
        assert record.shape[:2] == (
            len(inputs["prompt_ids"]),
            inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1],
        )
        losses.append((watch.seen - before[0], watch.flips - before[1]))
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    assert len(losses) == 8
    assert all(seen > 100 and flips == 0 for seen, flips in losses)


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradient_checkpointing_computes_the_same_gradients(reentrant, tmp_path):
    norms = []
    for checkpointing in (False, True):
        trainer = trainer_of(
            tmp_path, router_replay="rollout", gradient_checkpointing=checkpointing, max_steps=1,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )  # fmt: skip
        trainer.train()
        norms.append(logged(trainer, "grad_norm")[0])
    assert norms[0] == pytest.approx(norms[1], rel=1e-2 if reentrant else 1e-6)


@pytest.mark.parametrize("kind", [pytest.param("attention", marks=pytest.mark.slow), "experts"])
def test_adapters_on_attention_and_on_experts(kind, tmp_path):
    lora = {
        "attention": {"target_modules": ["q_proj", "v_proj"]},
        "experts": {"target_modules": [], "target_parameters": EXPERTS},
    }
    counts = {}
    for replay in ("off", "rollout"):
        trainer = trainer_of(
            tmp_path, router_replay=replay, peft=LoraConfig(r=4, **lora[kind]), learning_rate=1e-2, max_steps=3
        )
        watch = Watch(trainer.model)
        trainer.train()
        counts[replay] = watch.flips
        assert watch.seen > 400
    assert counts["off"] > 0
    assert counts["rollout"] == 0


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_a_base_in_4_bit(tmp_path):
    model().save_pretrained(tmp_path / "base")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )

    def packed():
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", dtype=torch.bfloat16, quantization_config=quantization
        )

    counts = {}
    for replay in ("off", "rollout"):
        trainer = trainer_of(
            tmp_path, router_replay=replay, model_of=packed, peft=LoraConfig(r=4, target_modules=["q_proj"])
        )
        assert len(routes(trainer).routers.found) == 3
        watch = Watch(trainer.model)
        trainer.train()
        counts[replay] = watch.flips
    assert counts["off"] > 0
    assert counts["rollout"] == 0


@pytest.mark.parametrize("adapters", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_reference_chooses_its_own_experts(adapters, tmp_path, monkeypatch):
    """What the reference computes is what it computes without replay."""
    peft = LoraConfig(r=4, target_modules=["q_proj"]) if adapters else None
    made, scored = {}, {}
    model().save_pretrained(tmp_path / "base")
    tiny.build_tokenizer("text").save_pretrained(tmp_path / "base")
    for replay in ("off", "rollout"):
        trainer = trainer_of(
            tmp_path, router_replay=replay, beta=0.1, peft=peft, max_steps=1, model_of=lambda: str(tmp_path / "base")
        )
        batch = trainer._generate_and_score_completions

        def kept(*args, batch=batch, replay=replay):
            made[replay] = batch(*args)
            return made[replay]

        trainer._generate_and_score_completions = kept
        trainer.train()
        scored[replay] = made[replay]["ref_per_token_logps"]
    assert torch.equal(made["off"]["completion_ids"], made["rollout"]["completion_ids"])
    assert torch.equal(scored["off"], scored["rollout"])


def test_old_log_probabilities_are_those_of_the_replayed_experts(tmp_path):
    """With the same weights, the ratio of a loss to the scoring is that of batch shapes alone."""
    noise = {}
    for replay in ("off", "rollout"):
        trainer = trainer_of(tmp_path, router_replay=replay, max_steps=1, **WINDOW)
        watch = Watch(trainer.model)
        trainer.train()
        noise[replay] = watch.flips
    assert noise["off"] > 0
    assert noise["rollout"] == 0


def test_a_run_resumed_inside_a_window_is_the_uninterrupted_one(tmp_path):
    settings = {"router_replay": "rollout", "max_steps": 4, **WINDOW}
    whole = trainer_of(tmp_path / "whole", **settings, save_strategy="steps")
    whole.args.save_steps = whole.state.save_steps = 1
    whole.train()
    for step in (1, 2):
        resumed = trainer_of(tmp_path / "resumed", **settings)
        watch = Watch(resumed.model)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert fingerprint(resumed.model) == fingerprint(whole.model)
        assert watch.flips == 0
        ours = [key for key in whole.state.log_history[-2] if "router" in key or "mismatch" in key]
        for one, two in zip(whole.state.log_history, resumed.state.log_history, strict=False):
            assert {key: one.get(key) for key in ours} == {key: two.get(key) for key in ours}


@pytest.mark.parametrize(("window", "checkpointing"), [({}, True), ({"steps_per_generation": 2}, False)])
def test_a_skipped_step_that_is_computed_again_does_not_end_the_replay(window, checkpointing, tmp_path):
    settings = {"gradient_checkpointing": checkpointing, "max_completion_length": 16, **window}
    trainer = trainer_of(tmp_path, router_replay="rollout", max_steps=4, **settings)
    watch = Watch(trainer.model)
    compute, seen = trainer._compute_loss, []

    def compute_loss(wrapped, inputs):
        before = watch.seen
        loss = compute(wrapped, inputs)
        seen.append(watch.seen - before)
        return loss * float("nan") if trainer.state.global_step == 0 else loss

    trainer._compute_loss = compute_loss
    trainer.train()
    assert trainer.precision.not_finite is not None  # the diagnosis has computed the first loss again
    assert len(seen) == 5
    assert min(seen) > 20
    assert watch.flips == 0


@pytest.mark.parametrize("place", ["backward pass", "router"])
def test_an_interrupted_run_leaves_nothing_in_the_model(place, tmp_path):
    trainer = trainer_of(tmp_path, router_replay="rollout", record_steps=[1, 2], gradient_checkpointing=False)

    def ours():
        hooks = (
            h for m in trainer.model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
        )
        return [h for h in hooks if getattr(h, "func", h).__module__.startswith("safe_trainers")]

    before = ours()

    def interrupt(*args):
        if trainer.state.global_step == 1 and (place == "backward pass" or torch.is_grad_enabled()):
            raise KeyboardInterrupt

    if place == "router":
        handle = trainer.model.model.layers[1].mlp.gate.register_forward_hook(interrupt)  # inside of the mode
    else:
        handle = trainer.model.lm_head.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    handle.remove()
    cells.reset_autocast()
    assert ours() == before
    assert torch._C._len_torch_function_stack() == 0
    trainer.model(torch.arange(5, 12)[None])


def test_evaluation_is_measured_and_replayed_too(tmp_path):
    found = {}
    for replay in ("off", "rollout"):
        trainer = trainer_of(tmp_path, router_replay=replay, per_device_eval_batch_size=8, num_generations_eval=1)
        torch.manual_seed(3)
        found[replay] = trainer.evaluate()
    assert found["off"][f"eval_{ANY}"] > 0
    assert found["rollout"][f"eval_{FLIPS}"] == 0
    assert found["rollout"][f"eval_{REPLAYED}"] > 0


def test_the_auxiliary_loss_counts_the_live_choices(tmp_path):
    """In the first step the weights are the same, so it is stock's, whatever is replayed."""
    values = []
    for safe, changes in ((False, {}), (True, {}), (True, {"router_replay": "rollout"})):
        trainer = trainer_of(tmp_path, "fp32", safe, max_steps=1, **changes)
        trainer.train()
        values.append(logged(trainer, "aux_loss")[0])
    assert values[0] == values[1] == values[2] > 0


def test_report_and_contract_say_what_is_known_of_each_router(tmp_path):
    trainer = trainer_of(tmp_path, router_replay="rollout", max_steps=1)
    trainer.train()
    row = trainer.precision.coverage["experts"]
    assert row.state == COVERED
    assert "3 routers" in row.detail
    assert "12 bytes per token" in row.detail
    table = trainer.precision.report.table(ROUTERS)
    assert [line[:3] for line in table.rows] == [
        (f"model.layers.{n}.mlp.gate", "bfloat16", "4 of 32") for n in range(3)
    ]
    assert all(line[3].endswith("%") and line[4].endswith("%") for line in table.rows)
    off = trainer_of(tmp_path, max_steps=1)
    assert off.precision.coverage["experts"].state == UNCOVERED


def test_routers_in_float32(tmp_path):
    trainer = trainer_of(tmp_path, fp32_modules=["@routers"], max_steps=1)
    dtypes = set()
    for router in routes(trainer).routers.found:
        module = trainer.model.get_submodule(router.scorer)
        module.register_forward_hook(lambda m, args, output: dtypes.add(output[0].dtype))
    trainer.train()
    assert dtypes == {torch.float32}
    assert trainer.precision.report.table(ROUTERS).rows[0][1] == "float32"
    stock = trainer_of(tmp_path, max_steps=1)
    assert stock.precision.report.table(ROUTERS).rows[0][1] == "bfloat16"


def phimoe():
    return moe_models.moe("phimoe", vocab_size=len(tiny.build_tokenizer("text")))


def dense():
    return tiny.build_model("text")


@pytest.mark.parametrize("cached", [True, False])
def test_rollouts_with_and_without_a_cache_agree_in_float32(cached, tmp_path):
    changes = {"generation_kwargs": {"use_cache": cached}}
    trainer = trainer_of(tmp_path, "fp32", router_replay="rollout", **changes)
    made = []
    generate = trainer.model.generate

    def counting(*args, **kwargs):
        kwargs["generation_config"].use_cache = cached  # TRL has a setting of its own
        made.append(kwargs["generation_config"].use_cache)
        return generate(*args, **kwargs)

    trainer.model.generate = counting
    trainer.train()
    assert set(made) == {cached}
    assert logged(trainer, FLIPS) == [0.0, 0.0]
    assert logged(trainer, REPLAYED) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_of": dense}, "no module of the model chooses experts"),
        ({"model_of": phimoe}, "gets experts that no call"),
        ({"torch_compile": True}, "compiles the choice"),
        ({"use_transformers_continuous_batching": True}, "continuous batching"),
        ({"generation_kwargs": {"num_beams": 2}}, "beam search"),
        ({"generation_kwargs": {"prefill_chunk_size": 17}}, "divides the prompts"),
    ],
    ids=["dense", "drawn", "compiled", "continuous", "beams", "chunks"],
)
def test_a_replay_that_cannot_reach_the_experts_is_refused(changes, reason, tmp_path):
    with pytest.raises(PrecisionError, match=reason) as refused:
        trainer_of(tmp_path, router_replay="rollout", **changes)
    assert [problem.id for problem in refused.value.problems] == ["routes-not-reached"]


def test_what_cannot_be_reached_is_not_refused_unless_asked_for(tmp_path):
    trainer = trainer_of(tmp_path, model_of=phimoe, max_steps=1)
    trainer.train()
    assert trainer.precision.coverage["experts"].state == UNCOVERED
    assert not logged(trainer, FLIPS)
    assert not routes(trainer_of(tmp_path, model_of=dense, max_steps=1)).routers.found


def test_a_rollout_whose_experts_are_not_known_is_refused(tmp_path):
    class OwnTurn(SafeGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            return [[5, 6, 7] for _ in prompt_ids], None

    reset_accelerate()
    for replay in ("off", "rollout"):
        args = SafeGRPOConfig(
            str(tmp_path), router_replay=replay, max_steps=1, per_device_train_batch_size=4, num_generations=2,
            use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = OwnTurn(
            model(), args=args, reward_funcs=cells.token_reward, train_dataset=prompts(),
            processing_class=tiny.build_tokenizer("text"),
        )  # fmt: skip
        if replay == "off":
            trainer.train()
            continue
        with pytest.raises(PrecisionError, match="are not known") as refused:
            trainer.train()
        assert [problem.id for problem in refused.value.problems] == ["routes-not-recorded"]


def test_a_class_without_rollouts_has_nothing_to_replay(tmp_path):
    reset_accelerate()
    args = SafeSFTConfig(str(tmp_path), router_replay="rollout", report_to=[], use_cpu=True)
    with pytest.raises(PrecisionError, match="SafeSFTTrainer has no rollouts"):
        SafeSFTTrainer(
            model(), args=args, train_dataset=Dataset.from_dict({"text": ["red"]}),
            processing_class=tiny.build_tokenizer("text"),
        )  # fmt: skip
