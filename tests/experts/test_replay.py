"""Replayed choices: the same experts, and the gradient of a computation that forces these experts by hand."""

import copy
from functools import partial
from types import MethodType

import moe_models
import pytest
import torch

from safe_trainers.core.errors import PrecisionError
from safe_trainers.experts.tape import Follower, Recorder, Tape
from safe_trainers.model.routers import find_routers, unknown


ROWS, LENGTH = 3, 7
needs_fused = pytest.mark.skipif(not moe_models.FUSED, reason="families have other routers in transformers 4")


def tokens(model, rows=ROWS, length=LENGTH, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.get_text_config().vocab_size - 20, (rows, length), generator=generator)


def any_experts(routers, rows=ROWS, length=LENGTH, seed=0):
    """A record of experts that no router chose: groups and experts in them, in any order."""
    generator = torch.Generator().manual_seed(seed)
    columns = []
    for router in routers.found:
        scores = torch.rand(rows, length, router.experts, generator=generator)
        if len(router.counts) == 2:
            groups = torch.rand(rows, length, 2, generator=generator).topk(1)[1]
            columns.append(groups)
            inside = torch.arange(router.experts) // (router.experts // 2) == groups
            scores = scores.masked_fill(~inside, -1.0)
        columns.append(scores.topk(router.chosen)[1])
    return torch.cat(columns, dim=-1).to(routers.dtype)


def given(forced, chosen, router, x):
    return forced(router, x, chosen)


def logps_of(model, ids, **inputs):
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def replayed(model, routers, record, ids, **inputs):
    tape, follower = Tape(model, routers), Follower(routers, record, replays=True)
    tape.follow(follower)
    logps = logps_of(model, ids, **inputs)
    logps.mean().backward()
    tape.follow(None)
    return logps.detach(), gradients(model), follower


