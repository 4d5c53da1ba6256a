"""Rules between the keys of a recipe, and the ranges of single ones.

What TRL and transformers would refuse after seconds of imports, or ignore without a message, from plain values only.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..core.device import Device
from ..core.dtypes import AUTO, BFLOAT16, FLOAT16, FLOAT32, HALVES, SHORT, parse_dtype, rename_torch_dtype
from ..core.errors import (
    Place,
    PrecisionError,
    Problem,
    RecipeError,
    hint,
    leave_out,
    nearest,
    refuse,
    warn,
    write,
)
from ..core.tasks import TASKS
from ..data.checks import contradictions, out_of_range
from ..policy.resolve import FLAG_OF, Choice, ModelFacts, Requested, resolve, resolve_compute
from ..policy.sampling import uncorrectable
from ..policy.settings import ADAPTER_DTYPES, unknown_choice
from .ranges import RANGES, USUAL
from .schema import convert, shown
from .settings import Settings


LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters",
        "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora")  # fmt: skip
HEADS = frozenset({"lm_head", "score", "classifier", "qa_outputs", "v_head"})
"""Linear layers whose path is one name."""
SIMILAR = 0.8
"""The similarity from which an unknown entry of a mapping is taken for a misspelt one."""
FOUR_BIT = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")
FSDP = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "offload", "auto_wrap")
PRECISION = ("precision", "fp16", "bf16")
DATASET = ("image_min_size", "image_max_size", "image_min_pixels", "image_max_pixels", "image_resize",
           "dataset_columns", "prompt_template")  # fmt: skip
LOADED = ("attn_implementation", "adapter_dtype", "dtype", "model_init_kwargs")
"""Keys that may contradict the compute dtype."""

GPU = Device(kind="cuda", name="a GPU", unscalable_dtypes=frozenset({BFLOAT16, FLOAT16}))
"""The device for which a recipe is checked, because the device of the run is unknown."""
CPU = Device(kind="cpu", name="CPU")


def rule_problems(settings: Settings) -> Iterator[Problem]:
    """What is wrong with the values of a recipe, each alone and together.

    Args:
        settings: Values of the right types.

    Yields:
        Problems; a rule that needs a broken value is left out.
    """
    yield from _out_of_range(settings)
    for keys, rule in RULES:
        if settings.sound(*keys):
            yield from rule(settings)


def _out_of_range(settings: Settings) -> Iterator[Problem]:
    for key, value in list(settings.values.items()):
        if key not in RANGES or not settings.sound(key):
            continue
        usual = USUAL.get(key, settings.schema.keys[key].default)
        problem = out_of_range(key, value, RANGES[key], usual)
        if problem is not None:
            settings.broken.add(key)
            yield settings.finding(problem)


def _generation_batch(settings: Settings) -> Iterator[Problem]:
    """Whole groups of completions for each prompt, as TRL counts them."""
    if not settings.has("num_generations"):
        return
    count = settings["num_generations"]
    if count is None:
        what = "num_generations must be an integer, got null: groups need a size"
        yield settings.error("num_generations", what, write(num_generations=8))
        return
    if settings["generation_batch_size"] is not None and settings["steps_per_generation"] is not None:
        what = "generation_batch_size and steps_per_generation set the same, and TRL accepts one of them"
        fix = leave_out("generation_batch_size")
        yield settings.error(("steps_per_generation", "generation_batch_size"), what, fix)
        return
    first = "num_generations" if settings["generation_batch_size"] is None else "generation_batch_size"
    keys = (first, "num_generations", "per_device_train_batch_size", "steps_per_generation")
    fits = [n for n in range(1, 65) if _misfit(settings, n) is None]
    processes = settings.processes
    misfit = _misfit(settings, processes) if processes is not None else None if fits else _misfit(settings, 1)
    if misfit is not None:
        others = f". It fits {fits[0]} processes" if fits else ""
        batch = settings["per_device_train_batch_size"]
        fix = write(per_device_train_batch_size=-(-batch // count) * count)
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


def _evaluation_batch(settings: Settings) -> Iterator[Problem]:
    count = settings["num_generations_eval"] or settings["num_generations"]
    if settings["eval_strategy"] == "no" or not count or settings.processes is None:
        return
    batch = settings["per_device_eval_batch_size"] * settings.processes
    if batch % count:
        what = f"the evaluation batch ({batch}) must be divisible by the generations used for evaluation ({count})"
        keys = ("per_device_eval_batch_size", "num_generations_eval", "num_generations")
        yield settings.error(keys, what, write(per_device_eval_batch_size=-(-batch // count) * count))


def _declared_compute(settings: Settings) -> Choice[str] | None:
    """The compute dtype of the run; `None` if the device decides, or the recipe contradicts itself."""
    flags = Requested(settings["bf16"], bool(settings["fp16"]), settings["precision"])
    try:
        if flags.precision is not None and parse_dtype(flags.precision, field="precision") == AUTO:
            return None
        unset = flags.precision is None and flags.bf16 is None and not flags.fp16
        return None if unset else resolve_compute(flags, GPU)[0]
    except PrecisionError:
        return None


def _load_dtype(settings: Settings) -> Any:
    """The dtype in `model_init_kwargs`, also by its older name."""
    declared = settings.usable("model_init_kwargs") or {}
    return declared.get("dtype") or declared.get("torch_dtype")


def _older_name(settings: Settings) -> Iterator[Problem]:
    """`torch_dtype` in `model_init_kwargs`, which TRL does not read."""
    try:
        renamed, problem = rename_torch_dtype(settings["model_init_kwargs"] or {})
    except PrecisionError as error:
        yield from (settings.finding(problem, "model_init_kwargs") for problem in error.problems)
        return
    if problem is not None:
        yield settings.finding(replace(problem, fix=write(model_init_kwargs=renamed)), "model_init_kwargs")


def _dtypes(settings: Settings) -> Iterator[Problem]:
    """Dtypes that do not exist, or that their key does not accept."""
    inner = _load_dtype(settings)
    asked = {
        "precision": settings["precision"],
        "adapter_dtype": settings.usable("adapter_dtype"),
        "dtype": str(inner) if inner else settings.usable("dtype"),
        "bnb_4bit_compute_dtype": settings.usable("bnb_4bit_compute_dtype"),
        "save_dtype": settings.usable("save_dtype"),
    }
    for key, value in asked.items():
        written = "model_init_kwargs" if key == "dtype" and inner else key
        if value is None:
            continue
        try:
            dtype = parse_dtype(value, field=key, allow_auto=key not in ("bnb_4bit_compute_dtype", "save_dtype"))
        except PrecisionError as error:
            yield from (settings.finding(problem, written) for problem in error.problems)
        else:
            if key == "adapter_dtype" and dtype not in ADAPTER_DTYPES:
                yield settings.finding(unknown_choice(key, value, ADAPTER_DTYPES), key)


def _precision(settings: Settings) -> Iterator[Problem]:
    """The rules of the policy, for the values that the recipe declares."""
    flags = Requested(
        bf16=settings["bf16"],
        fp16=bool(settings["fp16"]),
        precision=settings["precision"],
        rollout_compute=settings.usable("rollout_compute"),
        adapter_dtype=settings.usable("adapter_dtype"),
        config=TASKS[settings.task].config,
    )
    if flags.bf16 and flags.fp16 and flags.precision is None:
        what = "bf16 and fp16 are both on, and a run computes in one of them"
        yield settings.error(("fp16", "bf16"), what, leave_out("fp16"))
        return
    wrong = list(_dtypes(settings))
    yield from wrong
    on_cpu = bool(settings.usable("use_cpu"))
    if {problem.place.key for problem in wrong} - {"adapter_dtype"}:
        return
    if _declared_compute(settings) is None and not on_cpu:
        return  # the device decides: nothing follows from the recipe
    asked = _load_dtype(settings) or settings.usable("dtype")
    four_bit, eight_bit = settings.usable("load_in_4bit"), settings.usable("load_in_8bit")
    model = ModelFacts(
        weights=frozenset({AUTO if asked is None else parse_dtype(str(asked))}) - {AUTO},
        attn_implementation=settings.usable("attn_implementation"),
        quantization="4bit" if four_bit else "8bit" if eight_bit else None,
    )
    flags = replace(flags, adapter_dtype=AUTO) if wrong else flags
    policy = resolve(flags, CPU if on_cpu else GPU, model)
    for problem in policy.problems:
        yield settings.finding(problem, *PRECISION, *LOADED)
    for problem in policy.warnings:
        yield settings.finding(problem, *PRECISION, "rollout_compute")


def _half_trainables(settings: Settings) -> Iterator[Problem]:
    """Weights that are loaded and trained in half precision, without adapters."""
    asked, decided = _load_dtype(settings) or settings.usable("dtype"), _declared_compute(settings)
    if settings["use_peft"] or settings["load_in_4bit"] or settings["load_in_8bit"] or not asked or decided is None:
        return
    try:
        weights = parse_dtype(str(asked), field="dtype")
    except PrecisionError:  # a problem of `_dtypes`
        return
    if weights not in HALVES:
        return
    keys = ("model_init_kwargs", "dtype") if _load_dtype(settings) else ("dtype",)
    if decided.value == FLOAT16 and not settings["use_cpu"]:
        if not settings["upcast_trainables"]:
            given = f"upcast_trainables=False with {decided.reason} and weights in {weights}"
            problem = refuse("half-trainables-under-loss-scaling", given, memory="2 bytes for each parameter")
            yield settings.finding(problem, "upcast_trainables")
        return
    inner = settings["model_init_kwargs"] or {}
    fix: dict[str, Any] = {"dtype": FLOAT32}
    if _load_dtype(settings):
        fix = {"model_init_kwargs": {**inner, "dtype": FLOAT32}}
    if decided.value == FLOAT32 and not settings["use_cpu"]:
        fix |= {FLAG_OF[weights]: True} if settings["precision"] is None else {"precision": SHORT[weights]}
    rate = settings.usable("learning_rate")
    details = {"count": "all", "total": "the", "dtypes": weights, "rate": f"{rate:g}", "share": "some", "fix": ""}
    problem = warn("half-trainables", f"a model that is trained as a whole in {weights}", **details)
    yield settings.finding(replace(problem, fix=write(**fix)), *keys)


def _compute_of_4bit(settings: Settings) -> Iterator[Problem]:
    asked, decided = settings["bnb_4bit_compute_dtype"], _declared_compute(settings)
    if asked is None or not settings["load_in_4bit"] or decided is None or decided.value == FLOAT32:
        return
    try:
        wanted = parse_dtype(asked, field="bnb_4bit_compute_dtype", allow_auto=False)
    except PrecisionError:  # a problem of `_dtypes`
        return
    if wanted != decided.value:
        given = f"bnb_4bit_compute_dtype={asked!r} in a run that computes in {decided.value}"
        yield settings.finding(refuse("bnb-compute-dtype-contradicts", given), "bnb_4bit_compute_dtype")


def _launch_precision(settings: Settings) -> Iterator[Problem]:
    """An accelerate config with a precision of its own, which the run ignores."""
    entry = settings.launch.get("mixed_precision")
    asked = None if entry is None else str(entry.text or entry.value).lower()
    decided = _declared_compute(settings)
    if entry is None or asked in (None, "no", "none", "null", "false"):
        return
    if decided is None or asked != FLAG_OF.get(decided.value):
        compute = "what the device computes best" if decided is None else SHORT[decided.value]
        what = f"mixed_precision is {asked}, but the recipe decides, and computes in {compute}"
        place = Place(settings.launch_path, entry.line, "mixed_precision")
        yield Problem(what, fix=leave_out("mixed_precision"), place=place)


def _quantisation(settings: Settings) -> Iterator[Problem]:
    four, eight, peft = settings["load_in_4bit"], settings["load_in_8bit"], settings["use_peft"]
    if four and eight:
        what = "load_in_4bit and load_in_8bit are both on, and a model is packed once"
        yield settings.error(("load_in_8bit", "load_in_4bit"), what, leave_out("load_in_8bit"))
    if (four or eight) and not peft:
        key = "load_in_4bit" if four else "load_in_8bit"
        yield settings.error(key, f"{key} packs the weights, and packed weights are not trained", write(use_peft=True))
    ignored = tuple(key for key in FOUR_BIT if settings.sets(key) and settings[key])
    if ignored and not four:
        what = f"{', '.join(ignored)}: only for 4-bit models, and load_in_4bit is off"
        yield settings.warning(ignored, what, write(load_in_4bit=True))


def _lora(settings: Settings) -> Iterator[Problem]:
    """Yields a problem for adapter settings without an adapter: TRL would silently train the whole model."""
    given = tuple(key for key in LORA if settings.sets(key) and settings[key] != settings.schema.keys[key].default)
    if given and not settings["use_peft"] and not settings.sets("use_peft"):
        what = f"{', '.join(given)}: only for adapters, and use_peft is off: the whole model would be trained"
        yield settings.error(given, what, write(use_peft=True))


def _lora_targets(settings: Settings) -> Iterator[Problem]:
    """A single name, which PEFT matches with the whole path of a module, unless it is its word for all layers."""
    targets, key = settings["lora_target_modules"], "lora_target_modules"
    known = settings.schema.keys[key].examples
    if not targets or len(targets) != 1 or not known or targets[0].lower() in known:
        return
    (name,), (every, *_) = targets, known
    plain = name.lower().replace("_", "-")
    if every.startswith(plain) or nearest(plain, known, 0.75) is not None or plain in ("*", ".*"):
        what = f"{key}: {shown(name)} is not the name of a module; did you mean {every!r}?"
        yield settings.error(key, what, write(**{key: every}))
        return
    try:
        re.compile(name)
    except re.error as error:
        yield settings.error(key, f"{key}: {shown(name)} is not a regular expression: {error}", write(**{key: every}))
        return
    if name.isidentifier() and name not in HEADS:
        what = f"{key}: PEFT matches a single name with the whole path of a module, and {shown(name)} is a part of one"
        yield settings.warning(key, what, write(**{key: rf".*\.{name}"}))


def _kto(settings: Settings) -> Iterator[Problem]:
    """What TRL's KTO needs to pair each prompt with another completion of its batch."""
    if settings.task != "kto" or settings["loss_type"] == "apo_zero_unpaired":
        return
    if settings["per_device_train_batch_size"] == 1:
        what = "per_device_train_batch_size is 1, and KTO estimates the KL term from the other completions of a batch"
        keys = ("per_device_train_batch_size", "loss_type")
        yield settings.error(keys, what, write(per_device_train_batch_size=2))
    order = settings["train_sampling_strategy"]
    if order not in (None, "sequential"):
        what = f"train_sampling_strategy is {order}, and KTO pairs each completion with its neighbours in the dataset"
        yield settings.error("train_sampling_strategy", what, write(train_sampling_strategy="sequential"))


