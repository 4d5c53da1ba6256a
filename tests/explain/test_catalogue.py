"""Each text of the catalogue is what the installed packages really say, or has its place upstream."""

import ast
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from unittest import mock

import cells
import pytest
import torch
import torch.nn.functional as F
import transformers
import trl
from accelerate import Accelerator
from bitsandbytes.functional import has_avx512bf16
from peft import LoraConfig, get_peft_model
from policing import reset_accelerate
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig
from transformers.quantizers import quantizer_bnb_4bit

from safe_trainers import ContractError, PrecisionError, RecipeError, UnsupportedVersionError
from safe_trainers.core.errors import refuse
from safe_trainers.core.messages import WARNINGS
from safe_trainers.core.refusals import REFUSALS
from safe_trainers.explain import known_errors
from safe_trainers.explain.catalogue import OURS, entries, families, hits, own_entries
from safe_trainers.explain.entry import ANY, Case, Entry, squeeze
from safe_trainers.explain.known_errors import FILE, WORDINGS, parse_entries, upstream_entries
from safe_trainers.explain.log_reader import explain


UPSTREAM = upstream_entries()
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def ones(*shape, dtype=F32):
    return torch.ones(*shape, dtype=dtype)


# --- the real errors -------------------------------------------------------------------------------------------------


def conv_dtypes():
    torch.nn.Conv2d(3, 4, 2).to(BF16)(ones(1, 3, 8, 8))


def matmul_dtypes():
    torch.nn.Linear(3, 3, bias=False).to(BF16)(ones(2, 3))


def matmul_with_bias_dtypes():
    torch.nn.Linear(3, 3).to(BF16)(ones(2, 3))


def scalar_types():
    torch.bmm(ones(1, 2, 3), ones(1, 3, 2, dtype=BF16))


def index_put_dtypes():
    ones(4, 2)[torch.tensor([0, 1])] = ones(2, 2, dtype=BF16)


def masked_scatter_dtypes():
    ones(4).masked_scatter(torch.ones(4, dtype=torch.bool), ones(4, dtype=BF16))


def index_add_dtypes():
    ones(4, 2).index_add_(0, torch.tensor([0]), ones(1, 2, dtype=BF16))


def scatter_dtypes():
    ones(4).scatter_(0, torch.tensor([0]), ones(1, dtype=BF16))


def index_copy_dtypes():
    ones(4).index_copy_(0, torch.tensor([0]), ones(1, dtype=BF16))


def attention_dtypes():
    half = ones(1, 1, 2, 4, dtype=BF16)
    F.scaled_dot_product_attention(ones(1, 1, 2, 4), half, half)


def norm_dtypes():
    torch.nn.LayerNorm(4).to(BF16)(ones(2, 4))


def scaled(dtype=F32):
    weight = torch.nn.Parameter(ones(2, dtype=dtype))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], 1.0)
    scaler.scale(weight.sum().float()).backward()
    return scaler, optimizer


def unscale_fp16_gradients():
    scaler, optimizer = scaled(F16)
    scaler.unscale_(optimizer)


def no_inf_checks():
    scaler, optimizer = scaled()
    optimizer.zero_grad()
    scaler.step(optimizer)


def unscaled_twice():
    scaler, optimizer = scaled()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def nothing_requires_grad():
    ones(2).sum().backward()


def sampling_not_finite():
    torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)


def constant_overflows_fp16():
    ones(2, dtype=F16).masked_fill(torch.tensor([True, False]), -1e9)


def numpy_has_no_bf16():
    ones(2, dtype=BF16).numpy()


def recomputed_otherwise():
    layers, calls = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), []

    def forward(x):
        calls.append(x)
        with torch.autocast("cpu", dtype=BF16, enabled=len(calls) == 1):
            return layers(x)

    out = torch.utils.checkpoint.checkpoint(forward, ones(2, 4).requires_grad_(), use_reentrant=False)
    out.float().sum().backward()


def integer_weights_need_no_grad():
    torch.nn.Parameter(ones(2, dtype=torch.uint8))


def no_half_kernel():
    torch.linalg.qr(ones(2, 2, dtype=BF16))


def nan_in_backward():
    with torch.autograd.detect_anomaly():
        (torch.sqrt(torch.zeros(1, requires_grad=True)) * 0).backward()


def sharded(module):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    finally:
        torch.distributed.destroy_process_group()


def fsdp_mixed_dtypes():
    sharded(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to(BF16)))


def fsdp_packed_weights():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(ones(2, dtype=torch.uint8), requires_grad=False)
    sharded(module)


