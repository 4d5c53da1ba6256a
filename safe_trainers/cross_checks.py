"""Rules between the keys of a recipe, and the ranges of single ones.

What TRL and transformers would refuse after seconds of imports, or ignore in silence, from plain values alone.
"""

from collections.abc import Callable, Iterator
from typing import Any

from .device import Device
from .dtypes import AUTO, BFLOAT16, FLOAT16, FLOAT32, SHORT, parse_dtype
from .errors import PrecisionError, nearest, refuse
from .policy import FLAG_OF, Choice, Flags, Model, resolve, resolve_compute
from .schema import shown
from .settings import Remark, Settings


AT_LEAST = {
    "dataset_limit": 1, "image_min_size": 1, "image_max_size": 1, "image_min_pixels": 1, "image_max_pixels": 1,
    "loss_scale_growth_interval": 1, "max_consecutive_skips": 1, "sync_lost_limit": 0,
    "dataset_size": 1, "evaluation_size": 0, "warm_up_steps": 0, "warm_up_batch_size": 1,
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1,
    "num_generations": 2, "num_generations_eval": 1, "num_iterations": 1, "steps_per_generation": 1,
    "generation_batch_size": 2, "max_completion_length": 1, "max_length": 1, "max_tool_calling_iterations": 0,
    "lora_r": 1, "lora_alpha": 1, "lora_dropout": 0, "learning_rate": 0, "weight_decay": 0, "max_grad_norm": 0,
    "adam_beta1": 0, "adam_beta2": 0, "adam_epsilon": 0, "warmup_steps": 0, "seed": 0,
    "data_seed": 0, "save_total_limit": 0, "torch_empty_cache_steps": 1, "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": 1, "temperature": 0, "top_p": 0, "min_p": 0, "repetition_penalty": 0, "beta": 0,
    "epsilon": 0, "epsilon_high": 0, "top_entropy_quantile": 0, "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0, "vllm_max_model_length": 1, "vllm_server_timeout": 0,
    "label_smoothing_factor": 0, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0, "num_completions_to_print": 0,
    "logging_steps": 0, "eval_steps": 0, "save_steps": 0, "eval_delay": 0, "ddp_timeout": 1, "dataset_num_proc": 1,
    "max_steps": -1, "warm_up_learning_rate": 0, "warm_up_bias": 0, "overflow_probe_steps": 1, "test_split_size": 0,
}  # fmt: skip
"""The smallest value of a key."""

ABOVE = {"loss_scale_init": 0, "loss_scale_growth_factor": 1, "loss_scale_backoff_factor": 0, "num_train_epochs": 0}
"""What a key has to be above."""

AT_MOST = {
    "lora_dropout": 1, "adam_beta1": 1, "adam_beta2": 1, "top_p": 1, "min_p": 1, "top_entropy_quantile": 1,
    "vllm_gpu_memory_utilization": 1, "label_smoothing_factor": 1, "ref_model_mixup_alpha": 1, "warm_up_bias": 1,
    "test_split_size": 1, "sync_lost_limit": 1, "seed": 2**32 - 1, "data_seed": 2**32 - 1, "vllm_server_port": 65535,
    "vllm_group_port": 65535, "loss_scale_backoff_factor": 0.99999,
}  # fmt: skip
"""The largest."""

LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters",
        "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora")  # fmt: skip
FOUR_BIT = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")
FSDP = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "offload", "auto_wrap")
PRECISION = ("precision", "fp16", "bf16")

GPU = Device(kind="cuda", name="a GPU", unscalable=frozenset({BFLOAT16, FLOAT16}))
"""Where a recipe is taken to run: which device there will be, a file cannot know."""
CPU = Device(kind="cpu", name="CPU")


def cross_checks(settings: Settings) -> Iterator[Remark]:
    """What is wrong with the values of a recipe, each alone and together.

    Args:
        settings: Values of the right types.

    Yields:
        Remarks; a rule that needs a broken value is left out.
    """
    yield from _ranges(settings)
    for keys, rule in RULES:
        if settings.sound(*keys):
            yield from rule(settings)


def compute_of(settings: Settings) -> str | None:
    """What the run computes in, as far as the recipe alone decides it.

    Returns:
        `"float32"`, `"bfloat16"` or `"float16"`; `None` where the device decides.
    """
    decided = _decided(settings)
    return None if decided is None else decided.value


