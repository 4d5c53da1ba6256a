"""Keys that recipes on the web still hold and no parser takes any more, each with its successor.

A key counts as outdated only where the installed TRL does not have it: `warmup_ratio` is a field of transformers 4.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .schema import shown


@dataclass(frozen=True)
class Successor:
    """What has taken the place of a key.

    Attributes:
        key: The key to write instead; `None` where there is none.
        value: The value to write, where it is not the old one.
        why: What became of the old key, and what to do where no other key does the same.
    """

    key: str | None = None
    value: str | None = None
    why: str = ""


DROP = "it has no effect any more"
BNB = "TRL quantises with bitsandbytes' keys alone"
LAUNCH = "it is the launcher's to know"
COLUMN = "columns are renamed all at once"
VISION = "only what the adapters are in is trained"

RENAMED: Mapping[str, Successor] = {
    # TRL: GRPO and RLOO
    "max_prompt_length": Successor(
        why="prompts are not cut any more. Leave long ones out of the dataset, and count the rest into "
        "vllm_max_model_length"
    ),
    "vllm_device": Successor("vllm_mode", "colocate", "vLLM shares the training's GPUs, or runs in a server"),
    "vllm_dtype": Successor(why="vLLM is built in the compute dtype of the run: `precision` decides it"),
    "vllm_max_model_len": Successor("vllm_max_model_length"),
    "vllm_gpu_memory": Successor("vllm_gpu_memory_utilization"),
    "vllm_guided_decoding_regex": Successor("vllm_structured_outputs_regex"),
    "vllm_enable_prefix_caching": Successor(why=DROP),
    "use_transformers_paged": Successor("use_transformers_continuous_batching"),
    "vllm_importance_sampling_cap": Successor("vllm_importance_sampling_clip_max"),
    "use_liger_loss": Successor("use_liger_kernel"),
    "use_liger": Successor("use_liger_kernel"),
    "wandb_log_unique_prompts": Successor("log_unique_prompts"),
    "max_new_tokens": Successor("max_completion_length"),
    "response_length": Successor("max_completion_length"),
    "rloo_k": Successor("num_generations"),
    "kl_coef": Successor("beta"),
    "cliprange": Successor("epsilon"),
    "num_ppo_epochs": Successor("num_iterations"),
    "normalize_advantage": Successor("normalize_advantages"),
    "reward_model_path": Successor("reward_model_name_or_path"),
    "sft_model_path": Successor("model_name_or_path"),
    "total_episodes": Successor("max_steps", "STEPS", "a run is measured in optimizer steps"),
    "exp_name": Successor("run_name"),
    # TRL: SFT and reward
    "max_seq_length": Successor("max_length"),
    "max_seq_len": Successor("max_length"),
    "dataset_batch_size": Successor(why=DROP),
    "num_of_sequences": Successor(why=DROP),
    "chars_per_token": Successor(why=DROP),
    "use_assistant_only_loss": Successor("assistant_only_loss"),
    # TRL: models and adapters
    "torch_dtype": Successor("dtype"),
    "model_name": Successor("model_name_or_path"),
    "model_code_revision": Successor("model_revision"),
    "use_flash_attention_2": Successor("attn_implementation", "flash_attention_2"),
    "use_flash_attn": Successor("attn_implementation", "flash_attention_2"),
    "lora_rank": Successor("lora_r"),
    "lora_target": Successor("lora_target_modules"),
    "bnb_4bit_use_double_quant": Successor("use_bnb_nested_quant"),
    "use_double_quant": Successor("use_bnb_nested_quant"),
    "freeze_vision_modules": Successor(
        "lora_target_modules", "[q_proj, v_proj]", f"{VISION}: with use_peft, name the modules of the language model"
    ),
    "freeze_vision_tower": Successor("lora_target_modules", "[q_proj, v_proj]", f"{VISION}: see use_peft"),
    # Recipes of other projects, for the same trainers
    "max_pixels": Successor("image_max_pixels"),
    "min_pixels": Successor("image_min_pixels"),
    "max_anyres_num": Successor("image_max_pixels", "PIXELS"),
    "chat_template": Successor(
        "chat_template_path",
        "FILE",
        "a template is read from a file or a model by sft and reward, and belongs into "
        "the tokenizer for grpo and rloo",
    ),
    "dataset_prompt_column": Successor("dataset_columns", "{{prompt: {value}}}", COLUMN),
    "dataset_mixer": Successor("datasets", "[{{path: NAME}}]", "a mixture is a list"),
    "dataset_mixture": Successor("datasets", "[{{path: NAME}}]", "a mixture is a list"),
    "preprocessing_num_workers": Successor("dataset_num_proc"),
    "hub_model_revision": Successor("hub_revision"),
    "wandb_project": Successor("env", "{{WANDB_PROJECT: {value}}}", "trackers read their own variables"),
    "wandb_entity": Successor("env", "{{WANDB_ENTITY: {value}}}", "trackers read their own variables"),
    "num_processes": Successor(why=f"{LAUNCH}. Run: --accelerate_config NAME"),
    "accelerate_config": Successor(why=f"{LAUNCH}. Run: --accelerate_config {{value}}"),
    "mixed_precision": Successor("precision"),
    # transformers
    "evaluation_strategy": Successor("eval_strategy"),
    "tokenizer": Successor(why="the tokenizer is that of model_name_or_path"),
    "tokenizer_name": Successor(why="the tokenizer is that of model_name_or_path"),
    "warmup_ratio": Successor("warmup_steps", None, "a number below 1 is a share of the steps"),
    "no_cuda": Successor("use_cpu"),
    "use_mps_device": Successor(why="MPS is used where it is there"),
    "overwrite_output_dir": Successor(why="a run writes into output_dir; resume_from_checkpoint alone resumes"),
    "logging_dir": Successor(why="what a run writes is below output_dir. Or: export TENSORBOARD_LOGGING_DIR={value}"),
    "group_by_length": Successor("train_sampling_strategy", "group_by_length"),
    "per_gpu_train_batch_size": Successor("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Successor("per_device_eval_batch_size"),
    "batch_size": Successor("per_device_train_batch_size"),
    "micro_batch_size": Successor("per_device_train_batch_size"),
    "lr": Successor("learning_rate"),
    "epochs": Successor("num_train_epochs"),
    "num_epochs": Successor("num_train_epochs"),
    "lr_scheduler": Successor("lr_scheduler_type"),
    "warmup": Successor("warmup_steps"),
    "gradient_clipping": Successor("max_grad_norm"),
    "adafactor": Successor("optim", "adafactor"),
    "fp16_backend": Successor(why="fp16 has one backend, torch's"),
    "half_precision_backend": Successor(why="fp16 has one backend, torch's"),
    "fp16_opt_level": Successor(why="fp16 has one backend, torch's"),
    "fp16_full_train": Successor("fp16"),
    "fsdp_min_num_params": Successor("fsdp_config", "{{min_num_params: {value}}}"),
    "fsdp_transformer_layer_cls_to_wrap": Successor("fsdp_config", "{{transformer_layer_cls_to_wrap: [{value}]}}"),
    "include_inputs_for_metrics": Successor("include_for_metrics", "[inputs]"),
    "include_tokens_per_second": Successor("include_num_input_tokens_seen", "all"),
    "jit_mode_eval": Successor(why=DROP),
    "past_index": Successor(why=DROP),
    "mp_parameters": Successor(why=DROP),
    "ray_scope": Successor(why=DROP),
    "use_legacy_prediction_loop": Successor(why=DROP),
    "use_ipex": Successor(why=DROP),
    "save_safetensors": Successor(why="weights are always saved as safetensors"),
    "torchdynamo": Successor("torch_compile_backend"),
    "tpu_num_cores": Successor(why=DROP),
    "tpu_metrics_debug": Successor("debug", "tpu_metrics_debug"),
    "push_to_hub_model_id": Successor("hub_model_id"),
    "push_to_hub_organization": Successor("hub_model_id", "{value}/NAME"),
    "push_to_hub_token": Successor(why="a secret does not belong into a recipe. Run: huggingface-cli login"),
    "use_auth_token": Successor(why="a secret does not belong into a recipe. Run: huggingface-cli login"),
}
"""The outdated keys."""


def successor(key: str, value: Any, known: Collection[str]) -> tuple[str, str] | None:
    """What to write in the place of an outdated key.

    Args:
        key: The key.
        value: Its value.
        known: The keys of the task.

    Returns:
        What became of the key, and the line to write; `None` where the key is not known to be outdated.
    """
    found = RENAMED.get(key)
    if found is None or (found.key is not None and found.key != "env" and found.key not in known):
        if found is None:
            return None
        why = f": {found.why}" if found.why else ""
        return f"{key} is no key any more, and this task has none in its place{why}", f"drop `{key}`"
    plain = shown(value).strip("'") if not isinstance(value, (dict, list)) else "..."
    why = found.why.replace("{value}", plain)
    if found.key is None:
        return f"{key} is no key any more: {why}", f"drop `{key}`"
    new = plain if found.value is None else found.value.format(value=plain) if "{" in found.value else found.value
    text = f"{key} is no key any more; its successor is {found.key}" + (f": {why}" if why else "")
    return text, f"{found.key}: {new}"