def pickled_checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        torch.save(Path(folder), f"{folder}/state.pt")
        torch.load(f"{folder}/state.pt")


def optimizer_of_another_model():
    one, two = (torch.optim.AdamW([torch.nn.Parameter(ones(2)) for _ in range(n)]) for n in (1, 2))
    one.load_state_dict(two.state_dict())


def weights_of_another_shape():
    torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(2, 3).state_dict())


def checkpoint_cut_off():
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        save_file({"weight": ones(1000)}, file)
        file.write_bytes(file.read_bytes()[:1000])
        load_file(file)


def no_dtype_of_that_name():
    AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype="bf16")


def config(task="grpo", **changes):
    return cells.PLAIN[task](**{"output_dir": "unused", "use_cpu": True, "bf16": False, **changes})


def no_dtype_of_that_name_for_trl():
    cell = cells.Cell("text", "sft", "fp32", None)
    trl.SFTTrainer(**cells.arguments(cell, trl.SFTConfig, model_init_kwargs={"dtype": "bf16"}))


def tf32_needs_ampere():
    config(tf32=True)


def bf16_not_supported():
    config(use_cpu=False, bf16=True)


def both_half_flags():
    config(bf16=True, fp16=True)


def accelerator_state():
    reset_accelerate()
    Accelerator(cpu=True, mixed_precision="no")
    try:
        Accelerator(cpu=True, mixed_precision="bf16")
    finally:
        reset_accelerate()


def fp8_needs_an_engine():
    reset_accelerate()
    try:
        with mock.patch("accelerate.state.is_fp8_available", return_value=False):  # as without torchao
            Accelerator(cpu=True, mixed_precision="fp8")
    finally:
        reset_accelerate()


def unknown_config_key():
    config(max_prompt_length=512)


def trainer(task="grpo", **changes):
    cell = cells.Cell("text", task, "fp32", None)
    return cells.STOCK[task](**cells.arguments(cell, cells.PLAIN[task], **changes))


def whole_number_expected():
    trainer(num_generations=2.0).train()


def no_model():
    trl.GRPOTrainer(model=None, reward_funcs=[cells.token_reward], args=config())


def generations_do_not_divide():
    config(num_generations=3, per_device_train_batch_size=4)


def vllm_missing():
    trainer(use_vllm=True)


def scaler_without_scaler():
    with tempfile.TemporaryDirectory() as folder:
        trainer("sft", steps=1, save_strategy="steps", save_steps=1, output_dir=folder).train()
        torch.save(torch.amp.GradScaler("cpu").state_dict(), f"{folder}/checkpoint-1/scaler.pt")
        trainer("sft", steps=2, output_dir=folder).train(resume_from_checkpoint=f"{folder}/checkpoint-1")


def in_4_bit():
    return AutoModelForCausalLM.from_pretrained(
        cells.folder("text"), quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )


def purely_quantised():
    transformers.Trainer(in_4_bit(), transformers.TrainingArguments("unused", use_cpu=True))


def quantised_cast():
    in_4_bit().to(F16)


def quantised_half():
    in_4_bit().half()


def image_tokens_do_not_match():
    model = AutoModelForImageTextToText.from_pretrained(cells.folder("llava"))
    size = model.config.vision_config.image_size
    model(input_ids=torch.tensor([[5, 6, 7]]), pixel_values=torch.zeros(1, 3, size, size))


def flash_attention_missing():
    AutoModelForCausalLM.from_pretrained(cells.folder("text"), attn_implementation="flash_attention_2", dtype=BF16)


def lora_targets():
    get_peft_model(AutoModelForCausalLM.from_pretrained(cells.folder("text")), LoraConfig(target_modules=["qkv"]))


def file_missing():
    trl.TrlParser((trl.GRPOConfig,)).parse_args_and_config(["--config", "no_such.yaml"])


def child_failed():
    subprocess.run([sys.executable, "-c", "import sys; sys.exit(1)"], check=True)


def packed_as_dense():
    import bitsandbytes

    F.linear(ones(2, 64), bitsandbytes.nn.Linear4bit(64, 64).to("cpu").weight.t())


def not_quantised_yet():
    import bitsandbytes

    bitsandbytes.nn.Linear4bit(64, 64)(ones(2, 64))


def deepspeed_missing():
    from accelerate.utils import DeepSpeedPlugin

    Accelerator(deepspeed_plugin=DeepSpeedPlugin())


def attention_mask_dtype():
    query = ones(1, 1, 2, 4, dtype=BF16)
    F.scaled_dot_product_attention(query, query, query, attn_mask=ones(2, 2, dtype=F16))


