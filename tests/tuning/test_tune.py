"""The precision search: what it measures is what a run logs, and its sets are the smallest that hold."""

import contextlib
import copy
import json
import math
import os
from dataclasses import replace

import cells
import numpy as np
import pytest
import torch
import trl
from accelerate.state import AcceleratorState, GradientState, PartialState
from calling_tools import calling_tokenizer, look
from datasets import Dataset
from overflowing import overflowing
from PIL import Image
from policing import reset_accelerate
from transformers import AutoConfig, AutoModelForCausalLM

import safe_trainers
from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, tiny
from safe_trainers.cli.main import main
from safe_trainers.core.errors import RecipeError
from safe_trainers.numerics.overflow_fix import computing_in_float32
from safe_trainers.testing import fp16_on_cpu
from safe_trainers.tuning.accelerate_state import forget_precision
from safe_trainers.tuning.figures import Figures, summarize
from safe_trainers.tuning.gradients import Gradients, check_gradients
from safe_trainers.tuning.groups import (
    Group,
    divide,
    extra_bytes,
    find_groups,
    find_rules,
    head_name,
    layer_names,
    shortest_patterns,
)
from safe_trainers.tuning.identity import hash_of_rows
from safe_trainers.tuning.measure import Bench, batches_of, measured
from safe_trainers.tuning.outcome import Attempt, Outcome
from safe_trainers.tuning.plan import Plan
from safe_trainers.tuning.promise import Promise, Worst
from safe_trainers.tuning.result import Candidate
from safe_trainers.tuning.search import NOTHING, Goal, OutOfTimeError, Search, outermost, within
from safe_trainers.tuning.store import Store
from safe_trainers.tuning.tune import _Tuner, tune_trainer
from safe_trainers.weights.fp32_modules import find_modules
from upstream import needs_tools


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")

LENGTH = 12


