"""What torch says of dtypes, loss scaling, sampling and checkpoints."""

from .catalogue_entry import Entry


BOUNDARIES = (
    "swap the trainer for its safe one, `from safe_trainers import SafeGRPOTrainer`, which places a cast where two "
    "dtypes meet"
)
FLOAT32 = "`model_init_kwargs={'dtype': 'float32'}` with `bf16=True`"

ENTRIES = (
    Entry(
        "conv-dtypes",
        "torch",
        (
            "Input type (…) and weight type (…) should be the same",
            "Input type (…) and bias type (…) should be the same",
        ),
        "a convolution got another dtype than its weights have. In a vision-language model that is the first layer of "
        "the vision tower: processors return float32 pixels, and towers such as Aria's and Llama4's, and many of "
        "remote code, do not cast them.",
        f"{BOUNDARIES}; with a stock trainer {FLOAT32}",
    ),
    Entry(
        "matmul-dtypes",
        "torch",
        (
            "expected m1 and m2 to have the same dtype, but got: …",
            "mat1 and mat2 must have the same dtype",
            "expected mat1 and mat2 to have the same dtype",
            "self and mat2 must have the same dtype",
        ),
        "a linear layer got another dtype than its weights have, outside autocast: in `generate`, where part of the "
        "modules (norms, adapters, a trained head) is float32 and the rest is not, or where TRL rounded the trained "
        "head of a quantised model to bfloat16.",
        f"{BOUNDARIES}; with a stock trainer `bf16=True`, so that autocast casts, or one dtype for all weights",
    ),
    Entry(
        "matmul-packed",
        "torch",
        ("self and mat2 must have the same dtype, but got … and Byte",),
        "packed 4-bit weights were multiplied as if they were numbers: something calls the weight of a quantised "
        "layer in place of the layer.",
        "leave that layer out, `BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=['its name', 'lm_head'])`",
        link="https://github.com/unslothai/unsloth/issues/3337",
    ),
    Entry(
        "scalar-types",
        "torch",
        ("expected scalar type … but found …",),
        "two tensors of one operation have different dtypes, and it runs outside autocast.",
        f"{BOUNDARIES}; with a stock trainer one dtype for all weights and inputs, {FLOAT32}",
    ),
    Entry(
        "index-put-dtypes",
        "torch",
        ("Index put requires the source and destination dtypes match",),
        "the model merges image features into the text embeddings by index, without a cast: the tower ran under "
        "autocast and gave half precision, the embeddings are float32. SmolVLM did so up to transformers 5.14, at "
        "TRL's own defaults.",
        f"{BOUNDARIES}; or `pip install -U transformers`, or weights in the dtype of autocast, "
        "`model_init_kwargs={'dtype': 'bfloat16'}`",
    ),
    Entry(
        "masked-scatter-dtypes",
        "torch",
        ("masked_scatter: expected self and source to have same dtypes but got",),
        "the model merges the features of a tower into the text embeddings without a cast: the tower ran under "
        "autocast and gave half precision, the embeddings are float32.",
        f"{BOUNDARIES}; or `pip install -U transformers`, or `model_init_kwargs={{'dtype': 'bfloat16'}}`",
        link="https://github.com/huggingface/transformers/issues/47672",
    ),
    Entry(
        "scatter-dtypes",
        "torch",
        (
            "index_add_(): self (…) and source (…) must have the same scalar type",
            "scatter(): Expected self.dtype to be equal to src.dtype",
            "index_copy_(): self and source expected to have the same dtype",
        ),
        "one tensor is written into another of a different dtype without a cast: the experts of a mixture-of-experts "
        "model, or a cache, compute in another dtype than what they write to.",
        f"{BOUNDARIES}; with a stock trainer load all weights in the compute dtype, "
        "`model_init_kwargs={'dtype': 'bfloat16'}` with `bf16=True`",
    ),
    Entry(
        "attention-dtypes",
        "torch",
        ("Expected query, key, and value to have the same dtype",),
        "query, key and value come from modules of different dtypes: norms or adapters in float32 in a half model, "
        "outside autocast.",
        f"{BOUNDARIES}; with a stock trainer `bf16=True`, or one dtype for all weights",
    ),
    Entry(
        "norm-dtypes",
        "torch",
        ("mixed dtype (CPU): expect parameter to have scalar type of Float",),
        "a normalisation layer on CPU has weights of another dtype than what it gets.",
        f"{BOUNDARIES}; with a stock trainer one dtype for all weights and inputs, {FLOAT32}",
    ),
    Entry(
        "unscale-fp16-gradients",
        "torch",
        ("Attempting to unscale FP16 gradients.",),
        "`fp16=True` scales the loss, and what is trained is float16 itself, so that its gradients are too: full "
        "fine-tuning of a model loaded in float16, `autocast_adapter_dtype=False`, or `modules_to_save` on a float16 "
        "base.",
        "a safe trainer, which trains such weights in float32; with a stock one "
        "`for p in model.parameters(): p.data = p.data.float() if p.requires_grad else p.data` before the trainer",
    ),
    Entry(
        "unscale-bf16-gradients",
        "torch",
        ("\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'",),
        "`fp16=True` scales the loss, and what is trained is bfloat16. TRL rounds the trainables of every 4-bit and "
        "8-bit model to bfloat16, whatever the run computes in.",
        "a safe trainer, `from safe_trainers import SafeGRPOTrainer`, which keeps adapters as PEFT made them; on a "
        "GPU of compute capability 8.0 or more also `bf16=True` instead of `fp16=True`",
        link="https://github.com/huggingface/trl/issues/4901",
    ),
    Entry(
        "no-inf-checks",
        "torch",
        ("No inf checks were recorded for this optimizer.",),
        "the loss scaler met an optimizer none of whose parameters has a gradient: nothing that is trained took part "
        "in the loss.",
        "train something: `peft_config=LoraConfig(...)`, or `requires_grad_(True)`; with gradient checkpointing of a "
        "frozen base `model.enable_input_require_grads()`",
        link="https://github.com/huggingface/transformers/issues/24003",
    ),
    Entry(
        "unscaled-twice",
        "torch",
        ("unscale_() has already been called on this optimizer since the last update().",),
        "gradients were unscaled twice between two optimizer steps: clipping by hand beside the trainer's own.",
        "leave clipping to the trainer, `max_grad_norm=1.0`",
    ),
    Entry(
        "nothing-requires-grad",
        "torch",
        ("element 0 of tensors does not require grad and does not have a grad_fn",),
        "no trained parameter took part in the loss: the whole model is frozen, or gradient checkpointing with "
        "`use_reentrant=True` got inputs without gradients from frozen embeddings.",
        "`gradient_checkpointing_kwargs={'use_reentrant': False}`, or `model.enable_input_require_grads()`; and "
        "something to train, `peft_config=LoraConfig(...)`",
    ),
    Entry(
        "sampling-not-finite",
        "torch",
        (
            "probability tensor contains either `inf`, `nan` or element < 0",
            "probability tensor contains either inf, nan",
        ),
        "the logits that tokens are sampled from are not finite: something in the model overflows float16 (65,504), "
        "or an earlier update made weights that are no numbers.",
        "`bf16=True` on a device that computes it; under fp16 a safe trainer with `fp32_modules=[...]`, whose "
        "`print(trainer.overflow_report)` names the module",
    ),
    Entry(
        "out-of-memory",
        "torch",
        ("CUDA out of memory",),
        "weights, gradients, optimizer state and activations together are more than the GPU has. float32 takes twice "
        "what half precision does, and Adam two more numbers for each that is trained.",
        "`safe-trainers report RECIPE` says what takes how much; then `gradient_checkpointing: true`, a smaller "
        "`per_device_train_batch_size`, LoRA (`use_peft: true`) on `load_in_4bit: true`, or, with vLLM beside it, a "
        "smaller `vllm_gpu_memory_utilization`",
        link="https://github.com/huggingface/trl/issues/3172",
    ),
    Entry(
        "device-assert",
        "torch",
        ("CUDA error: device-side assert triggered",),
        "a CUDA kernel refused its input, and the line in the traceback is a later one: mostly logits that are not "
        "finite where tokens are sampled, or an index beyond an embedding table. The lines above, `Assertion ... "
        "failed`, say which.",
        "run once more with `CUDA_LAUNCH_BLOCKING=1`; after `Assertion` with `probability` or `val >= zero`: "
        "`bf16=True`, or `fp32_modules=[...]` under fp16",
        link="https://github.com/pytorch/pytorch/issues/13770",
    ),
    Entry(
        "constant-overflows-fp16",
        "torch",
        ("value cannot be converted to type c10::Half without overflow", "value cannot be converted to type at::Half"),
        "a constant such as -1e9 is written into a float16 tensor, whose largest number is 65,504: the model's code "
        "was not made for float16.",
        "`bf16=True` with `model_init_kwargs={'dtype': 'bfloat16'}`, or that module in float32: "
        "`fp32_modules=['its name']` of a safe config",
    ),
    Entry(
        "numpy-has-no-bf16",
        "torch",
        ("Got unsupported ScalarType BFloat16",),
        "NumPy has no bfloat16: a reward function, a callback or a metric calls `.numpy()` on a tensor of the model.",
        "`tensor.float().numpy()`",
    ),
    Entry(
        "recomputed-otherwise",
        "torch",
        ("Recomputed values for the following tensors have different metadata than during the forward pass",),
        "gradient checkpointing computes the forward pass again, and it came out in other dtypes or shapes: autocast "
        "was on once and off the other time, or (shape [0]) ZeRO-3 had released the weights.",
        "where `dtype` differs: call the model inside the trainer alone, not under an autocast of your own; where "
        "`shape` differs: `gradient_checkpointing_kwargs={'use_reentrant': True}`",
        link="https://github.com/pytorch/pytorch/issues/141896",
    ),
    Entry(
        "integer-weights-need-no-grad",
        "torch",
        ("Only Tensors of floating point and complex dtype can require gradients",),
        "packed 4-bit or 8-bit weights were marked as trainable.",
        "train adapters on them, `peft_config=LoraConfig(...)`, and leave `requires_grad` of the base alone",
    ),
    Entry(
        "no-half-kernel",
        "torch",
        ("not implemented for 'Half'", "not implemented for 'BFloat16'"),
        "this operation has no kernel for that half dtype on this device; the name before it says which operation.",
        "that module in float32: `fp32_modules=['its name']` of a safe config, or `model_init_kwargs={'dtype': "
        "'float32'}`",
    ),
    Entry(
        "nan-in-backward",
        "torch",
        ("returned nan values in its …th output.",),
        "anomaly detection met a gradient that is no number, at the operation it names.",
        "under fp16: `fp32_modules=['the module']`, or `bf16=True`; else a clamp where the function has no derivative",
    ),
    Entry(
        "nan-grad-norm",
        "transformers",
        ("'grad_norm': nan", "'grad_norm': 'nan'"),
        "the gradients of that step are no numbers. Under fp16 with a loss scaler a few such steps at the start are "
        "skipped and normal; without one, or if they go on, the weights are lost.",
        "a safe trainer, which logs `precision/skipped_steps` and stops with the cause; `bf16=True` where the device "
        "computes it",
        kind="warning",
        link="https://github.com/StarsfieldAI/R1-V/issues/69",
    ),
    Entry(
        "fsdp-mixed-dtypes",
        "torch",
        ("Must flatten tensors with uniform dtype but got",),
        "FSDP1 puts the weights of a module into one flat tensor, and they have different dtypes: adapters, norms or "
        "a head in float32 on a half base, or packed weights of another storage dtype.",
        "FSDP2, `fsdp_version: 2`, which keeps each weight by itself; or one dtype for all, and "
        "`bnb_4bit_quant_storage` equal to it",
        link="https://github.com/huggingface/trl/issues/1723",
    ),
    Entry(
        "fsdp-packed-weights",
        "torch",
        ("Cannot flatten integer dtype tensors",),
        "FSDP1 cannot shard 8-bit weights, nor 4-bit ones that are stored as bytes.",
        "`load_in_4bit=True` with `bnb_4bit_quant_storage='bfloat16'`, the dtype of the other weights",
        link="https://github.com/huggingface/peft/issues/1432",
    ),
    Entry(
        "pickled-checkpoint",
        "torch",
        ("Weights only load failed.",),
        "the file holds pickled Python objects, which run code when they are loaded; torch loads tensors alone.",
        "resume from a checkpoint of your own run; those of safe trainers hold nothing pickled. `weights_only=False` "
        "for files alone that you made yourself",
    ),
    Entry(
        "optimizer-of-another-model",
        "torch",
        (
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
            "loaded state dict has a different number of parameter groups",
        ),
        "the checkpoint was trained with another set of trainable parameters: another `peft_config`, another frozen "
        "tower, or with and without adapters.",
        "the `peft_config` and the model of the first run, or another `output_dir`",
    ),
    Entry(
        "weights-of-another-shape",
        "torch",
        ("size mismatch for …: copying a param with shape …",),
        "the checkpoint holds weights of another model: another size, rank of LoRA, or vocabulary.",
        "the model and the `peft_config` that the checkpoint was trained with",
    ),
    Entry(
        "checkpoint-cut-off",
        "safetensors",
        (
            "Error while deserializing header: incomplete metadata, file not fully covered",
            "Error while deserializing header: MetadataIncompleteBuffer",
        ),
        "the file was cut off: the run was killed, or the disk was full, while it was written.",
        "resume from the checkpoint before it, `resume_from_checkpoint='.../checkpoint-100'`; a safe trainer finds "
        "the newest complete one by itself, `resume_from_checkpoint=True`",
    ),
    Entry(
        "no-dtype-of-that-name",
        "torch",
        (
            "module 'torch' has no attribute 'bf16'",
            "module 'torch' has no attribute 'fp16'",
            "module 'torch' has no attribute 'fp32'",
            "Invalid `dtype` passed to the config. Expected either 'auto' or a string representing a valid",
        ),
        "`bf16`, `fp16` and `fp32` are flags of the training arguments; dtypes have their names in full.",
        "`dtype: bfloat16`, `float16` or `float32`",
    ),
    Entry(
        "tf32-needs-ampere",
        "transformers",
        ("--tf32 requires Ampere or a newer GPU arch",),
        "TF32 exists on GPUs of compute capability 8.0 and more.",
        "drop `tf32: true`",
    ),
)
"""Texts of torch, safetensors, and of dtypes in transformers."""