def two_halves_in_autocast():
    with torch.autocast("cpu", dtype=BF16):
        torch.cat([ones(2, dtype=F16), ones(2), ones(2, dtype=BF16)])


def gradient_dtype():
    torch.nn.Parameter(ones(2)).grad = ones(2, dtype=BF16)


def interpolated_dtypes():
    torch.lerp(ones(2), ones(2, dtype=F16), 0.5)


def vector_dtypes():
    torch.dot(ones(2), ones(2, dtype=F16))


def target_dtypes():
    F.binary_cross_entropy(ones(2, dtype=F16), ones(2))


def batch_dtypes():
    torch.baddbmm(ones(1, 2, 2, dtype=F16), ones(1, 2, 2), ones(1, 2, 2))


def output_dtype():
    torch.mm(ones(2, 2), ones(2, 2), out=ones(2, 2, dtype=BF16))


def module_to_integers():
    torch.nn.Linear(2, 2).to(torch.int32)


def integers_that_require_grad():
    ones(2, dtype=torch.int64).requires_grad_()


def blockwise_quantisation():
    pytest.importorskip("bitsandbytes").functional.quantize_blockwise(ones(64, dtype=torch.uint8))


def backward_twice():
    loss = ones(2).requires_grad_().pow(2).sum()
    loss.backward()
    loss.backward()


def changed_in_place():
    inputs = ones(2).requires_grad_() * 2
    loss = inputs.pow(2).sum()
    inputs += 1
    loss.backward()


def index_out_of_range():
    torch.nn.Embedding(3, 2)(torch.tensor([5]))


def label_out_of_range():
    F.cross_entropy(ones(1, 3), torch.tensor([7]))


def labels_of_another_length():
    F.cross_entropy(ones(4, 3), torch.tensor([1]))


def result_type():
    ones(2, dtype=torch.int64).add_(0.5)


def meta_weights():
    torch.nn.Linear(2, 2, device="meta").to("cpu")


def examples_of_several_lengths():
    torch.stack([ones(2), ones(3)])


def lists_of_several_lengths():
    torch.tensor([[1, 2], [3]])


def strings_in_a_batch():
    torch.tensor([["text"]])


def shapes_that_differ():
    ones(2, 3) + ones(2, 4)


def shape_of_a_view():
    ones(2, 3).reshape(4, 2)


def shapes_of_a_product():
    torch.nn.Linear(3, 3)(ones(2, 4))


def image_positions_do_not_match():
    ones(3, 4)[:, torch.tensor([True, True, False, False])] = ones(3, 3)


def empty_data_set():
    torch.utils.data.RandomSampler([])


def shared_tensors():
    from safetensors.torch import save_file

    shared = ones(3)
    save_file({"a": shared, "b": shared}, "shared.safetensors")


def file_cut_off():
    Path("empty.pt").touch()
    torch.load("empty.pt", weights_only=False)


def not_picklable():
    import pickle

    pickle.dumps(lambda: None)
    pickle.dumps(type("Local", (), {"__qualname__": "not_picklable.<locals>.Local"}))


def no_space_left():
    with open("/dev/full", "w") as full:
        full.write("x")


def unknown_trainer_argument():
    trl.SFTTrainer("model", tokenizer=None)


def trainer_of_another_release():
    Path(trl.SFTConfig("out", use_cpu=True, bf16=False).max_prompt_length)


def unknown_architecture():
    Path("config.json").write_text('{"model_type": "of_tomorrow"}')
    transformers.AutoConfig.from_pretrained(".")


def no_default_targets():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.config = transformers.PretrainedConfig()
    model.config.model_type = "of_its_own"
    get_peft_model(model, LoraConfig())


def package_missing():
    import of_another_world_of_vllm  # noqa: F401


def type_of_a_value():
    ones(2).fill_("5e-5")


def file_not_found():
    torch.load("checkpoint-100/optimizer.pt")


def file_not_permitted():
    raise PermissionError(13, "Permission denied", "/home/user/.cache/huggingface")  # tests can run as root


def no_kernel_for_dtype():
    torch.linalg.qr(ones(2, 2, dtype=torch.int64))


def devices_differ():
    torch.nn.Linear(2, 2)(torch.ones(2, device="meta"))


def gradient_not_possible():
    ones(2).requires_grad_().numpy()


def image_not_readable():
    from PIL import Image

    Path("tensor.png").write_bytes(b"a web page")
    Image.open("tensor.png")


def memory_of_the_machine():
    torch.empty(2**50)


