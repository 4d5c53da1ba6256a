"""Every warning of this package: what is supported, and probably not what was meant."""

from .finding import Finding, index


WARNINGS = index(
    Finding(
        "activations-near-overflow",
        "float16 ends at 65,504: what grows by a factor of two in training is infinite.",
        "{fix}",
    ),
    Finding(
        "overflow-without-effect",
        "float16 ends at 65,504. What was computed is finite all the same; the model clamps or masks it. Gradients "
        "through it may not be.",
        "{fix}",
    ),
    Finding(
        "fp16-on-cpu",
        "accelerate has neither autocast nor a loss scaler for fp16 on this device and says nothing: the run computes "
        "in the weights' own dtype, {weights}.",
        "{fix}",
    ),
    Finding(
        "half-weights-under-other-autocast",
        "autocast rounds {weights} weights to {compute} in most operations and leaves them alone in others: the run "
        "has the range of float16 and the digits of bfloat16.",
        "load the weights in the compute dtype, {load}, or {switch} instead",
    ),
    Finding(
        "half-trainables",
        "{count} of {total} trainable elements are {dtypes}: at learning_rate={rate} {share} of their first updates "
        "round to nothing, and the optimizer's averages are kept in {dtypes} too.",
        "{fix}",
    ),
    Finding(
        "adapter-of-another-base",
        "the adapter says that it was trained on {trained!r}, and it sits on {base!r}: on other weights it is another "
        "model, and nothing would show it.",
        "pass the adapter's own base, `AutoModelForCausalLM.from_pretrained({trained!r})`",
    ),
    Finding(
        "int8-computes-in-fp16",
        "whatever the run computes in, bitsandbytes rounds what enters an 8-bit layer to float16{where}, and on CUDA "
        "what comes out of it too: a result beyond 65504 is infinite.",
        "`load_in_4bit=True`, whose layers compute in the dtype of the run, or `fp16=True`",
    ),
    Finding(
        "rollout-not-aligned",
        "`rollout_compute='stock'` leaves generation as upstream has it: part of the model may compute in another "
        "dtype in the rollout than in training.",
        "drop `rollout_compute='stock'`",
    ),
    Finding(
        "window-not-resumed",
        "the rollouts that the checkpoint buffered do not fit this run: {changes}. They are generated anew, as TRL "
        "does, and the run goes on differently from one that was never stopped.",
        "keep these settings to resume exactly",
    ),
    Finding(
        "state-not-saved",
        "a checkpoint holds tensors, numbers, texts, lists and mappings only, so that loading it runs no code. "
        "Without it, a run that is resumed here goes on differently from one that was never stopped.",
        "{fix}",
    ),
    Finding(
        "merge-loses-the-adapter",
        "of what the adapters change, {share} rounds to nothing in {dtype}, whose steps are wider than the changes: "
        "what is left is another adapter.",
        "`dtype='float32'`, or ship the adapter beside its base, `model.save_pretrained(...)`",
    ),
    Finding(
        "adapter-dropout-in-rollouts",
        "TRL scores completions in training mode: each log-probability has the noise of a dropout of its own, so that "
        "the ratio of new to old policy is not 1 even where nothing was trained{where}.",
        "`disable_dropout=True`, or `LoraConfig(lora_dropout=0.0)`",
    ),
    Finding(
        "sync-loses-the-adapter",
        "of the weights that the adapters change, {share} are the base's again in {dtype}, whose steps are wider than "
        "the changes, in each of the last {syncs} syncs: the sampler runs almost the model that training began with.",
        "{fix}",
    ),
    Finding(
        "sampler-ties-weights",
        "vLLM has one weight for embeddings and head, as `tie_word_embeddings` says, and the adapters change {names}: "
        "it samples from another model than is trained.",
        "leave embeddings and head out of `target_modules` and `modules_to_save`, or untie them before",
    ),
    Finding(
        "sampler-without-fp32-modules",
        "vLLM knows nothing of them and computes in {dtype} throughout, where they may overflow.",
        "generate with the model's own `generate`, `use_vllm=False`",
    ),
    Finding(
        "vllm-server-not-asked",
        "this release of TRL has no way to ask a server what it computes in.",
        "start it with `--dtype {dtype}`, as the trainer computes",
    ),
    Finding(
        "cascade-attention-off",
        "before vLLM {mended} it computes shared prompts wrongly on this GPU (vLLM issue 22103), so it is switched "
        "off here, which takes some speed.",
        "pip install 'vllm>={mended}'",
    ),
    Finding(
        "fsdp-merges-in-place",
        "TRL merges them into the sharded base for each sync and takes them out again, which does not give the old "
        "weights back: in half precision the base drifts, and what a sync loses is not measured.",
        "a base in float32, `model_init_kwargs={{'dtype': 'float32'}}`, or `use_vllm=False`",
    ),
    Finding(
        "rotary-frequencies-in-half",
        "a cast of the whole model took them along: the later a token, the farther from its place it is computed, and "
        "vLLM, a reference model and whoever loads what is saved have them in float32.",
        "`from_pretrained(..., dtype='{dtype}')`, which casts weights alone, in place of `model.to(...)`",
    ),
    Finding(
        "reference-in-another-dtype",
        "it was loaded by itself, holds {held} where the policy holds {wanted}, and is sharded already: the KL "
        "divergence is not 0 even where nothing was trained.",
        "`model_init_kwargs={{'dtype': {wanted!r}}}`, and pass the model by name",
    ),
    Finding(
        "plan-not-kept",
        "an engine, a callback or other code changed it after the trainer was built.",
        "the run's own precision in the config of the engine (accelerate, FSDP, DeepSpeed), or none there at all",
    ),
)
"""Every warning of this package, by id; each is given once per trainer."""
