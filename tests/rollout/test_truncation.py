"""The distribution that vLLM samples from, recomputed token by token in float64."""

import math
from types import SimpleNamespace

import cells
import pytest
import torch
import trl
from cells import Cell
from live_bytes import LiveBytes
from policing import reset_accelerate
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from safe_trainers import PrecisionError
from safe_trainers.rollout.head_scaling import postprocessing
from safe_trainers.rollout.truncation import History, SamplingRule, TruncationCorrection


VOCABULARY, LENGTH = 60, 24
RULES = [
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logit_bias": {3: -100.0, 5: 2.0}},
    {"allowed_token_ids": list(range(0, VOCABULARY, 2))},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 0.6, "repetition_penalty": 1.2},
]


def reference(logits, rule, prompt, before):
    """Log-probabilities over the vocabulary for one position, as a dictionary of the kept tokens."""
    get = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
           "presence_penalty": 0.0, "frequency_penalty": 0.0, **rule}  # fmt: skip
    scores = {token: float(score) for token, score in enumerate(logits.double().tolist())}
    if "allowed_token_ids" in get:
        scores = {token: score for token, score in scores.items() if token in get["allowed_token_ids"]}
    for token, bias in get.get("logit_bias", {}).items():
        scores[token] += bias
    for token in scores:
        if token in prompt or token in before:
            factor = get["repetition_penalty"]
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= get["frequency_penalty"] * before.count(token) + get["presence_penalty"] * (token in before)
        scores[token] /= get["temperature"]

    def normalised(kept):
        total = math.log(sum(math.exp(score) for score in kept.values()))
        return {token: score - total for token, score in kept.items()}

    likely = max(normalised(scores).values()) + (math.log(get["min_p"]) if get["min_p"] else -math.inf)
    scores = {token: score for token, score in scores.items() if normalised(scores)[token] >= likely}
    if get["top_k"]:
        scores = dict(sorted(scores.items(), key=lambda item: -item[1])[: get["top_k"]])
    kept, mass = {}, 0.0
    for token, logp in sorted(normalised(scores).items(), key=lambda item: -item[1]):
        if mass >= get["top_p"] and kept:
            break
        kept[token] = scores[token]
        mass += math.exp(logp)
    return normalised(kept)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_log_probabilities_are_those_of_a_token_by_token_computation(rule):
    torch.manual_seed(0)
    logits, prompt = 3 * torch.randn(LENGTH, VOCABULARY), torch.randint(VOCABULARY, (5,))
    completion: list[int] = []
    expected = []
    for position in range(LENGTH):
        kept = reference(logits[position], rule, prompt.tolist(), completion)
        token = list(kept)[torch.tensor(list(kept.values())).exp().multinomial(1).item()]
        expected.append(kept[token])
        completion.append(token)
    tokens = torch.tensor(completion)
    temperature = rule.get("temperature", 1.0)
    own = SamplingRule.of(temperature, {k: v for k, v in rule.items() if k != "temperature"}.get)
    history = History.of(prompt, tokens, torch.arange(LENGTH), VOCABULARY) if own.penalises else None
    torch.testing.assert_close(own.logps(logits, tokens, history), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_a_sampled_token_that_rounding_moved_below_the_threshold_is_kept():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    logp = SamplingRule(top_k=2).logps(logits, torch.tensor([2]), None)
    torch.testing.assert_close(logp, logits[0, :3].log_softmax(0)[2:])


def test_a_rule_without_effect_is_the_softmax():
    logits, tokens = torch.randn(8, 10), torch.arange(8)
    rule = SamplingRule.of(0.7, {"top_k": -1, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}.get)
    expected = (logits / 0.7).log_softmax(1)[torch.arange(8), tokens]
    torch.testing.assert_close(rule.logps(logits, tokens, None), expected)


@pytest.mark.parametrize(
    ("config", "scale"),
    [({}, 1.0), ({"logit_scale": 0.25}, 0.25), ({"logit_scale": None}, 1.0), ({"logits_scaling": 4}, 0.25),
     ({"lm_head_multiplier": 2}, 2.0), ({"logits_scaling": 4, "model_type": "hyperclovax"}, 4.0)],
)  # fmt: skip
def test_the_scale_of_the_logits(config, scale):
    process, logits = postprocessing(type("Config", (), config)()), torch.tensor([1.0, 3.0])
    assert torch.equal(logits if process is None else process(logits), logits * scale)


class Whole(nn.Module):
    """A language model without a part that returns hidden states."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def get_input_embeddings(self):
        return self.embeddings

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.head(self.embeddings(input_ids)))


def truncation_of(model, corrects, **changes):
    """The feature in a run with `top_k=10` that has only what the feature reads."""
    args = {
        "use_vllm": True, "vllm_importance_sampling_correction": corrects, "top_k": 10, "top_p": 1.0,
        "deepspeed_plugin": None, "fsdp": None, "parallel_mode": None, "generation_kwargs": None,
    } | changes  # fmt: skip
    trainer = SimpleNamespace(vllm_generation=None, tools=None, temperature=1.0)
    settings = SimpleNamespace(precision_metrics=True)
    return TruncationCorrection(
        SimpleNamespace(
            args=SimpleNamespace(**args), trainer=trainer, model=model, settings=settings, scores_policy=True
        )
    )


def scored(feature):
    """Scores two completions of three tokens, and returns the result and what TRL's method returned."""
    ids = torch.arange(10).view(2, 5)
    returned = (torch.zeros(2, 3), None)

    def score():
        feature.run.model(ids)
        return returned

    feature.measure_next()
    feature.before_scoring({"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": 3})
    return feature.around_scoring(score), returned


def test_hidden_states_that_are_not_returned_are_refused_with_the_correction():
    with pytest.raises(PrecisionError, match="truncation-cannot-be-corrected") as caught:
        scored(truncation_of(Whole(), corrects=True))
    assert "its text model returns no hidden states" in str(caught.value)


def test_hidden_states_that_are_not_returned_leave_out_the_metric_without_the_correction():
    feature = truncation_of(Whole(), corrects=False)
    assert feature.why_no_shift is None
    for _ in range(2):
        result, returned = scored(feature)
        assert result is returned
        assert feature.shift is None
        assert "its text model returns no hidden states" in feature.why_no_shift


@pytest.mark.parametrize(("changes", "reason"), [
    ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "shards the head"),
    ({"torch_compile": True}, "hides the inputs of the head"),
    ({"top_k": 0, "vllm_structured_outputs_regex": "[a-z]+"}, None),
    ({"use_vllm": False, "torch_compile": True}, None),
    ({"top_k": 0, "torch_compile": True}, None),
])  # fmt: skip
def test_settings_without_the_correction_state_why_the_metric_is_missing(changes, reason):
    found = truncation_of(Whole(), corrects=False, **changes)
    assert list(found.check(found.run.model)) == []
    assert found.why_no_shift is None if reason is None else reason in found.why_no_shift


