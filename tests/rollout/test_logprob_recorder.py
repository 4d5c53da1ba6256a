"""What `generate` is recorded to have sampled from, against full forward passes in float64 that know no cache."""

import copy
import math
from functools import partial

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from trl.data_utils import prepare_multimodal_messages

from safe_trainers import tiny
from safe_trainers.model.rows import image_marks
from safe_trainers.rollout import logprob_recorder as sampled
from safe_trainers.rollout.logprob_recorder import RECORDED_MODES, Recorder, Turn, align
from upstream import needs_peft_with_caches


PROMPTS = [[5, 9, 11], [7], [12, 6, 5, 8, 9, 10], [5, 5]]
EXACT = 2e-6  # nats: log-softmax in float32 beside float64


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny.build_model("text").eval()


def padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def config(**changes):
    # A third of the vocabulary ends a row, so that rows stop at different steps.
    return GenerationConfig(
        **{"max_new_tokens": 12, "do_sample": True, "pad_token_id": 0, "eos_token_id": list(range(20, 60)),
           "bos_token_id": 1, "top_k": 0, "top_p": 1.0, **changes}
    )  # fmt: skip


def generate(model, turn=None, prompts=PROMPTS, seed=0, **changes):
    ids, mask = padded(prompts)
    recording = {} if turn is None else {"custom_generate": turn.recording()}
    torch.manual_seed(seed)
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config(**changes), **recording)
    return out[:, ids.shape[1] :], torch.random.get_rng_state()


def lengths_of(tokens, eos):
    ends = torch.isin(tokens, torch.tensor(eos))
    return [int(row.int().argmax()) + 1 if row.any() else len(row) for row in ends]


def full_forward(model, prompt, completion, temperature):
    """Log-probabilities of the completion by one unpadded forward pass in float64 without a cache."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


PROCESSORS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.9},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.3, "temperature": 0.8},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "suppressed": {"suppress_tokens": list(range(4, 30))},
    "min_new_tokens": {"min_new_tokens": 6},
    "greedy": {"do_sample": False},
    "no end": {"eos_token_id": None},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "dictionary": {"return_dict_in_generate": True},
}


@pytest.mark.parametrize("held", [0, 2**20], ids=["one step at a time", "together"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_what_is_recorded_is_what_a_full_forward_pass_gives(model, name, held, monkeypatch):
    monkeypatch.setattr(sampled, "BUFFER_BYTES", held)
    changes = PROCESSORS[name]
    temperature = changes.get("temperature", 1.0)
    turn = Turn(temperature)
    if name == "dictionary":
        ids, mask = padded(PROMPTS)
        out = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config(**changes), custom_generate=turn.recording()
        )
        tokens = out.sequences[:, ids.shape[1] :]
    else:
        tokens, _ = generate(model, turn, **changes)
    assert torch.equal(turn.tokens, tokens)
    assert turn.logps.shape == tokens.shape
    assert turn.logps.dtype == torch.float32
    exact, compared = copy.deepcopy(model).double(), []
    lengths = lengths_of(tokens, changes.get("eos_token_id", list(range(20, 60))) or [-1])
    for row, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        expected = full_forward(exact, prompt, tokens[row, :length].tolist(), temperature)
        assert (turn.logps[row, :length] - expected).abs().max() < EXACT
        compared.append(length)
    if name in ("plain", "temperature", "hot"):
        assert len(set(compared)) > 1  # rows of different lengths were among them


@pytest.mark.parametrize("name", [name for name in PROCESSORS if name != "dictionary"])
def test_tokens_and_random_state_are_those_of_a_run_without_it(model, name):
    plain, state = generate(model, **PROCESSORS[name])
    recorded, same = generate(model, Turn(1.0), **PROCESSORS[name])
    assert torch.equal(plain, recorded)
    assert torch.equal(state, same)


def test_pictures_are_read_once_and_count():
    torch.manual_seed(0)
    model, processor = tiny.build_model("llava").eval(), tiny.build_processor("llava")
    rows = tiny.prompt_dataset(4)
    prompts = [prepare_multimodal_messages(row["prompt"], images=[row["image"]]) for row in rows]
    texts = [processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) for prompt in prompts]
    images = [[row["image"]] for row in rows]
    inputs = dict(processor(images=images, text=texts, padding=True, padding_side="left", return_tensors="pt"))
    turn = Turn(1.0)
    settings = config(max_new_tokens=6, eos_token_id=None)
    with torch.no_grad():
        out = model.generate(**inputs, generation_config=settings, custom_generate=turn.recording())
        completions = out[:, inputs["input_ids"].shape[1] :]
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(completions)], 1)
        logits = model(**{**inputs, "input_ids": out, "attention_mask": mask}).logits[:, -7:-1]
    expected = logits.log_softmax(-1).gather(-1, completions.unsqueeze(-1)).squeeze(-1)
    assert (turn.logps - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "adapter",
    [LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False),
     pytest.param(
         PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), marks=needs_peft_with_caches)],
    ids=["lora", "prompt tuning, which copies what generate is given"],
)  # fmt: skip
def test_adapters(adapter):
    torch.manual_seed(0)
    model = get_peft_model(tiny.build_model("text"), adapter).eval()
    turn = Turn(1.0)
    tokens, _ = generate(model, turn, prompts=[[5, 6, 7]] * 2, eos_token_id=None)
    with torch.no_grad():
        ids = torch.cat([torch.tensor([[5, 6, 7]] * 2), tokens], 1)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -13:-1]
    expected = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert (turn.logps - expected).abs().max() < 1e-5


class InPlace(LogitsProcessor):
    """Changes the logits that it is given, which nothing in transformers does on this way."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 2:
            scores[:, 3] = -math.inf
        return scores