def text_model(layers=3, std=0.06):
    """A language model with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(cells.folder("text"))
    config.num_hidden_layers, config.layer_types, config.initializer_range = layers, None, std
    return AutoModelForCausalLM.from_config(config)


class Builder:
    """Builds trainers of copies of a model."""

    def __init__(self, folder, model=None, family="text", rows=48, **changes):
        self.model = text_model() if model is None else model
        self.processor = tiny.build_processor(family)
        made = tiny.prompt_dataset(rows, seed=0)
        self.dataset = made if family in tiny.VISION_FAMILIES else made.remove_columns("image")
        self.settings = {
            "output_dir": str(folder),
            "use_cpu": True,
            "per_device_train_batch_size": 12,
            "num_generations": 2,
            "max_completion_length": LENGTH,
            "generation_kwargs": tiny.generation_kwargs(self.processor),
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "precision_report": "off",
            **changes,
        }
        self.arguments = {}  # further arguments of the trainer

    def __call__(self, precision, wrap=lambda trainer_class: trainer_class, **changes):
        return wrap(fp16_on_cpu(SafeGRPOTrainer))(
            copy.deepcopy(self.model),
            args=SafeGRPOConfig(precision=precision, **{**self.settings, **changes}),
            reward_funcs=lambda completions, **_: [float(len(str(text)) % 5) for text in completions],
            processing_class=self.processor,
            train_dataset=self.dataset,
            **self.arguments,
        )


@pytest.fixture
def builder(tmp_path):
    """A builder of trainers for a language model."""
    yield Builder(tmp_path)
    reset_accelerate()
    cells.reset_autocast()


def bench_of(builder, precision="bf16", batches=1, **changes):
    forget_precision()
    trainer = builder(precision, measured, precision_metrics=False, **changes)
    return Bench(trainer, batches_of(trainer.train_dataset, 12, 12 * batches))


# ---- What is measured ----


def test_forced_tokens_give_the_bits_of_sampling_them(builder):
    bench = bench_of(builder)
    tokens = bench.sample(NOTHING, seed=3)
    sampled, forced = bench.measure(NOTHING, None, seed=3), bench.measure(NOTHING, tokens)
    assert sampled.tokens > 100
    assert sampled.mean > 1e-5
    assert (sampled.mean, sampled.max, sampled.ess) == (forced.mean, forced.max, forced.ess)


@pytest.mark.parametrize("patterns", [["lm_head"], ["layers.1.self_attn", "lm_head"], ["mlp"]])
def test_a_set_is_measured_as_a_trainer_with_it_computes(builder, patterns):
    bench = bench_of(builder)
    tokens, names = bench.sample(NOTHING, seed=0), find_modules(bench.model, patterns)
    toggled = bench.measure(names, tokens)
    built = bench_of(builder, fp32_modules=patterns).measure(NOTHING, tokens)
    assert toggled.mean == built.mean != bench.measure(NOTHING, tokens).mean
    assert toggled.max == built.max


def test_measuring_leaves_the_model_as_it_was(builder):
    bench = bench_of(builder)
    before = {name: (p.dtype, p.data.clone()) for name, p in bench.model.named_parameters()}
    tokens = bench.sample(NOTHING, seed=0)
    bench.measure(layer_names(bench.model)[:1], tokens)
    check_gradients(bench, NOTHING, layer_names(bench.model), tokens, 1.0)
    assert all(p.dtype == before[n][0] and torch.equal(p, before[n][1]) for n, p in bench.model.named_parameters())
    assert all(p.grad is None for p in bench.model.parameters())


def test_figures_of_known_differences():
    trainer = torch.tensor([[-1.0, -2.0, 9.0], [-1.0, -1.0, -1.0]])
    sampler = torch.tensor([[-1.5, -2.0, 0.0], [-1.0, -1.0, -0.9]])
    figures = summarize([(trainer, sampler, torch.tensor([[1, 1, 0], [1, 1, 1]]))], 2.0)
    assert figures.tokens, figures.sequences == (5, 2)
    assert figures.mean == pytest.approx(0.6 / 5)
    assert figures.out_of_band == pytest.approx(2 / 5)
    assert Figures.of_dict(json.loads(json.dumps(figures.to_dict()))) == figures
    twice = summarize([(trainer, sampler, torch.tensor([[1, 1, 0], [1, 1, 1]]))] * 2, 2.0, [0, 1, 0, 1])
    assert twice.error == pytest.approx(figures.error)  # the same prompts again say nothing about other prompts
    lost = summarize([(trainer * torch.nan, sampler, torch.ones(2, 3))], 0.0)
    assert not lost.finite
    assert Figures.of_dict(json.loads(json.dumps(lost.to_dict()))) == lost


def test_the_last_batch_may_have_fewer_rows(tmp_path, builder):
    bench = bench_of(Builder(tmp_path, rows=17), batches=2, max_completion_length=2)
    assert [len(rows) for rows in bench.batches] == [12, 5]
    assert bench.measure(NOTHING, bench.sample(NOTHING, seed=0)).sequences == 17
    promise = Promise(NOTHING, bench.batches, 1, 0)
    assert promise.measure(bench, lambda figures: True, lambda rounds: rounds < 3).sequences == 12 + 5 + 12


def test_truncated_completions_are_measured_although_the_loss_leaves_them_out(builder):
    tokens = bench_of(builder, max_completion_length=3).measure(NOTHING, None).tokens
    masking = bench_of(builder, max_completion_length=3, mask_truncated_completions=True)
    assert masking.measure(NOTHING, None).tokens == tokens > 0


@needs_tools
def test_turns_after_tools_are_measured(tmp_path, builder):
    builder = Builder(
        tmp_path, max_completion_length=64, max_tool_calling_iterations=2, generation_kwargs={"max_new_tokens": 6}
    )
    builder.processor, builder.arguments = calling_tokenizer(), {"tools": [look]}
    prompt = [{"role": "user", "content": "what is in the picture"}]
    builder.dataset = Dataset.from_dict({"prompt": [prompt] * 12})
    bench = bench_of(builder)
    (turns,) = tokens = bench.sample(NOTHING, seed=3)
    assert len(turns) > 1
    sampled, forced = bench.measure(NOTHING, None, seed=3), bench.measure(NOTHING, tokens)
    assert 0 < sampled.mean < math.inf  # infinite if a token of a later turn was not recorded
    assert forced == replace(sampled, seconds=forced.seconds)


def test_a_run_that_weights_its_losses_is_measured(builder):
    """Its losses need the log-probabilities of the sampler, which one recording gives to both features."""
    plain = bench_of(builder).measure(NOTHING, None)
    weighted = bench_of(builder, rollout_correction=True).measure(NOTHING, None)
    assert weighted == replace(plain, seconds=weighted.seconds)


# ---- Groups and patterns ----


@pytest.mark.parametrize("family", ["text", "gpt_oss", "llava", "gemma3", "aria"])
def test_groups_cover_a_model_and_patterns_select_exactly_a_set(family):
    model = tiny.build_model(family)
    groups = find_groups(model)
    everything = outermost(NOTHING.union(*(group.modules for group in groups)))
    elements = sum(p.numel() for p in model.parameters())
    assert extra_bytes(model, everything) >= 0.95 * 2 * elements
    for chosen in (everything, *(group.modules for group in groups), groups[0].modules | groups[-1].modules):
        assert set(find_modules(model, shortest_patterns(model, chosen))) == set(find_modules(model, chosen))
    assert {"embeddings", "head", "norms"} <= {group.name for group in groups}
    assert any("router" in group.name for group in groups) == (family in ("gpt_oss", "aria"))


def test_all_layers_of_a_kind_are_one_pattern():
    model = text_model()
    names = [f"model.layers.{number}.self_attn" for number in range(3)]
    assert shortest_patterns(model, names) == ["self_attn"]
    assert shortest_patterns(model, names[1:]) == ["layers.1.self_attn", "layers.2.self_attn"]


@pytest.mark.parametrize(
    ("packed", "expected"),
    [
        ([], ["head only", "last layer", "last 2 layers"]),
        ([1], ["head only", "last layer"]),
        ([2], ["head only"]),
    ],
)
def test_layers_that_cannot_compute_in_float32_are_in_no_rule(packed, expected):
    bnb = pytest.importorskip("bitsandbytes")
    model = text_model()
    for number in packed:
        layer = model.model.layers[number].mlp
        size = layer.up_proj.in_features, layer.up_proj.out_features
        layer.up_proj = bnb.nn.Linear8bitLt(*size, bias=False, has_fp16_weights=False)
    rules = find_rules(model)
    assert [rule.name for rule in rules] == expected
    for group in (*rules, *find_groups(model)):
        selected = find_modules(model, shortest_patterns(model, group.modules))
        assert selected.keys() == group.modules
        with computing_in_float32(model, list(selected)):
            pass


# ---- The search ----


class Additive:
    """A model of independent sources: the mismatch is the root of the sum of their squares."""

    def __init__(self, sources, goal, most=None, error=0.0):
        self.sources, self.calls, self._most, self._error = sources, 0, most, error
        self.groups = [Group(name, frozenset([name]), nbytes) for name, (nbytes, _) in sources.items()]
        self.search = Search(self.groups, [frozenset(["head"])], self.measure, self.size, goal)

    def size(self, names):
        return sum(self.sources[name][0] for name in names)

    def measure(self, names):
        self.calls += 1
        if self._most is not None and self.calls > self._most:
            raise OutOfTimeError
        rest = [noise for name, (_, noise) in self.sources.items() if name not in names]
        mean = math.sqrt(sum(noise**2 for noise in rest) + 1e-16)
        return Figures(mean, mean, mean, 1.0, 0.0, 100, 10, self._error * mean, 1.0 + len(names))


SOURCES = {"head": (1000, 1e-5), "a": (100, 1e-3), "b": (100, 2e-3), "c": (300, 5e-4), "d": (900, 1e-4)}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(3e-3, ""), (1.2e-3, "b"), (6e-4, "ab"), (2e-4, "abc"), (5e-5, "abcd"), (1e-7, "abcd head")],
)
def test_the_smallest_set_that_meets_a_target(limit, expected):
    model = Additive(SOURCES, Goal(max_mismatch=limit))
    model.search.run()
    assert model.search.complete
    names = {*expected.split()[0]} if expected else set()
    assert model.search.best() == names | ({"head"} if "head" in expected else set())


@pytest.mark.parametrize(("budget", "expected"), [(0, ""), (150, "b"), (200, "ab"), (550, "abc"), (1400, "abcd")])
def test_the_smallest_mismatch_within_a_budget(budget, expected):
    model = Additive(SOURCES, Goal(max_bytes=budget))
    model.search.run()
    assert model.search.best() == set(expected)


def test_a_budget_that_cannot_be_met_gives_the_best_within_it():
    model = Additive(SOURCES, Goal(max_mismatch=1e-6, max_bytes=250))
    model.search.run()
    assert model.search.best() == {"a", "b"}


class Divisible(Additive):
    """A model in which a group, `mlp`, has two parts."""

    def __init__(self, goal):
        super().__init__({"a": (100, 1e-3), "b": (100, 2e-3), "mlp.up": (40, 3e-3), "mlp.down": (500, 1e-4)}, goal)
        self.search.groups = self.groups = [*self.groups[:2], Group("mlp", frozenset(["mlp"]), 540)]
        self.search.divide = self.divide
        self.divided = []

    def divide(self, group):
        self.divided.append(group.name)
        names = [name for name in self.sources if name.startswith(f"{group.name}.")]
        return [Group(name, frozenset([name]), self.sources[name][0]) for name in names]

    def size(self, names):
        return super().size(self.parts(names))

    def measure(self, names):
        return super().measure(self.parts(names))

    def parts(self, names):
        return [name for name in self.sources if within([name], names)]


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        (Goal(max_bytes=140), {"b", "mlp.up"}),
        (Goal(max_bytes=240), {"a", "b", "mlp.up"}),
        (Goal(max_bytes=99), {"mlp.up"}),
        (Goal(max_bytes=640), {"a", "b", "mlp.up"}),
        (Goal(max_bytes=200), {"b", "mlp.up"}),  # `a` and `b` leave no room
        (Goal(max_bytes=140, max_mismatch=1e-6), {"b", "mlp.up"}),
    ],
)
def test_the_rest_of_a_budget_is_filled_with_parts_of_groups(goal, expected):
    model = Divisible(goal)
    model.search.rules = []
    model.search.run()
    assert model.search.best() == expected
    assert model.size(expected) <= goal.max_bytes


class Overlapping(Divisible):
    """A model in which `mlp.c` removes what `mlp.a` removes, and more."""

    def __init__(self, goal):
        super().__init__(goal)
        self.sources = {"a": (100, 1e-3), "mlp.a": (10, 0), "mlp.b": (50, 0), "mlp.c": (200, 0), "mlp.d": (500, 0)}
        self.search.groups = self.groups = [self.groups[0], Group("mlp", frozenset(["mlp"]), 760)]

    def measure(self, names):
        inside = self.parts(names)
        left = [1e-3] * ("a" not in inside) + [2e-3] * ("mlp.b" not in inside) + [5e-4] * ("mlp.c" not in inside)
        left += [2e-3] * ("mlp.a" not in inside and "mlp.c" not in inside)
        mean = math.sqrt(sum(noise**2 for noise in left) + 1e-16)
        return Figures(mean, mean, mean, 1.0, 0.0, 100, 10, 0.0, 1.0)


def test_a_part_that_a_later_one_replaces_is_removed():
    model = Overlapping(Goal(max_bytes=360))
    model.search.rules = []
    model.search.run()
    assert model.search.best() == {"a", "mlp.b", "mlp.c"}


def test_groups_are_divided_for_budgets_only():
    model = Divisible(Goal(max_mismatch=1.1e-3))
    model.search.rules = []
    model.search.run()
    assert model.search.best() == {"b", "mlp"}
    assert model.divided == []


def test_an_attention_layer_is_divided_into_its_projections():
    model = text_model()
    group = next(group for group in find_groups(model) if group.name == "layers.1.self_attn")
    parts = divide(model, group)
    assert [part.name for part in parts] == [f"layers.1.self_attn.{name}_proj" for name in "qkvo"]
    assert sum(part.nbytes for part in parts) == group.nbytes
    assert all(within(part.modules, group.modules) for part in parts)
    assert divide(model, parts[0]) == ()


def test_a_source_that_overflows_is_always_in_the_set():
    model = Additive({**SOURCES, "tower": (5000, math.inf)}, Goal(max_mismatch=6e-4))
    model.search.run()
    assert model.search.best() == {"a", "b", "tower"}


def test_the_time_limit_leaves_the_best_so_far():
    model = Additive(SOURCES, Goal(max_mismatch=1e-7), most=9)
    model.search.run()
    assert not model.search.complete
    assert model.search.best() is not None


def test_the_time_of_a_set_can_be_a_budget():
    model = Additive(SOURCES, Goal(max_time=3.0))
    model.search.run()
    assert len(model.search.best()) == 2


def test_the_rules_within_the_budget_are_measured_again():
    model = Additive(SOURCES, Goal(max_bytes=1000))
    model.search.run()
    finalists = model.search.finalists(2)
    assert finalists[0] == model.search.best() == set("abc")
    assert set("head") not in finalists
    assert frozenset(["head"]) in finalists
    assert len(finalists) == 3
    small = Additive(SOURCES, Goal(max_bytes=999))
    small.search.run()
    assert frozenset(["head"]) not in small.search.finalists(2)


@pytest.mark.parametrize(("error", "expected"), [(0.05, "ab"), (0.0, "abc")])
def test_a_set_that_misses_the_target_within_its_error_is_measured_again(error, expected):
    model = Additive(SOURCES, Goal(max_mismatch=5e-4), error=error)
    model.search.run()
    assert model.search.best() == set("abc")
    finalists = model.search.finalists(2)
    again = {names: replace(figures, mean=0.95 * figures.mean) for names, figures in model.search.found.items()}
    chosen = model.search.best({names: again[names] for names in finalists})
    assert chosen == set(expected)


# ---- The whole search ----


def test_the_lines_give_the_promised_mismatch(tmp_path, builder):
    builder = Builder(tmp_path, rows=108, per_device_train_batch_size=36)
    budget = extra_bytes(builder.model, layer_names(builder.model)[-1:])
    plan = Plan("text", "tiny", Goal(max_bytes=budget), precisions=("bf16",), sequences=36, rounds=8)
    found = tune_trainer(lambda p, m: builder(p, m, precision_metrics=False), plan, Store(tmp_path / "found.json"))
    assert found.reached
    assert found.complete
    assert 0 < found.best.nbytes <= budget
    rules = {rule.chosen_by: rule.figures.mean for rule in found.rules}
    assert found.best.figures.mean < 0.9 * rules["last layer"]
    settings = dict(found.settings)
    trainer = builder(settings.pop("precision"), learning_rate=0.0, max_steps=8, logging_steps=8, seed=5, **settings)
    trainer.train()
    logged = trainer.state.log_history[0]["precision/logp_mismatch_mean"]
    assert logged == pytest.approx(found.promise.mean, abs=3 * math.sqrt(2) * found.promise.error)
    assert 0 < found.promise.error < 0.15 * found.promise.mean

    again = Store(tmp_path / "found.json")
    resumed = tune_trainer(lambda p, m: builder(p, m, precision_metrics=False), plan, again)
    assert again.resumed == found.measurements == resumed.measurements
    assert resumed.best == found.best


def test_a_promise_is_summarized_at_growing_intervals(builder):
    """A summary reads all tokens, and rare large differences need hundreds of rounds."""
    bench, asked = bench_of(builder, max_completion_length=2), []

    def exact_after(sequences):
        return lambda figures: asked.append(figures.sequences // 12) or figures.sequences >= sequences

    def promised(enough, more):
        return Promise(NOTHING, bench.batches, 1, 0).measure(bench, enough, more)

    last = promised(exact_after(math.inf), lambda rounds: rounds < 39)
    assert asked == [*range(4, 20), 20, 22, 24, 26, 28, 30, 33, 36]
    assert last.sequences == 39 * 12
    asked.clear()
    assert promised(exact_after(60), lambda rounds: True).sequences == 60
    assert asked == [4, 5]
    assert promised(exact_after(0), lambda rounds: False).sequences == 12


def test_a_set_that_was_best_by_chance_is_not_chosen(builder, monkeypatch):
    builder.model = text_model(2)
    lucky = frozenset(find_modules(builder.model, ["layers.1.self_attn"]))
    original, searched = Bench.measure, []

    def measure(self, names, tokens, seed=0):
        figures = original(self, names, tokens, seed)
        if len(self.batches) == 1:  # the sample of the search
            searched.append(frozenset(names))
            return replace(figures, mean=1e-9) if frozenset(names) == lucky else figures
        return figures

    monkeypatch.setattr(Bench, "measure", measure)
    plan = Plan(
        "text", goal=Goal(max_bytes=extra_bytes(builder.model, lucky)), precisions=("bf16",), sequences=12, rounds=1
    )
    found = tune_trainer(
        lambda p, m: builder(p, m, precision_metrics=False, max_completion_length=6), plan, Store(None)
    )
    assert lucky in searched
    assert found.best.fp32_modules != ("layers.1.self_attn",)
    again = {candidate.fp32_modules: candidate.figures for candidate in found.finalists}
    assert again[found.best.fp32_modules].mean < again["layers.1.self_attn",].mean
    assert again[found.best.fp32_modules].sequences == 4 * 12


def test_a_set_that_only_the_gradients_need_is_chosen(builder, monkeypatch):
    def usable(bench, names, *_):
        return Gradients(1024.0 if names else 0.5, 0.0)

    monkeypatch.setattr("safe_trainers.tuning.tune.check_gradients", usable)
    found = tuned(builder, 1.0, "fp16")  # the mismatch is small enough without a module in float32
    assert found.reached
    assert found.gradients.usable
    assert found.best.fp32_modules


def test_a_search_without_time_has_a_result(builder):
    plan = Plan("text", precisions=("bf16",), sequences=12, time_limit=0.0)
    found = tune_trainer(lambda p, m: builder(p, m, precision_metrics=False), plan, Store(None))
    assert not found.complete
    assert found.best.fp32_modules == ()
    assert found.promise.finite


def has_worst(bench, searched_on):
    """Whether sequences with the largest mismatch are in the sample."""
    return any(batch is rows for made in searched_on for rows in made for batch in bench.batches)


@pytest.fixture
def exact_sample(monkeypatch):
    """Makes the samples of searches look exact, as if no token with a large difference was in them.

    Returns the batches of sequences with the largest mismatch. The figures of samples with them are not changed.
    """
    original, original_batches, searched_on = Bench.measure, Worst.batches, []

    def batches(self, *arguments):
        made = original_batches(self, *arguments)
        searched_on.append(made[0])
        return made

    def measure(self, names, tokens, seed=0):
        figures = original(self, names, tokens, seed)
        if has_worst(self, searched_on):
            return figures
        return replace(figures, mean=1e-9 * (1 + len(names)))

    monkeypatch.setattr(Worst, "batches", batches)
    monkeypatch.setattr(Bench, "measure", measure)
    return searched_on


def tuned(builder, limit, precision="bf16", store=None, rounds=4):
    plan = Plan("text", goal=Goal(max_mismatch=limit), precisions=(precision,), sequences=12, rounds=rounds)
    return tune_trainer(
        lambda p, m: builder(p, m, precision_metrics=False), plan, Store(None) if store is None else store
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_mismatch_that_the_sample_of_the_search_does_not_have_is_searched_where_it_is(
    tmp_path, builder, exact_sample, monkeypatch, precision
):
    checked, starts, original = [], [], Promise.__init__

    def usable(bench, names, *_):
        checked.append(names)
        return Gradients(1024.0, 0.0)

    def started(self, *arguments, **settings):
        starts.append(settings["start"])
        original(self, *arguments, **settings)

    monkeypatch.setattr("safe_trainers.tuning.tune.check_gradients", usable)
    monkeypatch.setattr(Promise, "__init__", started)
    monkeypatch.setattr(_Tuner, "_tighten", None)  # a smaller target on such a sample says nothing
    builder.model = text_model(2)
    limit = tuned(builder, 1.0, precision).promise.mean / 3
    assert not exact_sample
    checked.clear()
    starts.clear()
    found = tuned(builder, limit, precision, Store(tmp_path / "found.json"))
    assert exact_sample
    assert found.reached
    assert found.promise.mean <= limit
    assert found.promise.sequences >= 4 * 12
    assert starts == [
        0,
        1,
    ]  # four rounds of the first promise, of three held-out batches; the second begins after them
    modules = frozenset(find_modules(builder.model, found.best.fp32_modules))
    assert modules
    # The gradients of the new set are checked.
    assert [outermost(names) for names in checked] == ([NOTHING, modules] if precision == "fp16" else [])
    # Measurements of these sequences are not those of the search, which a later one would take up.
    kept = json.loads((tmp_path / "found.json").read_text())["state"]["measured"]
    assert set(kept) <= {precision, f"{precision} selection"}
    assert found.measurements > sum(map(len, kept.values()))


@pytest.mark.parametrize("measurements", [1, 3])
def test_a_search_on_the_largest_mismatch_without_time_has_the_best_so_far(
    builder, exact_sample, monkeypatch, measurements
):
    builder.model = text_model(2)
    limit = tuned(builder, 1.0).promise.mean / 3
    original, measured_on = Bench.measure, []

    def measure(self, names, tokens, seed=0):
        if has_worst(self, exact_sample):
            measured_on.append(names)
            if len(measured_on) > measurements:
                raise OutOfTimeError
        return original(self, names, tokens, seed)

    monkeypatch.setattr(Bench, "measure", measure)
    found = tuned(builder, limit, rounds=30)
    assert not found.complete
    assert found.reached == (measurements == 3)  # the second measurement is that of everything in float32
    if not found.reached:
        assert found.best.fp32_modules == ()
        assert "because the time limit ended the search" in found.verdict
        # The promise, which ended when it had clearly missed the target, was continued.
        assert found.promise.error <= 0.025 * found.promise.mean or found.promise.sequences == 30 * 12


def test_a_target_near_what_is_left_in_float32_is_reached(builder, exact_sample):
    """The aim of the search is no smaller than that, however much a promise exceeds the target."""
    builder.model = text_model(2)
    found = tuned(builder, 1e-6)
    assert exact_sample
    assert found.reached


def test_no_set_within_the_budget_is_near_enough(builder, exact_sample, monkeypatch):
    builder.model = text_model(2)
    original, promised = Promise.measure, []

    def measure(self, *arguments):
        promised.append(self)
        return original(self, *arguments)

    monkeypatch.setattr(Promise, "measure", measure)
    budget = extra_bytes(builder.model, find_modules(builder.model, ["layers.1.self_attn"]))
    plan = Plan("text", goal=Goal(max_mismatch=1e-6, max_bytes=budget), precisions=("bf16",), sequences=12, rounds=4)
    found = tune_trainer(lambda p, m: builder(p, m, precision_metrics=False), plan, Store(None))
    assert exact_sample
    assert not found.reached
    assert found.best.fp32_modules == ()
    assert len(set(promised)) == 1


def test_modules_are_only_added_where_the_largest_mismatch_is(builder, exact_sample, monkeypatch):
    builder.model = text_model(2)
    original, sets = Bench.measure, []

    def measure(self, names, tokens, seed=0):
        figures = original(self, names, tokens, seed)
        if has_worst(self, exact_sample):
            sets.append(frozenset(names))
            return figures
        return figures if names else replace(figures, mean=1.0)  # the smallest set of the search is not empty

    monkeypatch.setattr(Bench, "measure", measure)
    found = tuned(builder, 1e-6)
    assert exact_sample
    first = sets[0]
    assert first
    assert all(within(first, names) for names in sets)
    assert within(first, frozenset(find_modules(builder.model, found.best.fp32_modules)))


@pytest.mark.parametrize(
    ("means", "sizes", "expected"),
    [([2e-7, 3e-6, 9e-6], [5, 3, 2], 0), ([3e-6, 2e-6, 1e-8], [2, 3, 5], 2), ([3e-6, math.inf, 2e-6], [2, 3, 50], 0)],
)
def test_the_best_promise_is_reported(means, sizes, expected):
    """The last set may be worse than an earlier one, because each is chosen on few tokens."""
    exact = Additive({"a": (1, 1.0)}, Goal()).measure(frozenset("a"))
    attempts = [
        Attempt(None, NOTHING, Candidate("bf16", (), size, exact), None, None, replace(exact, mean=mean, error=0.0))
        for mean, size in zip(means, sizes, strict=True)
    ]
    tuner = _Tuner(None, Plan(goal=Goal(max_mismatch=1e-7, max_bytes=10)), Store(None))
    assert tuner._best_of(attempts) is attempts[expected]


def test_a_smaller_target_that_gives_no_other_set_leaves_the_search_as_it_was(monkeypatch):
    class Chance(Search):
        def run(self):
            self.found[frozenset("a")] = replace(figures, mean=0.9)

    figures = Additive({"a": (1, 1.0)}, Goal()).measure(frozenset("a"))
    sizes = {NOTHING: 0, frozenset("a"): 1, frozenset("bc"): 2}
    search = Chance([], [], None, sizes.__getitem__, Goal(max_mismatch=1.0))
    search.found = {NOTHING: replace(figures, mean=2.0), frozenset("bc"): replace(figures, mean=0.1)}
    tuner = _Tuner(None, Plan(goal=search.goal), Store(None))
    monkeypatch.setattr(tuner, "_select", lambda *_: None)
    outcome = Outcome("bf16", search)
    assert not tuner._tighten(outcome, None, 0.5)
    assert outcome.best == frozenset("bc")


def test_the_sequences_with_the_largest_mismatch_have_it_in_other_batches_too(tmp_path):
    builder = Builder(tmp_path, text_model(2), per_device_train_batch_size=4)
    bench = Bench(builder("bf16", measured, precision_metrics=False), batches_of(builder.dataset, 4, 20))
    promise, sums = Promise(NOTHING, bench.batches, 1, 3, keep=6), {}
    figures = promise.measure(bench, lambda figures: False, lambda rounds: rounds < 5)
    for number, (trainer, sampler, mask, *_) in enumerate(
        row for index in range(5) for row in bench.run((), None, 3 + 100 * index, [bench.batches[index]])
    ):
        sizes = (trainer - sampler).abs().where(mask != 0, 0.0).sum(1)
        sums |= {(number, row): size for row, size in enumerate(sizes.tolist())}
    largest = sorted(sums.values(), reverse=True)[:6]
    batches, tokens = promise.worst.batches(4)
    assert [len(rows) for rows in batches] == [4, 2]
    again = Bench(bench.trainer, batches).measure(NOTHING, tokens)
    assert again.mean * again.tokens == pytest.approx(sum(largest), rel=0.05)
    assert again.mean > 1.2 * figures.mean


def test_sequences_of_several_turns_are_not_kept():
    worst = Worst(2)
    worst.add(["a"], [1.0], [[[5]], [[6]]])
    assert not worst
    worst.add(["a", "b", "c", "d"], [0.5, 2.0, 0.0, math.inf], [[[5, 1], [6, 1], [7, 1], [8, 1]]])
    worst.add(["e"], [1.0], [[[9]]])
    assert len(worst) == 2
    assert worst.batches(2) == ([["d", "b"]], [[[[8, 1], [6, 1]]]])
    assert worst.batches(1) == ([["d"], ["b"]], [[[[8, 1]]], [[[6, 1]]]])
    worst.add(["f"], [3.0], [[[7]]])  # ended before the others
    assert worst.batches(2) == ([["d", "f"]], [[[[8, 1], [7, 7]]]])


@pytest.mark.slow
def test_float16_that_overflows_gets_the_tower_in_float32(tmp_path):
    builder = Builder(tmp_path, overflowing(), "gemma3")
    plan = Plan("gemma3", goal=Goal(max_mismatch=0.05), precisions=("fp16",), sequences=12, rounds=1)
    found = tune_trainer(lambda p, m: builder(p, m, precision_metrics=False), plan, Store(None))
    reset_accelerate()
    cells.reset_autocast()
    assert found.before.figures.finite is False
    assert found.settings["fp32_modules"] == ["vision_tower"]
    assert found.reached
    assert found.gradients.usable


def test_a_loss_scale_is_halved_until_the_gradients_are_finite(builder):
    bench = bench_of(builder, "fp16")
    tokens, everything = bench.sample(NOTHING, seed=0), layer_names(bench.model)
    found = check_gradients(bench, NOTHING, everything, tokens, 2.0**34)
    assert 1 < found.scale < 2.0**34
    assert check_gradients(bench, NOTHING, everything, tokens, 2.0**-30) == found.__class__(0.0, 0.0)
    assert check_gradients(bench, everything, everything, tokens, 2.0**10).underflow <= found.underflow + 0.01


def test_a_mismatch_that_is_not_rounding_is_said_to_be_none(builder, monkeypatch):
    bench_type = type(bench_of(builder))
    original = bench_type.run

    def shifted(self, *args):
        for trainer, *rest in original(self, *args):
            yield (trainer + 0.3, *rest)

    monkeypatch.setattr(bench_type, "run", shifted)
    plan = Plan("text", precisions=("bf16",), sequences=12, rounds=1)
    found = tune_trainer(lambda p, m: builder(p, m, precision_metrics=False), plan, Store(None))
    assert not found.reached
    assert "not due to the precision" in " ".join(found.notes)
    assert "the best that was found" in found.verdict


@pytest.mark.parametrize("fails", [True, False])
def test_trainers_of_the_process_train_in_their_precision_after_a_search(builder, monkeypatch, fails):
    trainer = builder("bf16", max_steps=1, max_completion_length=2)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as transformers 4 does
    before = dict(AcceleratorState._shared_state), dict(PartialState._shared_state), dict(GradientState._shared_state)

    def build(precision, wrap):
        made = builder(precision, wrap, precision_metrics=False, max_completion_length=2)
        assert made.accelerator.mixed_precision == "no"
        if fails:
            raise RuntimeError("it failed")
        return made

    with pytest.raises(RuntimeError, match="it failed") if fails else contextlib.nullcontext():
        safe_trainers.tune(build, precisions=["fp32"], sequences=12, time_limit=1)
    after = AcceleratorState._shared_state, PartialState._shared_state, GradientState._shared_state
    assert after == before
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.accelerator.mixed_precision == "bf16"


# ---- The command ----


RECIPE = """\
# a recipe
model_name_or_path: tiny:llava
dtype: float32
bf16: true  # half precision
use_cpu: true
dataset_name: tiny:shapes
dataset_size: 64
evaluation_size: 4
reward_funcs: [safe_trainers.tiny.exact_match]
max_steps: 4
per_device_train_batch_size: 12
num_generations: 4
max_completion_length: 12
output_dir: runs/one
report_to: none
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The file of a recipe, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "vllm.yaml").write_text(f"{RECIPE}use_vllm: true\n")
    yield tmp_path / "mine.yaml"
    reset_accelerate()
    cells.reset_autocast()


