"""Model inputs with images, and models with boundaries."""

from safe_trainers import tiny
from safe_trainers.boundaries.cast_hooks import guard_features, guard_leaves
from safe_trainers.model.parts import find_parts


def media_batch(family, rows=2):
    """Model inputs of two questions with their pictures, as the family's own processor makes them."""
    processor = tiny.build_processor(family)
    data = tiny.prompt_dataset(rows, seed=0)
    texts, images = [], []
    for row in data:
        message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": tiny.QUESTION}]}]
        texts.append(processor.apply_chat_template(message, add_generation_prompt=True))
        images.append([row["image"]])
    return dict(processor(text=texts, images=images, return_tensors="pt", padding=True))


def guarded(model):
    parts = find_parts(model)
    guard_leaves(parts.towers.values())
    guard_features(parts)
    return model