def _entries(settings: Settings) -> Iterator[Problem]:
    """Misspelt entries of mappings whose entries are arguments of transformers."""
    for key, known in settings.schema.keys.items():
        written = settings[key] if settings.sets(key) and settings.sound(key) else None
        if not known.entries or not isinstance(written, dict):
            continue
        if key == "generation_kwargs" and settings.usable("use_vllm"):
            continue  # these are vLLM's
        for name in written:
            near = nearest(str(name), known.entries, SIMILAR) if name not in known.entries else None
            if near is not None:
                fix = write(**{key: {(near if other == name else other): value for other, value in written.items()}})
                yield settings.error(key, f"{key} has no entry {str(name)!r}{hint(near)}", fix)
            elif name not in known.entries and key != "generation_kwargs":
                what = (
                    f"{key} sets `{name}`, which is not an argument of from_pretrained: it needs to be an entry of the"
                )
                yield settings.note(key, f"{what} model's config")
        inner, accepted = written.get("attn_implementation"), settings.schema.keys["attn_implementation"]
        if isinstance(inner, str):
            try:
                convert(accepted, inner)
            except RecipeError as error:
                yield from (settings.finding(replace(problem, fix=None), key) for problem in error.problems)


def _vllm(settings: Settings) -> Iterator[Problem]:
    given = tuple(key for key in settings.values if key.startswith("vllm_"))
    if given and not settings["use_vllm"] and not settings.sets("use_vllm"):
        yield settings.warning(given, f"{', '.join(given)}: only for vLLM, and use_vllm is off", write(use_vllm=True))
    refusal = uncorrectable(settings.usable)
    if refusal is not None:
        yield settings.finding(refusal, "vllm_structured_outputs_regex", "generation_kwargs", "use_vllm")
    low, high = settings["vllm_importance_sampling_clip_min"], settings["vllm_importance_sampling_clip_max"]
    if low is not None and high is not None and low >= high:
        what = f"vllm_importance_sampling_clip_min ({low}) must be below vllm_importance_sampling_clip_max ({high})"
        yield settings.error(("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"), what)
    if settings["use_vllm"] and settings["vllm_mode"] == "server" and settings["vllm_enable_sleep_mode"]:
        what = "vllm_enable_sleep_mode is only for vllm_mode: colocate, and a server does not sleep"
        yield settings.warning("vllm_enable_sleep_mode", what, leave_out("vllm_enable_sleep_mode"))