def test_the_command_writes_the_lines_into_the_recipe(recipe, capsys, monkeypatch):
    monkeypatch.setattr("safe_trainers.tuning.tune.RELATIVE_ERROR", 0.3)  # a promise of fewer rounds
    command = ["tune", recipe.name, "--task", "grpo", "--sequences", "12", "--precision", "bf16", "--json",
               "found.json", "--plot", "found.png", "--write"]  # fmt: skip
    assert main(command) == 0
    out = capsys.readouterr().out
    result = json.loads((recipe.parent / "found.json").read_text())
    modules = result["settings"]["fp32_modules"]
    assert out.startswith(f"precision: bf16\nfp32_modules: [{', '.join(modules)}]\n")
    assert ": reached, " in out
    text = recipe.read_text()
    assert "precision: bf16" in text
    assert "\nbf16: true" not in text
    assert text.startswith("# a recipe\n")
    assert (recipe.parent / "mine.yaml.bak").read_text() == RECIPE
    assert main(command) == 0  # resumes
    assert "mine.yaml has these lines already, and was not changed" in capsys.readouterr().out
    assert not (recipe.parent / "mine.yaml.bak1").exists()
    assert (recipe.parent / "found.png").stat().st_size > 10_000
    assert not (recipe.parent / "runs").exists()


