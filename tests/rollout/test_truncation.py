"""The distribution that vLLM samples from, recomputed token by token in float64."""

import math

import pytest
import torch

from safe_trainers.rollout.head_scaling import postprocessing
from safe_trainers.rollout.truncation import History, SamplingRule


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
