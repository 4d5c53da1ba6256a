"""What the installed releases of TRL, transformers, accelerate and bitsandbytes lack, asked of them and not of their
version numbers; each is a reason to skip a test, and says what upstream lacks."""

import functools
import inspect
import tempfile
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import convert_outputs_to_fp32
from media_batches import media_batch
from packaging.version import Version
from peft import PeftModel, PeftModelForCausalLM
from transformers.cache_utils import StaticLayer
from trl.trainer.utils import create_model_from_path

from safe_trainers import tiny


TRANSFORMERS_4 = Version(transformers.__version__) < Version("5")
TRL_0 = Version(trl.__version__) < Version("1")


def needs_transformers_5(why: str):
    """Skips a test with transformers 4, which does something otherwise."""
    return pytest.mark.skipif(TRANSFORMERS_4, reason=f"transformers 4 {why}")


def needs_trl_1(why: str):
    """Skips a test with TRL 0, which does something otherwise."""
    return pytest.mark.skipif(TRL_0, reason=f"TRL 0 {why}")


def _says(trainer: type, words: str) -> bool:
    """Whether the constructor of a trainer has a message with these words."""
    return any(isinstance(text, str) and words in text for text in trainer.__init__.__code__.co_consts)


def _codes(function):
    """The code of a function, and of the comprehensions inside of it."""
    code = getattr(function, "__code__", function)
    return [code, *(inner for part in code.co_consts if inspect.iscode(part) for inner in _codes(part))]


def _is_imported(module: str) -> bool:
    """Whether a module can be imported."""
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def has_field(config: type, name: str) -> bool:
    return name in config.__dataclass_fields__


def takes(function, name: str) -> bool:
    return name in inspect.signature(function).parameters


def _converts_caches() -> bool:
    """Whether accelerate converts outputs to float32 that only have a dtype, and are no tensors."""
    try:
        convert_outputs_to_fp32(lambda: SimpleNamespace(dtype=torch.bfloat16))()
    except AttributeError:
        return True
    return False


CLIP_MAX = next(
    name
    for name in ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    if has_field(trl.GRPOConfig, name)
)
"""What TRL calls the upper limit of importance sampling."""

LOADER_OF_5 = find_spec("transformers.core_model_loading") is not None
"""Whether weights are loaded by the loader of transformers 5."""

TAKES_QUANTIZATION = takes(trl.SFTTrainer.__init__, "quantization_config")

CHUNKS_THE_HEAD = hasattr(import_module("trl.trainer.sft_trainer"), "_patch_chunked_ce_lm_head")
"""Whether SFT multiplies with the head's weight past the head, and cannot do it in float32."""
CALLS_THE_HEAD = {"loss_type": "nll"} if CHUNKS_THE_HEAD else {}
"""Settings of SFT in which a head may be float32."""

needs_quantization_argument = pytest.mark.skipif(
    not TAKES_QUANTIZATION, reason="stock trainers of this TRL have no `quantization_config`"
)
needs_packed_without_kernels = pytest.mark.skipif(
    not _is_imported("transformers.integrations.finegrained_fp8"),
    reason="this transformers imports Triton for FP8, which does not support CPUs",
)
needs_streams = pytest.mark.skipif(
    _says(trl.GRPOTrainer, "Iterable datasets are not yet supported"),
    reason="GRPO does not support streamed datasets in this TRL",
)
needs_continuous_settings = pytest.mark.skipif(
    not has_field(trl.GRPOConfig, "transformers_continuous_batching_config"),
    reason="this TRL cannot limit the cache of continuous batching, which would fill the memory",
)
needs_continuous_autocast = pytest.mark.skipif(
    takes(transformers.LlamaForCausalLM.forward, "cache") and _converts_caches(),
    reason="this transformers returns the cache of continuous batching, which this accelerate takes for a tensor",
)
needs_peft_with_caches = pytest.mark.skipif(
    takes(transformers.LlamaForCausalLM.forward, "cache")
    and "cache" not in PeftModelForCausalLM.prepare_inputs_for_generation.__code__.co_consts,
    reason="this PEFT does not find the cache of this transformers, and puts the prompt in at each token again",
)
needs_tools = pytest.mark.skipif(
    not hasattr(transformers.PreTrainedTokenizerBase, "parse_response"),
    reason="transformers before 5 cannot parse tool calls, which TRL's tools need",
)
needs_images_of_turns = pytest.mark.skipif(
    not takes(getattr(trl.GRPOTrainer, "_generate_single_turn", lambda: None), "multimodal_fields"),
    reason="this TRL passes other arguments to the method that generates a turn",
)
needs_epoch_after_skip = pytest.mark.skipif(
    not takes(DataLoaderShard.__init__, "iteration"),
    reason="this accelerate loses the epoch of a dataloader when it skips batches, which changes the order",
)
needs_whole_losses = pytest.mark.skipif(
    "round" in {name for code in _codes(transformers.Trainer._maybe_log_save_evaluate) for name in code.co_names},
    reason="this transformers logs losses with four digits",
)
needs_disabled_flag = pytest.mark.skipif(
    "_adapters_disabled" not in inspect.unwrap(PeftModel.disable_adapter).__code__.co_names,
    reason="this PEFT does not say whether virtual tokens are disabled",
)
needs_missing_logps = pytest.mark.skipif(
    "nan" not in {text for code in _codes(trl.GRPOTrainer._generate_and_score_completions) for text in code.co_consts},
    reason="this TRL fails if a log-probability is missing",
)
needs_limit_below = pytest.mark.skipif(
    not has_field(trl.GRPOConfig, "vllm_importance_sampling_clip_min"),
    reason="importance sampling of this TRL always has an upper limit",
)


