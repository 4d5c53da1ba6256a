"""What can go wrong, and every refusal and warning of this package in one list.

```
Exception
└── SafeTrainersError
    ├── PrecisionError        (ValueError)   a run that would crash or lose precision, refused at construction
    │   └── CheckpointError                  a checkpoint that cannot be resumed from, or weights that cannot be saved
    ├── ContractError         (TypeError)    a trainer class whose bases are in the wrong order
    ├── RecipeError           (ValueError)   a recipe, command line or dataset that cannot be run
    └── UnsupportedVersionError (ImportError) TRL or transformers outside the supported range
UserWarning
└── PrecisionWarning                         supported, but not what you probably want; says what to do
```

A refusal is right only where stock TRL would crash, or would train something else than what was asked for; whatever
stock trains correctly must train. `REFUSALS` is the whole list, so that it can be read, tested and bounded.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


class SafeTrainersError(Exception):
    """Base class of the errors that this package raises on purpose."""


class ContractError(SafeTrainersError, TypeError):
    """A trainer class whose bases cannot keep the precision promises; the message holds the corrected line."""


class RecipeError(SafeTrainersError, ValueError):
    """A recipe, a command line or a dataset that cannot be run.

    Args:
        problems: One text per problem; all of them are shown at once.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class UnsupportedVersionError(SafeTrainersError, ImportError):
    """TRL or transformers is installed in a version outside the supported range."""


class PrecisionWarning(UserWarning):
    """A run that is supported but loses precision or speed; the text says what to do about it."""


@dataclass(frozen=True)
class Finding:
    """One entry of the lists below: what is wrong with some input, and the line that mends it.

    Attributes:
        id: Stable slug, the same in every release.
        why: Why it fails, as a template.
        fix: The line to write instead, as a template.
    """

    id: str
    why: str
    fix: str


@dataclass(frozen=True)
class Problem:
    """A finding about one run.

    Attributes:
        id: The finding's slug, a key of `REFUSALS` or `WARNINGS`.
        given: What was passed.
        why: Why it fails.
        fix: The line to write.
    """

    id: str
    given: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.given}\n  why: {self.why}\n  fix: {self.fix}  [{self.id}]"


class PrecisionError(SafeTrainersError, ValueError):
    """Everything that makes a run wrong in precision, found before its first step and raised at once.

    Args:
        problems: What was found, each with what was passed, why it fails and the line to write.

    Attributes:
        subject: What the problems are with, for the first line.
    """

    subject: ClassVar[str] = "the precision of this run"

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head} with {self.subject}:\n" + "\n".join(f"- {p}" for p in self.problems))

    def __reduce__(self) -> tuple[type["PrecisionError"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class CheckpointError(PrecisionError):
    """A checkpoint that cannot be resumed from, or weights that cannot be saved as asked; nothing was overwritten."""

    subject = "the checkpoints of this run"


def _index(*findings: Finding) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings}


REFUSALS = _index(
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
        "half-weights-under-other-autocast",
        "autocast would round {weights} weights to {compute} in every operation and leave the others alone, so that "
        "two half formats meet: some models crash there, and none computes what either format promises.",
        "load the weights in the compute dtype, {load}, or set `{flag}=True`",
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
        "continuous-batching-casts-weights",
        "it casts the model itself to {compute} at each rollout and never back: master weights and the optimizer's "
        "state would silently be half precision from the first rollout on.",
        "`use_transformers_continuous_batching=False`, or `use_vllm=True`",
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
        "drop `adapter_dtype='bfloat16'`, or use `bf16=True`",
    ),
    Finding(
        "adapters-not-captured",
        "TRL {version} rounds the trainables of a quantised model to bfloat16, and these were made in a way in which "
        "their bits could not be kept.",
        "make the adapters with `peft_config=`, or pass a `PeftModel`",
    ),
    Finding(
        "loss-scale-out-of-range",
        "it has to be {accepted}.",
        "{field}={usual}",
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
        "merge-not-kept",
        "what stands in the files is not what was merged: {what}.",
        "ship the adapter beside its base, `model.save_pretrained(...)`",
    ),
)
"""Every refusal that a trainer or a config of this package can make, by id."""

WARNINGS = _index(
    Finding(
        "fp16-on-cpu",
        "accelerate has neither autocast nor a loss scaler for fp16 on this device and says nothing: the run computes "
        "in the weights' own dtype, {weights}.",
        "drop `fp16=True`, or use `bf16=True`",
    ),
    Finding(
        "half-trainables",
        "{count} of {total} trainable elements are {dtypes}: at learning_rate={rate} {share} of their first updates "
        "round to nothing, and so does most of the optimizer's state.",
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
)
"""Every warning of this package, by id; each is given once per trainer."""


def refuse(finding_id: str, given: str, **details: object) -> Problem:
    """Builds the problem of a refusal.

    Args:
        finding_id: A key of `REFUSALS`.
        given: What was passed.
        **details: The values that the finding's templates name.

    Returns:
        The problem, to be collected into one `PrecisionError`.
    """
    return _problem(REFUSALS[finding_id], given, details)


def warn(finding_id: str, given: str, **details: object) -> Problem:
    """Builds the problem of a warning; see `refuse`."""
    return _problem(WARNINGS[finding_id], given, details)


def _problem(finding: Finding, given: str, details: dict[str, object]) -> Problem:
    return Problem(finding.id, given, finding.why.format(**details), finding.fix.format(**details))


def nearest(value: str, accepted: Iterable[str]) -> str | None:
    """The accepted spelling nearest to `value`, or `None` where nothing is near.

    Args:
        value: What was written.
        accepted: What could have been meant.

    Returns:
        The nearest accepted spelling, compared without regard to case, `-` and `_`.
    """

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    by_plain = {plain(choice): choice for choice in accepted}
    match = difflib.get_close_matches(plain(value), by_plain, n=1, cutoff=0.6)
    return by_plain[match[0]] if match else None


def hint(match: str | None, prefix: str = "") -> str:
    """The end of a message that names the nearest spelling; empty where there is none.

    Args:
        match: What `nearest` found.
        prefix: What stands before it where it is written.
    """
    return f"; did you mean {prefix + match!r}?" if match else ""
