"""Vision-language models as people write them: without the methods of transformers, and with operations of their own.

Each is the text model and tower of `tiny`'s family `nocast` with one part changed.
"""

import torch
from torch import nn
from torch.nn import functional

from safe_trainers import tiny
from safe_trainers.tiny import nocast


class EncodesImages(nocast.NoCastModel):
    """Names its features `encode_images`, and merges them itself."""

    get_image_features = None

    def encode_images(self, pixel_values):
        return self.projector(self.vision_tower(pixel_values))

    def forward(self, input_ids=None, pixel_values=None, attention_mask=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.language_model.embed_tokens(input_ids)
            is_image = input_ids == self.config.image_token_id
            if pixel_values is not None and bool(is_image.any()):
                inputs_embeds = inputs_embeds.clone()
                inputs_embeds[is_image] = self.encode_images(pixel_values).flatten(0, 1)
        return self.language_model(inputs_embeds=inputs_embeds, attention_mask=attention_mask, **kwargs)


class HidesEmbeddings(EncodesImages):
    """Has no `get_input_embeddings`."""

    def get_input_embeddings(self):
        raise NotImplementedError


class ProjectsItself(EncodesImages):
    """Projects with a parameter of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.randn(config.vision_config.hidden_size, config.text_config.hidden_size) / 50)
        del self.projector

    def encode_images(self, pixel_values):
        return self.vision_tower(pixel_values) @ self.weight


class ConvolvingTower(nocast.NoCastVisionTower):
    """Convolves with parameters of its own."""

    def __init__(self, config):
        super().__init__(config)
        layer = self.patch_embedding
        self.patches, self.kernel, self.offset = layer.stride, nn.Parameter(layer.weight), nn.Parameter(layer.bias)
        del self.patch_embedding

    def forward(self, pixel_values):
        hidden = functional.conv2d(pixel_values, self.kernel, self.offset, stride=self.patches)
        hidden = hidden.flatten(2).transpose(1, 2) + self.position_embedding.weight
        return hidden + self.fc2(functional.gelu(self.fc1(self.norm2(hidden))))


class ConvolvesItself(nocast.NoCastModel):
    """Has a tower with a convolution outside of any layer."""

    def __init__(self, config):
        super().__init__(config)
        self.vision_tower = ConvolvingTower(config.vision_config)


class Product(torch.autograd.Function):
    """A matrix product with a backward pass of its own, which autocast does not reach."""

    @staticmethod
    def forward(ctx, values, weight):
        ctx.save_for_backward(values, weight)
        return values @ weight

    @staticmethod
    def backward(ctx, gradient):
        values, weight = ctx.saved_tensors
        return gradient @ weight.t(), values.flatten(0, 1).t() @ gradient.flatten(0, 1)


class ProductUnderAutocast(Product):
    """The same with the two lines that PyTorch documents."""

    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


class Multiplies(nocast.NoCastModel):
    """Has a `torch.autograd.Function` between its tower and its projector."""

    function = Product

    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.eye(config.vision_config.hidden_size))

    def get_image_features(self, pixel_values, **kwargs):
        return self.projector(self.function.apply(self.vision_tower(pixel_values), self.weight))


class MultipliesUnderAutocast(Multiplies):
    """The same with a function that autocast reaches."""

    function = ProductUnderAutocast


class NormalisesSpectrally(nocast.NoCastModel):
    """Has layers whose weight is computed, with a state that each computation changes."""

    def __init__(self, config):
        super().__init__(config)
        nn.utils.parametrizations.spectral_norm(self.vision_tower.fc1)
        nn.utils.parametrizations.spectral_norm(self.projector[0])


def build(inner, dtype=torch.float32):
    """A model around `inner`, one of the classes of this module."""

    class Own(nocast.NoCastForConditionalGeneration):
        def __init__(self, config):
            super().__init__(config)
            self.model = inner(config)

    if inner.get_image_features is None:
        Own.get_image_features = None
    if inner is HidesEmbeddings:
        Own.get_input_embeddings = HidesEmbeddings.get_input_embeddings
    config = tiny.build_model("nocast").config
    torch.manual_seed(0)
    return Own(config).to(dtype)
