"""A tool, and a tokenizer for which an answer that begins with an odd token is a call of it."""

from safe_trainers import tiny


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% for call in m.get('tool_calls') or [] %}"
    "{{ call.function.name }} {{ call.function.arguments | tojson }} {% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def look(count: int) -> str:
    """Looks.

    Args:
        count: How often.
    """
    return " ".join(["red squares", "two", "blue"][: 1 + count % 3])


def calling_tokenizer():
    """The tokenizer of the embedded language models, with a chat template and calls of tools."""
    tokenizer = tiny.build_processor("text")

    def parse(ids, *args, **kwargs):
        """An answer that begins with an odd token is a call."""
        call = {"type": "function", "function": {"name": "look", "arguments": {"count": ids[0]}}}
        return {
            "role": "assistant",
            "content": tokenizer.decode(ids),
            **({"tool_calls": [call]} if ids[0] % 2 else {}),
        }

    tokenizer.chat_template, tokenizer.response_template, tokenizer.parse_response = TEMPLATE, {"is": "set"}, parse
    tokenizer.response_schema = {"is": "set"}  # what it was called first
    return tokenizer