def _ranges(settings: Settings) -> Iterator[Remark]:
    for key, value in list(settings.values.items()):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not settings.sound(key):
            continue
        low, high = AT_LEAST.get(key), AT_MOST.get(key)
        if low is not None and value < low:
            settings.broken.add(key)
            yield settings.error(key, f"{key}={value} is too small", f"{key}: {low} or more")
        elif key in ABOVE and value <= ABOVE[key]:
            settings.broken.add(key)
            usual = settings.schema.keys[key].default
            yield settings.error(key, f"{key}={value} has to be above {ABOVE[key]}", f"{key}: {usual}")
        elif high is not None and value > high:
            settings.broken.add(key)
            what = "is no share" if high == 1 else "is too large"
            meant = f"{key}: {0.6 if key == 'warm_up_bias' else 0.5}, or {low or 0} to {high}"
            yield settings.error(key, f"{key}={value} {what}", meant if high == 1 else f"{key}: {high} or less")


def _generation_batch(settings: Settings) -> Iterator[Remark]:
    """Whole groups of completions for each prompt, as TRL counts them."""
    if not settings.has("num_generations"):
        return
    if settings["num_generations"] is None:
        yield settings.error(
            "num_generations", "num_generations is null, and groups have a size", "num_generations: 8"
        )
        return
    if settings["generation_batch_size"] is not None and settings["steps_per_generation"] is not None:
        text = "generation_batch_size and steps_per_generation say the same, and TRL takes one of them"
        yield settings.error(("steps_per_generation", "generation_batch_size"), text, "drop `generation_batch_size`")
        return
    first = "num_generations" if settings["generation_batch_size"] is None else "generation_batch_size"
    keys = (first, "num_generations", "per_device_train_batch_size", "steps_per_generation")
    fits = [n for n in range(1, 65) if _misfit(settings, n) is None]
    processes = settings.processes
    misfit = _misfit(settings, processes) if processes is not None else None if fits else _misfit(settings, 1)
    if misfit is not None:
        others = f". It fits {fits[0]} processes" if fits else ""
        count = settings["num_generations"]
        batch = settings["per_device_train_batch_size"]
        fix = f"per_device_train_batch_size: {-(-batch // count) * count}"
        yield settings.error(keys, misfit + others, None if settings["generation_batch_size"] else fix)


def _misfit(settings: Settings, processes: int) -> str | None:
    step = settings["per_device_train_batch_size"] * processes
    asked, count = settings["generation_batch_size"], settings["num_generations"]
    of = f"per_device_train_batch_size {settings['per_device_train_batch_size']} on {processes} process(es)"
    if asked is not None and asked % step:
        return f"generation_batch_size ({asked}) must be divisible by the global batch size ({step}: {of})"
    steps = settings["steps_per_generation"] or settings["gradient_accumulation_steps"]
    total = asked if asked is not None else step * steps
    if total % count:
        made = "" if asked is not None else f": {of}, times {steps}"
        return f"generation_batch_size ({total}{made}) must be divisible by num_generations ({count})"
    return None


def _evaluation_batch(settings: Settings) -> Iterator[Remark]:
    count = settings["num_generations_eval"] or settings["num_generations"]
    if settings["eval_strategy"] == "no" or not count or settings.processes is None:
        return
    batch = settings["per_device_eval_batch_size"] * settings.processes
    if batch % count:
        text = f"the evaluation batch ({batch}) must be divisible by the generations used for evaluation ({count})"
        yield settings.error(
            ("per_device_eval_batch_size", "num_generations_eval", "num_generations"),
            text, f"per_device_eval_batch_size: {-(-batch // count) * count}",
        )  # fmt: skip


def _decided(settings: Settings) -> Choice | None:
    flags = Flags(settings["bf16"], bool(settings["fp16"]), settings["precision"])
    try:
        if flags.precision is not None and parse_dtype(flags.precision, field="precision") == AUTO:
            return None
        unset = flags.precision is None and flags.bf16 is None and not flags.fp16
        return None if unset else resolve_compute(flags, GPU)[0]
    except PrecisionError:
        return None