@pytest.mark.parametrize("held", [0, 2**20])
def test_logits_that_were_changed_in_place_are_not_taken_for_raw_ones(model, held, monkeypatch):
    monkeypatch.setattr(sampled, "BUFFER_BYTES", held)
    ids, mask = padded(PROMPTS)
    turn, model = Turn(1.0), copy.deepcopy(model)
    model.generation_config.suppress_tokens = None  # would come first, and hand on a copy
    with torch.no_grad():
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=config(eos_token_id=None),
            logits_processor=LogitsProcessorList([InPlace()]),
            custom_generate=turn.recording(),
        )
    changed = torch.tensor([(ids.shape[1] + step) % 2 == 1 for step in range(12)])
    assert turn.logps.isnan().all(0).tolist() == changed.tolist()
    assert turn.logps[:, ~changed].isfinite().all()


def test_inference_mode_is_recorded_too(model):
    turn = Turn(1.0)
    with torch.inference_mode():
        ids, mask = padded(PROMPTS)
        model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config(), custom_generate=turn.recording()
        )
    assert turn.logps.isfinite().all()


@pytest.mark.parametrize("held", [0, 2**20])
@pytest.mark.parametrize("kept", [5, 3, 1])
def test_steps_that_are_taken_back_are_forgotten(kept, held, monkeypatch):
    """transformers samples past the end on a GPU and takes it back, which is played here step by step."""
    monkeypatch.setattr(sampled, "BUFFER_BYTES", held)
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(2, 9, generator=generator) for _ in range(5)]
    tokens = torch.randint(9, (2, 5), generator=generator)
    prompt = torch.zeros(2, 3, dtype=torch.long)
    recorder = Recorder([], 1.0, 3)
    for step, scores in enumerate(logits):
        recorder(torch.cat([prompt, tokens[:, :step]], 1), scores)
    found = recorder.finish(torch.cat([prompt, tokens[:, :kept]], 1))
    expected = torch.stack(logits, 1).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)[:, :kept]
    assert torch.allclose(found, expected)


def test_beam_search_is_none_of_the_recorded_modes():
    assert config().get_generation_mode() in RECORDED_MODES
    assert config(do_sample=False).get_generation_mode() in RECORDED_MODES
    assert config(num_beams=2).get_generation_mode() not in RECORDED_MODES
    assert config(prompt_lookup_num_tokens=2).get_generation_mode() not in RECORDED_MODES


# ---- From turns to a batch ----


def turn_of(prompts, rows, values):
    width = max(map(len, rows))
    return Turn(
        1.0,
        prompts=prompts,
        lengths=[len(row) for row in rows],
        tokens=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        logps=torch.tensor([row + [-99.0] * (width - len(row)) for row in values]),
    )


def arranged(turns, completions, prompts=((1,), (2,))):
    ids = torch.tensor(prompts)
    return align(turns, completions, ids, torch.ones_like(ids))


def test_one_turn_is_as_wide_as_the_batch():
    turn = turn_of([[1], [2]], [[5, 6], [7]], [[-1.0, -2.0], [-3.0]])
    wide = torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]])  # pad_to_multiple_of
    assert arranged([turn], wide)[0, :2].tolist() == [-1.0, -2.0]
    assert arranged([turn], wide)[:, 2:].isnan().all()
    assert arranged([turn], wide[:, :1]).tolist() == [[-1.0], [-3.0]]


def test_a_token_that_was_not_sampled_has_no_log_probability():
    turn = turn_of([[1], [2]], [[5, 6], [7, 8]], [[-1.0, -2.0], [-3.0, -4.0]])
    found = arranged([turn], torch.tensor([[5, 9], [7, 8]]))
    assert found.isnan().tolist() == [[False, True], [False, False]]


def test_nothing_recorded_and_another_batch():
    turn = turn_of([[1], [2]], [[5], [7]], [[-1.0], [-3.0]])
    ids = torch.tensor([[5], [7]])
    assert arranged([], ids) is None
    assert arranged([turn], ids, [[3], [4]]) is None
    assert align([turn], ids, None) is None