def process_group_missing():
    torch.distributed.barrier()


def name_of_another_release():
    from transformers import NameOfAnotherRelease  # noqa: F401


PROVOKED = {
    "conv-dtypes": [conv_dtypes],
    "dtypes-differ": [interpolated_dtypes, vector_dtypes, target_dtypes, batch_dtypes],
    "out-dtype": [output_dtype],
    "ragged-batch": [examples_of_several_lengths, lists_of_several_lengths, strings_in_a_batch],
    "shapes-do-not-fit": [shapes_that_differ, shape_of_a_view, shapes_of_a_product],
    "integer-weights-need-no-grad": [integer_weights_need_no_grad, integers_that_require_grad],
    "matmul-dtypes": [matmul_dtypes, matmul_with_bias_dtypes],
    "scatter-dtypes": [index_add_dtypes, scatter_dtypes, index_copy_dtypes],
    "no-dtype-of-that-name": [no_dtype_of_that_name, no_dtype_of_that_name_for_trl],
    "quantised-cast": [quantised_cast, quantised_half],
} | {
    function.__name__.replace("_", "-"): [function]
    for function in (
        scalar_types,
        index_put_dtypes,
        masked_scatter_dtypes,
        attention_dtypes,
        norm_dtypes,
        unscale_fp16_gradients,
        no_inf_checks,
        unscaled_twice,
        attention_mask_dtype,
        two_halves_in_autocast,
        gradient_dtype,
        module_to_integers,
        blockwise_quantisation,
        backward_twice,
        changed_in_place,
        index_out_of_range,
        label_out_of_range,
        labels_of_another_length,
        result_type,
        meta_weights,
        image_positions_do_not_match,
        empty_data_set,
        shared_tensors,
        file_cut_off,
        not_picklable,
        no_space_left,
        unknown_trainer_argument,
        trainer_of_another_release,
        unknown_architecture,
        package_missing,
        type_of_a_value,
        file_not_found,
        file_not_permitted,
        no_kernel_for_dtype,
        devices_differ,
        gradient_not_possible,
        memory_of_the_machine,
        image_not_readable,
        process_group_missing,
        no_default_targets,
        name_of_another_release,
        nothing_requires_grad,
        sampling_not_finite,
        constant_overflows_fp16,
        numpy_has_no_bf16,
        recomputed_otherwise,
        no_half_kernel,
        nan_in_backward,
        fsdp_mixed_dtypes,
        fsdp_packed_weights,
        pickled_checkpoint,
        optimizer_of_another_model,
        weights_of_another_shape,
        checkpoint_cut_off,
        tf32_needs_ampere,
        bf16_not_supported,
        both_half_flags,
        accelerator_state,
        fp8_needs_an_engine,
        unknown_config_key,
        whole_number_expected,
        no_model,
        generations_do_not_divide,
        vllm_missing,
        scaler_without_scaler,
        purely_quantised,
        image_tokens_do_not_match,
        flash_attention_missing,
        lora_targets,
        file_missing,
        child_failed,
        packed_as_dense,
        not_quantised_yet,
        deepspeed_missing,
    )
}
"""What makes the packages say it, by id of the entry; those that need a process of their own are below."""

IN_A_CHILD = {
    "unknown-launch-arguments",
    "reward-not-found",
    "torchvision-other-torch",
    "import-failed",
    "requests-missing",
    "rank-failed",
    "bitsandbytes-not-installed",
    "bitsandbytes-cpu-kernel",
    "deprecated-torch-dtype",
}