def _precision(settings: Settings) -> Iterator[Remark]:
    """The policy's own rules, on what the recipe declares."""
    flags = Flags(
        bf16=settings["bf16"],
        fp16=bool(settings["fp16"]),
        precision=settings["precision"],
        rollout_compute=settings.usable("rollout_compute"),
        adapter_dtype=settings.usable("adapter_dtype"),
        config="Safe" + {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT"}.get(settings.task, "Reward") + "Config",
    )
    if flags.bf16 and flags.fp16 and flags.precision is None:
        yield settings.error(("fp16", "bf16"), "bf16 and fp16 are both on, and a run computes in one", "drop `fp16`")
        return
    inner = (settings.usable("model_init_kwargs") or {}).get("dtype")
    asked = inner or settings.usable("dtype")
    try:
        weights = parse_dtype(str(asked), field="dtype") if asked is not None else AUTO
        on_cpu = bool(settings.usable("use_cpu"))
        model = Model(
            weights=frozenset({weights}) - {AUTO},
            attn_implementation=settings.usable("attn_implementation"),
            quantization="4bit"
            if settings.usable("load_in_4bit")
            else "8bit"
            if settings.usable("load_in_8bit")
            else None,
        )
        policy = resolve(flags, CPU if on_cpu else GPU, model)
        if settings.usable("bnb_4bit_compute_dtype") is not None:
            parse_dtype(settings.usable("bnb_4bit_compute_dtype"), field="bnb_4bit_compute_dtype", allow_auto=False)
        if settings.usable("save_dtype") is not None:
            parse_dtype(settings.usable("save_dtype"), field="save_dtype", allow_auto=False)
    except PrecisionError as error:
        for problem in error.problems:
            key = problem.given.split("=")[0]
            yield settings.finding("error", ("model_init_kwargs",) if inner and key == "dtype" else (key,), problem)
        return
    unknown = _decided(settings) is None and not on_cpu  # the device decides: what follows from it is not known here
    for problem in policy.problems:
        if not unknown or problem.id == "unknown-choice":
            keys = (problem.given.split("=")[0], *PRECISION, "dtype", "model_init_kwargs")
            yield settings.finding("error", keys if problem.id == "unknown-choice" else (*PRECISION, *keys), problem)
    for warning in policy.warnings:
        if not unknown:
            yield settings.finding("warning", (*PRECISION, "rollout_compute"), warning)


def _compute_of_4bit(settings: Settings) -> Iterator[Remark]:
    asked, compute = settings["bnb_4bit_compute_dtype"], compute_of(settings)
    if asked is None or not settings["load_in_4bit"] or compute is None or compute == FLOAT32:
        return
    try:
        wanted = parse_dtype(asked, field="bnb_4bit_compute_dtype", allow_auto=False)
    except PrecisionError:  # said by `_precision`
        return
    if wanted != compute:
        given = f"bnb_4bit_compute_dtype={asked!r} in a run that computes in {compute}"
        yield settings.finding("error", ("bnb_4bit_compute_dtype",), refuse("bnb-compute-dtype-contradicts", given))


def _launch_precision(settings: Settings) -> Iterator[Remark]:
    """An accelerate config with a precision of its own; its variable would win over the recipe, or be ignored."""
    entry = settings.launch.get("mixed_precision")
    said = None if entry is None else str(entry.text or entry.value).lower()
    decided = compute_of(settings)
    if entry is None or said in (None, "no", "none", "null", "false"):
        return
    compute = "what the device computes best" if decided is None else SHORT[decided]
    if decided is None or said != FLAG_OF.get(decided):
        text = f"mixed_precision is {said}, and the recipe computes in {compute}"
        fix = "drop `mixed_precision`: the recipe decides"
        yield Remark("error", text, fix, "mixed_precision", settings.launch_path, entry.line)


def _quantisation(settings: Settings) -> Iterator[Remark]:
    four, eight, peft = settings["load_in_4bit"], settings["load_in_8bit"], settings["use_peft"]
    if four and eight:
        text = "load_in_4bit and load_in_8bit are both on, and a model is packed once"
        yield settings.error(("load_in_8bit", "load_in_4bit"), text, "drop `load_in_8bit`")
    if (four or eight) and not peft:
        key = "load_in_4bit" if four else "load_in_8bit"
        yield settings.error(key, f"{key} packs the weights, and packed weights are not trained", "use_peft: true")
    ignored = [key for key in FOUR_BIT if settings.sets(key) and settings[key]]
    if ignored and not four:
        text = f"{', '.join(ignored)}: for 4-bit models alone, and load_in_4bit is off"
        yield settings.remark("warning", tuple(ignored), text, "load_in_4bit: true, or drop them")


def _lora(settings: Settings) -> Iterator[Remark]:
    """Settings of an adapter that is not made: without a word, TRL would train the whole model."""
    given = [key for key in LORA if settings.sets(key) and settings[key] != settings.schema.keys[key].default]
    if given and not settings["use_peft"] and not settings.sets("use_peft"):
        text = f"{', '.join(given)}: for adapters, and use_peft is off: the whole model would be trained"
        yield settings.error(tuple(given), text, "use_peft: true")


def _vllm(settings: Settings) -> Iterator[Remark]:
    given = [key for key in settings.values if key.startswith("vllm_")]
    if given and not settings["use_vllm"] and not settings.sets("use_vllm"):
        text = f"{', '.join(given)}: for vLLM, and use_vllm is off"
        yield settings.remark("warning", tuple(given), text, "use_vllm: true, or drop them")
    low, high = settings["vllm_importance_sampling_clip_min"], settings["vllm_importance_sampling_clip_max"]
    if low is not None and high is not None and low >= high:
        text = f"vllm_importance_sampling_clip_min ({low}) has to be below vllm_importance_sampling_clip_max ({high})"
        yield settings.error(("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"), text)
    if settings["use_vllm"] and settings["vllm_mode"] == "server" and settings["vllm_enable_sleep_mode"]:
        text = "vllm_enable_sleep_mode is for vllm_mode: colocate, and a server does not sleep"
        yield settings.remark("warning", ("vllm_enable_sleep_mode",), text, "drop `vllm_enable_sleep_mode`")


def _rewards(settings: Settings) -> Iterator[Remark]:
    weights, names = settings["reward_weights"], settings["reward_funcs"]
    count = len(names or []) + bool(settings["reward_model_name_or_path"])
    if weights is not None and count and len(weights) != count:
        yield settings.error("reward_weights", f"reward_weights has {len(weights)} numbers for {count} rewards")


def _losses(settings: Settings) -> Iterator[Remark]:
    loss, level = settings["loss_type"], settings["importance_sampling_level"]
    needed = {"luspo": "sequence", "vespo": "token"}.get(str(loss))
    if settings.has("importance_sampling_level") and needed is not None and level != needed:
        keys = ("importance_sampling_level", "loss_type")
        yield settings.remark("warning", keys, f"loss_type {loss} is made for importance_sampling_level {needed}",
                              f"importance_sampling_level: {needed}")  # fmt: skip


def _batch_search(settings: Settings) -> Iterator[Remark]:
    if settings["auto_find_batch_size"] and settings.has("num_generations"):
        text = "auto_find_batch_size halves the batch, which then holds no whole groups of completions"
        yield settings.error("auto_find_batch_size", text, "drop `auto_find_batch_size`")


def _evaluations(settings: Settings) -> Iterator[Remark]:
    if settings["load_best_model_at_end"] and settings["save_strategy"] not in ("best", settings["eval_strategy"]):
        text = "load_best_model_at_end needs save_strategy and eval_strategy to be the same"
        yield settings.error("load_best_model_at_end", text, f"eval_strategy: {settings['save_strategy']}")
    if settings["lr_scheduler_type"] == "reduce_lr_on_plateau" and settings["eval_strategy"] == "no":
        text = "lr_scheduler_type reduce_lr_on_plateau needs an evaluation to look at"
        yield settings.error("lr_scheduler_type", text, "eval_strategy: steps")


def _loader(settings: Settings) -> Iterator[Remark]:
    if settings["dataloader_prefetch_factor"] is not None and not settings["dataloader_num_workers"]:
        text = "dataloader_prefetch_factor is for dataloader_num_workers, of which there are none"
        yield settings.error("dataloader_prefetch_factor", text, "dataloader_num_workers: 2")


def _steps(settings: Settings) -> Iterator[Remark]:
    for strategy, key in (("logging_strategy", "logging_steps"), ("save_strategy", "save_steps")):
        steps: Any = settings[key]
        if settings[strategy] == "steps" and steps is not None and (steps == 0 or (steps > 1 and steps != int(steps))):
            text = f"{key}={shown(steps)} is neither a number of steps nor a share of them"
            yield settings.error((key, strategy), text, f"{key}: {max(int(steps), 1)}")


def _completions(settings: Settings) -> Iterator[Remark]:
    if settings["log_completions_hub_repo"] is not None and not settings["log_completions"]:
        text = "log_completions_hub_repo is where completions go, and log_completions is off"
        yield settings.error("log_completions_hub_repo", text, "log_completions: true")


def _dataset(settings: Settings) -> Iterator[Remark]:
    """What `DatasetArguments` would refuse, one after the other, and `prepare_dataset` once the dataset is there."""
    for low, high in (("image_min_size", "image_max_size"), ("image_min_pixels", "image_max_pixels")):
        least, most = settings[low], settings[high]
        if least is not None and most is not None and least > most:
            yield settings.error((low, high), f"{low}={least} is above {high}={most}", f"{low}: {most} or less")
    if settings["image_resize"] and min(settings["image_resize"]) < 1:
        text = f"image_resize={settings['image_resize']} is no width and height"
        yield settings.error("image_resize", text, "image_resize: [512, 512]")
    columns = settings["dataset_columns"] or {}
    if {"image", "images"} <= set(columns):
        text = "dataset_columns has `image` and `images`, which are the same"
        yield settings.error("dataset_columns", text, "drop one of them")
    if settings["prompt_template"] is not None and columns and "prompt" not in columns:
        text = "prompt_template makes the prompt, and dataset_columns has none"
        yield settings.error(("prompt_template", "dataset_columns"), text, "dataset_columns: {prompt: COLUMN, ...}")


def _engines(settings: Settings) -> Iterator[Remark]:
    words = settings["fsdp"] if isinstance(settings["fsdp"], list) else str(settings["fsdp"] or "").split()
    wrong = next((word for word in words if word.lower() not in {*FSDP, "true", "false"}), None)
    if wrong is not None:
        text = f"fsdp is {wrong!r}, and takes some of {', '.join(FSDP)}"
        yield settings.error("fsdp", text, f"fsdp: {nearest(wrong, FSDP) or FSDP[0]}")
    if settings["deepspeed"] and settings["fsdp"]:
        yield settings.error(("fsdp", "deepspeed"), "fsdp and deepspeed are both set, and one engine trains a model")


def _length(settings: Settings) -> Iterator[Remark]:
    if settings["max_steps"] == 0:
        text = "max_steps=0 trains nothing, and TRL takes it for num_train_epochs"
        yield settings.error("max_steps", text, "max_steps: 1, or drop it")


RULES: tuple[tuple[tuple[str, ...], Callable[[Settings], Iterator[Remark]]], ...] = (
    (
        ("num_generations", "generation_batch_size", "per_device_train_batch_size", "steps_per_generation",
         "gradient_accumulation_steps"), _generation_batch,
    ),
    (("num_generations", "num_generations_eval", "per_device_eval_batch_size", "eval_strategy"), _evaluation_batch),
    (PRECISION, _precision),
    (("bf16", "fp16", "precision", "bnb_4bit_compute_dtype", "load_in_4bit"), _compute_of_4bit),
    (PRECISION, _launch_precision),
    (("load_in_4bit", "load_in_8bit", "use_peft", *FOUR_BIT), _quantisation),
    (("use_peft", *LORA), _lora),
    (("use_vllm", "vllm_mode"), _vllm),
    (("reward_funcs", "reward_weights"), _rewards),
    (("loss_type", "importance_sampling_level"), _losses),
    (("auto_find_batch_size",), _batch_search),
    (("load_best_model_at_end", "save_strategy", "eval_strategy", "lr_scheduler_type"), _evaluations),
    (("dataloader_prefetch_factor", "dataloader_num_workers"), _loader),
    (("logging_steps", "logging_strategy", "save_steps", "save_strategy"), _steps),
    (("log_completions", "log_completions_hub_repo"), _completions),
    (("image_min_size", "image_max_size", "image_min_pixels", "image_max_pixels", "image_resize", "dataset_columns",
      "prompt_template"), _dataset),
    (("deepspeed", "fsdp"), _engines),
    (("max_steps",), _length),
)  # fmt: skip
"""Each rule, with the keys that it needs."""