def test_a_target_out_of_reach_gives_the_best_and_status_1(recipe, capsys):
    command = ["tune", recipe.name, "--task", "grpo", "--sequences", "12", "--precision", "bf16", "--max_mismatch",
               "1e-12", "--max_bytes", "40K", "--max_tokens", "6", "--write"]  # fmt: skip
    assert main(command) == 1
    shown = capsys.readouterr()
    assert "not reached; the best that was found gives" in shown.out
    assert "was not changed" in shown.err
    assert recipe.read_text() == RECIPE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft/tiny_vlm_bf16"], "only grpo and rloo have rollouts"),
        (["no/such/model"], "neither a recipe nor a model"),
        (["tiny:nothing"], "not an embedded model"),
        (["vllm.yaml", "--task", "grpo"], "tune measures the model's own `generate`"),
        (["grpo/tiny_vlm_bf16", "--write"], "safe-trainers copy grpo/tiny_vlm_bf16"),
        (["mine.yaml", "--plot", "a.doc"], "--plot must end in"),
        (["mine.yaml", "--json", "nowhere/a.json"], "does not exist"),
        (["mine.yaml", "--task", "grpo", "--json", "mine.yaml"], "is not a file of `safe-trainers tune`"),
        (["tiny:text", "--write"], "tiny:text is not one. Write its name"),
        (["tiny:reward"], "tiny:reward is not a model that generates; expected one of llava"),
        (["empty"], "empty is neither a recipe nor a model: it has no config.json"),
        (["tiny:text", "--min_ess", "1.5"], "min_ess must be a number above 0 and at most 1, got 1.5"),
        (["tiny:text", "--json", "empty"], "--json empty is a folder"),
    ],
)
def test_bad_input_is_one_error(recipe, arguments, message, capsys):
    (recipe.parent / "empty").mkdir()
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_bytes": -1}, "max_bytes must be a number from 0, got -1"),
        ({"sequences": 0}, "sequences must be a number from 1, got 0"),
        ({"time_limit": 0.0}, "time_limit must be a number above 0, got 0"),
        ({"max_time": float("nan")}, "max_time must be a number above 0, got nan"),
        ({"precisions": "bf16"}, "precisions must be a list of bf16, fp16, fp32, got 'bf16'"),
        ({"precisions": []}, "precisions must be a list"),
        ({"precisions": ["int8"]}, "precisions must be a list"),
    ],
)
def test_bad_arguments_of_the_function_are_one_error(arguments, message):
    with pytest.raises(RecipeError) as refused:
        safe_trainers.tune("tiny:text", **arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda measured: measured(trl.GRPOTrainer),
            "GRPOTrainer is not a safe trainer with rollouts. Write: measured",
        ),
        (
            lambda measured: measured(safe_trainers.SafeSFTTrainer),
            "SafeSFTTrainer is not a safe trainer with rollouts",
        ),
        (lambda measured: None, "returned an instance of NoneType, which cannot be measured. Write: return measured"),
    ],
)
def test_a_function_that_builds_something_else_is_one_error(made, message):
    with pytest.raises(RecipeError) as refused:
        safe_trainers.tune(lambda precision, measured: made(measured), precisions=["bf16"])
    assert message in str(refused.value)


