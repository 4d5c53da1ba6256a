"""The key-value cache of rollouts grows without copies, and holds what a cache that concatenates does."""

import random
from itertools import pairwise

import cells
import pytest
import torch
import trl
from cells import Cell
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer
from safe_trainers.model.parts import find_parts
from safe_trainers.rollout import cache_dtype, growing_cache
from safe_trainers.rollout.growing_cache import ROOM, GrowingTensor, growing_update
from upstream import TRANSFORMERS_4


def states(tokens, rows=2):
    return torch.randn(rows, 3, tokens, 4)


def test_appending_concatenates_also_after_other_operations():
    """Cropping, selecting rows and repeating them, as `generate` and users do between two tokens."""
    choices = random.Random(0)
    for _ in range(30):
        torch.manual_seed(choices.randrange(1000))
        appended, held, results = GrowingTensor(), states(5), []
        for _ in range(3 * ROOM):
            new = states(choices.choice([1, 1, 1, 2, ROOM + 3]), len(held))
            expected = torch.cat([held, new], dim=-2)
            held = appended.append(held, new)
            results.append((held, expected))
            change = choices.randrange(12)
            if change == 0:
                held = held[..., : -choices.randrange(1, 3), :]
            elif change == 1:
                held = held[torch.tensor([1, 0])]
            elif change == 2:
                held = held[..., -7:, :]
            elif change == 3:
                held = held.clone()
        assert all(torch.equal(made, expected) for made, expected in results)  # nothing is overwritten later


def test_views_of_the_same_place_are_not_taken_for_the_last_result():
    appended, rows = GrowingTensor(), 3  # as many as heads
    with torch.no_grad():
        held = appended.append(states(5, rows), states(1, rows)).transpose(0, 1)
        new = states(1, rows)
        assert torch.equal(appended.append(held, new), torch.cat([held, new], dim=-2))


def config_of(window):
    config = CONFIG_MAPPING["mistral"](num_hidden_layers=2, sliding_window=window)
    config.layer_types = ["full_attention", "sliding_attention" if window else "full_attention"]
    return config


@pytest.mark.parametrize("window", [None, 2, 6, 40])
@pytest.mark.parametrize("prompt", [1, 9])
@torch.no_grad()
def test_a_cache_returns_and_holds_what_stock_does(window, prompt):
    torch.manual_seed(0)
    stock, grown = (DynamicCache(config=config_of(window)) for _ in range(2))
    update = growing_update(grown)
    for tokens in (prompt, *[1] * (2 * ROOM), 3, *[1] * ROOM):
        for index in range(2):
            new = states(tokens), states(tokens)
            assert all(map(torch.equal, update(*new, index), stock.update(*new, index)))
            mine, theirs = grown.layers[index], stock.layers[index]
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
            assert mine.get_seq_length() == theirs.get_seq_length()
    selected = torch.tensor([1, 1, 0])
    for cache, append in ((stock, stock.update), (grown, update)):
        cache.batch_select_indices(selected)
        torch.manual_seed(1)
        cache.last = [append(states(1, 3), states(1, 3), index) for index in range(2)]
    for mine, theirs in zip(grown.last, stock.last, strict=True):
        assert all(map(torch.equal, mine, theirs))


def copies(update, tokens=ROOM):
    """How many tokens of a layer found all others in another place."""
    update(states(8), states(8), 0)
    places = [update(states(1), states(1), 0)[0].data_ptr() for _ in range(tokens)]
    return sum(now != before for before, now in pairwise(places))


@torch.no_grad()
def test_a_token_copies_no_other_while_there_is_room():
    stock = DynamicCache()
    kept = []

    def keeping(*given):
        kept.append(stock.update(*given))  # alive, so that no place is used again
        return kept[-1]

    assert copies(keeping) == ROOM - 1
    assert copies(growing_update(DynamicCache())) == 0


def test_gradients_need_the_concatenation_of_stock():
    cache = DynamicCache()
    update = growing_update(cache)
    first, second = states(3).requires_grad_(), states(1).requires_grad_()
    update(first, first, 0)
    squares = 0
    for _ in range(2):  # the second must not be written where the first is read by the backward pass
        keys, values = update(second, second, 0)
        squares = squares + (keys * values).sum()
    squares.backward()
    assert torch.equal(first.grad, 4 * first)
    assert torch.equal(second.grad, 6 * second)  # once in the first result, twice in the second


class OtherCache(DynamicCache):
    """A cache with an `update` of its own."""

    def update(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().update(*args, **kwargs)


@torch.no_grad()
def test_a_cache_with_its_own_update_keeps_it():
    cache = OtherCache()
    for _ in range(3):
        growing_update(cache)(states(1), states(1), 0)
    assert cache.calls == 3


@torch.no_grad()
def test_wider_states_widen_the_cache_as_in_stock():
    stock, grown = DynamicCache(), DynamicCache()
    update = growing_update(grown)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16):
        new = states(1).to(dtype), states(1).to(dtype)
        mine, theirs = update(*new, 0), stock.update(*new, 0)
        assert [made.dtype for made in mine] == [made.dtype for made in theirs]
        assert all(map(torch.equal, mine, theirs))
    assert grown.layers[0].keys.dtype == torch.float32


