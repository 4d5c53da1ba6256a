"""The form of refusals and warnings, and every warning of this package. `refusals.py` lists the refusals."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """An entry of `REFUSALS` or `WARNINGS`: why an input fails, and what to write instead.

    Attributes:
        id: Slug that stays the same in every release.
        why: Template of the explanation, a `str.format` string.
        fix: Template of the text to write instead, a `str.format` string.
    """

    id: str
    why: str
    fix: str


def index(*findings: Finding) -> dict[str, Finding]:
    """Returns the findings by their id."""
    return {finding.id: finding for finding in findings}


WARNINGS = index(
    Finding(
        "activations-near-overflow",
        "the largest float16 is 65,504; activations that double during training become infinite.",
        "{fix}",
    ),
    Finding(
        "overflow-without-effect",
        "the largest float16 is 65,504. The output of the model is still finite, because the model clamps or "
        "masks these values, but their gradients may not be.",
        "{fix}",
    ),
    Finding(
        "gradients-overflow-fp16",
        "the largest float16 is 65,504, and gradients exceed it in the backward pass although the loss is finite. The "
        "loss scale falls until they fit; below 1 it makes smaller gradients zero.",
        "{fix}",
    ),
    Finding(
        "gradients-underflow-fp16",
        "float16 rounds numbers below 3e-8 to zero. Weights before this module get no gradient from these elements.",
        "{fix}",
    ),
    Finding(
        "decode-not-compiled",
        "transformers does not compile `generate` for this model, its quantisation, or the device ({device}), and a "
        "static cache is slower without compilation.",
        "drop `compile_decode=True`",
    ),
    Finding(
        "fp16-on-cpu",
        "accelerate has neither autocast nor a loss scaler for fp16 on this device, and does not report it: the run "
        "computes in the dtype of its weights, {weights}.",
        "{fix}",
    ),
    Finding(
        "half-weights-under-other-autocast",
        "autocast casts {weights} weights to {compute} in most operations but not in all, so the run has the range of "
        "float16 and the precision of bfloat16.",
        "load the weights in the compute dtype, {load}, or use {switch} instead",
    ),
    Finding(
        "half-trainables",
        "{count} of {total} trainable elements are {dtypes}: at learning_rate={rate}, {share} of their first updates "
        "round to zero, and the optimizer state is stored in {dtypes} too.",
        "{fix}",
    ),
    Finding(
        "adapter-of-another-base",
        "its config names the base {trained!r}, but it is loaded on {base!r}. On other weights the adapter computes "
        "something else, and no error reports it.",
        "load the adapter on its own base, `AutoModelForCausalLM.from_pretrained({trained!r})`",
    ),
    Finding(
        "int8-computes-in-fp16",
        "bitsandbytes casts the inputs of 8-bit layers to float16{where}, whatever the compute dtype of the run, and "
        "on CUDA their outputs too; results above 65,504 become infinite.",
        "`load_in_4bit=True`, whose layers compute in the dtype of the run, or `fp16=True`",
    ),
    Finding(
        "not-recorded",
        "{why}. The run continues, and is not recorded.",
        "drop `record_steps`, or train with one process for each device and free space in `output_dir`",
    ),
    Finding(
        "step-not-reached",
        "the run ends after step {steps}, and records no step.",
        "`record_steps=[1]`, or train longer",
    ),
    Finding(
        "rollout-not-aligned",
        "`rollout_compute='stock'` leaves generation to TRL: parts of the model may compute in another dtype during "
        "rollouts than during training.",
        "drop `rollout_compute='stock'`",
    ),
    Finding(
        "window-not-resumed",
        "the rollouts buffered in the checkpoint do not match this run: {changes}. They are generated again, as TRL "
        "does, so the resumed run differs from an uninterrupted one.",
        "keep these settings to resume exactly",
    ),
    Finding(
        "state-not-saved",
        "a checkpoint stores only tensors, numbers, strings, lists and mappings, so that loading it runs no code. A "
        "run that resumes without this state differs from an uninterrupted one.",
        "{fix}",
    ),
    Finding(
        "merge-loses-the-adapter",
        "{share} of the adapters' changes round to zero in {dtype}, because adjacent values of this dtype are farther "
        "apart than the changes. The merged model does not contain the adapter that was trained.",
        "`dtype='float32'`, or distribute the adapter and its base separately, `model.save_pretrained(...)`",
    ),
    Finding(
        "adapter-dropout-in-rollouts",
        "TRL scores completions in training mode: dropout adds noise to each log-probability, so the ratio of new to "
        "old policy is not 1 even before the first update{where}.",
        "`disable_dropout=True`, or `LoraConfig(lora_dropout=0.0)`",
    ),
    Finding(
        "sync-loses-the-adapter",
        "in each of the last {syncs} syncs, {share} of the weights that the adapters change were equal to the base's "
        "in {dtype}, because adjacent values of this dtype are farther apart than the changes. The sampler computes "
        "almost the same as the model did before training.",
        "{fix}",
    ),
    Finding(
        "sampler-ties-weights",
        "vLLM uses one weight for embeddings and head, as `tie_word_embeddings` requests, but the adapters change "
        "{names}: vLLM samples from a different model than the trainer trains.",
        "leave embeddings and head out of `target_modules` and `modules_to_save`, or untie them first",
    ),
    Finding(
        "sampler-without-fp32-modules",
        "vLLM does not support `fp32_modules` and computes in {dtype} throughout; these modules may overflow there.",
        "generate with the model's own `generate`, `use_vllm=False`",
    ),
    Finding(
        "checkpoint-not-finite",
        "some trained weights are inf or NaN, so this checkpoint does not count as complete, and "
        "`resume_from_checkpoint=True` takes an older one.",
        "stop the run and resume from the last complete checkpoint",
    ),
    Finding(
        "torch-dtype-renamed",
        "TRL reads `dtype` and would load the model in float32; the value is used as `dtype`.",
        "`model_init_kwargs={{'dtype': {dtype!r}}}`",
    ),
    Finding(
        "logps-not-finite",
        "the policy or the reference model returned inf or NaN for some tokens. TRL replaces advantages that are not "
        "finite by 0, so that these completions train nothing.",
        "look for inf or NaN in the weights of the reference model and in the inputs",
    ),
    Finding(
        "weights-not-finite",
        "they are inf or NaN, so the model cannot be used. Weights that no step of the run has used, such as unused "
        "rows of embeddings, may have been so from the start.",
        "resume from the last complete checkpoint, or look for inf or NaN in the initial weights",
    ),
    Finding(
        "resumes-weights-not-finite",
        "some trained weights of this checkpoint are inf or NaN, so every step will be skipped.",
        "resume from an older checkpoint",
    ),
    Finding(
        "trained-weights-not-in-adapter",
        "PEFT does not write them to its files: a saved adapter lacks what they learn. Checkpoints have them, so that "
        "a resumed run is exact.",
        "`modules_to_save={modules}` in the `peft_config`, or save the trained model with `merge_and_save`",
    ),
    Finding(
        "trained-weights-not-saved",
        "PEFT does not write them to its files, and FSDP1 joins them with others, so that no checkpoint has them. A "
        "run that resumes goes on with their initial values.",
        "`fsdp_version: 2` in the accelerate config, or no FSDP",
    ),
    Finding(
        "trained-weights-not-in-checkpoint",
        "PEFT does not write them to its files, and the checkpoint is not of a release of safe-trainers that saves "
        "them. The run goes on with their initial values, and differs from an uninterrupted one.",
        "resume from a checkpoint of this release, or `resume_from_checkpoint=None`, to start again",
    ),
    Finding(
        "run-is-finished",
        "the run has no step left, so that nothing is trained and the weights stay those of the checkpoint.",
        "set a larger `max_steps` to train on, or `resume_from_checkpoint=None` to start again",
    ),
    Finding(
        "no-optimizer-state",
        "the checkpoint was saved with `save_only_model=True`. The optimizer's state is lost, and the learning rate, "
        "the random state and the order of data start again.",
        "save with `save_only_model=False` to resume exactly",
    ),
    Finding(
        "step-skipped",
        "applying its gradients would make every weight NaN, so this step changes no weight. "
        "`precision/skipped_steps` counts such steps; the run stops after `max_consecutive_skips` in a row.",
        "{fix}",
    ),
    Finding(
        "adapters-are-merged",
        "vLLM gets all weights with the adapters merged: {reason}.",
        "drop `adapter_sync='native'`, which changes nothing here",
    ),
    Finding(
        "sampler-without-float32-head",
        "the trainer's output head computes in float32, and vLLM's computes in {dtype}, or cannot be asked.",
        "vllm>=0.31 in the trainer's process, or a server that was started with "
        '`--hf-overrides \'{{"head_dtype": "float32"}}\'`',
    ),
    Finding(
        "vllm-server-of-unknown-model",
        "the trainer's model is {own!r}, and the config of the server's model is not on this machine to compare them.",
        "start the server with the trainer's model, {own!r}, unless both are the same",
    ),
    Finding(
        "vllm-server-not-asked",
        "this release of TRL cannot read the compute dtype of a vLLM server.",
        "start the server with `--dtype {dtype}`, the trainer's compute dtype",
    ),
    Finding(
        "cascade-attention-off",
        "before version {fixed_in}, vLLM computes shared prompts incorrectly on this GPU (vLLM issue 22103), so "
        "safe-trainers turns cascade attention off, which makes sampling somewhat slower.",
        "pip install 'vllm>={fixed_in}'",
    ),
    Finding(
        "mismatch-is-not-rounding",
        "sampler and trainer compute different log-probabilities: rounding explains about 1 spacing, and at most 3. "
        "Likely cause: {cause}. Excluded: {excluded}.",
        "{fix}",
    ),
    Finding(
        "sequence-weights-vanish",
        "the importance weight of a sequence is the product over its tokens. The rollouts so far, with {tokens} "
        "tokens each, predict for that length a log-weight with the mean {mean} and the standard deviation {std}: an "
        "effective sample size of {ess}, with {outside} of the sequences outside of TRL's limits.",
        "`{fix}`, which weighs each token, or a dtype with a smaller mismatch, `precision='fp16'`",
    ),
    Finding(
        "fsdp-merges-in-place",
        "TRL merges the adapters into the sharded base for each sync and subtracts them again, which does not restore "
        "the old weights exactly: in half precision the base drifts. The share that a sync loses is not measured.",
        "load the base in float32, `model_init_kwargs={{'dtype': 'float32'}}`, or `use_vllm=False`",
    ),
    Finding(
        "rotary-frequencies-in-half",
        "a cast of the whole model included the rotary frequencies: position errors grow with the position of a "
        "token. vLLM, a reference model, and anyone who loads the saved model use float32 frequencies instead.",
        "`from_pretrained(..., dtype='{dtype}')`, which casts only weights, instead of `model.to(...)`",
    ),
    Finding(
        "reference-in-another-dtype",
        "Its weights are {held}, and those of the policy {wanted}: the KL divergence is not 0 even before the first "
        "update.",
        "{fix}",
    ),
    Finding(
        "guarantee-not-kept",
        "the contract of {trainer} promises this hook for {when}. It was due before the first optimizer step, and was "
        "not called, so that stock TRL's code ran in its place.",
        "{fix}",
    ),
    Finding(
        "infinite-rewards-ignored",
        "TRL compares the rewards of a group, or of the batch, with one another. This release gives every completion "
        "that is compared with an infinite reward the advantage 0, so that nothing is learned from it.",
        "return None for a completion without a reward, which leaves out this completion alone",
    ),
    Finding(
        "plan-not-kept",
        "an engine, a callback or other code changed the dtype after the trainer was built.",
        "set the run's own precision in the config of the engine (accelerate, FSDP, DeepSpeed), or none at all",
    ),
    Finding(
        "model-of-another-trainer",
        "another trainer was built with the same model since, and has replaced the casts of this one.",
        "build {trainer} after the other trainer has finished",
    ),
)
"""Every warning of this package, by id. Each is given once per trainer."""