def test_a_function_with_modules_in_float32_is_one_error(builder):
    with pytest.raises(RecipeError) as refused:
        safe_trainers.tune(lambda p, m: builder(p, m, fp32_modules=["lm_head"]), precisions=["bf16"], sequences=12)
    assert "a trainer with fp32_modules=['lm_head'], with which all sets would be measured" in str(refused.value)
    assert str(refused.value).endswith("Write: fp32_modules=None")


def test_measurements_of_another_search_are_neither_used_nor_lost(recipe, capsys):
    common = ["--task", "grpo", "--sequences", "12", "--precision", "bf16", "--max_tokens", "4", "--max_bytes", "0"]
    command = ["tune", recipe.name, *common, "--time_limit", "1", "--json", "found.json"]
    main(command)
    held = (recipe.parent / "found.json").read_bytes()
    capsys.readouterr()
    main(command)
    assert "resumed with" in capsys.readouterr().err
    held = (recipe.parent / "found.json").read_bytes()
    recipe.write_text(f"{RECIPE}temperature: 0.5\n")
    assert main(command) == 2
    assert "they differ in temperature, 1.0 in place of 0.5. Write the name of a new file" in capsys.readouterr().err
    recipe.write_text(RECIPE.replace("dataset_size: 64", "dataset_size: 65\nseed: 7"))
    assert main(command) == 2
    recipe.write_text(RECIPE)
    assert main(["tune", "tiny:text", *common[2:], "--json", "found.json"]) == 2
    assert "they differ in target, mine.yaml in place of tiny:text" in capsys.readouterr().err
    assert (recipe.parent / "found.json").read_bytes() == held


