"""Checks of whole runs: a slice of the matrix, images, adapters, the loss scaler, and the dtype of rollouts."""

from collections.abc import Iterator, Sequence

from .build import Setup, Workshop, why_not_adapted
from .outcome import Row


WEIGHTS = ("fp32", "bf16", "fp16")
FLAGS = ("none", "bf16", "fp16")
KINDS = ("full", "lora", "4bit")
VISION = "llava"
"""A family that casts its pixels itself, so that the matrix does not measure what `media` does."""
UNCAST = "aria"
"""A family that does not cast its pixels."""


def matrix_setups(with_images: bool) -> list[Setup]:
    """The slice of the matrix: every pair of weights, flag, kind and family.

    Args:
        with_images: Whether half of the runs have images.
    """
    every = [(w, f) for w in range(len(WEIGHTS)) for f in range(len(FLAGS))]
    made = [Setup("text", WEIGHTS[w], FLAGS[f], KINDS[(w + f) % 3]) for w, f in every]
    if with_images:
        made += [Setup(VISION, WEIGHTS[w], FLAGS[f], KINDS[(w + f + 1) % 3]) for w, f in every]
    return made


def matrix(shop: Workshop) -> Iterator[Row]:
    """Trains the slice, and judges each run by all rules of whole runs.

    Args:
        shop: The trainer.
    """
    for setup in matrix_setups(shop.subject.takes_images):
        yield judged(shop, setup, rules=None, crash="trains")


def media(shop: Workshop) -> Iterator[Row]:
    """Trains with images that the model does not cast.

    Args:
        shop: The trainer.
    """
    if not shop.subject.takes_images:
        yield Row(
            "",
            "not applicable",
            f"there are no images for {shop.subject.trainer_class.__name__} (task {shop.subject.task})",
        )
        return
    for weights, flag, kind in (
        ("fp32", "bf16", "full"),
        ("bf16", "bf16", "lora"),
        ("bf16", "none", "full"),
        ("fp32", "fp16", "full"),
    ):
        setup = Setup(UNCAST, weights, flag, kind)
        row = judged(shop, setup, rules=("media-dtype", "log-probabilities"), crash="media-trains")
        if row.status == "crashed":
            twin, _ = shop.judge(Setup("text", weights, flag, kind))
            if twin.outcome == "crashed":
                row = Row(str(setup), "not applicable", f"crashes without images too: {twin.message}")
        yield row


def adapters(shop: Workshop) -> Iterator[Row]:
    """Reads the adapters of LoRA runs.

    Args:
        shop: The trainer.
    """
    for weights, flag, kind in (
        ("bf16", "bf16", "lora"),
        ("bf16", "none", "lora"),
        ("bf16", "bf16", "4bit"),
        ("fp32", "bf16", "4bit"),
    ):
        yield judged(shop, Setup("text", weights, flag, kind), rules=("adapters-rounded",), crash="trains")


def scaler(shop: Workshop) -> Iterator[Row]:
    """Trains under a loss scaler, with weights that are in half precision when they are loaded.

    Args:
        shop: The trainer.
    """
    for weights, kind in (("fp16", "full"), ("fp16", "lora"), ("fp16", "4bit"), ("fp32", "full")):
        yield judged(shop, Setup("text", weights, "fp16", kind), rules=("half-under-scaler",), crash="scaler-trains")


def rollout_dtype(shop: Workshop) -> Iterator[Row]:
    """Compares the compute dtypes of rollout, scoring and training.

    Args:
        shop: The trainer.
    """
    if not shop.subject.generates:
        yield Row("", "not applicable", "the trainer does not sample completions")
        return
    for family, weights, flag, kind in (
        ("text", "fp32", "bf16", "lora"),
        ("text", "fp32", "bf16", "full"),
        ("text", "bf16", "none", "full"),
        ("text", "bf16", "bf16", "4bit"),
        (VISION, "fp32", "bf16", "lora"),
    ):
        yield judged(shop, Setup(family, weights, flag, kind), rules=("phases-differ",), crash="trains")


def judged(shop: Workshop, setup: Setup, rules: Sequence[str] | None, crash: str) -> Row:
    """Runs a setup after its float32 control.

    Args:
        shop: The trainer.
        setup: What is trained.
        rules: The rules that count; `None` for all.
        crash: The rule that a crash breaks.

    Returns:
        The result.
    """
    missing = why_not_adapted(shop.subject, setup.kind) or shop.why_not_built(setup.family)
    if missing:
        return Row(str(setup), "not applicable", missing)
    failed = shop.control(setup)
    if failed is not None:
        return failed
    outcome, faults = shop.judge(setup)
    counted = [(rule, text) for rule, text in faults if rules is None or rule in rules]
    if outcome.outcome == "refused":
        return Row(str(setup), "refused", outcome.message.splitlines()[0])
    if outcome.outcome == "crashed":
        return Row(str(setup), "crashed", f"{outcome.message} ({outcome.frame})", crash)
    if counted:
        return Row(str(setup), "fault", "; ".join(text for _, text in counted), counted[0][0])
    return Row(str(setup), "passed")