@needs_fused
@pytest.mark.parametrize("family", moe_models.BY_HAND)
def test_values_and_gradients_are_those_of_experts_forced_by_hand(family):
    model = moe_models.moe(family)
    by_hand, ids = copy.deepcopy(model), tokens(model)
    routers = find_routers(model)
    record = any_experts(routers)
    logps, grads, follower = replayed(model, routers, record, ids)
    assert follower.differing().any(-1).float().mean() > 0.5  # few of these experts are those of the router
    start = 0
    for router in routers.found:
        chosen = record[..., start + router.width - router.chosen : start + router.width].reshape(-1, router.chosen)
        module = by_hand.get_submodule(router.name)
        forced = moe_models.BY_HAND[family]
        module.forward = MethodType(partial(given, forced, chosen.long()), module)
        start += router.width
    expected = logps_of(by_hand, ids)
    torch.testing.assert_close(logps, expected.detach(), rtol=1e-5, atol=1e-5)
    expected.mean().backward()
    wanted = gradients(by_hand)
    assert grads.keys() == wanted.keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(
            gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    scorers = {router.scorer for router in routers.found}
    assert all(float(grads[f"{name}.weight"].abs().max()) > 0 for name in scorers)
    free = copy.deepcopy(model)
    assert not torch.allclose(logps_of(free, ids), logps, atol=1e-3)  # without replay it is another computation


def seen_by_experts(model, run):
    """The experts that the modules with the experts' weights got, as sets, while `run` runs."""
    seen = []
    handles = [
        module.register_forward_pre_hook(lambda m, args: seen.append(args[1].sort(-1)[0]))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    run()
    for handle in handles:
        handle.remove()
    return seen


@needs_fused
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_scoring_uses_the_experts_of_decoding_which_it_does_not_by_itself(family, dtype):
    rows, prompt, length = 16, 5, 48
    many = {"num_experts": 64, "n_routed_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 8}
    model = moe_models.moe(family, hidden_size=128, num_hidden_layers=4, **many)
    routers = find_routers(model)
    tape, recorder = Tape(model, routers), Recorder(routers, rows)
    begin = tokens(model, rows, prompt)
    tape.follow(recorder)
    kept = []
    settings = {"do_sample": True, "max_new_tokens": length, "eos_token_id": None}
    sample = partial(model.generate, begin, attention_mask=torch.ones_like(begin), **settings)
    with torch.autocast("cpu", dtype):
        torch.manual_seed(0)
        decoded = seen_by_experts(model, lambda: kept.append(sample()))
    tape.follow(None)
    record, sequences = recorder.finish(), kept[0]
    assert record.shape == (rows, prompt + length - 1, routers.width)
    layers = len(routers.found)
    by_layer = [torch.cat([s.view(rows, -1, s.shape[-1]) for s in decoded[n::layers]], dim=1) for n in range(layers)]

    def flips(replays):
        follower = Follower(routers, record, replays)
        tape.follow(follower)
        with torch.no_grad(), torch.autocast("cpu", dtype):
            scored = seen_by_experts(model, partial(logps_of, model, sequences[:, :-1]))
        tape.follow(None)
        used = [s.view(rows, -1, s.shape[-1]) for s in scored]
        found = sum(int((a != b).any(-1).sum()) for a, b in zip(by_layer, used, strict=True))
        assert int(follower.differing().sum()) >= found
        return found, int(follower.differing().sum())

    stock, counted = flips(replays=False)
    assert stock > 0
    if len(routers.found[0].counts) == 1:
        assert counted == stock
    assert flips(replays=True)[0] == 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_gradient_checkpointing_replays_the_same_rows(reentrant, chunks):
    model = moe_models.moe()
    ids, routers = tokens(model), find_routers(model)
    record = any_experts(routers)

    def replayed_in_chunks(model):
        found = find_routers(model)
        tape, follower = Tape(model, found), Follower(found, record, replays=True)
        tape.follow(follower)
        torch.cat([logps_of(model, part) for part in ids.chunk(chunks)]).mean().backward()
        tape.follow(None)
        assert follower.differing().shape == (ROWS, LENGTH, len(found.found))
        return gradients(model)

    wanted = replayed_in_chunks(copy.deepcopy(model))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    made = replayed_in_chunks(model)
    assert made.keys() == wanted.keys()
    assert [name for name, gradient in made.items() if not torch.equal(gradient, wanted[name])] == []


def test_what_a_router_chooses_itself_keeps_its_bits():
    model = moe_models.moe()
    ids, routers = tokens(model), find_routers(model)
    tape, recorder = Tape(model, routers), Recorder(routers, ROWS)
    tape.follow(recorder)
    own = logps_of(model, ids)
    tape.follow(None)
    own.mean().backward()
    wanted = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    record = recorder.finish().flip(-1)  # in another order
    logps, grads, follower = replayed(model, routers, record[..., [1, 0, 3, 2]].flip(-1), ids)
    assert not follower.differing().any()
    assert torch.equal(logps, own)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in grads.items())


def test_the_record_begins_with_the_prompt_however_many_tokens_are_computed_after_it():
    """Under FSDP2 and ZeRO-3, a rank goes on until the longest completion of all ranks has ended."""
    model = moe_models.moe()
    ids, routers = tokens(model), find_routers(model)
    tape = Tape(model, routers)

    def recorded(after, cached=True):
        recorder = Recorder(routers, ROWS)
        tape.follow(recorder)
        with torch.no_grad():
            done = model(ids[:, :2], use_cache=cached)
            for n in range(3, 3 + after):
                kept = done.past_key_values
                done = model(ids[:, n - 1 : n], past_key_values=kept) if cached else model(ids[:, :n], use_cache=False)
        tape.follow(None)
        return recorder.finish(), recorder.width

    record, width = recorded(4)
    assert (record.shape[1], width) == (6, 2)
    for (other, its_width), end in ((recorded(2), 4), (recorded(4, cached=False), 6)):
        assert its_width == width
        assert torch.equal(other, record[:, :end])


def test_tokens_without_a_record_are_free():
    model = moe_models.moe()
    ids, routers = tokens(model), find_routers(model)
    nothing = torch.full((ROWS, LENGTH, routers.width), unknown(routers.dtype), dtype=routers.dtype)
    logps, _, follower = replayed(model, routers, nothing, ids)
    assert torch.equal(logps, logps_of(model, ids))
    assert not follower.known.any()


@pytest.mark.parametrize("shape", [(ROWS, LENGTH + 1), (ROWS + 1, LENGTH), (ROWS - 1, LENGTH)])
def test_another_pass_than_the_recorded_one_is_refused_or_not_counted(shape):
    model = moe_models.moe()
    ids, routers = tokens(model, *shape), find_routers(model)
    tape = Tape(model, routers)
    tape.follow(Follower(routers, any_experts(routers), replays=True))
    if shape[0] >= ROWS:
        with pytest.raises(PrecisionError, match="got other tokens"):
            logps_of(model, ids)
    follower = Follower(routers, any_experts(routers), replays=False)
    tape.follow(follower)
    before = logps_of(model, ids)
    tape.follow(None)
    assert follower.differing() is None
    assert torch.equal(before, logps_of(model, ids))


def test_a_copy_of_the_model_makes_its_own_choices():
    model = moe_models.moe()
    ids, routers = tokens(model), find_routers(model)
    tape, follower = Tape(model, routers), Follower(routers, any_experts(routers), replays=True)
    wanted = logps_of(model, ids)
    tape.follow(follower)
    reference = copy.deepcopy(model)
    assert torch.equal(logps_of(reference, ids), wanted)
    assert not torch.equal(logps_of(model, ids), wanted)
    tape.follow(None)


def test_an_error_in_the_model_leaves_nothing_behind(monkeypatch):
    model = moe_models.moe()
    ids, routers = tokens(model), find_routers(model)
    tape = Tape(model, routers)
    tape.follow(Recorder(routers, ROWS))
    gate = model.get_submodule(routers.found[0].name)
    monkeypatch.setattr(gate, "forward", lambda *_: 1 / 0, raising=False)
    with pytest.raises(ZeroDivisionError):
        logps_of(model, ids)
    assert not tape._modes
    tape.follow(None)
    assert not gate._forward_hooks
    assert not gate._forward_pre_hooks