def palette_image(colour):
    image = Image.new("P", (2, 2))
    image.putpalette([colour] * 3)
    return image


@pytest.mark.parametrize(
    "values",
    [
        [Image.new("RGB", (2, 2), colour) for colour in (0, 1)],
        [Image.new("L", size) for size in ((2, 3), (3, 2))],
        [palette_image(colour) for colour in (0, 1)],
        [[{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (2, 2), c)}]}] for c in (0, 1)],
        [{"bytes": content, "path": None} for content in (b"a", b"b")],
        [np.full((2, 2), value) for value in (0, 1)],
        [np.array(["a", value], dtype=object) for value in ("b", "c")],
        [torch.full((2, 2), value, dtype=torch.bfloat16) for value in (0, 1)],
        ["easy", "hard"],
        [1, 2],
    ],
    ids=lambda values: type(values[0]).__name__,
)
def test_measurements_depend_on_the_content_of_all_columns(values):
    one, other = ([{"prompt": "a", "column": value}] for value in values)
    assert hash_of_rows(one) == hash_of_rows(copy.deepcopy(one)) != hash_of_rows(other)


def test_measurements_of_other_images_are_refused(tmp_path):
    def identity(colour):
        return {"target": "a", "rows": hash_of_rows([{"prompt": "a", "image": Image.new("RGB", (2, 2), colour)}])}

    store = Store(tmp_path / "found.json")
    store.open(identity(0))
    store.write({})
    Store(tmp_path / "found.json").open(identity(0))
    with pytest.raises(RecipeError, match="they differ in the rows of the dataset"):
        Store(tmp_path / "found.json").open(identity(1))


