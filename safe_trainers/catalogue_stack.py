"""What transformers, accelerate, TRL, PEFT, bitsandbytes, vLLM, DeepSpeed and flash-attn say."""

from .catalogue_entry import Entry


ENTRIES = (
    Entry(
        "bf16-not-supported",
        "transformers",
        ("Your setup doesn't support bf16/gpu.",),
        "TRL's configs turn `bf16` on by themselves, and this machine has no device that computes it. The check comes "
        "before unknown keys are looked at, so that a misspelt key in the same file stays hidden.",
        "on a CPU `use_cpu: true` with `bf16: false`; on a T4 or V100 `fp16: true` with `bf16: false`; then "
        "`safe-trainers validate RECIPE`",
    ),
    Entry(
        "both-half-flags",
        "transformers",
        ("At most one of fp16 and bf16 can be True, but not both",),
        "TRL's configs turn `bf16` on by themselves; `fp16: true` beside it makes two.",
        "`fp16: true` with `bf16: false`, or `precision: fp16` of a safe config",
    ),
    Entry(
        "accelerator-state",
        "accelerate",
        (
            "AcceleratorState has already been initialized and cannot be changed",
            "AcceleratorState has already been initialized with",
        ),
        "accelerate keeps one mixed precision for the life of a process, and a second trainer asks for another.",
        "one process for each run; in a notebook restart the kernel before the second config",
    ),
    Entry(
        "fp8-needs-an-engine",
        "accelerate",
        ("Using `fp8` precision requires",),
        "`mixed_precision: fp8` of an accelerate config needs TransformerEngine or MS-AMP.",
        "remove `mixed_precision` from the accelerate config: the recipe decides",
    ),
    Entry(
        "unknown-launch-arguments",
        "accelerate",
        ("Accelerate launch command: error: unrecognized arguments: …",),
        "`trl` hands keys that it does not know to `accelerate launch`, which does not know them either: a misspelt "
        "key of the recipe, or one that TRL has renamed or removed.",
        "`safe-trainers validate RECIPE`, which names the line and the nearest key",
    ),
    Entry(
        "unknown-config-key",
        "trl",
        ("Config.__init__() got an unexpected keyword argument '…'",),
        "this release of TRL has no such field: it is misspelt, renamed or removed (`max_prompt_length`, "
        "`torch_dtype`, `warmup_ratio` and others were).",
        "`safe-trainers validate RECIPE`, which names the successor",
    ),
    Entry(
        "whole-number-expected",
        "trl",
        ("'float' object cannot be interpreted as an integer",),
        "a number with a point where a whole one is needed, such as `num_generations: 4.0`: types in a recipe are not "
        "checked by TRL's parser.",
        "`num_generations: 4`; `safe-trainers validate RECIPE` names the key",
    ),
    Entry(
        "no-model",
        "trl",
        ("'NoneType' object has no attribute 'config'",),
        "no model was given, and the trainer looks into its config.",
        "`model_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct`, or `model=...` in code",
    ),
    Entry(
        "reward-not-found",
        "trl",
        ("Could not load reward function '…'",),
        "the reward is no registered name and no dotted path that can be imported. One that is written as text is "
        "taken letter by letter, so that the name in the message is its first letter.",
        "`reward_funcs: [my_module.my_reward]`, a list, with the module on PYTHONPATH",
    ),
    Entry(
        "generations-do-not-divide",
        "trl",
        (
            "generation_batch_size (…) must be divisible by num_generations (…)",
            "must be evenly divisible by the number of generations per prompt",
        ),
        "each prompt gets `num_generations` completions, and the batch that is generated at once "
        "(`per_device_train_batch_size` * processes * `steps_per_generation`) is no multiple of it.",
        "`per_device_train_batch_size: 8` with `num_generations: 8`, or any multiple",
    ),
    Entry(
        "vllm-missing",
        "trl",
        ("vLLM is not available and `use_vllm` is set to True", "vLLM is not installed. Please install it with"),
        "`use_vllm: true`, and vLLM is not installed or does not load.",
        "`pip install 'trl[vllm]'`, or `use_vllm: false`; `safe-trainers doctor` says which",
    ),
    Entry(
        "scaler-without-scaler",
        "transformers",
        ("'NoneType' object has no attribute 'load_state_dict'",),
        "the checkpoint was written under `fp16=True` and holds the state of a loss scaler; the run that resumes it "
        "has none.",
        "the same `fp16: true` as before, or resume with a safe trainer, which leaves the file aside",
    ),
    Entry(
        "purely-quantised",
        "transformers",
        ("You cannot perform fine-tuning on purely quantized models.",),
        "packed weights get no gradients, and there are no adapters to train.",
        "`peft_config=LoraConfig(r=16, target_modules='all-linear')`, or `use_peft: true` in a recipe",
    ),
    Entry(
        "quantised-cast",
        "transformers",
        (
            "You cannot cast a bitsandbytes model in a new `dtype`",
            "`.half()` is not supported for quantized model",
            "`.float()` is not supported for quantized model",
            "`.to` is not supported for `4-bit` or `8-bit` bitsandbytes models",
        ),
        "packed weights have no dtype that could be cast; what is around them takes its dtype when it is loaded.",
        "`from_pretrained(..., dtype='bfloat16', quantization_config=...)`, and no `.to(dtype)`, `.half()` or "
        "`.float()` after it",
    ),
    Entry(
        "deprecated-torch-dtype",
        "transformers",
        ("`torch_dtype` is deprecated! Use `dtype` instead!",),
        "the argument was renamed; it still works.",
        "`dtype='bfloat16'`",
        kind="warning",
    ),
    Entry(
        "image-tokens-do-not-match",
        "transformers",
        ("Image features and image tokens do not match",),
        "the prompt holds another number of image tokens than the tower gives features: truncation cut them off, the "
        "prompt has no image part, or a completion sampled the image token.",
        "`max_length: null`, so that prompts are not truncated; a smaller picture rather than a shorter prompt",
    ),
    Entry(
        "flash-attention-missing",
        "transformers",
        ("FlashAttention2 has been toggled on, but it cannot be used due to the following error",),
        "`attn_implementation: flash_attention_2`, and flash-attn is not installed or does not load.",
        "`attn_implementation: sdpa`, or `pip install flash-attn --no-build-isolation`",
    ),
    Entry(
        "flash-attention-needs-16-bit",
        "flash-attn",
        (
            "FlashAttention only support fp16 and bf16 data type",
            "FlashAttention only supports fp16 and bf16 data type",
        ),
        "its kernels exist for float16 and bfloat16 alone, and this forward pass computes in float32: without "
        "autocast, or behind a norm that PEFT's preparation for k-bit training made float32.",
        "`bf16: true`, or `attn_implementation: sdpa`",
        link="https://github.com/QwenLM/Qwen3/issues/406",
    ),
    Entry(
        "flash-attention-other-torch",
        "flash-attn",
        ("flash_attn_2_cuda… undefined symbol:",),
        "flash-attn was compiled against another torch than the one that is installed.",
        "`pip install flash-attn --no-build-isolation --force-reinstall --no-deps`, or `attn_implementation: sdpa`",
        link="https://github.com/Dao-AILab/flash-attention/issues/1832",
    ),
    Entry(
        "cuda-library-missing",
        "vllm",
        ("libcudart.so.… cannot open shared object file",),
        "vLLM, flash-attn or bitsandbytes was built for another release of CUDA than the torch that is installed.",
        "install it anew beside this torch, `pip install --force-reinstall --no-deps vllm` (or flash-attn, "
        "bitsandbytes) in a build for the CUDA of `python -c 'import torch; print(torch.version.cuda)'`",
        link="https://github.com/vllm-project/vllm/issues/52300",
    ),
    Entry(
        "lora-targets",
        "peft",
        ("Target modules … not found in the base model.",),
        "no module of this model has one of these names: they differ from family to family.",
        "`lora_target_modules: all-linear`, or names from `model.named_modules()`",
    ),
    Entry(
        "torchvision-other-torch",
        "torchvision",
        ("operator torchvision::nms does not exist",),
        "torchvision was built for another torch than the one that is installed. transformers imports it wherever it "
        "is there, so that `from trl import GRPOTrainer` fails.",
        "pip uninstall torchvision",
        link="https://github.com/huggingface/diffusers/issues/9109",
    ),
    Entry(
        "requests-missing",
        "trl",
        ("No module named 'requests'",),
        "TRL up to 1.12 imports `requests` without asking for it.",
        "pip install requests",
    ),
    Entry(
        "import-failed",
        "transformers",
        (
            "Failed to import … because of the following error (look up to see its traceback)",
            "Could not import module '…'. Are this object's requirements defined correctly?",
        ),
        "a package that this module imports cannot be loaded; the first traceback above names it.",
        "safe-trainers doctor",
        kind="launcher",
    ),
    Entry(
        "file-missing",
        "trl",
        ("No such file or directory: '….yaml'",),
        "there is no recipe or accelerate config at this path.",
        "a path from where the command is run; `safe-trainers list` names those that come with the package",
    ),
    Entry(
        "child-failed",
        "accelerate",
        ("subprocess.CalledProcessError: Command",),
        "the launcher says that its child process ended with an error. What the error was stands above it.",
        "read the traceback above this one, or give the whole log to `safe-trainers explain LOG`",
        kind="launcher",
    ),
    Entry(
        "rank-failed",
        "torch",
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError",),
        "the launcher says that one of its processes ended with an error. What the error was stands above it.",
        "read the first traceback of the rank that it names as root cause, or give the whole log to "
        "`safe-trainers explain LOG`",
        kind="launcher",
    ),
    Entry(
        "packed-as-dense",
        "bitsandbytes",
        ("mat1 and mat2 shapes cannot be multiplied (… and 1x…)", "mat1 and mat2 shapes cannot be multiplied (…x1)"),
        "packed 4-bit weights, one long row or column of bytes, were multiplied as if they were a matrix: something "
        "calls `F.linear(x, layer.weight)` in place of the layer.",
        "leave that layer out, `BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=['its name', 'lm_head'])`",
        link="https://github.com/bitsandbytes-foundation/bitsandbytes/issues/600",
    ),
    Entry(
        "not-quantised-yet",
        "bitsandbytes",
        ("FP4 quantization state not initialized.",),
        "a 4-bit layer is packed when it is moved to its device, and this one never was: its weights were not in the "
        "checkpoint, or a wrapper took them out of the model's loading.",
        "`from_pretrained(..., quantization_config=...)` for the whole model; leave modules that the checkpoint lacks "
        "out, `llm_int8_skip_modules=['its name']`",
        link="https://github.com/huggingface/transformers/issues/23839",
    ),
    Entry(
        "bitsandbytes-not-installed",
        "transformers",
        ("Using `bitsandbytes` …-bit quantization requires",),
        "the model is quantised by bitsandbytes, which is not installed, or too old.",
        "pip install -U bitsandbytes",
    ),
    Entry(
        "bitsandbytes-without-gpu",
        "bitsandbytes",
        ("The installed version of bitsandbytes was compiled without GPU support.",),
        "bitsandbytes found no CUDA library that fits this torch: 8-bit optimizers and quantisation on the GPU are "
        "missing.",
        "pip install -U bitsandbytes; then `safe-trainers doctor`",
        kind="warning",
        link="https://github.com/bitsandbytes-foundation/bitsandbytes/issues/719",
    ),
    Entry(
        "bitsandbytes-cpu-kernel",
        "bitsandbytes",
        ("Failed to load CPU gemm_4bit_forward from kernels-community",),
        "a faster 4-bit kernel for CPUs is not installed; the slower one gives the same.",
        "nothing, or pip install kernels",
        kind="warning",
    ),
    Entry(
        "4-bit-computes-in-float32",
        "bitsandbytes",
        ("Input type into Linear4bit is …=torch.float32 (default).",),
        "4-bit layers compute in float32 unless they are told otherwise, whatever the run computes in.",
        "a safe trainer, whose 4-bit layers compute as the run does; else `bnb_4bit_compute_dtype='bfloat16'`",
        kind="warning",
        link="https://github.com/hiyouga/LlamaFactory/issues/321",
    ),
    Entry(
        "vllm-model-refuses-fp16",
        "vllm",
        ("The model type '…' does not support float16.",),
        "numbers in this model overflow float16 (Gemma's do), and vLLM does not build it.",
        "`bf16: true` on a GPU of compute capability 8.0 or more, or `use_vllm: false`",
        link="https://github.com/vllm-project/vllm/issues/28857",
    ),
    Entry(
        "vllm-quantisation-dtype",
        "vllm",
        ("torch.bfloat16 is not supported for quantization method", "torch.float32 is not supported for quantization"),
        "vLLM's kernels of this quantisation exist for other dtypes than the one asked for.",
        "a base that is not quantised for vLLM, or `use_vllm: false`",
        link="https://github.com/vllm-project/vllm/issues/28857",
    ),
    Entry(
        "vllm-bf16-needs-ampere",
        "vllm",
        ("Bfloat16 is only supported on GPUs with compute capability of at least 8.0",),
        "this GPU has no bfloat16 arithmetic, and vLLM takes the dtype of the checkpoint, bfloat16.",
        "`fp16: true` with a safe trainer, which builds vLLM in the compute dtype; a server with `--dtype float16`",
        link="https://github.com/vllm-project/vllm/issues/1157",
    ),
    Entry(
        "deepspeed-missing",
        "deepspeed",
        ("DeepSpeed is not installed => run",),
        "the accelerate config asks for DeepSpeed, which is not installed.",
        "pip install 'safe-trainers[deepspeed]', or an accelerate config without it",
    ),
    Entry(
        "deepspeed-loss-scale",
        "deepspeed",
        ("Current loss scale already at minimum - cannot decrease scale anymore.",),
        "under fp16 the gradients of step after step were not finite, whatever the loss scale: something in the model "
        "overflows float16 in the forward pass, where no loss scale helps, or the weights are lost already.",
        "`bf16: true` where the device computes it; else a safe trainer without DeepSpeed, with `fp32_modules: [...]`",
        link="https://github.com/deepspeedai/DeepSpeedExamples/issues/418",
    ),
    Entry(
        "deepspeed-config-mismatch",
        "deepspeed",
        ("Please correct the following DeepSpeed config values that mismatch TrainingArguments values",),
        "the DeepSpeed config and the recipe say different things, among them which half format is on.",
        "`auto` for each of these values in the DeepSpeed config, or `--accelerate_config zero2`",
        link="https://github.com/shibing624/MedicalGPT/issues/191",
    ),
    Entry(
        "deepspeed-other-half",
        "accelerate",
        ("`--mixed_precision` arg cannot be set to `…` when `…` is set in the DeepSpeed config file.",),
        "the DeepSpeed config turns one half format on, and the recipe (TRL's default is bf16) the other.",
        '`"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}` in the DeepSpeed config',
        link="https://github.com/huggingface/transformers/issues/39849",
    ),
)
"""Texts of everything above torch."""
