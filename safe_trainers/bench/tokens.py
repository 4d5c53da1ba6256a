"""Checks of token ids: what the sampler saw against what scoring and training see, and what truncation cuts."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .. import tiny
from ..model.parts import find_parts, unwrap
from .build import VISIBLE_RATE, Setup, Workshop, with_changes
from .cells import VISION
from .outcome import Row


Ids = tuple[int, ...]

FAMILIES = ("text", VISION, "qwen2_5_vl")
"""One image token for each patch, and one for each group of patches between two markers."""


class Tokens:
    """Records token ids of a model, without padding.

    Attributes:
        sampled: Prompts with their completions, and the length of each prompt.
        seen: Rows of forward passes outside of generation: `"training"` with gradients, else `"scoring"`.
    """

    def __init__(self) -> None:
        self.sampled: set[tuple[Ids, int]] = set()
        self.seen: dict[str, set[Ids]] = {"scoring": set(), "training": set()}
        self._generating = False

    @contextlib.contextmanager
    def attached(self, model: Any) -> Iterator["Tokens"]:
        """Records while the block runs.

        Args:
            model: The model of a trainer.
        """
        base: Any = unwrap(model)
        generate: Any = getattr(base, "generate", None)
        parts = find_parts(model)  # some losses call the model inside of the head
        inside = {id(module): module for module in (base, *parts.containers, parts.text)}

        def generated(*args: Any, **kwargs: Any) -> Any:
            before, self._generating = self._generating, True
            try:
                found = generate(*args, **kwargs)
            finally:
                self._generating = before
            self._note_sampled(args, kwargs, found)
            return found

        handles = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in inside.values()]
        if generate is not None:
            base.generate = generated
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
            vars(base).pop("generate", None)

    def _note_sampled(self, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        mask = kwargs.get("attention_mask")
        sequences = getattr(found, "sequences", found)
        if not isinstance(ids, torch.Tensor) or not isinstance(sequences, torch.Tensor):
            return
        mask = torch.ones_like(ids) if mask is None else mask
        for row, kept, whole in zip(ids, mask.bool(), sequences[:: len(sequences) // len(ids)], strict=False):
            prompt = row[kept].tolist()
            self.sampled.add(((*prompt, *whole[ids.shape[1] :].tolist()), len(prompt)))

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")
        if self._generating or not isinstance(ids, torch.Tensor):
            return
        mask = torch.ones_like(ids) if mask is None else mask
        if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
            return  # a mask for attention layers
        phase = "training" if torch.is_grad_enabled() else "scoring"
        for row, kept in zip(ids, mask.bool(), strict=True):
            self.seen[phase].add(tuple(row[kept].tolist()))

    def strangers(self, most: int | None) -> Iterator[str]:
        """Yields rows that do not begin as a sampled sequence, through its prompt and into its completion.

        Args:
            most: The most tokens of a completion.
        """
        for phase, rows in self.seen.items():
            for row in sorted(rows):
                fits = [n for whole, n in self.sampled if n < len(row) and whole[: len(row)] == row]
                if not fits:
                    yield f"{phase} computes on {len(row)} tokens that were not sampled"
                elif most is not None and len(row) - max(fits) > most:
                    yield f"{phase} computes on a completion of {len(row) - max(fits)} tokens, and {most} are allowed"


def image_tokens(row: Sequence[int], family: str) -> int:
    """Counts the image tokens of a row.

    Args:
        row: Token ids.
        family: The model family.
    """
    tokenizer: Any = tiny.build_tokenizer(family)
    token = tiny.families.family_spec(family).image_token
    return 0 if token is None else list(row).count(tokenizer.convert_tokens_to_ids(token))


def record(shop: Workshop, setup: Setup) -> tuple[Tokens, Any]:
    """Trains, and records token ids.

    Args:
        shop: The trainer class.
        setup: What is trained.

    Returns:
        The ids and the trainer.
    """
    trainer = shop.construct(setup)
    with Tokens().attached(trainer.model) as tokens:
        trainer.train()
    return tokens, trainer


def prompt_ids(shop: Workshop) -> Iterator[Row]:
    """Compares the ids of rollouts with those of scoring and training.

    Args:
        shop: The trainer class.
    """
    if not shop.subject.generates:
        yield Row("", "not applicable", "the trainer does not sample completions")
        return
    for family in FAMILIES:
        setup = Setup(family)
        missing = shop.why_not_built(family)
        if missing:
            yield Row(str(setup), "not applicable", missing)
            continue

        def measure(setup: Setup = setup, family: str = family) -> Row:
            tokens, trainer = record(shop, setup)
            if not tokens.sampled:
                return Row(str(setup), "not applicable", "the model's `generate` was not called")
            if not any(tokens.seen.values()):
                return Row(str(setup), "could not run", "no forward pass with `input_ids` was seen")
            wrong = list(tokens.strangers(getattr(trainer.args, "max_completion_length", None)))
            counts = {image_tokens(whole[:n], family) for whole, n in tokens.sampled}
            found = {image_tokens(row, family) for rows in tokens.seen.values() for row in rows}
            if wrong:
                more = f"; image tokens of a row: {found}, sampled: {counts}" if found != counts else ""
                return Row(str(setup), "fault", wrong[0] + more, "other-ids")
            compared = sum(map(len, tokens.seen.values()))
            return Row(str(setup), "passed", f"{compared} rows, {max(counts)} image tokens each")

        failed = shop.control(setup)
        yield failed if failed is not None else shop.attempt(str(setup), measure)


def truncation(shop: Workshop) -> Iterator[Row]:
    """Cuts completions and rows, and compares with what the settings are documented to do.

    Args:
        shop: The trainer class.
    """
    subject, found = shop.subject, False
    if subject.generates and subject.accepts("mask_truncated_completions"):
        found = True
        yield _if_trained(shop, "masked completions", "text", lambda: _masked(shop))
    for setting, families in (("max_length", ("text", VISION)), ("max_prompt_length", (VISION,))):
        if subject.accepts(setting) and not (subject.generates and setting == "max_length"):
            for family in families[: 2 if subject.takes_images else 1]:
                found = True
                run = f"{family}, {setting}"
                yield _if_trained(shop, run, family, partial(_cut, shop, setting, family, run))
    if not found:
        yield Row("", "not applicable", "the config has no setting that truncates")


def _if_trained(shop: Workshop, run: str, family: str, measure: Callable[[], Row]) -> Row:
    """Measures, unless the model of the family does not train in float32 without the setting."""
    failed = shop.control(Setup(family))
    return shop.attempt(run, measure) if failed is None else replace(failed, run=run)


def _masked(shop: Workshop) -> Row:
    """A step in which all completions are truncated changes no weight if they are masked, and does if they are not."""
    run = "masked completions"
    tokenizer: Any = tiny.build_tokenizer("text")
    banned = [*tiny.generation_kwargs(tokenizer)["suppress_tokens"], tokenizer.eos_token_id, tokenizer.pad_token_id]
    setup = with_changes(
        Setup("text", steps=1),
        generation_kwargs={"suppress_tokens": banned},
        learning_rate=VISIBLE_RATE,
        weight_decay=0.0,
    )
    changed = {}
    for masked in (False, True):
        trainer = shop.construct(with_changes(setup, mask_truncated_completions=masked))
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        changed[masked] = sum(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    if not changed[False]:
        return Row(run, "could not run", "no weight changes without the mask either")
    if changed[True]:
        return Row(run, "fault", f"{changed[True]} weights change, although all completions are masked",
                   "masked-completions")  # fmt: skip
    return Row(run, "passed", f"{changed[False]} weights change without the mask, and 0 with it")


def _cut(shop: Workshop, setting: str, family: str, run: str) -> Row:
    """Rows are cut to the setting from their end, and never inside an image."""
    whole, _ = record(shop, Setup(family))
    rows = whole.seen["training"]
    if not rows:
        return Row(run, "could not run", "no forward pass with `input_ids` was seen")
    images = max(image_tokens(row, family) for row in rows)
    longest = max(map(len, rows))
    most = images if family == VISION else longest - 1
    try:
        cut, _ = record(shop, with_changes(Setup(family), **{setting: most}))  # two steps see every row
    except Exception as error:
        if family == VISION:  # an error before or during training is right: the setting contradicts the images
            return Row(run, "passed", f"stops: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
        raise
    seen = cut.seen["training"]
    if not seen:
        return Row(run, "passed", "no row was trained on")
    for row in sorted(seen):
        kept = image_tokens(row, family)
        if kept != images:
            return Row(run, "fault", f"trains on {kept} of {images} image tokens of a row", "image-tokens-cut")
        if setting == "max_length" and (len(row) > most or not any(one[: len(row)] == row for one in rows)):
            return Row(run, "fault", f"a row has {len(row)} tokens with {setting}={most}", "longer-than-max-length")
    return Row(run, "passed", f"rows of {longest} tokens became {max(map(len, seen))} with {setting}={most}")