@torch.no_grad()
def test_layers_that_keep_more_than_their_window_do_so():
    """They do while the tokens of a draft may be removed again."""
    stock, grown = (DynamicCache(config=config_of(2)) for _ in range(2))
    for cache in (stock, grown):
        cache.layers[1].record_past = True
    update = growing_update(grown)
    for _ in range(6):
        new = states(1), states(1)
        assert all(map(torch.equal, update(*new, 1), stock.update(*new, 1)))
    assert torch.equal(grown.layers[1].keys, stock.layers[1].keys)


class Stream:
    """A stand-in for a stream of CUDA, which waits for nothing."""

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@torch.no_grad()
def test_a_cache_that_offloads_its_layers_does_so(monkeypatch):
    offloaded = []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(DynamicCache, "offload", lambda cache, index, *others: offloaded.append(index))
    cache = DynamicCache()
    cache.offloading, cache.only_non_sliding, cache.prefetch_stream = True, True, Stream()
    update = growing_update(cache)
    for _ in range(3):
        update(states(1), states(1), 0)
    assert offloaded == [0, 0, 0]


def watch_caches(monkeypatch):
    """The caches of all later turns."""
    found = []
    make = cache_dtype.growing_update

    def keeping(cache):
        found.append(cache)
        return make(cache)

    monkeypatch.setattr(cache_dtype, "growing_update", keeping)
    return found


def has_room(caches):
    """Whether each layer that concatenates holds views of longer tensors, and no cache is changed any more."""
    layers = [layer for cache in caches for layer in cache.layers if isinstance(layer, DynamicLayer)]
    longer = [t.untyped_storage().nbytes() > t.nbytes for layer in layers for t in (layer.keys, layer.values)]
    return bool(longer) and all(longer) and not any("update" in vars(cache) for cache in caches)


def rollouts(cell, **changes):
    """The tokens that a safe trainer samples, and its weights after two steps."""
    changes = {"max_completion_length": 2 * ROOM, "generation_kwargs": {"min_new_tokens": 2 * ROOM}, **changes}
    return cells.sampled(SafeGRPOTrainer, cells.arguments(cell, SafeGRPOConfig, **changes))


@pytest.mark.parametrize(
    ("family", "flag", "attention"),
    [("text", "bf16", "sdpa"), ("text", "none", "sdpa"), ("text", "bf16", "eager"), ("llava", "bf16", "sdpa"),
     ("gemma3", "bf16", "sdpa"), ("gemma3", "none", "sdpa")],
)  # fmt: skip
def test_rollouts_sample_the_tokens_of_a_cache_that_concatenates(family, flag, attention, monkeypatch):
    cell = Cell(family, "grpo", "fp32", flag, lora=True)
    loading = {"model_init_kwargs": {"dtype": "float32", "attn_implementation": attention}}
    caches = watch_caches(monkeypatch)
    grown = rollouts(cell, **loading)
    assert has_room(caches)
    monkeypatch.setattr(cache_dtype, "growing_update", lambda cache: cache.update)
    assert rollouts(cell, **loading) == grown


def test_stock_copies_the_cache_for_each_token(monkeypatch):
    """The tensors are kept, so that no place is used again."""
    update, kept = DynamicCache.update, []

    def keeping(cache, keys, values, index, *args, **kwargs):
        made = update(cache, keys, values, index, *args, **kwargs)
        if index == 0:
            kept.append(made[0])
        return made

    monkeypatch.setattr(DynamicCache, "update", keeping)
    cell = Cell("text", "grpo", "fp32", "none", lora=True)
    trl.GRPOTrainer(**cells.arguments(cell, trl.GRPOConfig, steps=1, max_completion_length=8)).train()
    decoded = [keys.data_ptr() for keys in kept if keys.shape[-2] > 1]
    assert len(decoded) > 4
    assert len(set(decoded)) == len(decoded)


SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 256, "sliding_window": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "sdpa") for family in ("deepseek_v2", "gemma3_text", "gpt_neox", "mistral", "phi3", "qwen3_next")),
        *((family, "eager") for family in ("gemma2", "gpt_oss", "mixtral", "starcoder2")),
    ],
)
def test_families_compute_the_same_logits(family, attention, autocast, monkeypatch):
    """Sliding windows, latent keys, sinks, and states of linear attention."""
    default = CONFIG_MAPPING[family]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**{name: value for name, value in SMALL.items() if hasattr(default, name)}),
        attn_implementation=attention,
    ).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.1)

    def sample():
        torch.manual_seed(1)
        prompt, text = torch.randint(3, 100, (2, 10)), find_parts(model).text
        with torch.autocast("cpu", torch.bfloat16, autocast), cache_dtype.cache_prepared(text, autocast):
            made = model.generate(
                prompt, max_new_tokens=2 * ROOM, min_new_tokens=2 * ROOM, do_sample=True, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        return made.sequences, torch.stack(made.logits)

    caches = watch_caches(monkeypatch)
    grown = sample()
    own_cache = TRANSFORMERS_4 and family == "qwen3_next"  # a class of its own, which is left alone
    assert caches == [] if own_cache else has_room(caches)
    monkeypatch.setattr(cache_dtype, "growing_update", lambda cache: cache.update)
    assert all(map(torch.equal, grown, sample()))


def test_room_is_what_a_tensor_has_beyond_its_tokens():
    appended = GrowingTensor()
    made = appended.append(states(5), states(1))
    assert made.untyped_storage().nbytes() == made[..., :1, :].numel() * (6 + growing_cache.ROOM) * 4