def _rewards(settings: Settings) -> Iterator[Problem]:
    weights, names = settings["reward_weights"], settings["reward_funcs"]
    count = len(names or []) + bool(settings["reward_model_name_or_path"])
    if weights is not None and count and len(weights) != count:
        what = f"reward_weights has {len(weights)} numbers for {count} rewards"
        yield settings.error("reward_weights", what, write(reward_weights=[1.0] * count))


def _losses(settings: Settings) -> Iterator[Problem]:
    loss, level = settings["loss_type"], settings["importance_sampling_level"]
    needed = {"luspo": "sequence", "vespo": "token"}.get(str(loss))
    if settings.has("importance_sampling_level") and needed is not None and level != needed:
        what = f"loss_type {loss} is made for importance_sampling_level {needed}"
        fix = write(importance_sampling_level=needed)
        yield settings.warning(("importance_sampling_level", "loss_type"), what, fix)


def _batch_search(settings: Settings) -> Iterator[Problem]:
    if settings["auto_find_batch_size"] and settings.has("num_generations"):
        what = "auto_find_batch_size halves the batch, which then does not hold whole groups of completions"
        yield settings.error("auto_find_batch_size", what, leave_out("auto_find_batch_size"))


def _evaluations(settings: Settings) -> Iterator[Problem]:
    if settings["load_best_model_at_end"] and settings["save_strategy"] not in ("best", settings["eval_strategy"]):
        what = "load_best_model_at_end needs save_strategy and eval_strategy to be the same"
        yield settings.error("load_best_model_at_end", what, write(eval_strategy=settings["save_strategy"]))
    if settings["lr_scheduler_type"] == "reduce_lr_on_plateau" and settings["eval_strategy"] == "no":
        what = "lr_scheduler_type reduce_lr_on_plateau needs evaluations"
        yield settings.error("lr_scheduler_type", what, write(eval_strategy="steps"))