def test_a_model_that_does_not_fit_is_one_error(recipe, monkeypatch, capsys):
    import psutil

    folder = tiny.save("text", recipe.parent / "model")
    free = type("Free", (), {"available": 1000})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert main(["tune", str(folder)]) == 2
    assert "does not fit: its weights take" in capsys.readouterr().err


def test_a_folder_of_a_model_is_measured_on_random_tokens(recipe):
    folder = tiny.save("text", recipe.parent / "model")
    found = safe_trainers.tune(str(folder), precisions=["bf16"], sequences=8, max_tokens=6, max_bytes=10**6)
    assert found.prompts.startswith("random tokens")
    assert found.reached
    assert found.promise.mean < found.before.figures.mean


def test_the_names_of_files_that_are_no_results_are_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(RecipeError, match="Write the name of a new file"):
        Store(tmp_path / "other.json")
    assert os.listdir(tmp_path) == ["other.json"]


def test_rows_are_batched_without_overlap():
    rows = Dataset.from_dict({"n": list(range(10))})
    assert [[row["n"] for row in batch] for batch in batches_of(rows, 3, 5)] == [[0, 1, 2], [3, 4, 5]]
    assert [[row["n"] for row in batch] for batch in batches_of(rows, 3, 5, skip=6)] == [[6, 7, 8], [9]]
    assert len(batches_of(rows, 3, 5, skip=10)) == len(batches_of(rows, 3, 5, skip=11)) == 0
    assert list(batches_of(rows.to_iterable_dataset(), 3, 5, skip=6)) == list(batches_of(rows, 3, 5, skip=6))


def test_rows_of_held_out_prompts_are_read_when_they_are_used():
    """Thousands of decoded images do not fit into memory."""
    read = []

    class Images:
        def __len__(self):
            return 100

        def __getitem__(self, row):
            read.append(row)
            return {"n": row}

    batches = batches_of(Images(), 4, 80)[2:][1:]
    assert len(batches) == 17
    assert read == []
    assert batches[-1] == [{"n": row} for row in (76, 77, 78, 79)]
    assert batches[0] == [{"n": row} for row in (12, 13, 14, 15)]
    assert read == [76, 77, 78, 79, 12, 13, 14, 15]
    with pytest.raises(IndexError):
        batches[17]


def test_a_tied_head_has_its_own_name():
    assert head_name(text_model(1)) == "lm_head"
