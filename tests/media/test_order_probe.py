"""Values that show the order in which a kernel sums, and features that are shared only where the order is the same."""

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from safe_trainers import SafeGRPOConfig
from safe_trainers.media.order_probe import OrderProbe, _convolution, _product
from safe_trainers.media.shared_features import SharedFeatures


HALVES = (torch.bfloat16, torch.float16)


def linear(dtype):
    weight, bias = torch.randn(64, 32).to(dtype), torch.randn(64).to(dtype)
    return lambda rows: functional.linear(rows, weight, bias), lambda n: torch.randn(n, 32).to(dtype)


def wide(dtype):
    weight = torch.randn(1024, 1024).to(dtype)
    return lambda rows: functional.linear(rows, weight), lambda n: torch.randn(n, 1024).to(dtype)


def patches(dtype):
    weight = torch.randn(64, 3, 2, 8, 8).to(dtype)
    return lambda x: functional.conv3d(x, weight, stride=(2, 8, 8)), lambda n: torch.randn(n, 3, 2, 8, 8).to(dtype)


def convolution(dtype):
    weight = torch.randn(16, 3, 3, 3).to(dtype)
    return lambda x: functional.conv2d(x, weight, padding=1), lambda n: torch.randn(n, 3, 12, 12).to(dtype)


def groups(dtype):
    weight = torch.randn(64, 32, 3, 3).to(dtype)
    return lambda x: functional.conv2d(x, weight, padding=1, groups=2), lambda n: torch.randn(n, 64, 7, 7).to(dtype)


def dilated(dtype):
    weight = torch.randn(16, 8, 4).to(dtype)
    return lambda x: functional.conv1d(x, weight, stride=2, dilation=2), lambda n: torch.randn(n, 8, 60).to(dtype)


def depthwise(dtype):
    weight = torch.randn(16, 1, 8).to(dtype)
    return lambda x: functional.conv1d(x, weight, groups=16), lambda n: torch.randn(n, 16, 40).to(dtype)


def pointwise(dtype):
    weight = torch.randn(16, 16, 1).to(dtype)
    return lambda x: functional.conv1d(x, weight, groups=2), lambda n: torch.randn(n, 32, 10).to(dtype)


def attention(dtype):
    return lambda x: functional.scaled_dot_product_attention(x, x, x), lambda n: torch.randn(n, 2, 20, 16).to(dtype)


def matrices(dtype):
    return lambda x: x @ x.transpose(-1, -2), lambda n: torch.randn(n, 2, 12, 16).to(dtype)


CONVOLUTIONS = (patches, convolution, groups, dilated, depthwise, pointwise)
KINDS = (linear, wide, *CONVOLUTIONS, attention, matrices)


def differ(operation, few, repeats):
    """Whether the results for some rows differ from those for the same rows among others."""
    return not torch.equal(operation(torch.cat([few] * repeats))[: len(few)], operation(few))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_difference_that_few_values_show_is_found_with_one(kind, dtype):
    """Which kernels sum in another order depends on the processor; where values show it, the probe shows it."""
    torch.manual_seed(0)
    operation, draw = kind(dtype)
    for number, repeats in ((2, 4), (16, 8), (64, 8)):
        shown = any(differ(operation, draw(number), repeats) for _ in range(40))
        with OrderProbe():
            found = differ(operation, draw(number), repeats)
        assert found or not shown


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_equal_calls_have_equal_results_of_the_same_form(kind, dtype):
    torch.manual_seed(0)
    operation, draw = kind(dtype)
    values = 30 * draw(8)
    true = operation(values)
    with OrderProbe():
        probed, again = operation(values), operation(values)
    assert torch.equal(probed, again)
    assert (probed.shape, probed.dtype, probed.stride()) == (true.shape, true.dtype, true.stride())
    assert probed.isfinite().all()
    assert probed.unique().numel() > 20
    assert torch.equal(operation(values), true)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_computes_the_same(kind):
    torch.manual_seed(0)
    operation, draw = kind(torch.bfloat16)
    values = draw(8)
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        with context(), OrderProbe():
            found.append(operation(values))
    assert torch.equal(*found)
    assert not torch.equal(found[0], operation(values))


@torch.no_grad()
def test_factors_have_no_product_but_the_rounding_errors_of_the_order():
    left, right = _product((torch.randn(4, 64), torch.randn(64, 8)), 0)
    exact, size = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    assert exact.abs().max() < 1e-9 * size.max()
    order = torch.randperm(64)
    assert ((left[:, order] @ right[order]) != (left @ right)).float().mean() > 0.5


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@torch.no_grad()
def test_entries_of_windows_cancel(kind):
    """In windows without padding, in which an entry could lack its opposite."""
    torch.manual_seed(0)
    operation, draw = kind(torch.float32)
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.convolution.default:
                called.append(args)
            return func(*args, **(kwargs or {}))

    with Calls():
        operation(draw(2))
    value, weight, _, stride, padding, *rest = _convolution(called[0])
    unpadded = (stride, [0] * len(padding), *rest)
    assert weight.count_nonzero() > 0.6 * weight.numel()
    exact = torch.ops.aten.convolution(value.double(), weight.double(), None, *unpadded)
    size = torch.ops.aten.convolution(value.double().abs(), weight.double().abs(), None, *unpadded)
    assert exact.abs().max() < 1e-9 * size.max()
    assert value.stride() == called[0][0].stride()


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
@pytest.mark.parametrize("kinds", [(0,) * 8, (0, 0, 1, 1), (0, 1, 0, 1)])
@torch.no_grad()
def test_shared_features_have_the_same_bits_for_all_later_images(weights, kinds):
    """One batch in three agreed by chance where the kernel of the patches sums in another order."""
    torch.manual_seed(0)
    arguments = cells.arguments(Cell("qwen2_5_vl", "grpo", weights, "bf16", lora=True), SafeGRPOConfig, 1)
    arguments["peft_config"] = LoraConfig(r=4, target_modules=r".*language_model.*\.q_proj")
    model = (trainer := cells.SAFE["grpo"](**arguments)).model
    container = [m for m in model.modules() if "get_image_features" in vars(m)][-1]  # it calls no other one
    whole = type(container).get_image_features
    width = next(m for n, m in model.named_modules() if n.endswith("patch_embed.proj")).weight[0].numel()
    grid = torch.tensor([[1, 8, 8]] * len(kinds))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(30):
            images = torch.randn(max(kinds) + 1, 64, width)
            batch = images[list(kinds)].flatten(0, 1)
            ours = container.get_image_features(batch, image_grid_thw=grid)
            theirs = whole(container, batch, image_grid_thw=grid)
            assert all(map(torch.equal, parts(ours), parts(theirs)))
    feature = trainer.precision[SharedFeatures]
    assert feature.seen == 30 * len(kinds)
    assert feature.shares or feature.refused


def parts(features):
    """The tensors of a result of `get_image_features`, whose form depends on the release of transformers."""
    features = getattr(features, "pooler_output", features)
    return list(features) if isinstance(features, (list, tuple)) else [features]