@pytest.mark.parametrize("changes", [{"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, {"torch_compile": True}])
def test_a_head_that_is_known_to_be_hidden_is_not_watched_for_metrics_alone(changes):
    feature = truncation_of(Whole(), corrects=False, **changes)
    watched = []
    feature.run.model.register_forward_hook(lambda model, args, out: watched.append(len(model._forward_hooks)))
    scored(feature)
    assert watched == [1]  # this hook


# --- the parts of a batch ---

HIDDEN, TOKENS, COMPLETION, ROWS = 256, 256, 128, 8


def trainer_of(autocast):
    """A GRPO trainer with a model whose hidden states are larger than its logits, and a batch with padding."""
    reset_accelerate()
    made = cells.arguments(Cell("text", "grpo", "fp32", autocast), cells.SAFE_CONFIG["grpo"], model_init_kwargs=None)
    tokenizer = AutoTokenizer.from_pretrained(cells.folder("text"))
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    trainer = cells.SAFE["grpo"](**{**made, "model": model, "processing_class": tokenizer})
    ids = torch.randint(len(tokenizer), (ROWS, TOKENS))
    mask = torch.ones_like(ids)
    mask[::2, :20], mask[1::2, -7:] = 0, 0
    return trainer, ids, mask


def scored_in_parts(feature, trainer, ids, mask, size):
    """Scores a batch with TRL's method, alone or inside the feature; returns the result and the peak of live bytes."""

    def score():
        method = trl.GRPOTrainer._get_per_token_logps_and_entropies
        return method(trainer, trainer.model, ids, mask, COMPLETION, batch_size=size)

    if feature is not None:
        feature.measure_next()
        feature.before_scoring({"input_ids": ids, "attention_mask": mask, "logits_to_keep": COMPLETION})
    with LiveBytes() as live:
        result = score() if feature is None else feature.around_scoring(score)
    return result[0], live.peak


@pytest.mark.parametrize("size", [1, 2])
@torch.no_grad()
def test_a_part_of_a_batch_takes_the_memory_that_it_takes_in_trl(size):
    trainer, ids, mask = trainer_of(None)
    feature = truncation_of(trainer.model, corrects=True)
    feature.run.trainer = trainer
    stock, peak = scored_in_parts(None, trainer, ids, mask, size)
    scored, own = scored_in_parts(feature, trainer, ids, mask, size)
    results = 3 * ROWS * COMPLETION * 4
    assert own - peak <= results < ROWS * TOKENS * HIDDEN * 4 / 100  # all hidden states would be in the difference
    whole, _ = scored_in_parts(feature, trainer, ids, mask, ROWS)
    torch.testing.assert_close(scored, whole, atol=1e-5, rtol=1e-5)
    changed = (scored != stock).float()
    assert changed[0].mean() > 0.9
    assert changed[1, -7:].sum() == 0  # padding


def test_the_gradient_of_a_loss_whose_samples_are_measured_is_trls():
    trainer, ids, mask = trainer_of("bf16")
    feature = truncation_of(trainer.model, corrects=False)
    feature.run.trainer = trainer
    head = trainer.model.get_output_embeddings().weight
    gradients = []
    for measured in (None, feature):
        logps, _ = scored_in_parts(measured, trainer, ids[:2], mask[:2], None)
        gradients.append(torch.autograd.grad(logps.sum(), head)[0])
    assert feature.shift.shape == logps.shape
    assert feature.why_no_shift is None
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_a_text_model_that_runs_for_fewer_sequences_is_refused():
    trainer, ids, mask = trainer_of(None)
    feature = truncation_of(trainer.model, corrects=True)
    feature.run.trainer = trainer
    feature.measure_next()
    feature.before_scoring({"input_ids": ids, "attention_mask": mask, "logits_to_keep": COMPLETION})
    with pytest.raises(PrecisionError, match="hidden states of 2 sequences of 8"):
        feature.around_scoring(lambda: (trainer.model(ids[:2]), torch.zeros(ROWS, COMPLETION))[::-1])
