"""Every refusal of this package.

A refusal is correct only if stock TRL would crash, would train something other than what was requested, or would
emulate bfloat16 many times more slowly, or if two settings contradict each other. Another run that stock TRL trains
correctly must not be refused.
"""

from .messages import Finding, index


REFUSALS = index(
    Finding(
        "unknown-dtype",
        "{value!r} is not a dtype; expected one of {accepted}.",
        "`{field}={suggestion!r}`",
    ),
    Finding(
        "precision-contradicts-flag",
        "`precision` sets the autocast dtype of the run, and `{flag}` contradicts it.",
        "drop `{flag}`, or drop `precision={precision!r}`",
    ),
    Finding(
        "half-weights-under-other-precision",
        "`precision` loads and computes in {compute}, but these weights are {weights}.",
        "load the weights in {compute}, {load}, or write {switch}",
    ),
    Finding(
        "fused-head-is-not-float32",
        "in this release of TRL, `loss_type='chunked_nll'` multiplies with the head's weight under autocast and never "
        "calls the head, which therefore does not compute in float32.",
        "use `loss_type='nll'`, or remove the head from `fp32_modules`",
    ),
    Finding(
        "ranks-differ",
        "the gradients of all processes are averaged, so that each process must compute the same function.",
        "install the versions of rank 0 and use its recipe and settings on every machine",
    ),
    Finding(
        "two-half-formats",
        "a run can use only one half-precision dtype.",
        "drop one of the two, or write only `precision='bf16'` or `precision='fp16'`",
    ),
    Finding(
        "bf16-is-emulated",
        "{device} has no bfloat16 arithmetic (compute capability 8.0 is required): PyTorch emulates it, which is many "
        "times slower.",
        "use {config}`fp16=True` with `bf16=False`",
    ),
    Finding(
        "flash-attention-needs-half",
        "flash attention kernels support only bfloat16 and float16, but this run computes in float32.",
        "`bf16=True` (or `precision='bf16'`), or `model_init_kwargs={{'attn_implementation': 'sdpa'}}`",
    ),
    Finding(
        "half-trainables-under-loss-scaling",
        "the loss scaler cannot unscale gradients of these dtypes, so the optimizer would fail at the first step.",
        "drop `upcast_trainables=False` (float32 takes {memory} more), or load the parameters in float32",
    ),
    Finding(
        "adapter-dtype-cannot-be-scaled",
        "fp16 training scales the loss, and the loss scaler on {device} cannot unscale bfloat16 gradients, so the "
        "optimizer would fail at the first step.",
        "drop `adapter_dtype='bfloat16'`, or use {switch}",
    ),
    Finding(
        "adapters-not-captured",
        "TRL {version} casts the trainable parameters of a quantised model to bfloat16, and this trainer creates its "
        "adapters in a way that does not allow safe-trainers to keep their original values.",
        "create the adapters first, and pass the model: `model=get_peft_model(model, peft_config)`",
    ),
    Finding(
        "infinite-rewards",
        "TRL compares the rewards of a group with one another; an infinite reward makes every advantage of its group "
        "0 or infinite.",
        "return a finite number from {function}, or None if the function does not apply",
    ),
    Finding(
        "checkpoint-on-another-machine",
        "every process reads the weights and the optimizer's state, and only the main process has written them.",
        "a folder that all machines share as `output_dir`, or copy {folder} of machine 0 to the same place on every "
        "other machine, without removing files there",
    ),
    Finding(
        "another-optimizer",
        "the checkpoint has the state of {saved}, and this run uses {used}.",
        "the `optim` of the first run, or `resume_from_checkpoint=None` with the checkpoint as the model",
    ),
    Finding(
        "rewards-overflow",
        "TRL divides by the standard deviation of a group, whose squares overflow float32 above 1.8e19: every "
        "advantage of the group would be 0 or NaN.",
        "return rewards of a smaller size, such as between -1 and 1",
    ),
    Finding(
        "reward-weights-not-finite",
        "TRL adds the weighted rewards with `nansum`: a reward function with the weight NaN is ignored, and one with "
        "an infinite weight outweighs all others.",
        "`reward_weights=[{fix}]`",
    ),
    Finding(
        "rollout-cannot-be-corrected",
        "importance weights cannot be applied to the samples of `generate`: {reason}.",
        "drop `rollout_correction=True`",
    ),
    Finding(
        "importance-weights-not-finite",
        "importance weights are computed from the sampler's log-probabilities, and one of those was {what}. The loss "
        "would become NaN, and all weights with it after one optimizer step.",
        "{fix}",
    ),
    Finding(
        "loss-scale-out-of-range",
        "the value must be {accepted}.",
        "`{field}={recommended}`",
    ),
    Finding(
        "steps-out-of-range",
        "the value must be {accepted}.",
        "`{field}={recommended}`",
    ),
    Finding(
        "activations-overflow-fp16",
        "the largest float16 is 65,504; this overflows to inf and the loss becomes NaN. The overflow happens in the "
        "forward pass, so a smaller loss scale does not prevent it.",
        "{fix}",
    ),
    Finding(
        "weights-not-finite",
        "its {name} contains inf or NaN; changing the precision cannot fix that.",
        "load weights that are finite; if a cast to float16 made them infinite, load them in their own dtype, "
        "`model_init_kwargs={{'dtype': 'auto'}}`",
    ),
    Finding(
        "rollout-not-finite",
        "the logits that tokens are sampled from contain inf or NaN: an activation of the model overflows float16.",
        "`bf16=True` on a device with bfloat16 arithmetic, or list in `fp32_modules=[...]` the modules that "
        "`print(trainer.precision.overflow)` shows near 65,504",
    ),
    Finding(
        "optimizer-steps-skipped",
        "gradients that contain inf or NaN cannot be applied. The loss scale fell from {began} to {now} over these "
        "steps, and no weight changed.",
        "{fix}",
    ),
    Finding(
        "gradients-not-finite",
        "the norm of their gradients is inf or NaN. Such gradients make every weight NaN.",
        "{fix}",
    ),
    Finding(
        "no-step-taken",
        "all of them were skipped, because the gradients were not finite: no weight has changed.",
        "{fix}",
    ),
    Finding(
        "not-a-list-of-patterns",
        "the value must be a list of module names or patterns, each a string.",
        "{fix}",
    ),
    Finding(
        "two-load-dtypes",
        "`torch_dtype` is the older name of `dtype`, and a model is loaded in one dtype.",
        "`model_init_kwargs={{'dtype': {dtype!r}}}`",
    ),
    Finding(
        "learning-rate-out-of-range",
        "the learning rate must be a finite number of at least 0; safe-trainers computes from it how many updates "
        "would be lost to rounding.",
        "`learning_rate=1e-5`",
    ),
    Finding(
        "no-such-module",
        "no module of {model} has a name that matches{hint}.",
        "{fix}",
    ),
    Finding(
        "not-a-peft-config",
        "`peft_config` must be a `peft.PeftConfig`, got {kind}.",
        "`peft_config=LoraConfig(r=16, target_modules='all-linear')`",
    ),
    Finding(
        "int8-cannot-compute-in-float32",
        "bitsandbytes multiplies 8-bit weights in float16, whatever the dtype of the input.",
        "exclude the module from quantisation: `BitsAndBytesConfig(load_in_8bit=True, "
        "llm_int8_skip_modules=[{name!r}, 'lm_head'])`",
    ),
    Finding(
        "mixed-weights-cannot-meet",
        "the model combines these dtypes in an operation where no cast can be inserted from outside. PyTorch reports: "
        "{error}",
        "{fix}",
    ),
    Finding(
        "media-cannot-compute",
        "a forward and a backward pass with a sample image or sound fail, and no cast can be inserted from outside. "
        "PyTorch reports: {error}",
        "{fix}",
    ),
    Finding(
        "media-cast-to-packed-dtype",
        "the model casts this input to {dtype}, the dtype that the packed weights are stored in; every value between "
        "-1 and 1 becomes 0.",
        "exclude the layer from quantisation: {fix}",
    ),
    Finding(
        "weights-overflow",
        "the largest {target} is {limit}; these weights would become infinite.",
        "load the model in bfloat16 or float32, `model_init_kwargs={{'dtype': 'bfloat16'}}`, with `bf16=True`",
    ),
    Finding(
        "quantised-weights-overflow-fp16",
        "{cause} The largest float16 is 65,504; larger weights become infinite and the loss becomes NaN.",
        "{fix}",
    ),
    Finding(
        "repacked-in-evaluation",
        "bitsandbytes packed them in another order for this CPU's bfloat16 units: no gradient passes through them, "
        "and their scales are rounded to bfloat16.",
        "load the model again, `model = {kind}.from_pretrained(...)`, and evaluate it only after the trainer is built",
    ),
    Finding(
        "dora-on-int8-on-cpu",
        "in each forward pass on a CPU, PEFT replaces the weight by one without scales, so that bitsandbytes fails in "
        "the next forward pass of the layer.",
        "`use_dora=False`, or a 4-bit base, `BitsAndBytesConfig(load_in_4bit=True)`",
    ),
    Finding(
        "quantised-layers-do-not-train",
        "{found}. One layer of each kind was run forward and backward on random inputs.",
        "{fix}",
    ),
    Finding(
        "bitsandbytes-missing",
        "the model is quantised with bitsandbytes, which is {state}.",
        "pip install 'bitsandbytes>={minimum}'",
    ),
    Finding(
        "quantised-head",
        "a packed weight gets no gradient, and the weight of a head that the checkpoint does not contain is never "
        "packed, so that its quantised layer cannot compute.",
        "{fix}",
    ),
    Finding(
        "bnb-compute-dtype-contradicts",
        "the outputs of packed layers are rounded to the dtype of the layers around them anyway, and bfloat16 and "
        "float16 cannot be combined in one operation.",
        "drop `bnb_4bit_compute_dtype`; its default is the compute dtype of the run",
    ),
    Finding(
        "accelerator-disagrees",
        "the accelerator was built with mixed precision {actual!r}: an accelerate config, or "
        "ACCELERATE_MIXED_PRECISION in the environment, overrides the training arguments.",
        "remove `mixed_precision` from the accelerate config, or unset ACCELERATE_MIXED_PRECISION",
    ),
    Finding(
        "launched-with-another-precision",
        "the run computes in {compute} ({reason}) and ignores the launcher's setting, which contradicts it.",
        "drop `mixed_precision` from the accelerate config, or unset ACCELERATE_MIXED_PRECISION; the run's own "
        "settings choose its precision",
    ),
    Finding(
        "deepspeed-scales-the-loss",
        "DeepSpeed scales the loss with its own loss scaler and ignores {fields}.",
        "set `initial_scale_power` and `loss_scale_window` in the `fp16` block of the DeepSpeed config, and drop "
        "{fields}",
    ),
    Finding(
        "deepspeed-casts-every-weight",
        "DeepSpeed casts every weight to {dtype} when it builds its engine, including the weights of these modules.",
        "drop `fp32_modules`, or shard with FSDP2, `fsdp_version: 2`",
    ),
    Finding(
        "fsdp1-flattens-one-dtype",
        "FSDP1 flattens all parameters of a wrapped module into one tensor, and a tensor has one dtype ({examples}).",
        "`fsdp_version: 2`, which keeps parameters separate",
    ),
    Finding(
        "unknown-choice",
        "{value!r} is not one of {accepted}.",
        "`{field}={suggestion!r}`",
    ),
    Finding(
        "no-complete-checkpoint",
        "the folder contains no checkpoint that is marked as complete, only {found}.",
        "{fix}",
    ),
    Finding(
        "checkpoint-of-another-recipe",
        "the checkpoint is of a run with other settings: {changes}. The optimizer and the schedule would go on with "
        "the state of that run.",
        "use the settings of that run, or write `--accept-changes` to resume with the new ones",
    ),
    Finding(
        "checkpoint-of-other-weights",
        "the checkpoint contains {saved}, and this run trains {trained}.",
        "{fix}",
    ),
    Finding(
        "checkpoint-damaged",
        "the checkpoint is damaged: {faults}. Loading it would fail half-way, or continue with an incomplete state.",
        "{fix}",
    ),
    Finding(
        "adapter-does-not-fit",
        "the saved adapter does not match this run: {detail}.",
        "{fix}",
    ),
    Finding(
        "save-dtype-overflows",
        "{name} contains {value}, and the largest float16 is 65,504: it would be saved as infinity.",
        "`save_dtype='bfloat16'`, which has float32's range, or no `save_dtype`, which saves each weight in its own "
        "dtype",
    ),
    Finding(
        "nothing-to-merge",
        "the model has no active adapter.",
        "pass the `PeftModel` itself, `trainer.model`, outside of `disable_adapter()`",
    ),
    Finding(
        "adapter-cannot-be-merged",
        "{why}.",
        "distribute the adapter and its base separately, `model.save_pretrained(...)`",
    ),
    Finding(
        "merged-weights-overflow",
        "{name} contains {value}, and the largest float16 is 65,504: it would become infinite.",
        "`dtype='bfloat16'` or `dtype='float32'`",
    ),
    Finding(
        "output-not-empty",
        "the path exists and is not an empty folder; its content would be overwritten, or mistaken for a part of the "
        "merged model.",
        "pass a folder that is empty or does not exist yet",
    ),
    Finding(
        "output-is-working-folder",
        "the merged model replaces this folder in one step, which would leave this process in a working directory "
        "that no longer exists.",
        "pass a folder below it, `output_dir='merged'`",
    ),
    Finding(
        "nothing-to-compare",
        "no row contains two consecutive tokens that are not padding, so no next-token prediction is left to compare.",
        "pass rows of two tokens or more, or no `inputs` to compare pseudo-random tokens",
    ),
    Finding(
        "merge-not-kept",
        "the saved files do not contain the merged weights: {what}.",
        "distribute the adapter and its base separately, `model.save_pretrained(...)`",
    ),
    Finding(
        "no-routers",
        "`'@routers'` stands for the routers of a mixture of experts, and none was found: {reason}.",
        "drop `'@routers'` from `fp32_modules`",
    ),
    Finding(
        "routes-not-reached",
        "the experts that the sampler chooses cannot be used in scoring and losses: {reason}.",
        "`router_replay='off'`",
    ),
    Finding(
        "decode-cannot-be-compiled",
        "the forward pass of `generate` cannot be compiled: {reason}.",
        "drop `compile_decode=True`",
    ),
    Finding(
        "routes-not-recorded",
        "the experts that were chosen in this rollout are not known, and `router_replay='rollout'` needs them.",
        "`router_replay='off'`",
    ),
    Finding(
        "routes-do-not-fit",
        "`router_replay='rollout'` has the experts of {rows} sequences of {length} tokens, and the model got other "
        "tokens.",
        "`router_replay='off'`",
    ),
    Finding(
        "share-out-of-range",
        "the value must be a fraction from 0 to 1.",
        "`{field}={recommended}`",
    ),
    Finding(
        "continuous-batching-casts-packed-weights",
        "TRL casts the model for each rollout, including these packed bytes, which do not represent floating-point "
        "numbers: the sampled tokens would be meaningless.",
        "`bnb_4bit_quant_storage='uint8'`, or `use_transformers_continuous_batching=False`",
    ),
    Finding(
        "vllm-refuses-fp16",
        "activations of {kind} models overflow float16, and vLLM refuses to build them in it.",
        "`precision='bf16'` (or `bf16=True`), or `use_vllm=False`",
    ),
    Finding(
        "vllm-server-computes-otherwise",
        "the trainer computes in {dtype}: sampler and trainer would assign different probabilities to each token.",
        "start the server with `--dtype {dtype}`",
    ),
    Finding(
        "vllm-serves-another-model",
        "its config has {name}={theirs!r}, and the trainer's model has {ours!r}, so it cannot load the trainer's "
        "weights.",
        "start the server with the trainer's model, {own!r}",
    ),
    Finding(
        "truncated-sampling-with-correction",
        "vLLM returns log-probabilities over the tokens that these settings keep, but TRL compares them with "
        "log-probabilities over the whole vocabulary. The importance weight of a completion, and its gradient, "
        "therefore shrink with every token.",
        "drop {drop}, or write `vllm_importance_sampling_correction=False`",
    ),
    Finding(
        "truncation-cannot-be-corrected",
        "the trainer's log-probabilities over the tokens that vLLM keeps cannot be computed: {reason}.",
        "`vllm_importance_sampling_correction=False`, or sampling without truncation",
    ),
    Finding(
        "vllm-computed-another-prompt",
        "vLLM sampled from a different prompt than the trainer scores: {difference}.{cause}",
        "`use_vllm=False`: the model's own `generate` uses the trainer's token ids",
    ),
    Finding(
        "vllm-prepares-prompts-otherwise",
        "this release of vLLM replaces image tokens in a way that is not known here: {method} has another signature.",
        "install the vLLM release that this TRL release supports last, or `use_vllm=False`",
    ),
    Finding(
        "vllm-quantises-its-cache",
        "its attention reads rounded keys and values: with fp8, the mismatch is 6 times that of bfloat16.",
        "start the server with `--kv-cache-dtype auto`",
    ),
    Finding(
        "vllm-keeps-image-features",
        "this vLLM caches the features of images, computed with older weights, and cannot clear them.",
        "install vLLM 0.22 or newer, start a server with `VLLM_SERVER_DEV_MODE=1`, or freeze the tower",
    ),
    Finding(
        "vllm-ignores-the-adapter",
        "vLLM has no layer of this name that applies an adapter, so it would sample without {count} of the adapters.",
        "`adapter_sync='merged'`",
    ),
    Finding(
        "vllm-finds-no-place",
        "vLLM found the image tokens of {found} of {count} in it{where}.",
        "`use_vllm=False`: the model's own `generate` uses the trainer's token ids and features",
    ),
    Finding(
        "fsdp-sends-packed-weights",
        "TRL itself gathers and merges the layers that FSDP shards: vLLM would receive packed bytes, and each sync "
        "would quantise the base again.",
        "`use_vllm=False`, or a base that is not quantised",
    ),
    Finding(
        "vllm-holds-packed-weights",
        "the weight sync sends base and adapter as one dense tensor, which cannot be loaded into packed weights.",
        "{fix}",
    ),
)
"""Every refusal that a trainer or a config of this package can make, by id."""