def test_sequences_may_be_moved_repeated_and_left_out():
    turn = turn_of([[1], [1], [2]], [[5, 6], [7], [5, 6]], [[-1.0, -2.0], [-3.0], [-4.0, -5.0]])
    found = arranged([turn], torch.tensor([[5, 6], [7, 0], [5, 6], [5, 6]]), [[2], [1], [1], [1]])
    assert found[:, 0].tolist() == [-4.0, -3.0, -1.0, -1.0]
    assert found[2].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("packed", [False, True])
def test_rows_with_the_same_tokens_are_matched_by_their_images(packed):
    # Without its images, the first row would be taken for the first sequence. The batch has another dtype.
    turn = turn_of([[1], [1], [1], [1]], [[5], [5], [5], [5]], [[-1.0], [-2.0], [-3.0], [-4.0]])
    shape = (2, 6) if packed else (3, 4, 4)  # two patches for each image
    images = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    grid = {"image_grid_thw": torch.tensor([[1, 1, 2]] * 4)} if packed else {}

    def batch(order):
        rows = [images[index] for index in order]
        return {"pixel_values": torch.cat(rows) if packed else torch.stack(rows), **grid}

    def aligned():
        ids, rollout = torch.ones(4, 1, dtype=torch.long), batch([1, 1, 0, 0])
        rollout["pixel_values"] = rollout["pixel_values"].half()
        return align([turn], 5 * ids, ids, ids, partial(image_marks, rollout)).squeeze().tolist()

    assert aligned() == [-1.0, -2.0, -3.0, -4.0]
    turn.images = image_marks(batch([0, 0, 1, 1]), 4)
    assert aligned() == [-3.0, -4.0, -1.0, -2.0]


def test_tokens_after_another_prefix_are_not_those_that_were_sampled():
    turn = turn_of([[1]], [[5, 6, 7]], [[-1.0, -2.0, -3.0]])
    found = arranged([turn], torch.tensor([[5, 9, 7]]), [[1]])
    assert found.isnan().tolist() == [[False, True, True]]


def test_calls_for_some_rows_each_are_put_together():
    calls = [turn_of([[1], [2]], [[5], [6]], [[-1.0], [-2.0]]), turn_of([[3]], [[7, 8]], [[-3.0, -4.0]])]
    found = arranged(calls, torch.tensor([[5, 0], [6, 0], [7, 8]]), [[1], [2], [3]])
    assert found[:, 0].tolist() == [-1.0, -2.0, -3.0]
    assert found[2, 1] == -4.0


def test_later_turns_continue_their_rows():
    # Rows 0 and 2 are the same up to a tool, whose results differ; row 1 calls none; row 3 is cut off by the limit.
    first = turn_of([[1], [1], [1], [1]], [[5, 6], [7, 8], [5, 6], [5, 5]],
                    [[-0.1, -0.2], [-1.1, -1.2], [-2.1, -2.2], [-3.1, -3.2]])  # fmt: skip
    second = turn_of([[1, 5, 6, 30], [1, 5, 6, 31], [1, 5, 5, 30]], [[9], [9, 9], [4, 4, 4]],
                     [[-0.3], [-2.3, -2.4], [-3.3, -3.4, -3.5]])  # fmt: skip
    third = turn_of([[1, 5, 6, 31, 9, 9, 0]], [[3]], [[-2.5]])
    batch = torch.tensor([[5, 6, 30, 9, 0, 0], [7, 8, 0, 0, 0, 0], [5, 6, 31, 9, 9, 0], [5, 5, 30, 4, 4, 0]])
    nan = math.nan
    expected = torch.tensor(
        [[-0.1, -0.2, nan, -0.3, nan, nan], [-1.1, -1.2, nan, nan, nan, nan], [-2.1, -2.2, nan, -2.3, -2.4, nan],
         [-3.1, -3.2, nan, -3.3, -3.4, nan]]
    )  # fmt: skip
    assert torch.allclose(arranged([first, second, third], batch, [[1]] * 4), expected, equal_nan=True)


def test_rows_that_are_alike_are_continued_in_order():
    first = turn_of([[1], [1]], [[5], [5]], [[-1.0], [-2.0]])
    second = turn_of([[1, 5, 30], [1, 5, 30]], [[8], [9]], [[-3.0], [-4.0]])
    batch = torch.tensor([[5, 30, 8], [5, 30, 9]])
    found = arranged([first, second], batch, [[1]] * 2)
    assert found[:, 0].tolist() == [-1.0, -2.0]
    assert found[:, 2].tolist() == [-3.0, -4.0]


def test_padding_is_not_taken_for_a_sampled_token():
    """What a tool returned, or a later turn sampled, may be the token that rows are padded with."""
    first = turn_of([[1], [1]], [[5, 6, 7], [5]], [[-1.0, -2.0, -3.0], [-4.0]])
    second = turn_of([[1, 5, 30]], [[0]], [[-5.0]])
    found = arranged([first, second], torch.tensor([[5, 6, 7], [5, 30, 0]]), [[1]] * 2)
    assert found[1].isnan().tolist() == [False, True, False]
    assert found[1, 2] == -5.0