def _loader(settings: Settings) -> Iterator[Problem]:
    if settings["dataloader_prefetch_factor"] is not None and not settings["dataloader_num_workers"]:
        what = "dataloader_prefetch_factor is only for workers, and dataloader_num_workers is 0"
        yield settings.error("dataloader_prefetch_factor", what, write(dataloader_num_workers=2))


def _steps(settings: Settings) -> Iterator[Problem]:
    for strategy, key in (("logging_strategy", "logging_steps"), ("save_strategy", "save_steps")):
        steps: Any = settings[key]
        if settings[strategy] == "steps" and steps is not None and (steps == 0 or (steps > 1 and steps != int(steps))):
            what = f"{key} must be an integer, or a share of the steps below 1, got {shown(steps)}"
            yield settings.error((key, strategy), what, write(**{key: max(int(steps), 1)}))


def _completions(settings: Settings) -> Iterator[Problem]:
    if settings["log_completions_hub_repo"] is not None and not settings["log_completions"]:
        what = "log_completions_hub_repo is the repository of logged completions, and log_completions is off"
        yield settings.error("log_completions_hub_repo", what, write(log_completions=True))


def _dataset(settings: Settings) -> Iterator[Problem]:
    """What `DatasetArguments` would refuse."""
    return (settings.finding(problem) for problem in contradictions(settings.usable))