IN_SOURCE = {
    "evaluation-without-data": "transformers/trainer.py",
    "called-at-another-time": "trl/trainer/dpo_trainer.py",
    "checkpoint-of-other-processes": "torch/distributed/_shard/sharded_tensor/api.py",
    "cuda-graph-failed": "torch/_inductor/cudagraph_trees.py",
    "device-not-as-required": "accelerate/accelerator.py",
    "fsdp-layer-class": "accelerate/utils/dataclasses.py",
    "gated-model": "transformers/utils/hub.py",
    "hub-not-reachable": "transformers/utils/hub.py",
    "internal-check-failed": "peft/peft_model.py",
    "model-file-missing": "transformers/utils/hub.py",
    "model-not-found": "transformers/utils/hub.py",
    "model-not-loadable": "transformers/models/auto/auto_factory.py",
    "model-returns-no-loss": "transformers/trainer.py",
    "no-chat-template": "transformers/tokenization_utils_base.py",
    "no-checkpoint-to-resume": "transformers/trainer.py",
    "no-padding-of-images": "trl/trainer/sft_trainer.py",
    "number-not-finite": "peft/tuners/lora/layer.py",
    "old-torch-and-pickles": "transformers/utils/import_utils.py",
    "one-generation": "trl/trainer/grpo_config.py",
    "operation-failed": "trl/trainer/grpo_trainer.py",
    "quantiser-cannot-train": "transformers/trainer_utils.py",
    "second-adapter": "trl/trainer/grpo_trainer.py",
    "stream-without-length": "transformers/trainer.py",
    "thing-not-found": "peft/tuners/tuners_utils.py",
    "trust-remote-code": "transformers/dynamic_module_utils.py",
    "zero3-with-device-map": "transformers/integrations/accelerate.py",
    "amp-names-deprecated": "torch/cuda/amp/autocast_mode.py",
    "cache-off-with-checkpointing": "transformers/modeling_layers.py",
    "class-found-in-neither-module": "transformers/models/auto/auto_factory.py",
    "config-of-a-processor-missing": "transformers/models/auto/video_processing_auto.py",
    "deepspeed-does-not-know-the-batch-size": "accelerate/accelerator.py",
    "distributed-without-nccl": "torch/distributed/distributed_c10d.py",
    "embedding-layers-saved": "peft/utils/save_and_load.py",
    "fewer-processes-than-asked": "datasets/arrow_dataset.py",
    "generation-flags-ignored": "transformers/generation/configuration_utils.py",
    "inputs-of-flash-attention-cast": "transformers/models/gpt_neo/modeling_gpt_neo.py",
    "kernels-package-missing": "transformers/integrations/hub_kernels.py",
    "longer-than-the-tokenizer-says": "transformers/tokenization_utils_base.py",
    "merge-into-packed-weights": "peft/tuners/lora/bnb.py",
    "offload-folder-needed": "accelerate/big_modeling.py",
    "old-linux-kernel": "accelerate/utils/other.py",
    "only-assistant-tokens": "trl/chat_template_utils.py",
    "packing-needs-a-length": "trl/trainer/sft_trainer.py",
    "pad-token-of-generation-set": "transformers/generation/utils.py",
    "parameters-offloaded": "accelerate/big_modeling.py",
    "prompt-longer-than-generation": "transformers/generation/utils.py",
    "reentrant-not-set": "torch/utils/checkpoint.py",
    "right-padding-in-generation": "transformers/generation/utils.py",
    "same-model-as-reference": "trl/trainer/kto_trainer.py",
    "sampling-settings-not-valid": "transformers/generation/configuration_utils.py",
    "scheduler-before-optimizer": "torch/optim/lr_scheduler.py",
    "sliding-window-not-used": "transformers/models/qwen2_5_omni/modeling_qwen2_5_omni.py",
    "special-token-not-in-vocabulary": "trl/trainer/reward_trainer.py",
    "tokenizer-call-is-faster": "transformers/tokenization_utils_base.py",
    "tokens-of-config-aligned": "transformers/trainer_utils.py",
    "trl-vllm-release": "trl/import_utils.py",
    "best-model-strategies-differ": "transformers/training_args.py",
    "data-set-cached-elsewhere": "datasets/builder.py",
    "data-set-with-a-transform": "trl/trainer/sft_trainer.py",
    "fsdp-without-processes": "transformers/trainer.py",
    "generation-settings-in-the-config": "transformers/configuration_utils.py",
    "images-cut-by-max-length": "trl/trainer/sft_trainer.py",
    "iterable-data-set-dispatched": "trl/trainer/grpo_trainer.py",
    "lora-all-modules-excluded": "peft/tuners/tuners_utils.py",
    "masks-without-labels": "trl/trainer/sft_trainer.py",
    "one-accelerator-for-two-engines": "accelerate/accelerator.py",
    "prompts-not-conversational-with-images": "trl/trainer/grpo_trainer.py",
    "reference-not-kept": "trl/trainer/dpo_trainer.py",
    "reward-model-labels": "trl/trainer/reward_trainer.py",
    "rewards-of-another-number": "trl/trainer/grpo_trainer.py",
    "router-loss-without-router": "trl/trainer/sft_trainer.py",
    "teacher-of-another-vocabulary": "trl/trainer/distillation_trainer.py",
    "trl-server-not-for-training": "trl/generation/vllm_client.py",
    "stop-words-without-tokenizer": "transformers/generation/utils.py",
    "embeds-and-ids": "transformers/generation/utils.py",
    "fsdp-with-deepspeed": "transformers/trainer.py",
    "sdpa-not-supported-by-model": "transformers/modeling_utils.py",
    "no-reward-source": "trl/trainer/grpo_trainer.py",
    "adapter-name-taken": "peft/peft_model.py",
}
"""Where the message stands in the installed packages, if raising it needs a network, a GPU or a large model."""