@functools.cache
def static_cache_has_two_dtypes() -> bool:
    """Whether a static cache stores keys and values of two dtypes."""
    layer = StaticLayer(max_cache_len=4)
    try:
        layer.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16))
    except RuntimeError:
        return False
    return True


needs_static_cache_of_one_dtype = pytest.mark.skipif(
    static_cache_has_two_dtypes(), reason="a static cache of this transformers has a dtype for keys and one for values"
)


@functools.cache
def why_not_built(family: str) -> str | None:
    """Why the installed transformers cannot run a tiny family, or load what was built; `None` where it can."""
    try:
        model = tiny.build_model(family)
        tiny.build_processor(family)
        if family in tiny.VISION_FAMILIES:
            with torch.no_grad():
                model(**media_batch(family))  # 5.24 gives Llama4's output an attribute less than it reads
        with tempfile.TemporaryDirectory() as folder:  # 5.14 loads some processors with torchvision alone
            transformers.AutoProcessor.from_pretrained(tiny.save(family, f"{folder}/{family}"))
    except (AttributeError, ImportError) as error:
        said = str(error).strip().split(" but ")[0]
        return f"this transformers cannot run {family}: {said}"
    return None


@functools.cache
def leaves_quantised() -> bool:
    """Whether a pre-quantised checkpoint is loaded in the dtype that it was saved in, whatever is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        saved, packed = tiny.save("text", f"{folder}/plain"), f"{folder}/packed"
        load = transformers.AutoModelForCausalLM.from_pretrained
        config = transformers.BitsAndBytesConfig(load_in_4bit=True)
        load(saved, dtype=torch.bfloat16, quantization_config=config).save_pretrained(packed)
        return load(packed, dtype=torch.float16).get_input_embeddings().weight.dtype == torch.bfloat16


@functools.cache
def loads_own_classes(folder: str) -> bool:
    """Whether TRL loads a model from a folder whose class is none of transformers' own.

    Args:
        folder: A saved `nocast` model.
    """
    try:
        create_model_from_path(folder, device_map=None)
    except AttributeError:
        return False
    return True


@functools.cache
def generate_asks_the_tower_first() -> bool:
    """Whether `generate` runs the vision tower before the model's forward, and so outside of what wraps that."""
    model, processor = tiny.build_model("llava"), tiny.build_processor("llava")
    inside, early = [], []
    forward = model.forward

    @functools.wraps(forward)  # `generate` reads the signature
    def wrapped(*args, **kwargs):
        inside.append(1)
        return forward(*args, **kwargs)

    model.forward = wrapped  # as accelerate does
    model.model.vision_tower.register_forward_pre_hook(lambda module, args: early.append(not inside))
    content = [{"type": "image"}, {"type": "text", "text": tiny.QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    picture = tiny.prompt_dataset(1, seed=0)[0]["image"]
    with torch.no_grad():
        model.generate(**processor(text=[text], images=[[picture]], return_tensors="pt"), max_new_tokens=1)
    return early[0]


@functools.cache
def towers_count_in_the_dtype_of_pixels() -> bool:
    """Whether Idefics3's tower, which is Aria's too, places patches with fractions in the dtype of the pixels.

    Then an early cast of pixels changes what it computes.
    """
    model = tiny.build_model("aria", dtype="bfloat16")
    embeddings = model.model.vision_tower.embeddings
    embeddings.patch_embedding.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    mask, made = torch.ones(1, 4, 4, dtype=torch.bool), []
    embeddings.register_forward_hook(lambda module, args, output: made.append(output))
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for given in (pixels, pixels.bfloat16()):
            model.model.vision_tower(given, patch_attention_mask=mask)
    return not torch.equal(*made)