def _engines(settings: Settings) -> Iterator[Problem]:
    words = settings["fsdp"] if isinstance(settings["fsdp"], list) else str(settings["fsdp"] or "").split()
    wrong = next((word for word in words if word.lower() not in {*FSDP, "true", "false"}), None)
    if wrong is not None:
        what = f"fsdp must be some of {', '.join(FSDP)}, got {wrong!r}"
        yield settings.error("fsdp", what, write(fsdp=nearest(wrong, FSDP) or FSDP[0]))
    if settings["deepspeed"] and settings["fsdp"]:
        what = "fsdp and deepspeed are both set, and one engine trains a model"
        yield settings.error(("fsdp", "deepspeed"), what, leave_out("fsdp"))


def _length(settings: Settings) -> Iterator[Problem]:
    if settings["max_steps"] == 0:
        what = "max_steps=0 would train for num_train_epochs: TRL reads 0 as not set"
        yield settings.error("max_steps", what, leave_out("max_steps"))


RULES: tuple[tuple[tuple[str, ...], Callable[[Settings], Iterator[Problem]]], ...] = (
    (
        ("num_generations", "generation_batch_size", "per_device_train_batch_size", "steps_per_generation",
         "gradient_accumulation_steps"), _generation_batch,
    ),
    (("num_generations", "num_generations_eval", "per_device_eval_batch_size", "eval_strategy"), _evaluation_batch),
    (PRECISION, _precision),
    (("model_init_kwargs",), _older_name),
    (("bf16", "fp16", "precision", "bnb_4bit_compute_dtype", "load_in_4bit"), _compute_of_4bit),
    ((*PRECISION, "use_peft", "load_in_4bit", "load_in_8bit", "upcast_trainables", "model_init_kwargs", "dtype"),
     _half_trainables),
    (PRECISION, _launch_precision),
    (("load_in_4bit", "load_in_8bit", "use_peft", *FOUR_BIT), _quantisation),
    (("use_peft", *LORA), _lora),
    (("lora_target_modules",), _lora_targets),
    (("per_device_train_batch_size", "loss_type", "train_sampling_strategy"), _kto),
    ((), _entries),
    (("use_vllm", "vllm_mode"), _vllm),
    (("reward_funcs", "reward_weights"), _rewards),
    (("loss_type", "importance_sampling_level"), _losses),
    (("auto_find_batch_size",), _batch_search),
    (("load_best_model_at_end", "save_strategy", "eval_strategy", "lr_scheduler_type"), _evaluations),
    (("dataloader_prefetch_factor", "dataloader_num_workers"), _loader),
    (("logging_steps", "logging_strategy", "save_steps", "save_strategy"), _steps),
    (("log_completions", "log_completions_hub_repo"), _completions),
    ((), _dataset),
    (("deepspeed", "fsdp"), _engines),
    (("max_steps",), _length),
)  # fmt: skip
"""Each rule, with the keys that it needs."""
