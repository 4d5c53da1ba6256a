"""Every refusal and every warning of this package, in two lists.

A refusal is right only where stock TRL would crash, or would train something else than what was asked for; whatever
stock trains correctly must train. `REFUSALS` is the whole list, so that it can be read, tested and bounded.
"""

from .finding import Finding, index
from .finding_warnings import WARNINGS


__all__ = ["REFUSALS", "WARNINGS", "Finding"]

REFUSALS = index(
    Finding(
        "unknown-dtype",
        "{value!r} names no dtype; accepted are {accepted}.",
        "{field}={suggestion!r}",
    ),
    Finding(
        "precision-contradicts-flag",
        "`precision` decides about autocast by itself, and `{flag}` says something else.",
        "drop `{flag}`, or drop `precision={precision!r}`",
    ),
    Finding(
        "half-weights-under-other-precision",
        "`precision` names the dtype that the run loads and computes in, {compute}, and these weights hold {weights}.",
        "load the weights in {compute}, {load}, or write {switch}",
    ),
    Finding(
        "fused-head-is-not-float32",
        "`loss_type='chunked_nll'` of this TRL multiplies with the head's weight, past the head and under autocast.",
        "`loss_type='nll'`, or leave the head out of `fp32_modules`",
    ),
    Finding(
        "two-half-formats",
        "a run computes in one of them.",
        "drop one of the two, or write `precision='bf16'` or `precision='fp16'` alone",
    ),
    Finding(
        "bf16-is-emulated",
        "{device} has no bfloat16 arithmetic (it needs compute capability 8.0): torch emulates it, many times slower.",
        "use {config}`fp16=True` with `bf16=False`",
    ),
    Finding(
        "flash-attention-needs-half",
        "flash attention kernels exist for bfloat16 and float16 only, and this run computes in float32.",
        "`bf16=True` (or `precision='bf16'`), or `model_init_kwargs={{'attn_implementation': 'sdpa'}}`",
    ),
    Finding(
        "half-trainables-under-loss-scaling",
        "the loss scaler cannot unscale gradients of these dtypes: the optimizer would fail at the first step.",
        "drop `upcast_trainables=False` (float32 takes {memory} more), or load them in float32",
    ),
    Finding(
        "adapter-dtype-cannot-be-scaled",
        "fp16 scales the loss, and the scaler of {device} cannot unscale bfloat16 gradients: the optimizer would fail "
        "at the first step.",
        "drop `adapter_dtype='bfloat16'`, or use {switch}",
    ),
    Finding(
        "adapters-not-captured",
        "TRL {version} rounds the trainables of a quantised model to bfloat16, and these were made in a way in which "
        "their bits could not be kept: the trainer made them out of sight.",
        "make them before, and pass the model: `model=get_peft_model(model, peft_config)`",
    ),
    Finding(
        "infinite-rewards",
        "TRL compares rewards within their group: with an infinite one all advantages of the group are 0 or infinite.",
        "let {function} return a finite number, or None where it does not apply",
    ),
    Finding(
        "reward-weights-not-finite",
        "TRL adds up the rewards times their weights and leaves out what is no number: with NaN a function counts for "
        "nothing, and with infinity for everything.",
        "`reward_weights=[{fix}]`",
    ),
    Finding(
        "importance-weights-not-finite",
        "they are made from the sampler's log-probabilities, of which one was {what}: the loss would be no number, "
        "and after one step no weight.",
        "{fix}",
    ),
    Finding(
        "loss-scale-out-of-range",
        "it has to be {accepted}.",
        "{field}={usual}",
    ),
    Finding(
        "steps-out-of-range",
        "it has to be {accepted}.",
        "{field}={usual}",
    ),
    Finding(
        "activations-overflow-fp16",
        "float16 ends at 65,504: what is computed from it is no number. It happens in the forward pass, where no loss "
        "scale helps.",
        "{fix}",
    ),
    Finding(
        "weights-not-finite",
        "its {name} holds numbers that are not finite: no precision mends that.",
        "load weights that are finite; where they were cast to float16, in their own dtype, "
        "`model_init_kwargs={{'dtype': 'auto'}}`",
    ),
    Finding(
        "rollout-not-finite",
        "the logits that tokens are sampled from are not finite: something in the model overflows float16.",
        "`bf16=True` on a device that computes it, or in `fp32_modules=[...]` the modules that "
        "`print(trainer.overflow_report)` shows near 65,504",
    ),
    Finding(
        "optimizer-steps-skipped",
        "gradients that are not finite cannot be applied: the loss scale fell from {began} to {now} meanwhile, and no "
        "weight has changed.",
        "{fix}",
    ),
    Finding(
        "not-a-list-of-patterns",
        "it is a list of names of modules, each a text.",
        "{fix}",
    ),
    Finding(
        "learning-rate-out-of-range",
        "how an update rounds follows from it, so it has to be a finite number, not below 0.",
        "learning_rate=1e-5",
    ),
    Finding(
        "no-such-module",
        "no module of {model} has a name that matches{hint}.",
        "{fix}",
    ),
    Finding(
        "not-a-peft-config",
        "adapters are made from a `peft.PeftConfig`, and this is a {kind}.",
        "`peft_config=LoraConfig(r=16, target_modules='all-linear')`",
    ),
    Finding(
        "int8-cannot-compute-in-float32",
        "bitsandbytes multiplies 8-bit weights in float16, whatever comes in.",
        "keep the module out of the quantisation: `BitsAndBytesConfig(load_in_8bit=True, "
        "llm_int8_skip_modules=[{name!r}, 'lm_head'])`",
    ),
    Finding(
        "mixed-weights-cannot-meet",
        "the model multiplies or merges the two without a cast that could be placed from outside; torch says: {error}",
        "{fix}",
    ),
    Finding(
        "media-cast-to-packed-dtype",
        "the model casts it to the dtype that the packed weights are stored in, {dtype}, and nothing is left of "
        "values between -1 and 1.",
        "keep the layer out of the quantisation: `BitsAndBytesConfig({load}=True, "
        "llm_int8_skip_modules=[{name!r}, 'lm_head'])`",
    ),
    Finding(
        "weights-overflow",
        "the largest number of {target} is {limit}: they would become infinite.",
        "load the model in bfloat16 or float32, `model_init_kwargs={{'dtype': 'bfloat16'}}`, with `bf16=True`",
    ),
    Finding(
        "quantised-weights-overflow-fp16",
        "float16 ends at 65504: {what} become infinite, and the loss is no number.",
        "{fix}",
    ),
    Finding(
        "unknown-quantizer",
        "what layers of {method} compute in, and what they need beside them, is not known here; known are the 4-bit "
        "and 8-bit layers of bitsandbytes, and models that were dequantised while they were loaded.",
        "{fix}",
    ),
    Finding(
        "bitsandbytes-missing",
        "it is quantised by bitsandbytes, which is {state}.",
        "pip install 'bitsandbytes>={minimum}'",
    ),
    Finding(
        "quantised-head",
        "a packed weight gets no gradient, and a head that the checkpoint lacks is never packed: its layer cannot "
        "compute.",
        "{fix}",
    ),
    Finding(
        "bnb-compute-dtype-contradicts",
        "what the packed layers compute is rounded to the dtype around them anyway, and two half formats do not mix.",
        "drop `bnb_4bit_compute_dtype`: it follows the compute dtype of the run",
    ),
    Finding(
        "accelerator-disagrees",
        "the accelerator that was built runs mixed precision {actual!r}; an accelerate config, or "
        "ACCELERATE_MIXED_PRECISION in the environment, overrides the training arguments.",
        "remove `mixed_precision` from the accelerate config, or unset ACCELERATE_MIXED_PRECISION",
    ),
    Finding(
        "launched-with-another-precision",
        "the run computes in {compute} ({asked}), whatever the launcher says: one of the two was not meant.",
        "drop `mixed_precision` from the accelerate config, or ask for it in the run: `precision={said!r}`",
    ),
    Finding(
        "deepspeed-scales-the-loss",
        "DeepSpeed scales the loss by itself, and nothing would read {fields}.",
        "in the `fp16` block of the DeepSpeed config `initial_scale_power`, `loss_scale_window`; drop {fields}",
    ),
    Finding(
        "deepspeed-casts-every-weight",
        "DeepSpeed casts every weight to {dtype} when its engine is built, those of these modules with them.",
        "drop `fp32_modules`, or shard with FSDP2, `fsdp_version: 2`",
    ),
    Finding(
        "fsdp1-flattens-one-dtype",
        "FSDP1 makes one tensor of all weights of such a unit, and a tensor has one dtype ({examples}).",
        "`fsdp_version: 2`, which keeps each weight by itself",
    ),
    Finding(
        "unknown-choice",
        "{value!r} is not one of {accepted}.",
        "{field}={suggestion!r}",
    ),
    Finding(
        "no-complete-checkpoint",
        "it holds no checkpoint that is marked as complete: {found}.",
        "{fix}",
    ),
    Finding(
        "checkpoint-damaged",
        "the checkpoint is not whole: {faults}. Loading it would stop half-way, or go on with what is left.",
        "{fix}",
    ),
    Finding(
        "adapter-does-not-fit",
        "the saved adapter is not this run's: {detail}.",
        "the `peft_config` and the model that it was trained with, or another `output_dir` for a new run",
    ),
    Finding(
        "save-dtype-overflows",
        "{name} holds {value}, and float16 ends at 65,504: it would be saved as infinity.",
        "`save_dtype='bfloat16'`, which has float32's range, or none: weights are then saved as they are held",
    ),
    Finding(
        "nothing-to-merge",
        "no adapter is active in it.",
        "pass the `PeftModel` itself, `trainer.model`, outside of `disable_adapter()`",
    ),
    Finding(
        "adapter-cannot-be-merged",
        "{why}.",
        "ship the adapter beside its base, `model.save_pretrained(...)`",
    ),
    Finding(
        "merged-weights-overflow",
        "{name} holds {value}, and float16 ends at 65,504: it would be infinite.",
        "`dtype='bfloat16'` or `dtype='float32'`",
    ),
    Finding(
        "output-not-empty",
        "there is something in it, which would be overwritten, or mistaken for a part of the merged model.",
        "a folder that is empty, or not there yet",
    ),
    Finding(
        "output-is-working-folder",
        "the merged model takes the place of this folder in one step, and this process would stay in the one that is "
        "gone.",
        "a folder below it, `output_dir='merged'`",
    ),
    Finding(
        "nothing-to-compare",
        "no token in them that is no padding follows another one: there is no prediction to compare.",
        "inputs with rows of two tokens or more, or none for pseudo-random ones",
    ),
    Finding(
        "merge-not-kept",
        "what stands in the files is not what was merged: {what}.",
        "ship the adapter beside its base, `model.save_pretrained(...)`",
    ),
    Finding(
        "share-out-of-range",
        "it has to be a share, from 0 to 1.",
        "{field}={usual}",
    ),
    Finding(
        "continuous-batching-casts-packed-weights",
        "TRL casts the model for each rollout, these packed bytes with it as if they were numbers: what is sampled "
        "would be garbage.",
        "`bnb_4bit_quant_storage='uint8'`, or `use_transformers_continuous_batching=False`",
    ),
    Finding(
        "vllm-refuses-fp16",
        "numbers in a {kind} model overflow float16, and vLLM does not build it.",
        "`precision='bf16'` (or `bf16=True`), or `use_vllm=False`",
    ),
    Finding(
        "vllm-server-computes-otherwise",
        "the trainer computes in {dtype}: sampler and trainer would give each token another probability.",
        "start the server with `--dtype {dtype}`",
    ),
    Finding(
        "fsdp-sends-packed-weights",
        "TRL gathers and merges the layers that FSDP shards in a way of its own: vLLM would get packed bytes, and "
        "each sync would pack the base anew.",
        "`use_vllm=False`, or a base that is not quantised",
    ),
    Finding(
        "vllm-holds-packed-weights",
        "what is sent to it is base and adapter in one dense tensor, which packed weights cannot take.",
        "{fix}",
    ),
)
"""Every refusal that a trainer or a config of this package can make, by id."""
