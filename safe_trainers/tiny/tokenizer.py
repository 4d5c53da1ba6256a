"""A tokenizer with one token per word of the task, and bytes for everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safe_trainers.tiny.families import Family, family_spec
from safe_trainers.tiny.grammar import task_words


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

# The mark of a leading space in byte-level vocabularies such as GPT-2's.
_SPACE = "\u0120"

_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
CONTENT
{{- eos_token -}}
{%- endgeneration -%}
{%- else -%}
CONTENT
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""

_CONTENT = """\
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] or [] -%}
{%- if part['type'] == 'image' -%}{{- 'IMAGE' -}}{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}"""


def chat_template(family: str | Family) -> str:
    """Return the chat template of a family.

    A prompt rendered with `add_generation_prompt=True` is a prefix of the prompt with its answer, and an answer ends
    with the end-of-sequence token, as completion-only fine-tuning requires. `{% generation %}` marks the messages of
    the assistant.

    Args:
        family: One of `FAMILIES`, or the specification of another family.

    Returns:
        A Jinja template.

    Raises:
        ValueError: If there is no such family.
    """
    return _TEMPLATE.replace("CONTENT", _CONTENT.replace("IMAGE", family_spec(family).template_token))


def _vocabulary(spec: Family) -> dict[str, int]:
    """Return the ids by token: special tokens, roles, markers, the 256 bytes, then the words of the task."""
    from tokenizers import pre_tokenizers

    words = task_words()
    tokens = [PAD, BOS, EOS, UNK, *_ROLES, *spec.special_tokens.values()]
    tokens += sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [word for word in words if len(word) > 1]
    tokens += [_SPACE + word for word in words]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def build_tokenizer(family: str | Family) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a family.

    Each word of the task is one token, with and without a leading space. Other text is encoded as UTF-8 bytes, so that
    every string can be decoded exactly. The tokenizer needs no merges: `ignore_merges` looks up whole words first.

    Args:
        family: One of `FAMILIES`, or the specification of another family.

    Returns:
        A fast tokenizer that pads on the left, with chat template and multimodal tokens set.

    Raises:
        ValueError: If there is no such family.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spec = family_spec(family)
    vocabulary = _vocabulary(spec)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|[^\p{L}]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens={**{f"{role[2:-2]}_role_token": role for role in _ROLES}, **spec.special_tokens},
        chat_template=chat_template(family),
        padding_side="left",
        truncation_side="left",
        model_max_length=1024,
        model_input_names=["input_ids", "attention_mask"],  # without the token types that transformers 4.57 adds
        clean_up_tokenization_spaces=False,
    )


def marker_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids that must not be sampled: multimodal markers, roles, padding, unknown.

    Args:
        tokenizer: A tokenizer of this package, or any other.

    Returns:
        Sorted ids of all special tokens except the end-of-sequence token.
    """
    keep = tokenizer.eos_token_id
    return sorted(index for index in set(tokenizer.all_special_ids) if index != keep)