def strings_of(path):
    """The strings of a module, with `ANY` for what is formatted."""
    package, _, rest = path.partition("/")
    spec = importlib.util.find_spec(package)
    for node in ast.walk(ast.parse((Path(spec.submodule_search_locations[0]) / rest).read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else ANY for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize(("key", "path"), IN_SOURCE.items())
def test_the_packages_contain_it(key, path):
    assert any(any(UPSTREAM[key].places(squeeze(text))) for text in strings_of(path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("expected", "provoke"), [pytest.param(key, f, id=f.__name__) for key, fs in PROVOKED.items() for f in fs]
)
def test_the_packages_say_it(expected, provoke, tmp_path, monkeypatch, caplog):
    # The repository holds no file of a test.
    monkeypatch.chdir(tmp_path)
    # DeepSpeed's plugin writes into the environment before it finds that there is no DeepSpeed.
    before = dict(os.environ)
    try:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            provoke()
    finally:
        cells.reset_autocast()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        reset_accelerate()
    kind = type(caught.value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    # bitsandbytes logs its reason, and then raises an assertion without a word.
    text = f"{name}: {caught.value}" if str(caught.value) else f"{caplog.messages[-1]}\n{name}"
    found = explain(text).found
    assert found, text
    assert found[0].entry.id == expected, text


def test_each_entry_is_backed():
    # A family is backed by the texts that people pasted; there is no one thread of it.
    pasted = tomllib.loads(Path(__file__).with_name("pasted_errors.toml").read_text(encoding="utf-8"))["pasted"]
    unlinked = {entry.id for entry in UPSTREAM.values() if entry.link is None}
    families_seen = {row["id"] for row in pasted if "id" in row and UPSTREAM[row["id"]].general}
    assert unlinked <= set(PROVOKED) | IN_A_CHILD | set(IN_SOURCE) | families_seen
    assert set(PROVOKED) | IN_A_CHILD | set(IN_SOURCE) <= set(UPSTREAM)
    for entry in UPSTREAM.values():
        assert entry.link is None or re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", entry.link)


# --- in processes of their own ---------------------------------------------------------------------------------------


def child(*command, **environment):
    """What a process says in all."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=240
    )
    return done.stdout + done.stderr


def stand_in(folder, package, code, version="0.0.1"):
    """A package of that name on a path of its own, which fails as the real one does where it cannot be installed."""
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(code)
    metadata = folder / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return str(folder)


@pytest.mark.slow
def test_a_torchvision_that_breaks_trl(tmp_path):
    # A stand-in: the real one is several GB of CUDA packages. It fails as the real one does beside another torch.
    path = stand_in(tmp_path, "torchvision", 'raise RuntimeError("operator torchvision::nms does not exist")')
    found = explain(child(sys.executable, "-c", "from trl import GRPOTrainer", PYTHONPATH=path))
    assert [one.entry.id for one in found.found][:2] == ["torchvision-other-torch", "import-failed"]
    assert found.explained


def test_requests_that_is_not_there():
    # Without the installed packages: TRL's own line, in an interpreter that has no `requests`.
    said = child(sys.executable, "-I", "-S", "-c", "import requests")
    assert explain(said).found[0].entry.id == "requests-missing"


def test_bitsandbytes_that_is_not_there(monkeypatch):
    # bitsandbytes is installed here: that it is not is all that is pretended.
    monkeypatch.setattr(quantizer_bnb_4bit, "is_bitsandbytes_available", lambda *args, **kwargs: False)
    with pytest.raises(ImportError) as caught:
        in_4_bit()
    assert explain(str(caught.value)).found[0].entry.id == "bitsandbytes-not-installed"


@pytest.mark.slow
def test_what_bitsandbytes_and_transformers_warn_of():
    code = (
        "import torch, sys; from transformers import AutoModelForCausalLM as A, BitsAndBytesConfig as B\n"
        "A.from_pretrained(sys.argv[1], torch_dtype=torch.bfloat16, quantization_config=B(load_in_4bit=True))\n"
    )
    said = explain(child(sys.executable, "-c", code, str(cells.folder("text"))))
    # bitsandbytes looks for the kernel only where the CPU has units for bfloat16.
    kernel = {"bitsandbytes-cpu-kernel"} if has_avx512bf16() else set()
    assert {one.entry.id for one in said.found} == {"deprecated-torch-dtype", *kernel}
    assert {one.entry.kind for one in said.found} == {"warning"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("learning_rte: 1.0e-5\nuse_cpu: true\nbf16: false", "unknown-launch-arguments"),
        ("reward_funcs: rew.digits\nuse_cpu: true\nbf16: false", "reward-not-found"),
        ("learning_rte: 1.0e-5", "bf16-not-supported"),
    ],
)
def test_what_trl_says_to_a_wrong_recipe(recipe, expected, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"model_name_or_path: x/y\ndataset_name: a/b\noutput_dir: {tmp_path}/out\n{recipe}\n")
    command = Path(sys.executable).with_name("trl")
    said = explain(child(str(command), "grpo", "--config", str(file)))
    assert said.found[0].entry.id == expected
    assert said.explained


@pytest.mark.slow
def test_what_torchrun_says_of_a_failed_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.nn.Linear(3, 3, bias=False).bfloat16()(torch.ones(2, 3))\n")
    said = explain(child(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)))
    assert [one.entry.id for one in said.found] == ["matmul-dtypes", "rank-failed"]
    assert said.found[0].times in (1, 2)  # the launcher may end the second process before it prints its traceback


# --- the catalogue itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", UPSTREAM.values(), ids=lambda entry: entry.id)
def test_an_entry_finds_its_own_texts_and_no_other_does(entry):
    assert len(set(entry.messages)) == len(entry.messages)
    for text in entry.messages:
        assert len(squeeze(text.split(ANY)[0])) >= (4 if entry.level == "wording" else 5), "it begins with fixed words"
        assert [hit.entry.id for hit in hits(squeeze(text.replace(ANY, "x y")), families("torch"))] == [entry.id]


def every_case(said):
    """An entry or a case, and all cases inside of it."""
    return [said, *(inner for case in said.cases for inner in every_case(case))]


def test_a_case_inside_of_a_case_is_decided_by_its_evidence():
    inner, other = Case("it is within.", "`a`", ("inside",)), Case("or this.", "`b`")
    outer = Case("it is outside.", "`c`", ("outside",), (inner, other, other))
    entry = Entry("some-error", "torch", ("some message",), "a message.", "`d`", cases=(outer, other))
    assert entry.answer("nowhere") == ("a message.", "`d`", (other,))
    assert entry.answer("inside") == ("a message.", "`d`", (other,)), "the outer case decides first"
    assert entry.answer("outside") == ("it is outside.", "`c`", (other, other))
    assert entry.answer("outside, inside") == ("it is within.", "`a`", ())


@pytest.mark.parametrize("entry", UPSTREAM.values(), ids=lambda entry: entry.id)
def test_an_entry_says_why_and_what_to_write(entry):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", entry.id)
    for said in every_case(entry):
        assert sum(not case.evidence for case in said.cases) != 1, "one possible cause is the cause"
        assert said.cause.endswith(".")
        assert said.fix
        assert not said.fix.endswith(".")


def test_names_of_the_installed_packages_are_words_of_the_field():
    configs = (trl.SFTConfig, trl.GRPOConfig, trl.DPOConfig, trl.RewardConfig, trl.ModelConfig, LoraConfig)
    names = {field.name for config in configs for field in dataclasses.fields(config) if "_" in field.name}
    known = {name for name in names if families(f"KeyError: '{name}'") == families("torch")}
    assert len(known) > 0.85 * len(names), sorted(names - known)
    assert families("KeyError: 'colour_of_the_sky'") != families("torch")


def test_no_id_of_ours_is_an_upstream_one():
    assert not UPSTREAM.keys() & own_entries().keys()
    assert len(entries()) == len(UPSTREAM) + len(own_entries())


def test_each_id_is_in_one_file():
    here = Path(known_errors.__file__).parent
    parsed = [parse_entries((here / name).read_text(encoding="utf-8"), name) for name in (FILE, WORDINGS)]
    assert len(UPSTREAM) == sum(map(len, parsed))
    assert {entry.level for entry in parsed[0].values()} >= {"message", "family"}
    assert {entry.level for entry in parsed[1].values()} == {"wording"}


ENTRY = """[some-error]
package = "torch"
messages = ["some message …", "another"]
cause = '''
it is wrapped
in the file.'''
fix = "`bf16=True`"
kind = "warning"
link = "https://github.com/a/b/issues/1"
level = "family"

[[some-error.cases]]
evidence = ["train.py", "its words"]
cause = '''
it is
another cause.'''
fix = "`fp16=True`"

[[some-error.cases]]
cause = "it may be this one."
fix = "`tf32=False`"

[[some-error.cases.cases]]
evidence = ["here"]
cause = "it is within."
fix = "`fp16=False`"
"""


def test_an_entry_is_read_with_all_its_fields():
    assert parse_entries(ENTRY) == {
        "some-error": Entry(
            "some-error",
            "torch",
            ("some message …", "another"),
            "it is wrapped in the file.",
            "`bf16=True`",
            kind="warning",
            link="https://github.com/a/b/issues/1",
            level="family",
            cases=(
                Case("it is another cause.", "`fp16=True`", ("train.py", "its words")),
                Case("it may be this one.", "`tf32=False`", cases=(Case("it is within.", "`fp16=False`", ("here",)),)),
            ),
        )
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('package = "torch"\n', "", "[some-error]: package is missing"),
        ('fix = "`bf16=True`"\n', "", "[some-error]: fix is missing"),
        ('["some message …", "another"]', "[]", "[some-error]: messages must be a non-empty list of strings"),
        ('["some message …", "another"]', '"a"', "[some-error]: messages must be a non-empty list of strings"),
        ('["some message …", "another"]', "[1]", "[some-error]: messages must be a non-empty list of strings"),
        ('"`bf16=True`"', '""', "[some-error]: fix must be a non-empty string"),
        ('"`bf16=True`"', "true", "[some-error]: fix must be a non-empty string"),
        ('"family"', '"any"', "[some-error]: level must be one of message, family, wording, got 'any'"),
        ('fix = "`fp16=True`"', "", "[some-error], cases: fix is missing"),
        ('["train.py", "its words"]', '"a"', "[some-error], cases: evidence must be a non-empty list of strings"),
        ("it is\nanother cause.", "", "[some-error], cases: cause must be a non-empty string"),
        ("evidence", "evidense", "[some-error], cases: evidense is not a field; expected cause, fix, evidence, cases"),
        ('"warning"', '"fatal"', "[some-error]: kind must be one of error, launcher, warning, hint, got 'fatal'"),
        (
            "link =",
            "lnik =",
            "[some-error]: lnik is not a field; expected package, messages, cause, fix, kind, link, level, cases",
        ),
        ("[some-error]\n", "[some-error\n", "known_errors.toml is not TOML: "),
        ("[some-error]\n", "[some-error]\n[some-error]\n", "known_errors.toml is not TOML: "),
    ],
)
def test_a_malformed_entry_is_named(old, new, message):
    assert old in ENTRY
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_entries(ENTRY.replace(old, new))


def test_what_is_not_a_table_is_named():
    with pytest.raises(ValueError, match=r"\[some-error\]: must be a table"):
        parse_entries("some-error = 1")
    entry, _, _ = ENTRY.partition("[[")
    with pytest.raises(ValueError, match=r"\[some-error\], cases: must be a table"):
        parse_entries(f"{entry}cases = [1]")
    with pytest.raises(ValueError, match=r"\[some-error\]: cases must be a list of tables"):
        parse_entries(f"{entry}[some-error.cases]")


def test_all_refusals_and_warnings_are_in_it():
    assert set(REFUSALS) | set(WARNINGS) <= set(own_entries())
    for error in (ContractError, RecipeError, UnsupportedVersionError):
        said = explain(f"{error.__module__}.{error.__name__}: something of ours")
        assert said.explained
        assert said.found[0].entry.package == OURS


@pytest.mark.parametrize("finding", [*REFUSALS.values(), *WARNINGS.values()], ids=lambda finding: finding.id)
def test_our_own_messages_are_found_by_their_id_with_the_line_they_name(finding):
    names = set(re.findall(r"{(\w+)(?:!r)?}", finding.why + finding.fix))
    fill = dict.fromkeys(names, "something")
    message = f"given\n  why: {finding.why.format(**fill)}\n  fix: {finding.fix.format(**fill)}  [{finding.id}]"
    said = explain(f"safe_trainers.core.errors.PrecisionError: 1 problem with the precision of this run:\n- {message}")
    assert [one.entry.id for one in said.found] == [finding.id]
    assert said.found[0].fix == finding.fix.format(**fill)


def test_a_real_refusal_carries_its_id():
    error = PrecisionError([refuse("flash-attention-needs-half", "attn_implementation='flash_attention_2'")])
    assert explain(str(error)).found[0].entry.id == "flash-attention-needs-half"


def test_the_catalogue_needs_nothing_heavy():
    code = "import sys, safe_trainers.explain.log_reader; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "trl", "transformers", "yaml"} & set(loaded)
